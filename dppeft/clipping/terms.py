"""What one use of one parameter contributes to the per-example gradients.

A parameter may be used several times in a forward pass (ALBERT's layers, tied embeddings, two
forwards). Its per-example gradient is the *sum* over its uses, and that sum is what gets a norm.
Each use is a ``Term``: the per-example gradients themselves, or the two factors that they are an
outer product of, so that a full weight's gradient need never exist once per example.

Shapes: B examples, T positions. All terms hold float32 (float64 stays float64).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dppeft.clipping.grams import Products, by_example, gram_products, lengths_of, norms_by_chunks

# Below this share of the largest possible norm a sum of float32 products has lost its digits;
# random directions at T positions have a share of 1 / T.
_CANCELS = 1e-3
_ROUNDING = 1e-6  # of a float32 sum of products, relative to the sum of their lengths

Rows = Tensor | slice
_ALL = slice(None)


def at_least_float32(x: Tensor) -> Tensor:
    """Norms and sums never happen in a lower precision than float32."""
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


class Term(ABC):
    """Per-example gradients ``g_i`` of one parameter, i = 1..B, in whatever form is cheapest."""

    @property
    @abstractmethod
    def batch(self) -> int:
        """B."""

    @property
    @abstractmethod
    def dtype(self) -> torch.dtype:
        """float32 or float64."""

    @abstractmethod
    def instantiate(self, rows: slice = _ALL) -> Tensor:  # (b, *shape)
        """The gradients themselves, for the given rows."""

    @abstractmethod
    def norms_sq(self) -> Tensor:  # (B,)
        """``||g_i||^2``."""

    @abstractmethod
    def lengths(self) -> Tensor:  # (B,)
        """What ``||g_i||`` would be if all that is added up in it had one direction.

        ``add_to`` may round away a share of this, which is what a norm far below it must allow for.
        """

    @abstractmethod
    def add_to(self, total: Tensor, factors: Tensor) -> None:  # total: shape; factors: (B,)
        """``total += sum_i factors_i g_i``, without a (B, *shape) tensor if it can be avoided."""

    @abstractmethod
    def without(self, rows: Tensor) -> Term:  # rows: (B,) bool
        """The same term with zeros for the given rows, whatever they held (NaN included)."""


class Factored(Term):
    """Gradients that are measured by products of positions and need not exist."""

    @property
    def in_grams(self) -> bool:
        """Whether that is cheaper than making the gradients."""
        return True

    @abstractmethod
    def products(self, rows: Rows, dtype: torch.dtype) -> Products:
        """The squared norms, and ``lengths_of``, of the given rows, computed in this precision."""

    def norms_sq(self) -> Tensor:
        return norms_sq_of({"": self})[""]


@dataclass(frozen=True, eq=False)
class Dense(Term):
    """Gradients that exist: ``grads`` (B, *shape)."""

    grads: Tensor

    @property
    def batch(self) -> int:
        return len(self.grads)

    @property
    def dtype(self) -> torch.dtype:
        return self.grads.dtype

    def instantiate(self, rows: slice = _ALL) -> Tensor:
        return self.grads[rows]

    def norms_sq(self) -> Tensor:
        return by_example(self.grads).square().sum(1)

    def lengths(self) -> Tensor:
        return self.grads.new_zeros(self.batch)  # summed as they are: nothing cancels on the way

    def add_to(self, total: Tensor, factors: Tensor) -> None:
        total.view(-1).addmv_(by_example(self.grads).T, factors.to(self.grads.dtype))

    def without(self, rows: Tensor) -> Dense:
        return Dense(_zeroed(self.grads, rows))


@dataclass(frozen=True, eq=False)
class Outer(Factored):
    """``g_i = sum_t left_it right_it^T``: a matrix weight applied at T positions.

    ``left`` is (B, T, m) and ``right`` (B, T, n) for a weight of shape (m, n): for a Linear layer
    the output gradient and the input, for GPT-2's Conv1D the other way round.
    """

    left: Tensor
    right: Tensor

    @property
    def batch(self) -> int:
        return len(self.left)

    @property
    def dtype(self) -> torch.dtype:
        return self.left.dtype

    def compact(self) -> Term:
        """The gradients themselves where they are smaller than their factors (small adapters)."""
        (_, positions, m), n = self.left.shape, self.right.shape[-1]
        return Dense(self.instantiate()) if m * n <= positions * (m + n) else self

    def instantiate(self, rows: slice = _ALL) -> Tensor:
        return self.left[rows].transpose(1, 2) @ self.right[rows]

    def norms_sq(self) -> Tensor:
        """Gram form where 2 T^2 < m n (Li et al. 2022, Eq. 3), else form, measure and drop."""
        if self.in_grams:
            return super().norms_sq()
        elements = self.left.shape[-1] * self.right.shape[-1]
        return norms_by_chunks(self.instantiate, self.batch, elements)

    @property
    def in_grams(self) -> bool:
        (_, positions, m), n = self.left.shape, self.right.shape[-1]
        return 2 * positions**2 < m * n

    def products(self, rows: Rows, dtype: torch.dtype) -> Products:
        """``sum_ts (left_t . left_s)(right_t . right_s)``, each pair once; and ``lengths_of``."""
        return gram_products([self.left[rows].to(dtype)], self.right[rows].to(dtype))[0]

    def lengths(self) -> Tensor:
        return (self.left.norm(dim=2) * self.right.norm(dim=2)).sum(1)

    def add_to(self, total: Tensor, factors: Tensor) -> None:
        left, right = self.left, self.right
        if left.shape[-1] <= right.shape[-1]:  # scaled copies of the narrower side
            left = left * factors.to(left.dtype)[:, None, None]
        else:
            right = right * factors.to(right.dtype)[:, None, None]
        torch.addmm(total, left.flatten(0, 1).T, right.flatten(0, 1), out=total)

    def without(self, rows: Tensor) -> Outer:
        return Outer(_zeroed(self.left, rows), _zeroed(self.right, rows))


@dataclass(frozen=True, eq=False)
class Lookup(Factored):
    """``g_i = sum_t e_{ids_it} grad_it^T``: an embedding table of ``num_rows`` rows.

    ``ids`` is (B, T), ``grad`` (B, T, d) with zeros at the padding id.
    """

    ids: Tensor
    grad: Tensor
    num_rows: int

    @property
    def batch(self) -> int:
        return len(self.ids)

    @property
    def dtype(self) -> torch.dtype:
        return self.grad.dtype

    def compact(self) -> Term:
        """The gradients themselves where the table has no more rows than there are positions."""
        return Dense(self.instantiate()) if self.num_rows <= self.ids.shape[1] else self

    def instantiate(self, rows: slice = _ALL) -> Tensor:
        ids, grad = self.ids[rows], self.grad[rows]
        table = grad.new_zeros(len(ids), self.num_rows, grad.shape[-1])
        return table.scatter_add_(1, ids[..., None].expand_as(grad), grad)

    def products(self, rows: Rows, dtype: torch.dtype) -> Products:
        """``sum_ts [ids_t = ids_s] grad_t . grad_s``, and ``lengths_of``."""
        ids, grad = self.ids[rows], self.grad[rows].to(dtype)
        grams = (grad @ grad.mT).mul_(ids[:, :, None] == ids[:, None, :])
        return grams.sum((1, 2)), lengths_of(grams)

    def lengths(self) -> Tensor:
        return self.grad.norm(dim=2).sum(1)

    def add_to(self, total: Tensor, factors: Tensor) -> None:
        scaled = self.grad * factors.to(self.grad.dtype)[:, None, None]
        total.index_add_(0, self.ids.flatten(), scaled.flatten(0, 1))

    def without(self, rows: Tensor) -> Lookup:
        return Lookup(self.ids, _zeroed(self.grad, rows), self.num_rows)


@dataclass(frozen=True, eq=False)
class Tied(Factored):
    """An embedding table that is the output projection, too: one gradient, measured in its factors.

    Its squared norm is that of both parts and twice their inner product, which needs no table:
    ``sum_ts outer.left[t, ids_s] (lookup.grad_s . outer.right_t)``.
    """

    lookup: Lookup
    outer: Outer

    @property
    def batch(self) -> int:
        return self.lookup.batch

    @property
    def dtype(self) -> torch.dtype:
        return self.outer.dtype

    def instantiate(self, rows: slice = _ALL) -> Tensor:
        return self.lookup.instantiate(rows) + self.outer.instantiate(rows)

    def products(self, rows: Rows, dtype: torch.dtype) -> Products:
        """The squared norm as above, and ``lengths_of``."""
        ids, grad = self.lookup.ids[rows], self.lookup.grad[rows].to(dtype)
        left, right = self.outer.left[rows], self.outer.right[rows].to(dtype)
        read = left.gather(2, ids[:, None].expand(-1, left.shape[1], -1)).to(dtype)  # (B, T, S)
        cross = (right @ grad.mT).mul_(read).sum((1, 2))
        parts = [self.lookup.products(rows, dtype), self.outer.products(rows, dtype)]
        (a, lengths_a), (b, lengths_b) = parts
        return a + b + 2 * cross, lengths_a + lengths_b

    def lengths(self) -> Tensor:
        return self.lookup.lengths() + self.outer.lengths()

    def add_to(self, total: Tensor, factors: Tensor) -> None:
        self.lookup.add_to(total, factors)
        self.outer.add_to(total, factors)

    def without(self, rows: Tensor) -> Tied:
        return Tied(self.lookup.without(rows), self.outer.without(rows))


@dataclass(frozen=True, eq=False)
class Sum(Term):
    """Uses of other kinds together: measured a few rows at a time."""

    terms: Sequence[Term]

    @property
    def batch(self) -> int:
        return self.terms[0].batch

    @property
    def dtype(self) -> torch.dtype:
        return self.terms[0].dtype

    def instantiate(self, rows: slice = _ALL) -> Tensor:
        first, *rest = [term.instantiate(rows) for term in self.terms]
        return torch.stack([first, *rest]).sum(0) if rest else first

    def norms_sq(self) -> Tensor:
        elements = self.instantiate(slice(0, 1)).numel()
        return norms_by_chunks(self.instantiate, self.batch, elements)

    def lengths(self) -> Tensor:
        return torch.stack([term.lengths() for term in self.terms]).sum(0)

    def add_to(self, total: Tensor, factors: Tensor) -> None:
        for term in self.terms:
            term.add_to(total, factors)

    def without(self, rows: Tensor) -> Sum:
        return Sum([term.without(rows) for term in self.terms])


def add(terms: Sequence[Term]) -> Term:
    """The per-example sum of several uses of one parameter, kept in factors where that is possible.

    Outer products over T and T' positions are one outer product over T + T' positions.
    """
    dense = [term for term in terms if isinstance(term, Dense)]
    outer = [term for term in terms if isinstance(term, Outer)]
    lookup = [term for term in terms if isinstance(term, Lookup)]
    joined: list[Term] = [term for term in terms if isinstance(term, Sum | Tied)]
    if dense:
        joined.append(dense[0] if len(dense) == 1 else Dense(sum(term.grads for term in dense)))  # type: ignore[arg-type]
    table = lookup[0] if lookup else None
    if len(lookup) > 1:
        ids = torch.cat([use.ids for use in lookup], dim=1)
        table = Lookup(ids, torch.cat([use.grad for use in lookup], dim=1), lookup[0].num_rows)
    matrix = outer[0] if outer else None
    if len(outer) > 1:
        left = torch.cat([use.left for use in outer], dim=1)
        matrix = Outer(left, torch.cat([use.right for use in outer], dim=1))
    if table is not None and matrix is not None and matrix.left.shape[-1] == table.num_rows:
        joined.append(Tied(table, matrix))
    else:
        joined += [term for term in (table, matrix) if term is not None]
    return joined[0] if len(joined) == 1 else Sum(joined)


def weighted_sum(term: Term, factors: Tensor, shape: Sequence[int]) -> Tensor:
    """``sum_i factors_i g_i`` of a parameter of this shape, in the term's own precision."""
    total = torch.zeros(tuple(shape), dtype=term.dtype, device=factors.device)
    term.add_to(total, factors)
    return total


