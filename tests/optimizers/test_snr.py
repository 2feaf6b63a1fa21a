"""The estimate of the signal from released gradients: its numbers, its mean, what it refuses."""

from __future__ import annotations

import math

import pytest
import torch

import dppeft
from dppeft.errors import ArgumentError, UnsupportedModelError
from dppeft.optimizers.snr import SignalToNoise, StepRecord, mean_ratio
from tests.training.runs import carried_bert, dot_run, make_plan, sgd, token_rows

WIDTH, ROWS = 60, 12


@pytest.fixture(autouse=True)
def _state_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def _observed(steps, **changes):
    """A run whose clipped mean gradient is known: every row is drawn, every gradient is x."""
    x = torch.full((ROWS, WIDTH), 0.5 / math.sqrt(WIDTH))  # of norm 0.5 each
    plan = make_plan(ROWS, steps=steps, **changes)
    _, run = dot_run(x, plan, seed=3)
    monitor = SignalToNoise(run)
    for batch in run.batches():
        run.step(batch)
    return run, monitor


def test_the_estimate_is_unbiased_and_the_noise_left_in_is_found():
    """||mean gradient||**2 = 0.25; without the subtraction it would be 3.6 times that."""
    steps = 400
    run, monitor = _observed(steps, noise_multiplier=1.25, max_grad_norm=1.0)
    estimates = torch.tensor([record.signal_squared for record in monitor.records])
    noise = WIDTH * (1.25 / ROWS) ** 2
    error = math.sqrt((2 * WIDTH * (1.25 / ROWS) ** 4 + (1.25 / ROWS) ** 2) / steps)
    assert abs(float(estimates.mean()) - 0.25) < 5 * error
    assert abs(float(estimates.mean()) + noise - 0.25) > 50 * error
    # The stated error is the spread seen, within 20 %, and twice it is not.
    stated = sum(record.error for record in monitor.records) / steps
    assert float(estimates.std()) == pytest.approx(stated, rel=0.2)
    assert mean_ratio(monitor.records) == pytest.approx(math.sqrt(0.25 / noise), rel=0.1)
    assert [record.step for record in monitor.records] == list(range(steps))


def test_the_bound_is_that_of_the_release_under_adaptive_thresholds():
    adaptive = dppeft.AdaptiveClipping(quantile=0.5, count_noise=5.0)
    run, monitor = _observed(6, noise_multiplier=3.0, max_grad_norm=2.0, adaptive=adaptive)
    bounds = [entry.l2_bound for entry in run.ledger.entries]
    assert len(set(bounds)) == 6  # they moved
    assert [r.noise_std for r in monitor.records] == pytest.approx(
        [3.0 * bound / ROWS for bound in bounds], rel=1e-12
    )


def test_a_schedule_changes_the_divisor():
    schedule = (ROWS // 2, ROWS)
    changes = {"batch_schedule": schedule, "noise_multiplier": 1.0, "max_grad_norm": 1.0}
    run, monitor = _observed(None, **changes)
    assert [r.noise_std for r in monitor.records] == pytest.approx([2 / ROWS, 1 / ROWS])


def test_a_record_by_hand():
    record = StepRecord(step=0, size=4, released_squared=10.0, noise_std=0.5)
    assert (record.noise_squared, record.signal_squared, record.ratio) == (1.0, 9.0, 3.0)
    assert record.error == pytest.approx(math.sqrt(2 * 4 * 0.0625 + 4 * 0.25 * 9))
    weak = StepRecord(step=0, size=4, released_squared=0.5, noise_std=0.5)
    assert (weak.signal_squared, weak.ratio) == (-0.5, 0.0)
    quiet = StepRecord(step=0, size=4, released_squared=0.5, noise_std=0.0)
    assert quiet.ratio == mean_ratio([quiet]) == math.inf
    with pytest.raises(ArgumentError, match="at least one record"):
        mean_ratio([])


def test_reading_stops_and_changes_nothing():
    x = torch.eye(3)
    weights = []
    for watch in (True, False):
        model, run = dot_run(
            x, make_plan(3, steps=2, noise_multiplier=1.0, max_grad_norm=1.0), seed=1
        )
        monitor = SignalToNoise(run) if watch else None
        for number, batch in enumerate(run.batches()):
            run.step(batch)
            if monitor is not None and number == 0:
                monitor.close()
        weights.append(model.layer.weight.detach().clone())
        if monitor is not None:
            assert len(monitor.records) == 1
    assert torch.equal(*weights)


def test_gradients_that_were_lifted_are_refused():
    model = carried_bert()
    rows = token_rows(6)
    run = dppeft.make_private(model, sgd(model), rows, make_plan(6))
    with pytest.raises(UnsupportedModelError, match="computed from what is released"):
        SignalToNoise(run)
