"""The proof on a few rows: does clipping this model bound what one example can do?

Checked before the first private update, on rows that need not be private: (1) no example's loss
depends on another's; (2) the engine's per-example gradients equal those of each example alone;
(3) every trained tensor is covered and the optimizer holds exactly those; (4) removing a row moves
the clipped sum by at most the bound.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dppeft._types import Batch, ClippedSum, PerExampleLoss
from dppeft.clipping.engine import batch_size_of, by_row, make_engine
from dppeft.clipping.opacus import disagreement, without_dropout
from dppeft.clipping.units import (
    check_losses,
    refuse_mixing,
    rows_of,
    trainable,
    untouched_random_state,
)
from dppeft.errors import ArgumentError, UnsupportedModelError


@dataclass(frozen=True, kw_only=True)
class PreflightReport:
    """What was proven. ``worst_error`` is relative to each example's whole gradient."""

    rows: int
    trained_tensors: int
    trained_parameters: int
    without_signal: tuple[str, ...]
    worst_error: float
    worst_sensitivity: float

    def summary(self) -> str:
        """One line for a log or a card."""
        return (
            f"{self.trained_parameters:,} parameters in {self.trained_tensors} tensors; gradients "
            f"of {self.rows} rows alone and together differ by {self.worst_error:.1e}; removing a "
            f"row moved the clipped sum by {self.worst_sensitivity:.3f} of its bound"
        )


def check(
    model: nn.Module,
    batch: Batch,
    *,
    loss: PerExampleLoss,
    engine: str = "auto",
    optimizer: torch.optim.Optimizer | None = None,
) -> PreflightReport:
    """Proves the points above for this model, or raises and says what to change.

    Dropout is off during the proof; torch's random state and the model's modes are left alone.

    Raises:
        UnsupportedModelError: examples are mixed, or a gradient is not exact.
        ArgumentError: fewer than two rows, a reduced loss, an optimizer with other tensors.
    """
    size = batch_size_of(batch)
    if size < 2:
        raise ArgumentError(f"Preflight needs at least 2 rows to compare, got {size}.")
    refuse_foreign_hooks(model)
    refuse_mixing(model)
    if optimizer is not None:
        check_optimizer(model, optimizer)
    with untouched_random_state(model), without_dropout(model):
        _refuse_dependence(model, batch, size, loss)
        made = make_engine(model, loss=loss, engine=engine)
        truth = by_row(model, loss, batch, size)
        found = made.per_example_grads(batch)
        total = torch.stack([t.norms_sq() for t in truth.values()]).sum(0).sqrt().float()
        worst = 0.0
        for name, term in truth.items():
            alone = term.instantiate()
            wrong = disagreement(found.get(name), alone, truth)
            if wrong:
                raise UnsupportedModelError(
                    f"{name}: {wrong} when compared with each example alone. Freeze it or choose "
                    "another method; training it would not be private."
                )
            error = (found[name] - alone.float()).flatten(1).norm(dim=1) / total.clamp_min(1e-12)
            worst = max(worst, float(error.max()))
        sensitivity = _sensitivity(model, batch, size, loss, engine=engine, total=total)
    silent = tuple(name for name, term in truth.items() if not bool(term.norms_sq().any()))
    params = trainable(model)
    return PreflightReport(
        rows=size,
        trained_tensors=len(params),
        trained_parameters=sum(p.numel() for p in params.values()),
        without_signal=silent,
        worst_error=worst,
        worst_sensitivity=sensitivity,
    )


def refuse_foreign_hooks(model: nn.Module) -> None:
    """Raises where Opacus already sits on the model: two engines would count each row twice."""
    marked = any(hasattr(p, "grad_sample") for p in model.parameters())
    if marked or hasattr(model, "autograd_grad_sample_hooks"):
        raise UnsupportedModelError(
            "Opacus's hooks are already on this model. Call their cleanup(), or start again from "
            "the plain model: dppeft adds its own for the length of a step."
        )


def check_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Raises unless the optimizer holds exactly the parameters that train."""
    held = {id(p) for group in optimizer.param_groups for p in group["params"]}
    names = {id(p): name for name, p in model.named_parameters()}
    wanted = {id(p): name for name, p in trainable(model).items()}
    missing = [name for key, name in wanted.items() if key not in held]
    if missing:
        raise ArgumentError(
            f"The optimizer lacks {len(missing)} trained tensors, such as {missing[0]}. Make it "
            "after dppeft.wrap, from [p for p in model.parameters() if p.requires_grad], or freeze "
            "what should not train."
        )
    foreign = [names.get(key, "a tensor that is not the model's") for key in held - wanted.keys()]
    if foreign:
        raise ArgumentError(
            f"The optimizer holds {len(foreign)} tensors that do not train, such as {foreign[0]}. "
            "Make it after dppeft.wrap, from [p for p in model.parameters() if p.requires_grad]."
        )


def _refuse_dependence(model: nn.Module, batch: Batch, size: int, loss: PerExampleLoss) -> None:
    """Row 0's loss among its neighbours, among copies of itself, and alone."""
    with torch.no_grad():
        together = check_losses(loss(model, batch), size)
        order = list(range(size))[::-1]
        reversed_ = check_losses(loss(model, rows_of(batch, size, order)), size).flip(0)
        alone = torch.stack([
            check_losses(loss(model, rows_of(batch, size, [i])), 1)[0] for i in range(size)
        ])
        copies = check_losses(loss(model, rows_of(batch, size, [0] * size)), size)[0]
    tolerance = 1e-3 if together.dtype in (torch.float32, torch.float64) else 3e-2
    low = next(model.parameters()).dtype not in (torch.float32, torch.float64)
    tolerance = 3e-2 if low else tolerance
    for other, first in ((reversed_, together), (alone, together), (copies[None], together[:1])):
        if not torch.allclose(other, first, rtol=tolerance, atol=tolerance, equal_nan=True):
            raise UnsupportedModelError(
                "An example's loss changes with the other examples of its batch (batch "
                "statistics, attention or routing across examples, or a loss averaged over the "
                "batch). Such a model has no per-example gradients: find the layer that mixes "
                "rows, or return each example's own loss."
            )


def _sensitivity(
    model: nn.Module,
    batch: Batch,
    size: int,
    loss: PerExampleLoss,
    *,
    engine: str,
    total: Tensor,
) -> float:
    """The largest move of the clipped sum when a row is removed, relative to the bound."""
    finite = total[torch.isfinite(total) & (total > 0)]
    if not len(finite):
        return 0.0
    made = make_engine(model, loss=loss, engine=engine)
    worst = 0.0
    for multiple in (1e-3, 1.0, 2.0):
        bound = float(finite.median()) * multiple
        whole = made.clipped_sum(batch, max_grad_norm=bound)
        for row in range(size):
            rest = rows_of(batch, size, [r for r in range(size) if r != row])
            moved = _distance(whole, made.clipped_sum(rest, max_grad_norm=bound))
            worst = max(worst, moved / whole.l2_bound)
    if worst > 1.01:
        raise UnsupportedModelError(
            f"Removing one row moved the clipped sum by {worst:.3f} times its bound. This model "
            "cannot be trained privately as it is; please report it with the model's class."
        )
    return worst


def _distance(a: ClippedSum, b: ClippedSum) -> float:
    return float(sum((a.grads[n] - b.grads[n]).square().sum() for n in a.grads)) ** 0.5