def norms_sq_of(terms: dict[str, Term]) -> dict[str, Tensor]:
    """``norms_sq`` of each term, in float64 for rows whose positions cancel.

    Such a row has a norm far below the products that are summed, and float32 would report it as
    0, which is "nothing to clip". If the positions all had one direction, its norm would be the sum
    of their lengths. The sum is made in float32, so that what it may round away is added.
    """
    factored = {n: t for n, t in terms.items() if isinstance(t, Factored) and t.in_grams}
    found = {n: _with_margin(term) for n, term in terms.items() if n not in factored}
    if factored:
        products = _products_of(factored)
        norms_sq = torch.stack([products[name][0] for name in factored])
        cancels = norms_sq < _CANCELS * torch.stack([products[n][1] for n in factored]).square()
        if bool(cancels.any()):
            for k, term in enumerate(factored.values()):
                if bool(cancels[k].any()):
                    redone, lengths = term.products(cancels[k], torch.float64)
                    norm = redone.clamp_min(0).sqrt() + _ROUNDING * lengths
                    norms_sq[k, cancels[k]] = norm.square().to(norms_sq.dtype)
        norms_sq.clamp_min_(0)  # rounding can make a sum of products negative
        found |= dict(zip(factored, norms_sq, strict=True))
    return {name: found[name] for name in terms}


