"""Factors keep each example's share within the bound, at the edges too."""

from __future__ import annotations

import math

import pytest
import torch

from dppeft.clipping.factors import automatic, clip_factors, flat

NORMS = torch.tensor([0.0, 1e-12, 0.5, 1.0, 3.0, 1e18, math.inf, math.nan])


@pytest.mark.parametrize("bound", [1e-3, 0.5, 1.0, 1e9])
@pytest.mark.parametrize("rule", [flat, automatic])
def test_no_share_exceeds_the_bound(rule, bound: float) -> None:  # type: ignore[no-untyped-def]
    factors = rule(NORMS, bound)
    finite = NORMS.isfinite()
    assert bool(((factors * NORMS)[finite] <= bound * (1 + 1e-6)).all())
    assert bool((factors[~finite] == 0).all())
    assert bool((factors >= 0).all())
    assert bool(factors.isfinite().all())


def test_flat_is_the_identity_below_the_bound() -> None:
    assert flat(NORMS[:4], 1.0).tolist() == [1, 1, 1, 1]
    assert flat(torch.tensor([4.0]), 1.0).tolist() == [0.25]
    assert flat(NORMS[:5], math.inf).tolist() == [1] * 5
    assert flat(torch.zeros(0), 1.0).shape == (0,)


@pytest.mark.parametrize("clipping", ["flat", "per_layer", "automatic"])
def test_the_bound_holds_for_all_tensors_together(clipping: str) -> None:
    torch.manual_seed(0)
    squares = {name: torch.rand(100).mul(50).exp() for name in "abc"}
    factors, norms = clip_factors(squares, max_grad_norm=0.7, clipping=clipping)
    share = sum((factors[n] ** 2 * squares[n]) for n in squares).sqrt()
    finite = norms.isfinite()
    assert bool((share[finite] <= 0.7 * (1 + 1e-5)).all())
    assert float(share[finite].max()) > 0.69  # and it is not wasted


def test_one_bad_tensor_silences_the_row_everywhere() -> None:
    squares = {"a": torch.tensor([1.0, 1.0]), "b": torch.tensor([math.nan, 1.0])}
    for clipping in ("flat", "per_layer", "automatic"):
        factors, _ = clip_factors(squares, max_grad_norm=1.0, clipping=clipping)
        assert float(factors["a"][0]) == 0
        assert float(factors["b"][0]) == 0
        assert float(factors["a"][1]) > 0
