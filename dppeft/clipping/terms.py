"""What one use of one parameter contributes to the per-example gradients.

A parameter may be used several times in a forward pass (ALBERT's layers, tied embeddings, two
forwards). Its per-example gradient is the *sum* over its uses, and that sum is what gets a norm.
Each use is a ``Term``: the per-example gradients themselves, or the two factors that they are an
outer product of, so that a full weight's gradient need never exist once per example.

Shapes: B examples, T positions. All terms hold float32 (float64 stays float64).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

_GRAM_BLOCK = 32  # positions; a Gram matrix is symmetric, so blocks below its diagonal are left out
# Below this share of the largest possible norm a sum of float32 products has lost its digits;
# random directions at T positions have a share of 1 / T.
_CANCELS = 1e-3
_CHUNK_ELEMENTS = 1 << 24  # 64 MiB of float32 at a time when gradients are formed and dropped


def at_least_float32(x: Tensor) -> Tensor:
    """Norms and sums never happen in a lower precision than float32."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def by_example(grads: Tensor) -> Tensor:
    """(B, *shape) -> (B, p), also for a parameter without axes."""
    return grads.reshape(len(grads), -1)


class Term(Protocol):
    """Per-example gradients ``g_i`` of one parameter, i = 1..B, in whatever form is cheapest."""

    @property
    def batch(self) -> int:
        """B."""

    def instantiate(self, rows: slice = slice(None)) -> Tensor:  # (b, *shape)
        """The gradients themselves, for the given rows."""

    def norms_sq(self) -> Tensor:  # (B,)
        """``||g_i||^2``."""

    def weighted_sum(self, factors: Tensor) -> Tensor:  # factors (B,) -> shape
        """``sum_i factors_i g_i`` without a (B, *shape) tensor where that can be avoided."""

    def without(self, rows: Tensor) -> Term:  # rows: (B,) bool
        """The same term with zeros for the given rows, whatever they held (NaN included)."""


@dataclass(frozen=True, eq=False)
class Dense:
    """Gradients that exist: ``grads`` (B, *shape)."""

    grads: Tensor

    @property
    def batch(self) -> int:
        return len(self.grads)

    def instantiate(self, rows: slice = slice(None)) -> Tensor:
        return self.grads[rows]

    def norms_sq(self) -> Tensor:
        return by_example(self.grads).square().sum(1)

    def weighted_sum(self, factors: Tensor) -> Tensor:
        flat = factors.to(self.grads.dtype) @ by_example(self.grads)
        return flat.reshape(self.grads.shape[1:])

    def without(self, rows: Tensor) -> Dense:
        return Dense(_zeroed(self.grads, rows))


@dataclass(frozen=True, eq=False)
class Outer:
    """``g_i = sum_t left_it right_it^T``: a matrix weight applied at T positions.

    ``left`` is (B, T, m) and ``right`` (B, T, n) for a weight of shape (m, n): for a Linear layer
    the output gradient and the input, for GPT-2's Conv1D the other way round.
    """

    left: Tensor
    right: Tensor

    @property
    def batch(self) -> int:
        return len(self.left)

    def compact(self) -> Term:
        """The gradients themselves where they are smaller than their factors (small adapters)."""
        (_, positions, m), n = self.left.shape, self.right.shape[-1]
        return Dense(self.instantiate()) if m * n <= positions * (m + n) else self

    def instantiate(self, rows: slice = slice(None)) -> Tensor:
        return self.left[rows].transpose(1, 2) @ self.right[rows]

    def norms_sq(self) -> Tensor:
        """Gram form where 2 T^2 < m n (Li et al. 2022, Eq. 3), else form, measure and drop."""
        (_, positions, m), n = self.left.shape, self.right.shape[-1]
        if 2 * positions**2 < m * n:
            lengths = self.left.norm(dim=2) * self.right.norm(dim=2)
            return _measured_with_care(self._gram, lengths)
        return _norms_by_chunks(self.instantiate, self.batch, m * n)

    def _gram(self, rows: Tensor | slice, dtype: torch.dtype) -> Tensor:
        """``sum_ts (left_t . left_s)(right_t . right_s)``, each pair of positions once."""
        left, right = self.left[rows].to(dtype), self.right[rows].to(dtype)
        total = left.new_zeros(len(left))
        for start in range(0, left.shape[1], _GRAM_BLOCK):
            here, after = slice(start, start + _GRAM_BLOCK), slice(start, None)
            grams = (left[:, here] @ left[:, after].mT).mul_(right[:, here] @ right[:, after].mT)
            width = min(_GRAM_BLOCK, grams.shape[2])
            total += grams.sum((1, 2)) + grams[:, :, width:].sum((1, 2))  # the symmetric half
        return total

    def weighted_sum(self, factors: Tensor) -> Tensor:
        scaled = self.left * factors.to(self.left.dtype)[:, None, None]
        return scaled.flatten(0, 1).T @ self.right.flatten(0, 1)

    def without(self, rows: Tensor) -> Outer:
        return Outer(_zeroed(self.left, rows), _zeroed(self.right, rows))


