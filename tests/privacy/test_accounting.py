"""Epsilon against published values, closed forms, quadrature and dp-accounting."""

from __future__ import annotations

import contextlib
import math

import numpy as np
import pytest
from dp_accounting import dp_event, pld, rdp
from dp_accounting.pld import pld_pmf, privacy_loss_mechanism
from scipy import integrate
from scipy.stats import norm

import dppeft
from dppeft.errors import ArgumentError, ArgumentTypeError
from dppeft.privacy import _accountants, _losses

# (rate, noise multiplier, steps, delta, tight epsilon, epsilon by RDP): dp-accounting 0.6.0
TABLE = {
    "SST-2 B=1000 3 epochs": (0.014848, 0.7, 203, 1e-5, 3.730, 4.565),
    "SST-2 B=2000 3 epochs": (0.029696, 1.0, 102, 1e-5, 2.113, 2.541),
    "SST-2 B=2000 20 epochs": (0.029696, 1.0, 674, 1e-5, 4.932, 5.468),
    "the same twice": (0.029696, 1.0, 1348, 1e-5, 7.113, 7.792),
    "MNLI B=4096 20 epochs": (0.010430, 0.9, 1918, 1e-6, 3.796, 4.212),
    "toy": (0.1, 1.0, 100, 1e-5, 7.047, 7.904),
    "toy, small rate": (0.01, 1.0, 1000, 1e-5, 1.828, 2.101),
    "full batch, 1 step": (1.0, 1.0, 1, 1e-5, 4.377, 4.729),
    "full batch, 10 steps": (1.0, 4.0, 10, 1e-5, 3.341, 3.617),
}


def epsilon(rate, noise, steps, delta, accountant="pld"):
    return dppeft.epsilon(
        sample_rate=rate,
        noise_multiplier=noise,
        steps=steps,
        delta=delta,
        accountant=accountant,
    )


@pytest.mark.parametrize("accountant", ["pld", "rdp", "prv"])
@pytest.mark.parametrize("case", TABLE)
def test_A12_no_accountant_falls_below_the_tight_value(case, accountant):
    rate, noise, steps, delta, tight, by_rdp = TABLE[case]
    assert tight - 0.01 <= epsilon(rate, noise, steps, delta, accountant) <= by_rdp + 0.02


@pytest.mark.parametrize("case", TABLE)
def test_pld_is_tight_and_rdp_is_what_it_should_be(case):
    rate, noise, steps, delta, tight, by_rdp = TABLE[case]
    assert epsilon(rate, noise, steps, delta) == pytest.approx(tight, abs=1.2e-3)
    assert epsilon(rate, noise, steps, delta, "rdp") == pytest.approx(by_rdp, abs=1.2e-3)


def test_A12_gdp_is_refused_because_it_under_reports():
    with pytest.raises(ArgumentError, match="'gdp' is not offered.*under-reports"):
        epsilon(0.01, 1.0, 10, 1e-5, "gdp")
    with pytest.raises(ArgumentError, match="Unknown accountant='PLD'.*pld, rdp, prv"):
        epsilon(0.01, 1.0, 10, 1e-5, "PLD")


# ---- edge values


@pytest.mark.parametrize("accountant", ["pld", "rdp", "prv"])
def test_A13_no_steps_cost_nothing_and_no_noise_costs_everything(accountant):
    assert epsilon(0.1, 1.0, 0, 1e-5, accountant) == 0.0
    assert epsilon(0.0, 1.0, 10, 1e-5, accountant) == 0.0
    assert epsilon(0.1, 0.0, 5, 1e-5, accountant) == math.inf
    assert epsilon(0.1, [1.0, 0.0], 5, 1e-5, accountant) == math.inf
    assert epsilon(0.1, 0.0, 0, 1e-5, accountant) == 0.0


@pytest.mark.parametrize("delta", [0, 1, -1, math.nan, 2, math.inf])
def test_A13_delta_outside_0_1_is_refused(delta):
    for call in (
        lambda: epsilon(0.1, 1.0, 10, delta),
        lambda: dppeft.noise_multiplier(sample_rate=0.1, steps=10, epsilon=1.0, delta=delta),
    ):
        with pytest.raises(ValueError, match=rf"Expected delta in \(0, 1\), got delta={delta:g}"):
            call()


