"""The proof passes exact models, and catches what would make clipping meaningless."""

from __future__ import annotations

import pytest
import torch
from opacus.grad_sample.grad_sample_module import GradSampleHooks
from torch import Tensor, nn

import dppeft
from dppeft.clipping.preflight import check
from dppeft.loss import default_loss
from tests import tiny
from tests.clipping.nets import Net, net_loss, tokens
from tests.training.runs import adapted_bert, dot_run, make_plan, sgd, token_rows
from tests.tuners.outcomes import EXACT, EXTRA, MODELS, OPTIONS, README, TUNERS, cell


@pytest.mark.parametrize("method", ["lora", "dora", "full"])
def test_exact_models_pass_with_the_counts(method: str) -> None:
    model = tiny.wake(dppeft.wrap(tiny.build("bert", hidden_dropout_prob=0.1), method=method))
    report = dppeft.preflight(model.train(), tiny.make_batch("bert"))
    trained = [p for p in model.parameters() if p.requires_grad]
    assert report.trained_tensors == len(trained)
    assert report.trained_parameters == sum(p.numel() for p in trained)
    assert report.worst_error < 1e-4
    assert 0.5 < report.worst_sensitivity <= 1 + 1e-4
    assert report.prediction_error is not None
    assert report.prediction_error < 0.05
    assert model.training


def test_tensors_without_signal_are_listed() -> None:
    model = Net()
    model.spare = nn.Linear(3, 3)
    report = dppeft.preflight(model, tokens(), loss=net_loss)
    assert report.without_signal == ("spare.weight", "spare.bias")


class CrossAttention(nn.Module):
    """Every example attends to the others' means."""

    def forward(self, x: Tensor) -> Tensor:
        mean = x.mean(1)
        return x + (torch.softmax(mean @ mean.T, -1) @ mean)[:, None]


def test_attention_across_examples_is_caught() -> None:
    with pytest.raises(dppeft.UnsupportedModelError, match="other examples"):
        dppeft.preflight(Net(CrossAttention()), tokens(), loss=net_loss)


def test_batch_norm_is_caught_by_name() -> None:
    class Normed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.BatchNorm1d(6)

        def forward(self, x: Tensor) -> Tensor:
            return self.norm(x.mT).mT

    with pytest.raises(dppeft.UnsupportedModelError, match=r"part\.norm: BatchNorm1d"):
        dppeft.preflight(Net(Normed()), tokens(), loss=net_loss)


