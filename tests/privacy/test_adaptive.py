"""Thresholds that follow the norms: one Gaussian release with the counts, at the planned price."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

import dppeft
from dppeft.clipping.engine import make_engine
from dppeft.clipping.factors import WHOLE
from dppeft.errors import ArgumentError
from dppeft.privacy.adaptive import AdaptiveClipping, joint_bound
from dppeft.privacy.noise import GaussianNoise, fresh_secret
from dppeft.training.thresholds import COUNTS, Thresholds
from tests import oracle
from tests.training.runs import Dot, dot_loss, dot_run, make_plan


@pytest.mark.parametrize("thresholds", [1, 8])
@pytest.mark.parametrize("count_noise", [2.0, 5.0, 50.0])
def test_A17_the_gradients_noise_is_that_of_the_paper(thresholds: int, count_noise: float) -> None:
    """Andrew et al. (2021), Theorem 1; with K counts each takes (2 sigma_b)^-2."""
    sigma = 1.1
    adaptive = AdaptiveClipping(count_noise=count_noise)
    scale = adaptive.scale(
        3.0, thresholds=thresholds, noise_multiplier=sigma, expected_batch_size=1
    )
    bound = joint_bound(3.0, scale, thresholds)
    gradient = sigma * bound / 3.0
    assert gradient == pytest.approx((sigma**-2 - thresholds * (2 * count_noise) ** -2) ** -0.5)
    assert sigma * bound / scale == pytest.approx(count_noise)  # in units of one example


def test_A17_more_noise_than_the_counts_allow_is_refused() -> None:
    def planned(count_noise: float) -> dppeft.PrivacyPlan:
        return make_plan(
            100,
            noise_multiplier=2.0,
            max_grad_norm=1.0,
            adaptive=AdaptiveClipping(count_noise=count_noise),
        )

    assert "x 2.304" in planned(1.11).explain()
    with pytest.raises(ArgumentError, match="count_noise=1 is too little for noise_multiplier=2"):
        planned(1.0)
    with pytest.raises(ArgumentError, match="well above 1.41"):  # two tensors, two counts
        Thresholds(planned(1.11), "per_layer", ["a", "b"])
    with pytest.raises(ArgumentError, match="no threshold to adapt"):
        Thresholds(planned(5.0), "automatic", ["a"])
    with pytest.raises(ArgumentError, match="finite max_grad_norm"):
        make_plan(100, max_grad_norm=math.inf, adaptive=AdaptiveClipping())


def test_A17_eight_thresholds_of_one_have_the_bound_of_their_root() -> None:
    class Eight(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = torch.nn.ModuleList(torch.nn.Linear(3, 1, bias=False) for _ in range(8))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return sum(part(x) for part in self.parts)[:, 0]

    model = Eight()
    engine = make_engine(model, loss=dot_loss, clipping="per_layer")
    bounds = {name: 1.0 for name, _ in model.named_parameters()}
    clipped = engine.clipped_sum({"x": torch.ones(1, 3) * 9}, max_grad_norm=bounds)
    assert clipped.l2_bound == pytest.approx(2.828, abs=1e-3)
    for grad in clipped.grads.values():
        assert float(grad.norm()) == pytest.approx(1.0)
    with pytest.raises(ArgumentError, match="one for each trained tensor"):
        engine.clipped_sum({"x": torch.ones(1, 3)}, max_grad_norm={"parts.0.weight": 1.0})


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
@pytest.mark.parametrize("size", [0.01, 1.0, 100.0])
def test_one_example_moves_gradient_and_counts_within_the_bound(clipping: str, size: float) -> None:
    model = Dot(3)
    names = [name for name, _ in model.named_parameters()]
    plan = make_plan(
        4, noise_multiplier=1.0, max_grad_norm=1.0, adaptive=AdaptiveClipping(count_noise=0.6)
    )
    thresholds = Thresholds(plan, clipping, names)
    engine = make_engine(model, loss=dot_loss, clipping=clipping)
    x = torch.eye(4, 3) * size

    def vector(rows: torch.Tensor) -> tuple[oracle.Grads, float]:
        total = engine.clipped_sum({"x": rows}, max_grad_norm=thresholds.for_engine)
        joined = thresholds.join(total, noise_multiplier=1.0, expected_batch_size=4)
        return {n: g.double() for n, g in joined.grads.items()}, joined.l2_bound

    whole, bound = vector(x)
    assert COUNTS in whole
    worst = max(oracle.distance(whole, vector(torch.cat([x[:i], x[i + 1 :]]))[0]) for i in range(4))
    assert worst <= bound * (1 + 1e-5)
    if size == 100.0:  # and it is no looser than it must be
        assert worst > 0.999 * bound


def test_the_noise_follows_the_joint_bound() -> None:
    """count_noise just above sigma / 2 makes the price large: the plain bound must be rejected."""
    plan = make_plan(
        4, noise_multiplier=1.0, max_grad_norm=1.0, adaptive=AdaptiveClipping(count_noise=0.55)
    )
    thresholds = Thresholds(plan, "flat", ["w"])
    total = dppeft.ClippedSum(
        grads={"w": torch.zeros(40_000)}, norms=torch.zeros(0), l2_bound=1.0, count=0
    )
    joined = thresholds.join(total, noise_multiplier=1.0, expected_batch_size=4)
    noisy = GaussianNoise(fresh_secret(0)).add(joined, noise_multiplier=1.0, step=0)
    std = float(noisy["w"].std())
    assert std == pytest.approx((1 - (2 * 0.55) ** -2) ** -0.5, rel=0.02)
    assert std > 2  # without the counts it would be 1


@pytest.mark.parametrize("clipping", ["flat", "per_layer"])
def test_the_threshold_finds_the_quantile(clipping: str) -> None:
    norms = torch.linspace(1, 9, 200)
    x = torch.zeros(200, 2)
    x[:, 0] = norms
    plan = make_plan(
        200,
        steps=60,
        noise_multiplier=0.01,
        max_grad_norm=0.1,
        adaptive=AdaptiveClipping(quantile=0.75, learning_rate=0.5, count_noise=1.0),
    )
    _, run = dot_run(x, plan, clipping=clipping)
    for batch in run.batches():
        run.step(batch)
    (threshold,) = run._update.thresholds.values.values()
    assert threshold == pytest.approx(7.0, abs=0.2)  # a quarter of the norms is beyond
    assert run.spent().epsilon == pytest.approx(plan.epsilon())
    assert len(run.ledger.entries) == 60


def test_a_saved_run_goes_on_with_its_threshold(tmp_path: Path) -> None:
    plan = make_plan(
        8,
        steps=4,
        noise_multiplier=0.1,
        max_grad_norm=0.1,
        adaptive=AdaptiveClipping(count_noise=1.0),
    )
    _, run = dot_run(torch.ones(8, 2), plan)
    for batch in run.batches(steps=2):
        run.step(batch)
    moved = run._update.thresholds.values[WHOLE]
    assert moved > 0.11
    run.save(tmp_path)
    _, again = dot_run(torch.ones(8, 2), plan)
    again.restore(tmp_path)
    assert again._update.thresholds.values[WHOLE] == moved