@pytest.mark.parametrize("accountant", ["pld", "rdp", "prv"])
def test_A13_epsilon_is_never_negative_and_reading_twice_changes_nothing(accountant):
    assert epsilon(0.01, 10.0, 5, 0.5, accountant) >= 0
    assert epsilon(0.01, 10.0, 1, 0.999, accountant) >= 0
    first = epsilon(0.02, 1.0, 30, 1e-5, accountant)
    _losses.one_step.cache_clear()
    dppeft.privacy.accounting._epsilon.cache_clear()
    assert epsilon(0.02, 1.0, 30, 1e-5, accountant) == first


@pytest.mark.parametrize("accountant", ["pld", "rdp", "prv"])
@pytest.mark.parametrize("delta", [1e-18, 1e-15, 1e-13, 1e-11, 1e-9])
def test_A13_tiny_delta_is_answered_soundly_or_refused(accountant, delta):
    for rate, noise, steps in ((0.01, 1.0, 1000), (0.1, 2.0, 50)):
        by_rdp = epsilon(rate, noise, steps, delta, "rdp")
        with contextlib.suppress(ArgumentError):
            value = epsilon(rate, noise, steps, delta, accountant)
            assert by_rdp * 0.7 <= value <= by_rdp * 1.001 + 0.02
    if accountant == "pld" and delta == 1e-18:
        with pytest.raises(ArgumentError, match="Expected delta above .*Use accountant='rdp'"):
            epsilon(0.01, 1.0, 1000, delta)


def test_misuse_names_the_argument_and_the_value():
    cases = [
        (ArgumentError, "sample_rate=1.5", {"sample_rate": 1.5}),
        (ArgumentError, "sample_rate=-0.1", {"sample_rate": [0.1, -0.1]}),
        (ArgumentError, "noise_multiplier=-1", {"noise_multiplier": -1}),
        (ArgumentError, "noise_multiplier=inf", {"noise_multiplier": math.inf}),
        (ArgumentError, "steps=-3", {"steps": -3}),
        (ArgumentTypeError, "steps=1.5", {"steps": 1.5}),
        (ArgumentTypeError, "steps=True", {"steps": True}),
        (ArgumentTypeError, "sample_rate='0.1'", {"sample_rate": "0.1"}),
        (ArgumentTypeError, "delta='small'", {"delta": "small"}),
        (ArgumentError, "one length.*sample_rate of length 2, steps of length 3",
         {"sample_rate": [0.1, 0.2], "steps": [1, 2, 3]}),
    ]  # fmt: skip
    good = {"sample_rate": 0.1, "noise_multiplier": 1.0, "steps": 10, "delta": 1e-5}
    for kind, message, wrong in cases:
        with pytest.raises(kind, match=message):
            dppeft.epsilon(**{**good, **wrong})
    with pytest.raises(TypeError, match="sampel_rate"):
        dppeft.epsilon(**good, sampel_rate=0.1)


# ---- against the definition


def hockey_stick_by_quadrature(rate, noise, eps):
    """delta(epsilon) of one step from the definition, for removing and for adding a row."""

    def mixture(x):
        return (1 - rate) * norm.pdf(x, 0, noise) + rate * norm.pdf(x, 1, noise)

    def positive_part(x, upper, lower):
        return max(0.0, upper(x) - math.exp(eps) * lower(x))

    def plain(x):
        return norm.pdf(x, 0, noise)

    grid = np.linspace(-12 * noise, 1 + 12 * noise, 60)
    return max(
        sum(
            integrate.quad(positive_part, a, b, args=pair, epsabs=1e-15, limit=200)[0]
            for a, b in zip(grid[:-1], grid[1:], strict=True)
        )
        for pair in ((mixture, plain), (plain, mixture))
    )


@pytest.mark.parametrize(
    ("rate", "noise", "delta"), [(0.1, 1.0, 1e-5), (0.5, 0.7, 1e-4), (0.9, 3.0, 1e-3)]
)
def test_one_step_equals_the_definition(rate, noise, delta):
    value = epsilon(rate, noise, 1, delta)
    assert hockey_stick_by_quadrature(rate, noise, value) == pytest.approx(delta, rel=2e-3)
    assert hockey_stick_by_quadrature(rate, noise, value) <= delta * (1 + 1e-6)


