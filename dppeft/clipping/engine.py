"""Exact per-example gradients, clipped and summed: one forward, one backward.

``make_engine`` binds a model and a per-example loss; the engine then maps a batch to a
``ClippedSum`` that knows its own bound. It looks only at parameters that require a gradient, never
touches ``.grad``, and leaves neither hooks nor attributes behind.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from dppeft import _validate
from dppeft._types import Batch, ClippedSum, PerExampleLoss
from dppeft.clipping.capture import Capture
from dppeft.clipping.factors import CLIPPINGS, clip_factors, within
from dppeft.clipping.probing import by_row, full_precision, refuse_mixing, trainable
from dppeft.clipping.replay import Replayer
from dppeft.clipping.scaling import Scaled
from dppeft.clipping.terms import Term, norms_sq_of, weighted_sum
from dppeft.clipping.units import Planner, Unit, UnitPlan
from dppeft.errors import (
    ArgumentError,
    ArgumentTypeError,
    ChangedCallError,
    UnsupportedModelError,
)

ENGINES = ("auto", "opacus")
# What holds one entry per example, in the order in which it is trusted to.
_SIZED_BY = ("labels", "input_ids", "decoder_input_ids", "pixel_values", "inputs_embeds")


def batch_size_of(batch: Batch) -> int:
    """Number of examples in a batch, read from labels or ids rather than from any first tensor."""
    if not hasattr(batch, "items"):
        raise ArgumentTypeError(
            f"Expected the batch to be a dict of tensors, got {type(batch).__name__}. "
            "Name its parts in the collate_fn, for example {'x': x, 'labels': y}."
        )
    tensors = {k: v for k, v in batch.items() if isinstance(v, Tensor) and v.dim()}
    for key in (*_SIZED_BY, *tensors):
        if key in tensors:
            return len(tensors[key])
    raise ArgumentError(f"No tensor with a first axis of examples in the batch: {list(batch)}.")


class Engine(ABC):
    """Maps a batch to per-example gradients, and to their clipped sum.

    Args:
        model: only its parameters with ``requires_grad`` are looked at.
        loss: ``(model, batch) -> (B,)``.
        clipping: "flat", "per_layer" or "automatic".
    """

    def __init__(self, model: nn.Module, *, loss: PerExampleLoss, clipping: str = "flat") -> None:
        self.model = model
        self.loss = loss
        self.clipping = _validate.one_of(CLIPPINGS, clipping=clipping)

    @abstractmethod
    def terms(self, batch: Batch, batch_size: int) -> dict[str, Term]:
        """Per-example gradients of the parameters that the batch reaches; at least one row."""

    def per_example_grads(self, batch: Batch) -> dict[str, Tensor]:
        """Float32 gradients by name, (B, *shape); zeros for a parameter that is not reached."""
        size, params = batch_size_of(batch), self._trainable()
        terms = self.terms_of(batch, size)
        with full_precision():
            return {
                name: terms[name].instantiate().float()
                if name in terms
                else torch.zeros(size, *p.shape, device=p.device)
                for name, p in params.items()
            }

    def clipped_sum(
        self,
        batch: Batch,
        *,
        max_grad_norm: float | Mapping[str, float],
        into: dict[str, Tensor] | None = None,
        scales: Mapping[str, Tensor] | None = None,
    ) -> ClippedSum:
        """The sum of the clipped per-example gradients, and its bound.

        Guarantee: adding or removing one example moves the sum by at most ``l2_bound`` =
        ``max_grad_norm``. Edges: a row whose gradient is not finite contributes zero; an empty
        batch gives zeros and the model is not called.
        Reference: Abadi et al. (2016), Algorithm 1; Bu et al. (2023) for the single backward.

        Args:
            batch: the examples.
            max_grad_norm: C, or infinity for no clipping; with ``per_layer`` also a threshold for
                each trained tensor by name, whose squares add up to the bound's.
            into: sums of earlier batches, float32, which this one's is added to in place (a
                logical batch then takes the memory of one sum). Default: zeros.
            scales: by name, of the parameter's shape: gradients are multiplied by it before they
                are clipped, and so is what is summed. Must not depend on private rows.
        """
        bound = self._bound(max_grad_norm)
        size = batch_size_of(batch)
        terms = self.terms_of(batch, size)
        if scales:
            terms = {n: Scaled(t, scales[n]) if n in scales else t for n, t in terms.items()}
        grads = self._zeros() if into is None else into
        norms = torch.zeros(size, device=next(iter(grads.values())).device)
        counts: dict[str, Tensor] = {}
        if terms:
            how: Any = {"max_grad_norm": max_grad_norm, "clipping": self.clipping}
            with full_precision():
                norms_sq = {name: sq.float() for name, sq in norms_sq_of(terms).items()}
                factors, norms = clip_factors(norms_sq, **how)
                counts = within(norms_sq, norms, **how)
                broken = ~torch.isfinite(norms)
                if bool(broken.any()):  # 0 * NaN is NaN: such rows must be removed, not scaled
                    terms = {name: term.without(broken) for name, term in terms.items()}
                for name in list(terms):  # each is dropped once it is added
                    _add(grads[name], terms.pop(name), factors[name])
        return ClippedSum(grads=grads, norms=norms, l2_bound=bound, count=size, within=counts)

    def terms_of(self, batch: Batch, size: int) -> dict[str, Term]:
        """``terms``, also of an empty batch; an error where gradients cannot be had."""
        if torch.is_inference_mode_enabled():
            raise ArgumentError(
                "Gradients are off for good inside torch.inference_mode(). Call from outside it."
            )
        return self.terms(batch, size) if size else {}

    def _signature(self) -> tuple[object, ...]:
        """What was proven holds for these parameters, and these modules in these modes."""
        modes = tuple(module.training for module in self.model.modules())
        return (modes, *((name, id(p)) for name, p in self._trainable().items()))

    def zero_sum(self, *, max_grad_norm: float | Mapping[str, float]) -> ClippedSum:
        """The sum over no examples. The model is not called."""
        grads, bound = self._zeros(), self._bound(max_grad_norm)
        norms = torch.zeros(0, device=next(iter(grads.values())).device)
        return ClippedSum(grads=grads, norms=norms, l2_bound=bound, count=0)

    def _bound(self, max_grad_norm: float | Mapping[str, float]) -> float:
        """L2 bound of the sum: C, or the root of the thresholds' squares."""
        if isinstance(max_grad_norm, Mapping):
            if self.clipping != "per_layer" or max_grad_norm.keys() != self._trainable().keys():
                raise ArgumentError(
                    "Thresholds by name are for clipping='per_layer', one for each trained tensor; "
                    f"got {len(max_grad_norm)} of them with clipping={self.clipping!r}."
                )
            each = [_validate.positive(max_grad_norm=value) for value in max_grad_norm.values()]
            return math.sqrt(sum(value**2 for value in each))
        bound = _validate.positive(max_grad_norm=max_grad_norm, allow_inf=True)
        if math.isinf(bound) and self.clipping != "flat":
            raise ArgumentError(
                f"max_grad_norm=inf with clipping={self.clipping!r} has no meaning. "
                "Give a finite max_grad_norm, or use clipping='flat'."
            )
        return bound

    def _trainable(self) -> dict[str, nn.Parameter]:
        params = trainable(self.model)
        if not params:
            raise ArgumentError(
                "No parameter requires a gradient, so nothing would be trained. Use dppeft.wrap, "
                "or load the adapter with is_trainable=True."
            )
        return params

    def _zeros(self) -> dict[str, Tensor]:
        return {n: torch.zeros(p.shape, device=p.device) for n, p in self._trainable().items()}


