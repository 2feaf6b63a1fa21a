"""Small models and their definition, for the engine's tests."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import dppeft
from tests import oracle, tiny


def definition(model: nn.Module, batch: dict[str, Tensor], loss=None):  # type: ignore[no-untyped-def]
    """Each row alone at the batch's own width: for models without an attention mask."""
    size = len(batch["labels"])
    rows = [{key: value[i : i + 1] for key, value in batch.items()} for i in range(size)]
    return oracle.per_example(model, rows, loss or oracle.own_loss)


def stripped(model: nn.Module, batch: dict[str, Tensor]):  # type: ignore[no-untyped-def]
    rows = [tiny.row(batch, i) for i in range(len(batch["labels"]))]
    return oracle.per_example(model, rows)


class Net(nn.Module):
    """Tokens to logits; subclasses say how."""

    def __init__(self, part: nn.Module | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, 6)
        self.head = nn.Linear(6, 3)
        self.part = part

    def body(self, x: Tensor) -> Tensor:
        return x if self.part is None else self.part(x)

    def forward(self, input_ids: Tensor) -> Tensor:
        return self.head(self.body(self.embed(input_ids)).mean(1))


def tokens(batch: int = 4, length: int = 6, vocab: int = 20) -> dict[str, Tensor]:
    g = torch.Generator().manual_seed(3)
    return {
        "input_ids": torch.randint(0, vocab, (batch, length), generator=g),
        "labels": torch.randint(0, 3, (batch,), generator=g),
    }


def net_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    logits = model(batch["input_ids"])
    return nn.functional.cross_entropy(logits, batch["labels"], reduction="none")


def assert_exact(model: nn.Module, batch: dict[str, Tensor], loss=net_loss, tol=1e-4) -> None:  # type: ignore[no-untyped-def]
    found = dppeft.per_example_grads(model, batch, loss=loss)
    assert oracle.worst_error(found, definition(model, batch, loss)) < tol