@pytest.mark.parametrize("delta", [1e-30, 1e-12, 1e-5, 0.3])
def test_full_batch_equals_the_closed_form(delta):
    value = epsilon([1.0, 1.0], [3.0, 5.0], [9, 25], delta)
    mu = math.sqrt(9 / 9 + 25 / 25)  # together one Gaussian of sensitivity over std mu
    # Balle and Wang (2018), theorem 8
    first, second = norm.logcdf(mu / 2 - value / mu), norm.logcdf(-mu / 2 - value / mu)
    log_delta = first + math.log1p(-math.exp(value + second - first))
    assert log_delta == pytest.approx(math.log(delta), abs=1e-6)


@pytest.mark.parametrize(
    "segments",
    [
        [(0.02, 0.8, 300)],
        [(0.001, 0.6, 2000)],
        [(0.3, 5.0, 400)],
        [(0.01, 0.8, 50), (0.02, 0.8, 50), (0.04, 1.2, 10)],
        [(0.05, 1.0, 20), (1.0, 6.0, 3)],
    ],
)
def test_composition_equals_dp_accountings_own(segments):
    """Never below its value on a fine grid, and at most 0.3 % above."""
    delta = 1e-6
    reference = pld.PLDAccountant(value_discretization_interval=2e-4)
    for rate, noise, steps in segments:
        event = dp_event.GaussianDpEvent(noise)
        reference.compose(dp_event.PoissonSampledDpEvent(rate, event), steps)
    tight = reference.get_epsilon(delta)
    rates, noises, steps = zip(*segments, strict=True)
    value = epsilon(rates, noises, steps, delta)
    assert tight * (1 - 2e-3) <= value <= tight * 1.003
    assert epsilon(rates, noises, steps, delta, "rdp") >= value


def test_composition_of_small_losses_equals_their_convolution():
    a = pld_pmf.DensePLDPmf(0.1, -3, np.array([0.2, 0.3, 0.0, 0.4]), 0.1, True)
    b = pld_pmf.DensePLDPmf(0.1, 5, np.array([0.5, 0.48]), 0.02, True)
    both = _accountants._compose([(a, 3), (b, 2)])
    masses = np.ones(1)
    for part in (a, a, a, b, b):
        masses = np.convolve(masses, part._probs)
    np.testing.assert_allclose(both._probs, masses, atol=1e-14)
    assert both._lower_loss == 3 * -3 + 2 * 5
    assert both._infinity_mass == pytest.approx(1 - 0.9**3 * 0.98**2, abs=1e-13)


def test_the_grids_error_is_on_the_safe_side(monkeypatch):
    """A finer grid gives a smaller epsilon, with a limit: what is reported lies above it."""
    values = []
    for points in (4, 8, 32, 128):
        monkeypatch.setattr(_losses, "_POINTS_PER_STD", points)
        values.append(_accountants.pld([(0.03, 0.9, 500)], 1e-5))
    assert values == sorted(values, reverse=True)
    assert values[2] < values[3] * 1.0005


def test_the_divergence_of_a_grid_equals_dp_accountings_one_by_one():
    kinds = privacy_loss_mechanism.AdjacencyType
    grid = np.linspace(-20, 20, 401)
    for rate, noise in ((0.01, 0.5), (0.3, 1.0), (0.9, 4.0), (1.0, 1.0)):
        for kind in (kinds.REMOVE, kinds.ADD):
            options = {"sampling_prob": rate, "adjacency_type": kind}
            ours = _losses.SubsampledGaussianLoss(noise, **options)
            theirs = privacy_loss_mechanism.GaussianPrivacyLoss(noise, **options)
            np.testing.assert_allclose(
                ours.get_delta_for_epsilon(grid), theirs.get_delta_for_epsilon(grid), atol=1e-13
            )
            assert ours.get_delta_for_epsilon(0.5) == pytest.approx(
                theirs.get_delta_for_epsilon(0.5), abs=1e-13
            )


