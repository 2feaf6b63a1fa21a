"""The privacy loss of one Poisson-subsampled Gaussian step, discretised from above on a grid."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from dp_accounting.pld import pld_pmf, privacy_loss_mechanism
from numpy.typing import NDArray

Segment = tuple[float, float, int]  # (sample_rate, noise_multiplier, repeats)

_POINTS_PER_STD = 32  # grid points per standard deviation of one step's loss: error about 1e-4
_MAX_STEP_POINTS = 60_000  # of one step's discretised loss
_MAX_TOTAL_POINTS = 400_000  # of the composed one
_MIN_INTERVAL = 5e-7  # below it, rounding of double precision shows in the masses
ANCHORS = 24  # distinct segments whose loss is discretised; those of more are mixtures of these


def grid_interval(segments: Sequence[Segment]) -> float:
    """Grid interval: fine against the spread of one step's loss, within bounds on the work."""
    moments = [_loss_std_and_range(rate, noise) for rate, noise, _ in segments]
    repeats = np.array([repeats for _, _, repeats in segments], dtype=float)
    std = np.array([std for std, _ in moments])
    width = max(width for _, width in moments)
    total_variance = float(repeats @ std**2)
    total_width = 30 * math.sqrt(total_variance) + 4 * width
    return max(
        math.sqrt(total_variance / float(repeats.sum())) / _POINTS_PER_STD,
        width / _MAX_STEP_POINTS,
        total_width / _MAX_TOTAL_POINTS,
        _MIN_INTERVAL,
    )


@functools.lru_cache(maxsize=4096)
def _loss_std_and_range(rate: float, noise: float) -> tuple[float, float]:
    """Standard deviation of one step's privacy loss, and the width of its range up to e**-50."""
    z = np.linspace(-10, 10, 2001)
    weight = np.exp(-z * z / 2)
    weight /= weight.sum()

    def loss(x: NDArray[np.float64]) -> NDArray[np.float64]:
        stay = math.log1p(-rate) if rate < 1 else -math.inf
        out: NDArray[np.float64] = np.logaddexp(stay, math.log(rate) + (2 * x - 1) / (2 * noise**2))
        return out

    without, with_row = loss(z * noise), loss(z * noise + 1)
    mean = (1 - rate) * (weight @ without) + rate * (weight @ with_row)
    variance = (1 - rate) * (weight @ (without - mean) ** 2)
    variance += rate * (weight @ (with_row - mean) ** 2)
    return math.sqrt(variance), float(with_row[-1] - without[0])


@functools.lru_cache(maxsize=256)
def one_step(rate: float, noise: float, interval: float) -> tuple[pld_pmf.DensePLDPmf, ...]:
    """Pessimistic loss of one step by dp-accounting: removing a row; below rate 1 also adding."""
    kinds = privacy_loss_mechanism.AdjacencyType
    adjacencies = [kinds.REMOVE] if rate == 1 else [kinds.REMOVE, kinds.ADD]
    masses = []
    for adjacency in adjacencies:
        loss = SubsampledGaussianLoss(noise, sampling_prob=rate, adjacency_type=adjacency)
        bounds = loss.connect_dots_bounds()
        lower = math.floor(bounds.epsilon_lower / interval)
        upper = math.ceil(bounds.epsilon_upper / interval)
        deltas = loss.get_delta_for_epsilon(np.arange(lower, upper + 1) * interval)
        masses.append(_connect_dots(interval, lower, deltas))
    return tuple(masses)


