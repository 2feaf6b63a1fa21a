"""Values that pass between the layers."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

Batch = Mapping[str, Tensor]  # as a Hugging Face collator makes it; first dimension = examples
PerExampleLoss = Callable[[nn.Module, Batch], Tensor]  # (model, batch) -> (B,)


@runtime_checkable
class KnowsNoise(Protocol):
    """An optimizer that a private run tells the size of the noise, and asks for its units.

    Attributes:
        noise_std: standard deviation of the noise in each coordinate of the gradient to come, in
            the units of ``scales``; the run sets it before each step.
    """

    noise_std: float | None

    def scales(self) -> Mapping[Tensor, Tensor]:
        """By parameter, what gradients are multiplied by before they are clipped; none: 1.

        Must be made of released values alone.
        """
        ...


@dataclass(frozen=True, eq=False)
class ClippedSum:
    """The sum over examples of clipped per-example gradients, and how far one example can move it.

    Still private: only ``dppeft.privacy.noise`` turns it into something that may be released.

    Attributes:
        grads: name as in ``model.named_parameters()`` -> sum of clipped gradients, float32.
        norms: (B,) float32, per-example gradient norms before clipping. Private.
        l2_bound: adding or removing one example moves the sum by at most this (L2, all tensors
            jointly).
        count: number of examples summed. Private under Poisson sampling.
        within: for each threshold, the sum over examples of +1/2 where the norm is within it and
            -1/2 where it is not. Private.
    """

    grads: dict[str, Tensor]
    norms: Tensor
    l2_bound: float
    count: int
    within: Mapping[str, Tensor] = field(default_factory=dict)

    def __add__(self, other: ClippedSum) -> ClippedSum:
        """The sum over the union of two disjoint sets of examples; the bound is the larger one."""
        if self.grads.keys() != other.grads.keys():
            raise ValueError("Clipped sums of different tensors cannot be added.")
        return ClippedSum(
            grads={name: grad + other.grads[name] for name, grad in self.grads.items()},
            norms=torch.cat([self.norms, other.norms]),
            l2_bound=max(self.l2_bound, other.l2_bound),
            count=self.count + other.count,
            within=added(self.within, other.within),
        )


def added(one: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Sums by name; a name that only one of them has keeps its value."""
    return {**one, **{n: one[n] + value if n in one else value for n, value in other.items()}}


@dataclass(frozen=True, kw_only=True)
class Spent:
    """A guarantee: the releases made so far are (epsilon, delta)-DP for one unit.

    ``sample_rate`` and ``noise_multiplier`` are the values of the steps made (the last step's when
    steps differ). ``unit`` names the unit of privacy and the neighbouring relation.
    """

    epsilon: float
    delta: float
    steps: int
    sample_rate: float
    noise_multiplier: float
    accountant: str
    unit: str = "one row, add or remove"