def test_epsilon_read_off_a_loss_equals_dp_accountings():
    rng = np.random.default_rng(0)
    for _ in range(30):
        masses = rng.exponential(size=200) * rng.uniform(size=200) ** 8
        masses *= (1 - 1e-4) / masses.sum()
        start = int(rng.integers(-190, 20))
        loss = pld_pmf.DensePLDPmf(0.05, start, masses, 1e-4, True)
        for delta in (1e-5, 1.1e-4, 1e-3, 0.1, 0.9):
            expected = loss.get_epsilon_for_delta(delta)
            assert _accountants._epsilon_at(loss, delta) == pytest.approx(expected, abs=1e-9)


def test_epsilon_is_smooth_where_exp_of_the_loss_underflows():
    """dp-accounting's search jumps to infinity near a loss of 710; the curve must not."""
    noises = np.linspace(0.034, 0.040, 25)
    values = [epsilon(1.7e-4, float(noise), 36, 5.8e-6) for noise in noises]
    assert 860 < values[0] < 870
    steps = -np.diff(values)
    assert np.all(steps > 0)
    assert steps.max() < 2 * steps.min()


def test_renyi_divergence_equals_dp_accountings():
    orders = [*_accountants._FRACTIONAL_ORDERS, *_accountants._WHOLE_ORDERS]
    for rate, noise in ((0.01, 1.0), (0.2, 3.0), (1.0, 2.0)):
        reference = rdp.RdpAccountant(orders)
        reference.compose(dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(noise)))
        np.testing.assert_allclose(
            _accountants._renyi_of_one_step(rate, noise), reference.rdp, rtol=1e-7, atol=1e-12
        )


# ---- sequences


@pytest.mark.parametrize("accountant", ["pld", "rdp", "prv"])
def test_sequences_are_segments_and_their_order_does_not_matter(accountant):
    same = epsilon(0.02, 1.0, 60, 1e-5, accountant)
    assert epsilon([0.02] * 3, 1.0, 20, 1e-5, accountant) == same
    assert epsilon([0.02] * 60, [1.0] * 60, 1, 1e-5, accountant) == same
    assert epsilon(np.full(60, 0.02), 1.0, np.ones(60, dtype=int), 1e-5, accountant) == same
    mixed = epsilon([0.02, 0.01], [1.0, 2.0], [30, 30], 1e-5, accountant)
    assert epsilon([0.01, 0.02], [2.0, 1.0], [30, 30], 1e-5, accountant) == mixed
    assert mixed < same


def test_many_distinct_rates_are_bounded_from_above_and_closely(monkeypatch):
    rates = np.geomspace(0.004, 0.01, 40)
    exact = epsilon(rates, 1.0, 10, 1e-5)
    monkeypatch.setattr(_accountants, "_MAX_DISTINCT", 20)
    bounded = _accountants.pld([(float(rate), 1.0, 10) for rate in rates], 1e-5)
    assert exact < bounded < exact * 1.05
    segments = [(float(rate), 1 + float(rate), 1) for rate in np.geomspace(0.001, 0.01, 400)]
    merged = _accountants.merge(segments, 128)
    assert len(merged) <= 128
    assert sum(repeats for _, _, repeats in merged) == 400
    # Each step is charged at no lower a rate and with no more noise than its own.
    by_rate = sorted(rate for rate, _, repeats in merged for _ in range(repeats))
    by_noise = sorted(noise for _, noise, repeats in merged for _ in range(repeats))
    assert all(own <= used for (own, _, _), used in zip(segments, by_rate, strict=True))
    assert all(own >= used for (_, own, _), used in zip(segments, by_noise, strict=True))


def test_epsilon_moves_the_right_way_with_each_argument():
    base = {"rate": 0.02, "noise": 1.0, "steps": 100, "delta": 1e-5}
    for accountant in ("pld", "rdp", "prv"):
        middle = epsilon(**base, accountant=accountant)
        for more in ({"rate": 0.021}, {"noise": 0.95}, {"steps": 110}, {"delta": 5e-6}):
            assert epsilon(**{**base, **more}, accountant=accountant) > middle
