"""The loss of one row in a padded batch is what transformers computes for that row alone."""

from __future__ import annotations

import pickle

import peft
import pytest
import torch
from torch import Tensor, nn
from transformers import BertForQuestionAnswering

from dppeft.errors import ArgumentError, ArgumentTypeError, DataError, UnsupportedModelError
from dppeft.loss import default_loss
from tests.tiny import MODELS, build, make_batch, row


def own_losses(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """transformers' own loss of each row alone, its padding stripped."""
    rows = [row(batch, index) for index in range(len(batch["input_ids"]))]
    return torch.stack([model(**one).loss for one in rows])


def same(actual: Tensor, expected: Tensor) -> None:
    assert actual.dtype == torch.float64
    # transformers casts the logits of language models to float32 before its loss.
    rtol = 1e-9 if expected.dtype == torch.float64 else 2e-6
    torch.testing.assert_close(actual, expected.double(), rtol=rtol, atol=rtol)


@pytest.mark.parametrize("name", MODELS)
def test_equals_the_models_own_loss_of_each_row(name: str) -> None:
    model, batch = build(name, double=True), make_batch(name)
    same(default_loss(model)(model, batch), own_losses(model, batch))


@pytest.mark.parametrize("name", ["bert", "gpt2-classify", "distilbert"])
@pytest.mark.parametrize("columns", [1, 3])
def test_regression_is_the_squared_error(name: str, columns: int) -> None:
    model = build(name, num_labels=columns, double=True, problem_type="regression")
    batch = make_batch(name) | {"labels": torch.randn(4, columns, dtype=torch.float64)}
    if columns == 1:
        batch["labels"] = batch["labels"][:, 0]
    same(default_loss(model)(model, batch), own_losses(model, batch))


def test_one_column_is_regression_without_being_told() -> None:
    model = build("roberta", num_labels=1, double=True)
    batch = make_batch("roberta") | {"labels": torch.randn(4, dtype=torch.float64)}
    same(default_loss(model)(model, batch), own_losses(model, batch))


@pytest.mark.parametrize("problem_type", [None, "multi_label_classification"])
def test_float_labels_per_class_are_multi_label(problem_type: str | None) -> None:
    model = build("bert", double=True, problem_type=problem_type)
    labels = torch.tensor([[1, 0, 1], [0, 0, 0], [1, 1, 1], [0, 1, 0]], dtype=torch.float64)
    batch = make_batch("bert") | {"labels": labels}
    losses = default_loss(model)(model, batch)
    same(losses, own_losses(model, batch))
    # A multi-hot vector of whole numbers means the same.
    whole = default_loss(model)(model, batch | {"labels": labels.long()})
    torch.testing.assert_close(whole, losses)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64, torch.bool, torch.uint8])
def test_C2_class_labels_of_any_whole_dtype(dtype: torch.dtype) -> None:
    model, batch = build("bert", double=True), make_batch("bert", num_labels=2)
    losses = default_loss(model)(model, batch | {"labels": batch["labels"].to(dtype)})
    same(losses, own_losses(model, batch))
    column = default_loss(model)(model, batch | {"labels": batch["labels"].to(dtype)[:, None]})
    same(column, losses)


def test_C2_float_class_labels_are_refused_with_the_remedy() -> None:
    model, batch = build("bert"), make_batch("bert")
    message = r"dtype float32 and shape \(4,\).*whole-number class per row.*Convert the labels"
    with pytest.raises(ArgumentError, match=message):
        default_loss(model)(model, batch | {"labels": batch["labels"].float()})


@pytest.mark.parametrize(
    "config",
    [
        peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        peft.PromptEncoderConfig(
            task_type="CAUSAL_LM", num_virtual_tokens=3, encoder_hidden_size=8
        ),
        peft.PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3),
        peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["c_attn"], fan_in_fan_out=True),
    ],
    ids=lambda config: config.peft_type.value,
)
def test_virtual_tokens_are_no_targets(config: peft.PeftConfig) -> None:
    model = peft.get_peft_model(build("gpt2", double=True), config).double()
    batch = make_batch("gpt2")
    same(default_loss(model)(model, batch), own_losses(model, batch))


def test_prompt_tuned_t5_equals_its_own_loss() -> None:
    config = peft.PromptTuningConfig(
        task_type="SEQ_2_SEQ_LM", num_virtual_tokens=3, num_transformer_submodules=1
    )
    model = peft.get_peft_model(build("t5", double=True), config).double()
    batch = make_batch("t5")
    same(default_loss(model)(model, batch), own_losses(model, batch))


