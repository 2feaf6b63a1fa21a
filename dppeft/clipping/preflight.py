"""The proof on a few rows: does clipping this model bound what one example can do?

Checked before the first private update, on rows that need not be private: (1) no example's loss
depends on another's; (2) the engine's per-example gradients equal those of each example alone;
(3) every trained tensor is covered and the optimizer holds exactly those; (4) removing a row moves
the clipped sum by at most the bound; (5) moving the weights along the gradient changes the losses
as predicted, so that the tensors that train are those that the model reads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dppeft._types import Batch, ClippedSum, PerExampleLoss
from dppeft.clipping.engine import batch_size_of, make_engine
from dppeft.clipping.probing import (
    computes_exactly,
    disagreement,
    each_alone,
    full_precision,
    gradient_of,
    length_of,
    refuse_dependence,
    refuse_mixing,
    rows_of,
    trainable,
    untouched_random_state,
    without_dropout,
)
from dppeft.clipping.terms import Term, weighted_sum
from dppeft.errors import ArgumentError, UnsupportedModelError

# A tensor that is not read moves nothing: 100 % off. Curvature alone must not refuse a model.
_PREDICTED_WITHIN = 0.5
_TOO_FLAT = 1e-3  # losses together below which their changes drown in rounding


@dataclass(frozen=True, kw_only=True)
class PreflightReport:
    """What was proven.

    Attributes:
        rows: that the model was proven on.
        trained_tensors: how many tensors train.
        trained_parameters: their entries.
        without_signal: names of trained tensors whose gradient is zero on these rows.
        worst_error: of the engine's gradients, relative to each example's whole gradient.
        worst_sensitivity: move of the clipped sum when a row is removed, relative to its bound.
        prediction_error: of the change of the losses when the weights move, relative; None where
            the model computes too coarsely to tell, or the losses are near 0.
        made_up: the rows are from the vocabulary, so that these numbers may be published.
    """

    rows: int
    trained_tensors: int
    trained_parameters: int
    without_signal: tuple[str, ...]
    worst_error: float
    worst_sensitivity: float
    prediction_error: float | None = None
    made_up: bool = False

    def summary(self) -> str:
        """One line for a log or a card."""
        return (
            f"{self.trained_parameters:,} parameters in {self.trained_tensors} tensors; gradients "
            f"of {self.rows} rows alone and together differ by {self.worst_error:.1e}; removing a "
            f"row moved the clipped sum by {self.worst_sensitivity:.3f} of its bound"
        )

    def note(self) -> str:
        """For the privacy card: public numbers, or only that the proof was made."""
        if self.made_up:
            return f"Proven before the run, on rows that are nobody's: {self.summary()}."
        return "Proven before the run on rows of the data set, of which nothing else is told."


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
        refuse_dependence(model, batch, size, loss)
        exact, made = computes_exactly(model), make_engine(model, loss=loss, engine=engine)
        terms = made.terms_of(batch, size)
        lengths, worst = _compare(model, batch, size, loss, terms)
        sensitivity = _sensitivity(model, batch, size, loss, engine=engine, total=lengths)
        prediction = _prediction_error(model, batch, loss, terms) if exact else None
    silent = tuple(n for n in trainable(model) if n not in terms or not terms[n].norms_sq().any())
    params = trainable(model)
    return PreflightReport(
        rows=size,
        trained_tensors=len(params),
        trained_parameters=sum(p.numel() for p in params.values()),
        without_signal=silent,
        worst_error=worst,
        worst_sensitivity=sensitivity,
        prediction_error=prediction,
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


def _compare(
    model: nn.Module, batch: Batch, size: int, loss: PerExampleLoss, terms: dict[str, Term]
) -> tuple[Tensor, float]:
    """Each row's gradients against those of the row alone: their lengths, and the worst error."""
    exact, lengths, worst = computes_exactly(model), [], 0.0
    for row, alone in enumerate(each_alone(model, loss, batch, size)):
        whole = length_of(alone)
        for name, truth in alone.items():
            term = terms.get(name)
            found = None if term is None else gradient_of(term, row)
            wrong = disagreement(found, truth, whole, exact=exact)
            if wrong:
                raise UnsupportedModelError(
                    f"{name}: {wrong} when compared with each example alone. Freeze it or choose "
                    "another method; training it would not be private."
                )
            if found is not None:
                worst = max(worst, float((found - truth).norm() / whole.clamp_min(1e-12)))
        lengths.append(whole.float())
    return torch.stack(lengths), worst


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
            "Removing one row moved the clipped sum by more than its bound. This model cannot be "
            "trained privately as it is; please report it with the model's class."
        )
    return worst


def _distance(a: ClippedSum, b: ClippedSum) -> float:
    return float(sum((a.grads[n] - b.grads[n]).square().sum() for n in a.grads)) ** 0.5


def _prediction_error(
    model: nn.Module, batch: Batch, loss: PerExampleLoss, terms: dict[str, Term]
) -> float | None:
    """How far the losses' change along the gradient is from the gradient's length, relative.

    None where the losses are too small to tell.
    """
    params = {name: p for name, p in trainable(model).items() if name in terms}
    ones = {name: torch.ones(terms[name].batch, device=p.device) for name, p in params.items()}
    with full_precision():
        summed = {n: weighted_sum(terms[n], ones[n], p.shape) for n, p in params.items()}
    length = float(length_of(summed))
    if not (math.isfinite(length) and length > 0):
        return 0.0
    values = {name: p.detach().clone() for name, p in params.items()}

    def moved(distance: float) -> float:
        with torch.no_grad():
            for name, p in params.items():
                p.copy_(values[name] + (distance / length) * summed[name].to(p.dtype))
            return float(loss(model, batch).double().sum())

    errors = []
    try:
        size = abs(moved(0.0))
        if size < _TOO_FLAT:  # rows that are fitted already: what float32 rounds away is the change
            return None
        # Too little drowns in rounding, too much is not linear.
        for share in (1e-2, 1e-3, 1e-4, 1e-1):
            distance = share * size / (2 * length)
            change = moved(distance) - moved(-distance)
            errors.append(abs(change - share * size) / (share * size))
            if errors[-1] < 0.01:
                break
    finally:
        with torch.no_grad():
            for name, p in params.items():
                p.copy_(values[name])
    if min(errors) > _PREDICTED_WITHIN:
        raise UnsupportedModelError(
            "Moving the trained weights along their gradient changed the losses by another amount "
            "than predicted. The model does not read the tensors that train (a merged adapter, a "
            "cached or quantised copy), or its loss is not smooth. Load the model and wrap it "
            "again."
        )
    return min(errors)