def _with_margin(term: Term) -> Tensor:
    """``norms_sq`` of a term whose gradients are made to be measured; they cancel like products."""
    norms_sq = term.norms_sq()
    if isinstance(term, Dense):
        return norms_sq
    lengths = term.lengths()
    covered = (norms_sq.clamp_min(0).sqrt() + _ROUNDING * lengths).square()
    return torch.where(norms_sq < _CANCELS * lengths.square(), covered, norms_sq)


def _products_of(terms: dict[str, Factored]) -> dict[str, Products]:
    """``products`` of each term; matrices with one input (query, key, value) share its Gram."""
    found: dict[str, Products] = {}
    sharing: dict[tuple[object, ...], dict[str, Outer]] = {}
    for name, term in terms.items():
        if isinstance(term, Outer):
            right = term.right
            memory = (right.data_ptr(), right.dtype, right.shape, right.stride())
            sharing.setdefault(memory, {})[name] = term
        else:
            found[name] = term.products(_ALL, term.dtype)
    for group in sharing.values():
        right = next(iter(group.values())).right
        found |= zip(group, gram_products([t.left for t in group.values()], right), strict=True)
    return found


def _zeroed(x: Tensor, rows: Tensor) -> Tensor:
    return x.masked_fill(rows.view(-1, *[1] * (x.dim() - 1)), 0)