class Mixtures:
    """Losses of steps at many rates, from those at a few: an upper bound that costs little.

    The hockey-stick divergence is jointly convex, and the sampled mechanism's output is linear in
    its rate. So a step at rate (1 - w) a + w b is no less private than choosing in public, with
    probability w, between a step at rate b and one at rate a. The loss of that choice is the
    mixture of both losses. With rates a and b close together, what this adds is of second order.
    """

    def __init__(self, segments: Sequence[Segment]) -> None:
        self._rates: dict[float, NDArray[np.float64]] = {}
        noises = {noise for _, noise, _ in segments}
        for noise in noises:
            rates = np.unique([rate for rate, own, _ in segments if own == noise])
            if len(rates) > max(2, ANCHORS // len(noises)):
                # The ends exactly: every rate then lies between two of them.
                anchors = np.geomspace(rates[0], rates[-1], max(2, ANCHORS // len(noises)))
                rates = np.array([rates[0], *anchors[1:-1], rates[-1]])
            self._rates[noise] = rates

    def one_step(self, rate: float, noise: float, interval: float) -> list[pld_pmf.DensePLDPmf]:
        """The loss of removing a row and of adding one."""
        rates = self._rates[noise]
        above = int(np.searchsorted(rates, rate))
        upper = one_step(float(rates[above]), noise, interval)
        if rates[above] == rate:
            return [upper[0], upper[-1]]
        lower = one_step(float(rates[above - 1]), noise, interval)
        weight = float((rate - rates[above - 1]) / (rates[above] - rates[above - 1]))
        return [_mixed(lower[side], upper[side], weight) for side in (0, -1)]


def _mixed(
    one: pld_pmf.DensePLDPmf, other: pld_pmf.DensePLDPmf, weight: float
) -> pld_pmf.DensePLDPmf:
    """The loss of either, the other one with probability ``weight``; both on one grid."""
    first = min(one._lower_loss, other._lower_loss)
    last = max(part._lower_loss + len(part._probs) for part in (one, other))
    probs = np.zeros(last - first)
    infinite = 0.0
    for part, share in ((one, 1 - weight), (other, weight)):
        start = part._lower_loss - first
        probs[start : start + len(part._probs)] += share * np.asarray(part._probs)
        infinite += share * part._infinity_mass
    return pld_pmf.DensePLDPmf(
        one._discretization, first, probs, infinite, pessimistic_estimate=True
    )


def _connect_dots(interval: float, lower: int, deltas: NDArray[np.float64]) -> pld_pmf.DensePLDPmf:
    """The pessimistic loss on a grid whose divergences are ``deltas``, from ``lower`` up.

    Doroshenko et al. (2022), Algorithm 1. dp-accounting's own function goes through a dictionary,
    which takes several times as long as all the rest of a step.
    """
    growth = math.expm1(interval)
    rise = np.diff(np.minimum.accumulate(deltas))  # falling but for rounding
    probs = np.zeros(len(deltas))
    probs[:-1] = rise / growth
    probs[0] += 1 - deltas[0]
    probs[1:-1] -= (1 + growth) * rise[:-1] / growth
    probs[-1] = -(1 + growth) * rise[-1] / growth
    return pld_pmf.DensePLDPmf(
        interval, lower, np.maximum(probs, 0), float(deltas[-1]), pessimistic_estimate=True
    )


class SubsampledGaussianLoss(privacy_loss_mechanism.GaussianPrivacyLoss):  # type: ignore[misc]
    """dp-accounting's privacy loss, with the divergence of a whole grid computed at once."""

    def get_delta_for_epsilon(self, epsilon: Any) -> Any:
        """Hockey-stick divergence at each epsilon: as the base class's, some ten times faster.

        With noise s, rate q and u = log((e**e - 1 + q) / q), removing a row has loss e at
        x = -1/2 - s**2 u; adding one has loss e at x = 1/2 + s**2 u for -e in place of e.
        """
        epsilons = np.atleast_1d(np.asarray(epsilon, dtype=float))
        rate, variance = self.sampling_prob, self._standard_deviation**2
        removing = self.adjacency_type == privacy_loss_mechanism.AdjacencyType.REMOVE
        signed = epsilons if removing else -epsilons
        lowest = math.log1p(-rate) if rate < 1 else -math.inf
        crossing = signed > lowest
        inside = signed[crossing]
        big = inside > 500  # e**e would overflow; the -1 + q is lost in rounding there
        u = np.where(
            big, inside - math.log(rate), np.log1p(np.expm1(np.where(big, 0, inside)) / rate)
        )
        if rate == 1:
            u = inside
        x = -0.5 - variance * u if removing else 0.5 + variance * u
        deltas = np.where(crossing, 0.0, -np.expm1(epsilons) if removing else 0.0)
        deltas[crossing] = self.mu_upper_cdf(x) - np.exp(
            epsilons[crossing] + self.mu_lower_log_cdf(x)
        )
        deltas = np.clip(deltas, 0, 1)
        return float(deltas[0]) if np.ndim(epsilon) == 0 else deltas
