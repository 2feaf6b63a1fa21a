"""Runs that are refused before a row is read, and small ones that are not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import dppeft
from tests.tiny import make_batch
from tests.training.runs import make_plan, sgd, token_rows, trained

ROWS = token_rows(8)


class Unread(list):  # type: ignore[type-arg]
    """Rows that must not be read."""

    def __getitem__(self, index: Any) -> Any:
        raise AssertionError(f"row {index} was read before the model was refused")


def refused(match: str, model: nn.Module, optimizer: Any = None) -> None:
    optimizer = optimizer or torch.optim.SGD(trained(model).values(), lr=1.0)
    with pytest.raises(dppeft.DppeftError, match=match) as caught:
        dppeft.make_private(model, optimizer, Unread(ROWS), make_plan(8))
    assert "\n" not in str(caught.value)


def make_run(model: nn.Module, **options: Any) -> Any:
    plan = make_plan(8, steps=5, max_grad_norm=1.0, noise_multiplier=0.1)
    return dppeft.make_private(model, sgd(model, lr=0.5), ROWS, plan, **options)


def first_layer(model: nn.Module) -> Any:
    return model.base_model.model.bert.encoder.layer[0]


def computed(model: nn.Module) -> Tensor:
    batch = make_batch("bert")
    del batch["labels"]
    with torch.no_grad():
        return model.eval()(**batch).logits
