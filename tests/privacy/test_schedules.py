"""Batch schedules: what they hold, what they save, and that accounting them never under-reports."""

from __future__ import annotations

import numpy as np
import pytest
from scipy.stats import norm

import dppeft
from dppeft import schedules
from dppeft.errors import ArgumentError, ArgumentTypeError
from dppeft.privacy import _accountants, _losses


def test_each_kind_by_hand():
    assert schedules.constant(7, 3) == (7, 7, 7)
    assert schedules.steps([(0, 5), (2, 9)], 5) == (5, 5, 9, 9, 9)
    assert schedules.geometric(1, 8, every=2, steps=7) == (1, 1, 2, 2, 4, 4, 8)
    assert schedules.linear(10, 40, every=1, steps=4) == (10, 20, 30, 40)
    assert schedules.linear(40, 10, every=2, steps=5) == (40, 40, 25, 25, 10)
    assert schedules.geometric(3, 8, every=9, steps=4) == (8,) * 4


def test_the_public_module_is_this_one():
    assert dppeft.schedules is schedules
    assert callable(dppeft.plan)


def test_the_papers_growing_schedule():
    made = schedules.geometric(262_144, 1_048_576, every=7_500, steps=20_000)
    assert made == (262_144,) * 7_500 + (524_288,) * 7_500 + (1_048_576,) * 5_000


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: schedules.constant(0, 3), "batch_size >= 1, got batch_size=0"),
        (lambda: schedules.constant(5, 0), "steps >= 1, got steps=0"),
        (lambda: schedules.steps([], 3), "first change at step 0"),
        (lambda: schedules.steps([(1, 5)], 3), r"first change at step 0, got changes=\[\(1, 5\)\]"),
        (lambda: schedules.steps([(0, 5), (0, 6)], 3), r"rising steps, got steps \[0, 0\]"),
        (lambda: schedules.steps([(0, 5), (2, 6), (1, 7)], 3), "Put them in order"),
        (lambda: schedules.steps([(0, 5), (3, 6)], 3), "step 3 comes after the last of 3 steps"),
        (lambda: schedules.steps([(0, 5), (2, -6)], 3), "batch_size >= 1, got batch_size=-6"),
        (lambda: schedules.steps([(0, 5), (-2, 6)], 3), "first_step >= 1, got first_step=-2"),
        (lambda: schedules.linear(1, 2, every=0, steps=3), "every >= 1, got every=0"),
        (lambda: schedules.geometric(1, 0, every=1, steps=3), "last >= 1, got last=0"),
    ],
)
def test_schedules_that_cannot_be_are_refused(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()


@pytest.mark.parametrize("changes", [[(0, 5, 1)], [5], ["05"], [(0, 2.5)], [(0.5, 2)]])
def test_what_is_no_pair_of_whole_numbers_is_refused(changes):
    with pytest.raises(ArgumentTypeError, match="Expected"):
        schedules.steps(changes, 3)


def test_a_size_above_the_rows_is_refused_by_the_plan():
    growing = schedules.geometric(10, 2000, every=5, steps=10)
    with pytest.raises(ArgumentError, match="num_examples=1000"):
        dppeft.plan(
            num_examples=1000,
            batch_size=2000,
            batch_schedule=growing,
            delta=1e-5,
            noise_multiplier=1.0,
        )


def test_a_growing_batch_visits_fewer_examples_for_the_same_final_noise():
    """Epsilon and the noise per example of the last stage are equal; the examples are fewer."""
    common = {"num_examples": 1_000_000, "delta": 1e-7, "epsilon": 4.0}
    growing = schedules.geometric(2_000, 8_000, every=100, steps=300)
    grown = dppeft.plan(**common, batch_size=8_000, batch_schedule=growing)
    fixed = dppeft.plan(**common, batch_size=8_000, steps=300)
    assert sum(growing) == 100 * (2_000 + 4_000 + 8_000) < 300 * 8_000
    # Less is sampled, so less noise is needed: the last stage is no noisier than the fixed run's.
    assert grown.noise_multiplier < fixed.noise_multiplier
    assert grown.epsilon() <= 4.0


# ---- accounting of many sizes


def test_a_mixture_is_exactly_the_choice_in_public():
    """Its divergence is the weighted mean of both, and never below that of the step itself."""
    rates, noise, interval = np.linspace(0.01, 0.05, 60), 0.9, 1e-3
    mixtures = _losses.Mixtures([(float(rate), noise, 1) for rate in rates])
    for rate in rates[[0, 7, 31, 59]].tolist():
        for side, adding in enumerate((False, True)):
            mixed = mixtures.one_step(rate, noise, interval)[side]
            loss = (mixed._lower_loss + np.arange(len(mixed._probs))) * interval
            for epsilon in (-0.02, 0.0, 0.1, 0.5):
                gain = np.maximum(-np.expm1(epsilon - loss), 0)
                bound = float(mixed._probs @ gain) + mixed._infinity_mass
                truth = _divergence(rate, noise, epsilon, adding=adding)
                assert truth <= bound + 1e-9  # of the quadrature
                assert bound <= truth + 2e-4 * rate


def _divergence(rate: float, noise: float, epsilon: float, *, adding: bool) -> float:
    """Integral of the positive part of P - e**epsilon Q, one or the other way round."""
    x = np.linspace(-12 * noise, 12 * noise + 1, 400_001)
    without = norm.pdf(x, 0, noise)
    with_row = (1 - rate) * without + rate * norm.pdf(x, 1, noise)
    one, other = (without, with_row) if adding else (with_row, without)
    return float(np.trapezoid(np.maximum(one - np.exp(epsilon) * other, 0), x))


def test_many_sizes_are_bounded_from_above_and_closely():
    """Above the composition of every size one by one, and above it by little."""
    rates = np.linspace(0.002, 0.008, 80)
    segments = [(float(rate), 0.8, 5) for rate in rates]
    bounded = _accountants.pld(segments, 1e-6)
    interval = _losses.grid_interval(segments)
    parts = [(_losses.one_step(rate, noise, interval), n) for rate, noise, n in segments]
    exact = max(
        _accountants._epsilon_at(
            _accountants._compose([(both[side], n) for both, n in parts]), 1e-6
        )
        for side in (0, 1)
    )
    assert exact <= bounded * (1 + 1e-9)
    assert bounded < exact * 1.005


def test_the_dense_loss_equals_dp_accountings():
    from dp_accounting.pld import pld_pmf

    deltas = np.array([0.4, 0.33, 0.2, 0.12, 0.05, 0.05])
    ours = _losses._connect_dots(0.25, -2, deltas)
    theirs = pld_pmf.create_pmf_pessimistic_connect_dots_fixed_gap(0.25, -2, 3, deltas)
    dense = theirs.to_dense_pmf()
    kept = np.zeros(6)
    start = dense._lower_loss + 2
    kept[start : start + len(dense._probs)] = dense._probs
    np.testing.assert_allclose(ours._probs, kept, atol=1e-15)
    assert ours._infinity_mass == theirs._infinity_mass


@pytest.mark.thorough
def test_twenty_thousand_different_sizes_lie_between_their_stages():
    sizes = schedules.linear(262_144, 1_048_576, every=1, steps=20_000)
    assert len(set(sizes)) == 20_000
    common = {"num_examples": 346_000_000, "delta": 1e-9, "noise_multiplier": 0.8}
    plan = dppeft.plan(**common, batch_size=max(sizes), batch_schedule=sizes)
    epsilon = plan.epsilon()
    # Rounding each stage of 500 steps down and up brackets the truth.
    stages = [sizes[i : i + 500] for i in range(0, 20_000, 500)]
    below, above = (
        dppeft.epsilon(
            sample_rate=[pick(stage) / 346_000_000 for stage in stages],
            noise_multiplier=0.8,
            steps=[500] * len(stages),
            delta=1e-9,
        )
        for pick in (min, max)
    )
    assert below < epsilon < above * 1.002