@dataclass(frozen=True, eq=False)
class Lookup:
    """``g_i = sum_t e_{ids_it} grad_it^T``: an embedding table of ``num_rows`` rows.

    ``ids`` is (B, T), ``grad`` (B, T, d) with zeros at the padding id.
    """

    ids: Tensor
    grad: Tensor
    num_rows: int

    @property
    def batch(self) -> int:
        return len(self.ids)

    def instantiate(self, rows: slice = slice(None)) -> Tensor:
        ids, grad = self.ids[rows], self.grad[rows]
        table = grad.new_zeros(len(ids), self.num_rows, grad.shape[-1])
        return table.scatter_add_(1, ids[..., None].expand_as(grad), grad)

    def norms_sq(self) -> Tensor:
        return _measured_with_care(self._gram, self.grad.norm(dim=2))

    def _gram(self, rows: Tensor | slice, dtype: torch.dtype) -> Tensor:
        ids, grad = self.ids[rows], self.grad[rows].to(dtype)
        return ((grad @ grad.mT) * (ids[:, :, None] == ids[:, None, :])).sum((1, 2))

    def weighted_sum(self, factors: Tensor) -> Tensor:
        scaled = (self.grad * factors.to(self.grad.dtype)[:, None, None]).flatten(0, 1)
        table = scaled.new_zeros(self.num_rows, scaled.shape[-1])
        return table.index_add_(0, self.ids.flatten(), scaled)

    def without(self, rows: Tensor) -> Lookup:
        return Lookup(self.ids, _zeroed(self.grad, rows), self.num_rows)


@dataclass(frozen=True, eq=False)
class Sum:
    """Uses of different kinds (a tied embedding and head): measured a few rows at a time."""

    terms: Sequence[Term]

    @property
    def batch(self) -> int:
        return self.terms[0].batch

    def instantiate(self, rows: slice = slice(None)) -> Tensor:
        first, *rest = [term.instantiate(rows) for term in self.terms]
        return torch.stack([first, *rest]).sum(0) if rest else first

    def norms_sq(self) -> Tensor:
        elements = self.instantiate(slice(0, 1)).numel()
        return _norms_by_chunks(self.instantiate, self.batch, elements)

    def weighted_sum(self, factors: Tensor) -> Tensor:
        return torch.stack([term.weighted_sum(factors) for term in self.terms]).sum(0)

    def without(self, rows: Tensor) -> Sum:
        return Sum([term.without(rows) for term in self.terms])


def add(terms: Sequence[Term]) -> Term:
    """The per-example sum of several uses of one parameter, kept in factors where that is possible.

    Outer products over T and T' positions are one outer product over T + T' positions.
    """
    if len(terms) == 1:
        return terms[0]
    if all(isinstance(term, Dense) for term in terms):
        return Dense(torch.stack([term.instantiate() for term in terms]).sum(0))
    if all(isinstance(term, Outer) for term in terms):
        left = torch.cat([term.left for term in terms if isinstance(term, Outer)], dim=1)
        right = torch.cat([term.right for term in terms if isinstance(term, Outer)], dim=1)
        return Outer(left, right)
    if all(isinstance(term, Lookup) for term in terms):
        uses = [term for term in terms if isinstance(term, Lookup)]
        ids = torch.cat([use.ids for use in uses], dim=1)
        return Lookup(ids, torch.cat([use.grad for use in uses], dim=1), uses[0].num_rows)
    return Sum(terms)


def _zeroed(x: Tensor, rows: Tensor) -> Tensor:
    return x.masked_fill(rows.view(-1, *[1] * (x.dim() - 1)), 0)


def _measured_with_care(gram: Callable[[Any, torch.dtype], Tensor], lengths: Tensor) -> Tensor:
    """Squared norms from products of positions; in float64 for rows whose positions cancel.

    Such a row has a norm far below the products that are summed, and float32 would report it as
    0, which is "nothing to clip". ``lengths`` (B, T) are the norms of the single positions.
    """
    norms_sq = gram(slice(None), lengths.dtype)
    cancels = norms_sq < _CANCELS * lengths.sum(1).square()
    if bool(cancels.any()):
        norms_sq[cancels] = gram(cancels, torch.float64).to(norms_sq.dtype)
    return norms_sq.clamp_min(0)  # rounding can make a sum of products negative


def _norms_by_chunks(instantiate: Callable[[slice], Tensor], batch: int, elements: int) -> Tensor:
    step = max(1, _CHUNK_ELEMENTS // elements)
    parts = [
        by_example(instantiate(slice(start, start + step))).square().sum(1)
        for start in range(0, batch, step)
    ]
    return torch.cat(parts)
