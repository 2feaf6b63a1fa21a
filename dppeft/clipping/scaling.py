"""Per-example gradients in other units: each coordinate times a public factor, before any norm.

What is clipped and noised is then the gradient in the geometry of an adaptive optimizer
("scale, then privatise"; compare arXiv 2507.01129). The factors come from released values alone.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dppeft.clipping.grams import norms_by_chunks
from dppeft.clipping.terms import Term, weighted_sum


@dataclass(frozen=True, eq=False)
class Scaled(Term):
    """``scale * g_i``, elementwise: norms are of the scaled gradients, a few rows at a time.

    Attributes:
        term: the gradients g_i.
        scale: of the parameter's shape.
    """

    term: Term
    scale: Tensor

    @property
    def batch(self) -> int:
        return self.term.batch

    @property
    def dtype(self) -> torch.dtype:
        return self.term.dtype

    def instantiate(self, rows: slice = slice(None)) -> Tensor:
        return self.term.instantiate(rows) * self.scale

    def norms_sq(self) -> Tensor:
        return norms_by_chunks(self.instantiate, self.batch, self.scale.numel())

    def lengths(self) -> Tensor:
        return self.term.lengths() * self.scale.abs().amax()

    def add_to(self, total: Tensor, factors: Tensor) -> None:
        # The scale is the same for all examples: the sum needs none of them alone.
        total.addcmul_(weighted_sum(self.term, factors, total.shape), self.scale)

    def without(self, rows: Tensor) -> Scaled:
        return Scaled(self.term.without(rows), self.scale)
