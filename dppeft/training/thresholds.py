"""The clipping thresholds of a run: fixed, or following the norms (``AdaptiveClipping``)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from dppeft._types import ClippedSum
from dppeft.clipping.factors import WHOLE
from dppeft.errors import ArgumentError
from dppeft.privacy.adaptive import AdaptiveClipping, joint_bound
from dppeft.privacy.plan import PrivacyPlan

COUNTS = "counts within the thresholds"  # no name of a parameter has a space


class Thresholds:
    """One threshold, or one per trained tensor; moved only by what was released.

    Args:
        plan: with the first threshold, and how it adapts.
        clipping: "flat", "per_layer" or "automatic".
        names: of the trained tensors.
    """

    def __init__(self, plan: PrivacyPlan, clipping: str, names: Sequence[str]) -> None:
        self.adaptive: AdaptiveClipping | None = plan.adaptive
        if self.adaptive is not None and clipping == "automatic":
            raise ArgumentError(
                "clipping='automatic' normalises every gradient and has no threshold to adapt. "
                "Use clipping='flat' or 'per_layer', or a plan with adaptive=None."
            )
        each = clipping == "per_layer" and self.adaptive is not None
        first = plan.max_grad_norm / math.sqrt(len(names)) if each else plan.max_grad_norm
        self.values = dict.fromkeys(names if each else (WHOLE,), float(first))
        self._scale = 1.0  # of the counts in the last release
        self._check_price(plan)

    def _check_price(self, plan: PrivacyPlan) -> None:
        """An error before any row is used where the counts would cost more than the budget."""
        if self.adaptive is None:
            return
        for batch in set(plan.batch_schedule or (plan.expected_batch_size,)):
            self.adaptive.scale(
                1.0,
                thresholds=len(self.values),
                noise_multiplier=plan.noise_multiplier,
                expected_batch_size=batch,
            )

    @property
    def for_engine(self) -> float | dict[str, float]:
        """``max_grad_norm`` as the engine takes it."""
        return self.values[WHOLE] if WHOLE in self.values else dict(self.values)

    def join(
        self, total: ClippedSum, *, noise_multiplier: float, expected_batch_size: float
    ) -> ClippedSum:
        """The sum with the counts as further coordinates, and the bound of both together."""
        if self.adaptive is None:
            return total
        scale = self.adaptive.scale(
            total.l2_bound,
            thresholds=len(self.values),
            noise_multiplier=noise_multiplier,
            expected_batch_size=expected_batch_size,
        )
        device = next(iter(total.grads.values())).device
        nothing = torch.zeros((), device=device)
        counts = torch.stack([total.within.get(name, nothing) for name in self.values]) * scale
        bound = joint_bound(total.l2_bound, scale, len(self.values))
        self._scale = scale
        return replace(total, grads={**total.grads, COUNTS: counts}, l2_bound=bound)

    def move(self, noisy: Mapping[str, Tensor], expected_batch_size: float) -> None:
        """Post-processing: the next thresholds from the released counts."""
        if self.adaptive is None:
            return
        shares = noisy[COUNTS].cpu() / self._scale / expected_batch_size + 0.5
        for name, share in zip(self.values, shares.tolist(), strict=True):
            self.values[name] = self.adaptive.moved(self.values[name], share)

    def notes(self) -> list[str]:
        """For the privacy card."""
        if self.adaptive is None:
            return []
        return [
            f"The clipping threshold started at max_grad_norm and followed the "
            f"{self.adaptive.quantile:g} quantile of the gradient norms; epsilon covers the counts "
            "that moved it."
        ]

    def restore(self, values: Mapping[str, Any]) -> None:
        """Those of a saved run."""
        self.values = {name: float(values.get(name, value)) for name, value in self.values.items()}