def test_given_decoder_inputs_are_used() -> None:
    model, batch = build("t5", double=True), make_batch("t5", lengths=[4, 4])
    batch["decoder_input_ids"] = batch["labels"].flip(1).clamp_min(1)
    own = [model(**{k: v[i : i + 1] for k, v in batch.items()}).loss for i in range(2)]
    same(default_loss(model)(model, batch), torch.stack(own))


def test_rows_without_targets_give_zero_and_a_zero_gradient() -> None:
    model, batch = build("gpt2", double=True), make_batch("gpt2")
    batch["labels"][1] = -100
    batch["labels"][2, 1:] = -100  # position 0 predicts nothing after the shift
    losses = default_loss(model)(model, batch)
    assert losses[1] == 0
    assert losses[2] == 0
    losses[1:3].sum().backward()
    assert all(torch.count_nonzero(p.grad) == 0 for p in model.parameters() if p.grad is not None)


def test_question_answering_equals_the_models_own_loss() -> None:
    model = BertForQuestionAnswering(build("bert", num_labels=2).config).double().eval()
    batch = make_batch("bert", lengths=[6, 6, 6])
    del batch["labels"]
    batch |= {"start_positions": torch.tensor([1, 0, 3]), "end_positions": torch.tensor([2, 5, 9])}
    own = [model(**{k: v[i : i + 1] for k, v in batch.items()}) for i in range(3)]
    losses = default_loss(model)(model, batch)
    same(losses[:2], torch.stack([one.loss for one in own[:2]]))
    # Outside the row transformers gives nan (a mean over nothing); here that term is no target.
    start = nn.functional.cross_entropy(own[2].start_logits, batch["start_positions"][2:])
    same(losses[2], start / 2)


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5"])
def test_label_smoothing_is_that_of_cross_entropy(name: str) -> None:
    model, batch = build(name, double=True), make_batch(name)
    losses = default_loss(model, label_smoothing=0.1)(model, batch)
    for index in range(len(losses)):
        one = row(batch, index)
        logits, labels = model(**one).logits, one["labels"]
        if name == "gpt2":
            logits, labels = logits[:, :-1], labels[:, 1:]
        expected = nn.functional.cross_entropy(
            logits.flatten(0, -2), labels.flatten(), label_smoothing=0.1
        )
        torch.testing.assert_close(losses[index], expected)


def test_half_precision_logits_give_float32_losses() -> None:
    for name in ("bert", "gpt2"):
        model, batch = build(name).to(torch.bfloat16), make_batch(name)
        losses = default_loss(model)(model, batch)
        assert losses.dtype == torch.float32
        torch.testing.assert_close(losses, own_losses(model, batch).float(), rtol=0.05, atol=0.05)


class _Plain(nn.Module):
    """A plain classifier that returns its logits, in one of the ways people return them."""

    def __init__(self, columns: int, wrap_in: str) -> None:
        super().__init__()
        self.layer, self.wrap_in = nn.Linear(5, columns).double(), wrap_in

    def forward(self, x: Tensor) -> object:
        logits = self.layer(x)
        return {"tensor": logits, "dict": {"logits": logits}, "tuple": (logits, x)}[self.wrap_in]


@pytest.mark.parametrize("wrap_in", ["tensor", "dict", "tuple"])
def test_plain_modules_that_return_logits(wrap_in: str) -> None:
    model, x = _Plain(3, wrap_in), torch.randn(4, 5, dtype=torch.float64)
    labels = torch.tensor([0, 2, 1, 1])
    expected = nn.functional.cross_entropy(model.layer(x), labels, reduction="none")
    same(default_loss(model)(model, {"x": x, "labels": labels}), expected)


def test_plain_regression_needs_float_labels() -> None:
    model, x = _Plain(1, "tensor"), torch.randn(4, 5, dtype=torch.float64)
    labels = torch.tensor([0.5, 2.0, -1.0, 0.0], dtype=torch.float64)
    expected = (model.layer(x)[:, 0] - labels).square()
    same(default_loss(model)(model, {"x": x, "labels": labels}), expected)
    with pytest.raises(ArgumentError, match="float labels for one column"):
        default_loss(model)(model, {"x": x, "labels": labels.long()})


