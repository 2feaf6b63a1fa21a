"""Squared norms of sums over positions, from products of positions or a few rows at a time."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

_GRAM_BLOCK = 64  # positions; a Gram matrix is symmetric, so blocks below its diagonal are left out
_CHUNK_ELEMENTS = 1 << 24  # 64 MiB of float32 at a time when gradients are formed and dropped

Products = tuple[Tensor, Tensor]  # (B,) squared norms, (B,) sums of the positions' lengths


def by_example(grads: Tensor) -> Tensor:
    """(B, *shape) -> (B, p), also for a parameter without axes."""
    return grads.reshape(len(grads), -1)


def gram_products(lefts: Sequence[Tensor], right: Tensor) -> list[Products]:
    """For each ``left`` (B, T, m): the sum over pairs of positions, and ``lengths_of``.

    Below the diagonal a symmetric matrix holds nothing new; blocks of it are left out.
    """
    found = [(right.new_zeros(len(right)), right.new_zeros(len(right))) for _ in lefts]
    for start in range(0, right.shape[1], _GRAM_BLOCK):
        here, after = slice(start, start + _GRAM_BLOCK), slice(start, None)
        shared = right[:, here] @ right[:, after].mT
        width = min(_GRAM_BLOCK, shared.shape[2])
        for left, (total, lengths) in zip(lefts, found, strict=True):
            grams = (left[:, here] @ left[:, after].mT).mul_(shared)
            total += grams.sum((1, 2))
            if width < shared.shape[2]:
                total += grams[:, :, width:].sum((1, 2))
            lengths += lengths_of(grams[:, :, :width])
    return found


def lengths_of(grams: Tensor) -> Tensor:
    """Sum over positions of the lengths of their parts, whose squares are a Gram's diagonal."""
    return grams.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt().sum(1)


def norms_by_chunks(instantiate: Callable[[slice], Tensor], batch: int, elements: int) -> Tensor:
    """``||g_i||^2`` (B,) of gradients with so many elements each, made a few rows at a time."""
    step = max(1, _CHUNK_ELEMENTS // elements)
    parts = [
        by_example(instantiate(slice(start, start + step))).square().sum(1)
        for start in range(0, batch, step)
    ]
    return torch.cat(parts)