def test_a_loss_averaged_over_the_tokens_of_the_batch_is_caught() -> None:
    model = tiny.build("gpt2")

    def batch_mean(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        own = default_loss(model)(model, batch)
        used = (batch["labels"][:, 1:] != -100).sum(1)
        return own * used / used.sum()  # divides by the batch's number of targets

    with pytest.raises(dppeft.UnsupportedModelError, match="other examples"):
        dppeft.preflight(model, tiny.make_batch("gpt2"), loss=batch_mean)


def test_a_model_that_reads_its_padding_is_caught() -> None:
    """How much padding a row gets depends on the longest row of its batch."""

    def reads_padding(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        return net_loss(model, batch)

    batch = {**tokens(), "attention_mask": torch.ones(4, 6, dtype=torch.long)}
    batch["attention_mask"][1, 4:] = 0
    with pytest.raises(dppeft.UnsupportedModelError, match="without padding"):
        dppeft.preflight(Net(), batch, loss=reads_padding)


def test_a_second_set_of_hooks_is_caught() -> None:
    model = Net()
    hooks = GradSampleHooks(model, strict=False)
    with pytest.raises(dppeft.UnsupportedModelError, match="Opacus's hooks are already"):
        dppeft.preflight(model, tokens(), loss=net_loss)
    hooks.cleanup()
    dppeft.preflight(model, tokens(), loss=net_loss)


def test_the_optimizer_must_hold_what_trains() -> None:
    model = Net()
    everything = list(model.parameters())
    with pytest.raises(dppeft.DppeftError, match=r"lacks 1 trained tensors, such as head\.bias"):
        check(model, tokens(), loss=net_loss, optimizer=torch.optim.SGD(everything[:-1], lr=1))
    model.head.bias.requires_grad_(False)
    with pytest.raises(dppeft.DppeftError, match=r"do not train, such as head\.bias"):
        check(model, tokens(), loss=net_loss, optimizer=torch.optim.SGD(everything, lr=1))
    check(model, tokens(), loss=net_loss, optimizer=torch.optim.SGD(everything[:-1], lr=1))


class Router(nn.Module):
    """Chooses an expert for the whole batch by its mean."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Linear(6, 6) for _ in range(2))
        self.gate = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        shares = torch.softmax(self.gate(x.mean((0, 1))), 0)
        return sum(share * expert(x) for share, expert in zip(shares, self.experts, strict=True))


class Remembering(nn.Module):
    """Adds what it saw in the call before."""

    last: Tensor | float = 0.0

    def forward(self, x: Tensor) -> Tensor:
        seen, self.last = self.last, x.detach().mean()
        return x + seen


class RunningMean(nn.Module):
    """Keeps statistics of private rows, which would be exported with the model."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(6))

    def forward(self, x: Tensor) -> Tensor:
        self.mean.mul_(0.9).add_(x.detach().mean((0, 1)), alpha=0.1)
        return x - self.mean


class CachedCopy(nn.Module):
    """Reads a copy of its weight that was made once; gradients flow, updates change nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(6))
        self.copy = [torch.eye(6)]

    def forward(self, x: Tensor) -> Tensor:
        passed_on = self.weight - self.weight.detach()  # 0, with a gradient
        return x @ (self.copy[0] + passed_on)


class Detached(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.detach()


@pytest.mark.parametrize(
    ("part", "says"),
    [
        (Router(), "other examples"),
        (Remembering(), "other examples"),
        (RunningMean(), "other examples|buffer 'mean'"),
        (CachedCopy(), "does not read the tensors"),
        (nn.Dropout(0.5), None),  # right: one example's gradient does not depend on the others
        (Detached(), None),  # right: the head trains, the table gets zeros
    ],
    ids=lambda value: type(value).__name__,
)
def test_parts_that_are_wrong_and_two_that_are_not(part: nn.Module, says: str | None) -> None:
    model = Net(part)
    if isinstance(part, CachedCopy):
        model.embed.requires_grad_(False)
        model.head.requires_grad_(False)
    if says is None:
        assert dppeft.preflight(model, tokens(), loss=net_loss).rows == 4
        return
    with pytest.raises(dppeft.UnsupportedModelError, match=says):
        dppeft.preflight(model, tokens(), loss=net_loss)


def test_rows_that_are_fitted_already_are_no_reason_to_refuse() -> None:
    model = Net()
    tiny_loss = 1e-12  # changes of such losses drown in rounding
    report = dppeft.preflight(model, tokens(), loss=lambda m, b: tiny_loss * net_loss(m, b))
    assert report.prediction_error is None


def test_no_number_of_a_row_is_in_a_refusal() -> None:
    model = Net(CachedCopy())
    model.embed.requires_grad_(False)
    model.head.requires_grad_(False)
    with pytest.raises(dppeft.UnsupportedModelError) as refused:
        dppeft.preflight(model, tokens(), loss=net_loss)
    assert "%" not in str(refused.value)


@pytest.mark.parametrize("method", ["rgp", "adapter", "lora", "full"])
def test_opacus_on_layers_that_are_computed_again_is_refused(method: str) -> None:
    model = tiny.wake(dppeft.wrap(tiny.build("bert"), method)).train()
    model.activation_checkpointing_enable({"use_reentrant": False})
    with pytest.raises(dppeft.UnsupportedModelError, match="computed again.*engine='auto'"):
        check(model, tiny.make_batch("bert"), loss=default_loss(model), engine="opacus")


def test_opacus_is_refused_where_its_hooks_miss_what_autograd_added_up() -> None:
    from torch.utils.checkpoint import checkpoint

    class InTraining(Net):  # unlike in the proof, which is made in evaluation mode
        def __init__(self) -> None:
            super().__init__()
            self.first, self.part = nn.Linear(6, 6), nn.Linear(6, 6)

        def layers(self, x: Tensor) -> Tensor:
            return self.part(self.first(x).relu())

        def body(self, x: Tensor) -> Tensor:
            again = self.training and torch.is_grad_enabled()
            return checkpoint(self.layers, x, use_reentrant=False) if again else self.layers(x)

    model = InTraining()
    truth = dppeft.per_example_grads(model.eval(), tokens(), loss=net_loss, engine="opacus")
    assert truth["part.weight"].any()
    with pytest.raises(dppeft.UnsupportedModelError, match="miss a part"):
        dppeft.per_example_grads(model.train(), tokens(), loss=net_loss, engine="opacus")


@pytest.mark.parametrize("reduce", [Tensor.mean, Tensor.sum, lambda x: x[:, None]])
def test_a_reduced_loss_is_caught(reduce) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(dppeft.DppeftError, match="one value per example"):
        dppeft.preflight(Net(), tokens(), loss=lambda m, b: reduce(net_loss(m, b)))


def test_a_loss_without_a_gradient_is_caught() -> None:
    with pytest.raises(dppeft.UnsupportedModelError, match="depends on no trained parameter"):
        dppeft.preflight(Net(), tokens(), loss=lambda m, b: net_loss(m, b).detach())


def test_a_step_inside_the_backward_is_caught() -> None:
    model = Net()
    model.head.weight.register_post_accumulate_grad_hook(lambda param: None)
    with pytest.raises(dppeft.UnsupportedModelError, match=r"head\.weight has a hook"):
        dppeft.preflight(model, tokens(), loss=net_loss)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("tuner", TUNERS)
def test_every_exact_tuner_passes(tuner: str) -> None:
    text = README.read_text()
    exact = [name for name in MODELS if cell(text, tuner, name) == EXACT]
    if not exact:
        pytest.skip("exact on none of the models of the table")
    model = dppeft.wrap(tiny.build(exact[0]), tuner, **OPTIONS.get(tuner, {}))
    batch = tiny.make_batch(exact[0])
    batch |= {key: torch.arange(4) % 2 for key in EXTRA.get(tuner, ())}
    report = dppeft.preflight(tiny.wake(model, std=0.02).train(), batch)
    assert report.worst_error < 1e-3
    assert report.worst_sensitivity <= 1 + 1e-3


def test_its_report_is_in_the_card_and_a_late_unfreeze_is_caught() -> None:
    rows = token_rows(8)
    model = adapted_bert()
    plan = make_plan(8, steps=2)
    run = dppeft.make_private(model, sgd(model), rows, plan)
    assert any("nobody's" in note and "together" in note for note in run.card().notes)
    draws = run.batches()
    run.step(next(draws))
    frozen = next(p for p in model.parameters() if not p.requires_grad)
    frozen.requires_grad_(True)
    with pytest.raises(dppeft.DppeftError, match="requires_grad|train"):
        run.step(next(draws))


def test_of_private_rows_the_card_tells_nothing() -> None:
    model, run = dot_run(torch.eye(4), make_plan(4, steps=1))
    assert not run.preflight.made_up
    assert any("nothing else is told" in note for note in run.card().notes)


def test_one_row_cannot_prove_anything() -> None:
    with pytest.raises(dppeft.DppeftError, match="at least 2 rows"):
        dppeft.preflight(Net(), tokens(1), loss=net_loss)