def test_what_fits_no_loss_is_refused_with_the_remedy() -> None:
    class Hidden(nn.Module):
        def forward(self, x: Tensor) -> dict[str, Tensor]:
            return {"hidden": x}

    x = torch.zeros(2, 3)
    with pytest.raises(ArgumentError, match="returns no logits. Pass loss="):
        default_loss(Hidden())(Hidden(), {"x": x, "labels": x[:, 0]})
    model = nn.Unflatten(1, (3, 4))
    with pytest.raises(ArgumentError, match="logits of shape .2, 3, 4.*pass loss="):
        default_loss(model)(model, {"input": torch.zeros(2, 12), "labels": torch.zeros(2, 3)})
    model, batch = build("bert"), make_batch("bert")
    labels = batch.pop("labels")
    with pytest.raises(ArgumentError, match="no 'labels'; it holds attention_mask, input_ids"):
        default_loss(model)(model, batch)
    model.config.problem_type = "ranking"
    with pytest.raises(ArgumentError, match="problem_type='ranking'"):
        default_loss(model)(model, batch | {"labels": labels.float()[:, None].expand(-1, 3)})
    gpt2, batch = build("gpt2"), make_batch("gpt2")
    with pytest.raises(ArgumentError, match="one label per token"):
        default_loss(gpt2)(gpt2, batch | {"labels": torch.zeros(4, dtype=torch.long)})


def test_a_loss_with_a_part_that_belongs_to_no_example_is_refused() -> None:
    config = peft.AdaLoraConfig(total_step=10, target_modules=["query"])
    model = peft.get_peft_model(build("bert"), config)
    with pytest.raises(
        UnsupportedModelError, match="AdaLoraConfig trains with a loss term.*pass loss="
    ):
        default_loss(model)


def test_label_smoothing_is_validated() -> None:
    model = build("bert", num_labels=1)
    for wrong in (1.0, -0.1):
        with pytest.raises(ArgumentError, match="label_smoothing"):
            default_loss(model, label_smoothing=wrong)
    with pytest.raises(ArgumentTypeError, match="label_smoothing='a'"):
        default_loss(model, label_smoothing="a")  # type: ignore[arg-type]
    loss = default_loss(model, label_smoothing=0.1)
    with pytest.raises(ArgumentError, match="ask for regression. Set label_smoothing=0"):
        loss(model, make_batch("bert") | {"labels": torch.zeros(4)})


def test_causal_loss_copies_no_logits() -> None:
    """Beside the log-probabilities nothing of the logits' size is saved for the backward pass."""
    model, batch = build("gpt2"), make_batch("gpt2", lengths=[8] * 4)
    logits = model(**batch, use_cache=False).logits.detach().requires_grad_()
    fixed = nn.Identity()
    fixed.forward = lambda **inputs: (logits,)  # type: ignore[method-assign]
    storages: set[int] = set()

    def saved(tensor: Tensor) -> Tensor:
        if tensor.numel() >= logits.numel():
            storages.add(tensor.untyped_storage().data_ptr())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(saved, lambda tensor: tensor):
        default_loss(model)(fixed, batch).sum()
    assert len(storages - {logits.untyped_storage().data_ptr()}) == 1


def test_the_model_is_called_once_without_labels_and_without_a_cache() -> None:
    model, batch = build("gpt2-classify"), make_batch("gpt2-classify")
    calls: list[dict[str, object]] = []
    model.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(kwargs), with_kwargs=True
    )
    default_loss(model)(model, batch)
    assert [call.keys() for call in calls] == [{"input_ids", "attention_mask", "use_cache"}]
    assert calls[0]["use_cache"] is False
    assert "labels" in batch  # the caller's batch is left as it was


def test_the_loss_is_a_value_that_can_be_sent_to_another_process() -> None:
    model, batch = build("bert"), make_batch("bert")
    loss = default_loss(model)
    torch.testing.assert_close(pickle.loads(pickle.dumps(loss))(model, batch), loss(model, batch))


@pytest.mark.parametrize("label", [77, -7])
@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_a_label_that_the_model_does_not_have_is_refused_without_its_value(
    name: str, label: int
) -> None:
    model, batch = build(name), make_batch(name)
    batch["labels"][1 if name == "bert" else (1, 1)] = label
    with pytest.raises(DataError, match="A label lies outside 0 to") as error:
        default_loss(model)(model, batch)
    assert str(label) not in str(error.value)
