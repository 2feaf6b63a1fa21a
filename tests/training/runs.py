"""Small private runs: ragged rows on a tiny BERT, and a linear model with chosen gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import dppeft
from tests.tiny import build, wake

NUM_LABELS = 3


def token_rows(count: int, *, seed: int = 0, longest: int = 12) -> list[dict[str, Any]]:
    """Ragged rows of token lists with a class each."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(2, longest + 1, (count,), generator=generator).tolist()
    return [
        {
            "input_ids": torch.randint(2, 64, (length,), generator=generator).tolist(),
            "attention_mask": [1] * length,
            "labels": i % NUM_LABELS,
        }
        for i, length in enumerate(lengths)
    ]


def adapted_bert(**config: Any) -> nn.Module:
    """A tiny BERT with LoRA whose every trained tensor has a gradient; the same each time."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return wake(dppeft.wrap(build("bert", **config), "lora", r=4))


def carried_bert(**options: Any) -> nn.Module:
    """A tiny BERT whose matrices train through RGP's carriers; the same each time."""
    return dppeft.wrap(build("bert"), "rgp", r=3, warmup_steps=1, **options)


def full_matrices(model: nn.Module) -> dict[str, Tensor]:
    """What moves under RGP: the matrices, and what they are measured by."""
    moved = ("rgp_weight", "basis_")
    return {
        n: t.detach().clone() for n, t in model.state_dict().items() if any(m in n for m in moved)
    }


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def values(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in trained(model).items()}


def sgd(model: nn.Module, lr: float = 1.0) -> torch.optim.Optimizer:
    return torch.optim.SGD(trained(model).values(), lr=lr)


def make_plan(count: int, **changes: Any) -> Any:
    """A plan without noise and with a threshold that clips nothing, unless changed."""
    arguments: dict[str, Any] = {
        "num_examples": count,
        "batch_size": count,
        "steps": 3,
        "delta": 1e-4,
        "noise_multiplier": 0.0,
        "max_grad_norm": 1e9,
    }
    arguments.update(changes)
    if arguments.get("epsilon") is not None:
        arguments["noise_multiplier"] = None
    return dppeft.plan(**arguments)


class Dot(nn.Module):
    """``weight . x``: with :func:`dot_loss` the gradient of a row is the row itself."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 1, bias=False)
        nn.init.zeros_(self.layer.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[:, 0]


def dot_loss(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """Per-example loss whose gradient is ``x``."""
    return model(batch["x"])


def dot_rows(x: Tensor) -> list[dict[str, Tensor]]:
    return [{"x": row} for row in x]


def dot_run(x: Tensor, plan: Any, **options: Any) -> tuple[Dot, Any]:
    """A run on a :class:`Dot` model with SGD at rate 1: the weight is minus the released sum."""
    model = Dot(x.shape[1])
    rows = dot_rows(x)
    return model, dppeft.make_private(model, sgd(model), rows, plan, loss=dot_loss, **options)
