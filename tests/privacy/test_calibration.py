"""Calibration: the smallest noise that meets a target, by the epsilon that is reported."""

from __future__ import annotations

import math
import random

import pytest

import dppeft
from dppeft.errors import ArgumentError, DppeftError


def epsilon(rate, noise, steps, delta, accountant="pld"):
    return dppeft.epsilon(
        sample_rate=rate,
        noise_multiplier=noise,
        steps=steps,
        delta=delta,
        accountant=accountant,
    )


@pytest.mark.parametrize(
    ("rate", "steps", "delta", "target", "tight"),
    [
        (0.03, 700, 1e-5, 0.01, 193.5),
        (0.03, 700, 1e-5, 0.1, 24.47),
        (0.03, 700, 1e-5, 1, 3.104),
        (0.03, 700, 1e-5, 3, 1.350),
        (0.03, 700, 1e-5, 8, 0.8117),
        (0.03, 700, 1e-5, 50, 0.418),
        (2000 / 67349, 674, 1e-5, 3, 1.323),
        (2000 / 67349, 674, 1e-5, 8, 0.802),
        (4096 / 392702, 1918, 1e-6, 3, 1.005),
        (4096 / 392702, 1918, 1e-6, 8, 0.679),
    ],
)
def test_noise_is_the_smallest_that_meets_the_target(rate, steps, delta, target, tight):
    noise = dppeft.noise_multiplier(sample_rate=rate, steps=steps, epsilon=target, delta=delta)
    assert tight * 0.999 <= noise <= tight * 1.005
    assert 0.995 * target <= epsilon(rate, noise, steps, delta) <= target
    by_rdp = dppeft.noise_multiplier(
        sample_rate=rate, steps=steps, epsilon=target, delta=delta, accountant="rdp"
    )
    assert noise < by_rdp <= tight * (1.12 if target >= 1 else 1.25)


@pytest.mark.parametrize("target", [0.01, 1e3, 1e4, 1e5])
@pytest.mark.parametrize("accountant", ["pld", "rdp"])
def test_A11_the_ends_of_the_range_are_answered(target, accountant):
    noise = dppeft.noise_multiplier(
        sample_rate=0.03, steps=700, epsilon=target, delta=1e-5, accountant=accountant
    )
    assert 0.99 * target <= epsilon(0.03, noise, 700, 1e-5, accountant) <= target


@pytest.mark.parametrize("target", [1, 8])
def test_A11_prv_meets_its_target_too(target):
    noise = dppeft.noise_multiplier(
        sample_rate=0.03, steps=700, epsilon=target, delta=1e-5, accountant="prv"
    )
    assert 0.99 * target <= epsilon(0.03, noise, 700, 1e-5, "prv") <= target


def test_prv_refuses_by_name_where_opacus_cannot_answer():
    with pytest.raises(ArgumentError, match="accountant='prv' cannot answer.*'pld' or 'rdp'"):
        dppeft.noise_multiplier(
            sample_rate=0.03, steps=700, epsilon=1e3, delta=1e-5, accountant="prv"
        )


def random_problems(count, seed):
    rng = random.Random(seed)
    for _ in range(count):
        rate, steps = 10 ** rng.uniform(-4, 0), int(10 ** rng.uniform(0, 4.5))
        delta, target = 10 ** rng.uniform(-9, -4), 10 ** rng.uniform(-2, 3)
        # Below delta the drawn-at-all probability alone is the guarantee, whatever the noise.
        if rate * steps > 2 * delta:
            yield rate, steps, delta, target


def check_calibration(rate, steps, delta, target):
    noise = dppeft.noise_multiplier(sample_rate=rate, steps=steps, epsilon=target, delta=delta)
    value = epsilon(rate, noise, steps, delta)
    assert 0 <= target - value <= max(0.01, 0.01 * target), (rate, steps, delta, target, noise)


def test_A11_calibration_never_overshoots_and_wastes_little():
    for problem in random_problems(8, seed=1):
        check_calibration(*problem)


@pytest.mark.slow
def test_A11_calibration_of_many_random_problems():
    for problem in random_problems(300, seed=2):
        check_calibration(*problem)


def test_A11_heterogeneous_rates_are_calibrated_against_the_same_epsilon():
    rates, counts = [0.005, 0.01, 0.02, 0.04], [100, 100, 50, 25]
    noise = dppeft.noise_multiplier(sample_rate=rates, steps=counts, epsilon=3.0, delta=1e-6)
    assert 0.99 * 3 <= epsilon(rates, noise, counts, 1e-6) <= 3.0


def test_calibration_refuses_what_has_no_answer():
    good = {"sample_rate": 0.03, "steps": 700, "epsilon": 1.0, "delta": 1e-5}
    assert dppeft.noise_multiplier(**{**good, "epsilon": math.inf}) == 0.0
    for target in (0, -1, math.nan):
        with pytest.raises(ArgumentError, match="epsilon > 0, got epsilon="):
            dppeft.noise_multiplier(**{**good, "epsilon": target})
    with pytest.raises(ArgumentError, match="at least one step.*steps=0"):
        dppeft.noise_multiplier(**{**good, "steps": 0})
    with pytest.raises(ArgumentError, match="'gdp' is not offered"):
        dppeft.noise_multiplier(**good, accountant="gdp")
    with pytest.raises(DppeftError, match="cannot be met"):
        dppeft.noise_multiplier(**{**good, "epsilon": 1e-9, "delta": 1e-13, "sample_rate": 1.0})
