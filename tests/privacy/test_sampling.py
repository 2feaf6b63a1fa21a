"""Poisson sampling by its statistics; a fixed-size draw of the same marginal rate is rejected."""

from __future__ import annotations

import math
import random
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor

import dppeft
from dppeft.errors import ArgumentError
from dppeft.privacy.noise import fresh_secret
from dppeft.privacy.sampling import PoissonSampler


def make_plan(rows, batch, **more):
    more = more or {"steps": 5}
    return dppeft.plan(
        num_examples=rows, batch_size=batch, delta=1e-9, noise_multiplier=1.0, **more
    )


def statistics(draw: Callable[[int], Tensor], rows: int, draws: int) -> dict[str, float]:
    taken = np.zeros((draws, rows))
    for step in range(draws):
        taken[step, draw(step).numpy()] = 1
    together = taken.T @ taken / draws
    sizes = taken.sum(1)
    shifted = taken[1:].T @ taken[:-1] / (draws - 1)
    off = ~np.eye(rows, dtype=bool)
    return {
        "marginal": np.abs(taken.mean(0) - 0.2).max(),
        "pairs": np.abs(together[off] - 0.04).mean(),
        "mean pair": together[off].mean(),
        "size variance": sizes.var(),
        "empty": (sizes == 0).mean(),
        "across steps": shifted.mean(),
    }


def is_poisson(found: dict[str, float]) -> bool:
    """For 20 rows at rate 0.2 and 20,000 draws."""
    return (
        found["marginal"] < 0.012  # 4 standard errors
        and abs(found["mean pair"] - 0.040) < 0.001
        and found["pairs"] < 0.003
        and abs(found["size variance"] - 3.2) < 0.15
        and abs(found["empty"] - 0.8**20) < 0.003
        and abs(found["across steps"] - 0.040) < 0.001
    )


def test_A9_rows_are_drawn_independently():
    sampler = PoissonSampler(make_plan(20, 4), fresh_secret(0))
    found = statistics(sampler.indices, rows=20, draws=20_000)
    assert is_poisson(found), found


def test_A9_a_fixed_size_draw_is_rejected():
    rng = np.random.default_rng(0)

    def fixed_size(step: int) -> Tensor:
        return torch.from_numpy(rng.permutation(20)[:4])

    found = statistics(fixed_size, rows=20, draws=20_000)
    assert found["marginal"] < 0.012, "its marginal rate is right"
    assert not is_poisson(found)
    assert found["size variance"] == 0


def test_A8_a_shuffled_epoch_is_rejected():
    rng = np.random.default_rng(0)

    def shuffled(step: int, order: list = []) -> Tensor:  # noqa: B006  (keeps the epoch)
        if not order:
            order.extend(rng.permutation(20))
        return torch.tensor([order.pop() for _ in range(4)])

    assert not is_poisson(statistics(shuffled, rows=20, draws=20_000))


@pytest.mark.parametrize(("rows", "batch"), [(67349, 2000), (1000, 1), (5000, 4900)])
def test_the_rate_is_the_accountants(rows, batch):
    """The mean size over many steps is the expected one to 4 standard errors."""
    sampler = PoissonSampler(make_plan(rows, batch), fresh_secret(1))
    steps = 400
    mean = sum(len(sampler.indices(step)) for step in range(steps)) / steps
    rate = batch / rows
    assert abs(mean - batch) < 4 * math.sqrt(rows * rate * (1 - rate) / steps)


def test_a_rate_of_one_draws_every_row():
    sampler = PoissonSampler(make_plan(50, 50), fresh_secret())
    for step in range(20):
        assert sampler.indices(step).tolist() == list(range(50))


def test_empty_draws_happen_and_are_tensors():
    sampler = PoissonSampler(make_plan(100, 1), fresh_secret(0))
    sizes = [len(sampler.indices(step)) for step in range(300)]
    assert sizes.count(0) / 300 == pytest.approx(math.exp(-1), abs=0.11)
    empty = sampler.indices(sizes.index(0))
    assert empty.shape == (0,)
    assert empty.dtype == torch.int64


def test_a_schedule_sets_the_rate_of_each_step():
    plan = dppeft.plan(
        num_examples=40_000,
        batch_size=8000,
        delta=1e-9,
        noise_multiplier=1.0,
        batch_schedule=[400, 2000, 8000],
    )
    sampler = PoissonSampler(plan, fresh_secret(0))
    for step, expected in enumerate([400, 2000, 8000, 8000]):
        assert len(sampler.indices(step)) == pytest.approx(expected, abs=5 * math.sqrt(expected))


def test_draws_are_a_function_of_secret_and_step():
    secret = fresh_secret()
    plan = make_plan(1000, 100)
    ours, other_rank = PoissonSampler(plan, secret), PoissonSampler(plan, secret)
    forward = [ours.indices(step) for step in range(4)]
    backward = [other_rank.indices(step) for step in reversed(range(4))][::-1]
    assert all(torch.equal(a, b) for a, b in zip(forward, backward, strict=True))
    assert not torch.equal(forward[0], forward[1])
    elsewhere = PoissonSampler(plan, fresh_secret())
    assert not torch.equal(forward[0], elsewhere.indices(0))


def test_global_generators_neither_matter_nor_move():
    sampler = PoissonSampler(make_plan(1000, 100), fresh_secret(3))
    first = sampler.indices(0)
    torch.manual_seed(0)
    np.random.seed(0)
    random.seed(0)
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()
    assert torch.equal(sampler.indices(0), first)
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])
    assert random.getstate() == before[2]


def test_a_negative_step_is_refused():
    with pytest.raises(ArgumentError, match="step >= 0, got step=-1"):
        PoissonSampler(make_plan(10, 1), fresh_secret(0)).indices(-1)
