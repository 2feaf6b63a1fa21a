"""From per-example norms to the factors that bound each example's share of the sum."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

CLIPPINGS = ("flat", "per_layer", "automatic")
WHOLE = "all trained tensors"  # the one threshold of flat clipping; no parameter has such a name
AUTOMATIC_STABILITY = 0.01  # gamma of Bu et al. (2022), arXiv 2206.07136


def flat(norms: Tensor, max_grad_norm: float) -> Tensor:
    """``min(1, C / norm)`` for each example; shape (B,).

    Guarantee: ``factor * ||g|| <= C``. Edges: norm 0 -> 1; C = inf -> 1; a norm that is not finite
    -> 0; empty batch -> shape (0,).
    Reference: Abadi et al. (2016), Algorithm 1.
    """
    if math.isinf(max_grad_norm):
        factors = torch.ones_like(norms)
    else:
        factors = (max_grad_norm / norms).clamp(max=1.0)
    return torch.where(torch.isfinite(norms), factors, torch.zeros_like(factors))


def automatic(norms: Tensor, max_grad_norm: float) -> Tensor:
    """``C / (norm + gamma)``: every gradient is normalised, so C only scales the learning rate.

    Guarantee: ``factor * ||g|| < C``. Edges: norm 0 -> C / gamma (of a zero gradient); a norm that
    is not finite -> 0. Reference: Bu et al. (2022), arXiv 2206.07136, Eq. 4.
    """
    factors = max_grad_norm / (norms + AUTOMATIC_STABILITY)
    return torch.where(torch.isfinite(norms), factors, torch.zeros_like(factors))


def clip_factors(
    norms_sq: dict[str, Tensor], *, max_grad_norm: float | Mapping[str, float], clipping: str
) -> tuple[dict[str, Tensor], Tensor]:
    """Factors by parameter name, and the norms over all parameters together.

    ``per_layer`` clips each of the k trained tensors to C / sqrt(k) (Yu et al. 2022), so that the
    whole stays within C in each mode; or each to a threshold of its own.

    Args:
        norms_sq: name -> (B,) squared norm of that tensor's per-example gradients.
        max_grad_norm: C > 0; for ``per_layer`` also one by name.
        clipping: one of ``CLIPPINGS``.

    Returns:
        name -> (B,) factors, and (B,) norms. A row with any value that is not finite gets factor 0
        everywhere.
    """
    stacked = torch.stack(list(norms_sq.values()))  # (k, B)
    norms = stacked.sum(0).sqrt()
    if clipping == "per_layer":
        thresholds = _by_name(norms_sq, max_grad_norm)
        finite = torch.isfinite(norms)
        return {n: flat(sq.sqrt(), thresholds[n]) * finite for n, sq in norms_sq.items()}, norms
    assert not isinstance(max_grad_norm, Mapping)
    rule = automatic if clipping == "automatic" else flat
    shared = rule(norms, max_grad_norm)
    return dict.fromkeys(norms_sq, shared), norms


def within(
    norms_sq: dict[str, Tensor],
    norms: Tensor,
    *,
    max_grad_norm: float | Mapping[str, float],
    clipping: str,
) -> dict[str, Tensor]:
    """For each threshold the sum over examples of +1/2 within it, -1/2 beyond or not finite.

    One number for ``flat`` (under ``WHOLE``), one by name for ``per_layer``, none for ``automatic``
    (Andrew et al. 2021, Sec. 2, with its shift by 1/2).
    """
    if clipping == "automatic":
        return {}
    if clipping == "flat":
        assert not isinstance(max_grad_norm, Mapping)
        return {WHOLE: (norms <= max_grad_norm).float().sub(0.5).sum()}
    thresholds = _by_name(norms_sq, max_grad_norm)
    return {n: (sq.sqrt() <= thresholds[n]).float().sub(0.5).sum() for n, sq in norms_sq.items()}


def _by_name(
    norms_sq: dict[str, Tensor], max_grad_norm: float | Mapping[str, float]
) -> Mapping[str, float]:
    if isinstance(max_grad_norm, Mapping):
        return max_grad_norm
    threshold = max_grad_norm / math.sqrt(len(norms_sq))
    return dict.fromkeys(norms_sq, threshold)