class ExactEngine(Engine):
    """Our engine: closed forms where there are some, replay elsewhere, rows alone as a last resort.

    The units are found on the first batch and again whenever another set of parameters trains.
    """

    def __init__(self, model: nn.Module, *, loss: PerExampleLoss, clipping: str = "flat") -> None:
        super().__init__(model, loss=loss, clipping=clipping)
        self._plan: UnitPlan | None = None
        self._planned_for: tuple[object, ...] = ()
        self._replayers: dict[str, Replayer] = {}

    def plan_for(self, batch: Batch, batch_size: int) -> UnitPlan:
        """Which module accounts for which parameter, found on at most three rows of the batch."""
        signature = self._signature()
        if self._plan is None or signature != self._planned_for:
            refuse_mixing(self.model)
            planner = Planner(self.model, self.loss)
            plan = planner.plan(batch, batch_size, self._trial)
            if plan is None:  # nothing finite to learn from; look again at the next batch
                return UnitPlan([], by_row=next(iter(planner.params)))
            self._plan, self._planned_for = plan, signature
            self._replayers = {u.path: Replayer(u) for u in plan.units if u.rule is None}
        return self._plan

    def terms(self, batch: Batch, batch_size: int) -> dict[str, Term]:
        for attempt in range(2):
            plan = self.plan_for(batch, batch_size)
            if plan.by_row is not None:
                return by_row(self.model, self.loss, batch, batch_size)
            capture = Capture(self.model, plan.units, self._replayers)
            try:
                terms, leftover = capture.run(self.loss, batch, batch_size)
            except ChangedCallError:
                if attempt:
                    return by_row(self.model, self.loss, batch, batch_size)
                leftover = {""}
            if not leftover:
                return terms
            if attempt == 0:
                self._plan = None  # the model took another path than before: look again
        name = sorted(leftover)[0]
        raise UnsupportedModelError(
            f"{name} is used in a way that changes from call to call, so its per-example gradient "
            "is not exact. Freeze it, or make the forward pass the same for every batch."
        )

    def _trial(
        self, units: list[Unit], batch: Batch, size: int
    ) -> tuple[dict[str, Term], set[str]]:
        replayers = {unit.path: Replayer(unit) for unit in units if unit.rule is None}
        return Capture(self.model, units, replayers).run(self.loss, batch, size)


def _add(total: Tensor, term: Term, factors: Tensor) -> None:
    if term.dtype == total.dtype:
        term.add_to(total, factors)
    else:  # a float64 model is summed in float64
        total.add_(weighted_sum(term, factors, total.shape))


def make_engine(
    model: nn.Module, *, loss: PerExampleLoss, engine: str = "auto", clipping: str = "flat"
) -> Engine:
    """The engine by name: "auto" is ours, "opacus" the reference on Opacus's own hooks."""
    if _validate.one_of(ENGINES, engine=engine) == "opacus":
        from dppeft.clipping.opacus import OpacusEngine

        return OpacusEngine(model, loss=loss, clipping=clipping)
    return ExactEngine(model, loss=loss, clipping=clipping)
