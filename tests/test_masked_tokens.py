"""The masked-language loss at the targets alone: the model's own, for each row by itself."""

from __future__ import annotations

from typing import Any

import peft
import pytest
import torch
from torch import Tensor, nn

import dppeft
from dppeft import MaskedTokenLoss
from dppeft.errors import ArgumentError, UnsupportedModelError
from dppeft.loss import default_loss
from tests import oracle, tiny

MODELS = ("bert-mlm", "roberta-mlm", "distilbert-mlm")
METHODS = ("full", "bitfit", "lora", "adapter", "compacter", "rgp")


def batch_of() -> dict[str, Tensor]:
    """Four ragged rows: targets at the start, at the end, one alone, and none."""
    batch = tiny.make_batch("bert-mlm")
    assert len(batch["labels"]) >= 4
    batch = {name: value[:4].clone() for name, value in batch.items()}
    lengths = batch["attention_mask"].sum(dim=1)
    labels = torch.full_like(batch["input_ids"], -100)
    labels[0, 0], labels[0, lengths[0] - 1] = 3, 5
    labels[1, : lengths[1]] = batch["input_ids"][1, : lengths[1]]
    labels[2, 1] = 7
    return batch | {"labels": labels}


def rows_alone(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    return [tiny.row(batch, i) for i in range(len(batch["labels"]))]


def definition(smoothing: float = 0.0) -> Any:
    """The loss of one row from all logits of the whole model, written out."""

    def loss(model: nn.Module, row: dict[str, Tensor]) -> Tensor:
        labels = row["labels"][0]
        logits = model(**{n: v for n, v in row.items() if n != "labels"}).logits[0]
        terms = []
        for position in (labels != -100).nonzero().flatten().tolist():
            log_probs = logits[position] - logits[position].exp().sum().log()
            chosen = log_probs[int(labels[position])]
            terms.append(-(1 - smoothing) * chosen - smoothing * log_probs.sum() / len(log_probs))
        return torch.stack(terms).mean() if terms else 0.0 * logits.sum()

    return loss


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("name", MODELS)
def test_the_loss_is_that_of_all_logits(name: str, smoothing: float) -> None:
    model, batch = tiny.build(name).double(), batch_of()
    found = MaskedTokenLoss(label_smoothing=smoothing)(model, batch)
    truth = torch.stack([definition(smoothing)(model, row) for row in rows_alone(batch)])
    torch.testing.assert_close(found, truth, rtol=1e-9, atol=1e-9)
    whole = default_loss(model, label_smoothing=smoothing)(model, batch)
    torch.testing.assert_close(found, whole, rtol=1e-9, atol=1e-9)
    assert not found[3].any()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("name", MODELS)
def test_each_rows_gradient_is_that_of_the_row_alone(name: str, method: str) -> None:
    """With ``full`` the table is read as words and as the tied projection."""
    model, batch = tiny.wake(dppeft.wrap(tiny.build(name), method)), batch_of()
    found = dppeft.per_example_grads(model, batch, loss=MaskedTokenLoss())
    truth = oracle.per_example(model, rows_alone(batch), definition())
    assert oracle.worst_error(found, truth) < 1e-4
    assert all(not grad[3].any() for grad in found.values())


def test_padding_changes_nothing() -> None:
    model, batch = tiny.build("roberta-mlm").double(), batch_of()
    fill = {"labels": -100}
    wider = {n: nn.functional.pad(v, (0, 5), value=fill.get(n, 0)) for n, v in batch.items()}
    loss = MaskedTokenLoss()
    torch.testing.assert_close(loss(model, wider), loss(model, batch), rtol=1e-9, atol=1e-9)


def test_the_projection_sees_the_targets_only() -> None:
    model, batch = tiny.build("bert-mlm"), batch_of()
    seen = []
    decoder = model.get_output_embeddings()
    decoder.register_forward_hook(lambda _, inputs, __: seen.append(inputs[0].shape[:2]))
    MaskedTokenLoss()(model, batch)
    most = int((batch["labels"] != -100).sum(dim=1).max())
    assert seen == [(4, most)]
    none = batch | {"labels": torch.full_like(batch["labels"], -100)}
    assert not MaskedTokenLoss()(model, none).any()


def private_run(model: nn.Module) -> Any:
    plan = dppeft.plan(
        num_examples=64, batch_size=8, steps=2, epsilon=8.0, delta=1e-3, max_grad_norm=1.0
    )
    row = {"input_ids": [2, 5, 6, 3], "attention_mask": [1] * 4, "labels": [-100, 5, -100, -100]}
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return dppeft.make_private(model, optimizer, [row] * 64, plan, loss=MaskedTokenLoss())


def test_a_head_that_only_looks_like_one_is_refused_before_any_step() -> None:
    assert private_run(dppeft.wrap(tiny.build("roberta-mlm"), "full")).preflight.made_up

    class Scaled(type(tiny.build("roberta-mlm").lm_head)):
        def forward(self, features: Tensor, **_: Any) -> Tensor:
            return 2 * super().forward(features)

    model = dppeft.wrap(tiny.build("roberta-mlm"), "full")
    model.lm_head.__class__ = Scaled
    with pytest.raises(UnsupportedModelError, match="not those of its parts called in order"):
        private_run(model)


def test_the_check_leaves_each_modules_own_mode() -> None:
    model = tiny.build("roberta-mlm")
    model.lm_head.eval()
    modes = [module.training for module in model.modules()]
    MaskedTokenLoss().check(model)
    assert [module.training for module in model.modules()] == modes


def test_bad_input_is_one_line() -> None:
    loss, batch = MaskedTokenLoss(), batch_of()
    with pytest.raises(ArgumentError, match="label_smoothing < 1"):
        MaskedTokenLoss(label_smoothing=1.0)
    with pytest.raises(ArgumentError, match="Expected labels of the shape of input_ids"):
        loss(tiny.build("bert-mlm"), batch | {"labels": torch.zeros(4, dtype=torch.long)})
    with pytest.raises(UnsupportedModelError, match="is no masked language model"):
        loss.check(tiny.build("bert"))
    prompts = peft.PromptTuningConfig(task_type="FEATURE_EXTRACTION", num_virtual_tokens=2)
    with pytest.raises(UnsupportedModelError, match="puts tokens before the input"):
        loss.check(peft.get_peft_model(tiny.build("bert-mlm"), prompts))
