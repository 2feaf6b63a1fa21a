"""Epsilon of a sequence of Poisson-subsampled Gaussian releases, by each accountant on offer.

Every function takes segments ``(sample_rate, noise_multiplier, repeats)`` with
0 < sample_rate <= 1, noise_multiplier > 0, repeats >= 1 and returns an upper bound on epsilon for
adding or removing one row. Composition does not depend on the order of the segments.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
import warnings
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from dp_accounting import dp_event, gaussian_mechanism, rdp
from dp_accounting.pld import pld_pmf
from numpy.typing import NDArray
from scipy import fft, signal, special

from dppeft.errors import ArgumentError
from dppeft.privacy._losses import ANCHORS, Mixtures, Segment, grid_interval, one_step

_MAX_INTERVAL = 50.0  # exp(interval) must stay finite
_MAX_DISTINCT = 96  # distinct segments that are composed one by one
_FFT_ERROR = 3e-16  # a composed tail is wrong by about this, times the number of steps
_TAIL_MASS = 1e-15  # left out of a composed loss on either side, and counted as infinite loss
_RDP_MAX_DISTINCT = 16
_PRV_MAX_EPSILON = 100  # beyond it Opacus's accountant takes minutes
_PRV_MAX_POINTS = 1 << 19
# The default orders suit epsilon near 1; orders near 1 and very large ones serve the two ends.
_DEFAULT_ORDERS = rdp.rdp_privacy_accountant.DEFAULT_RDP_ORDERS
_FRACTIONAL_ORDERS = [1.01, 1.02, 1.05, *(a for a in _DEFAULT_ORDERS if a % 1)]
_WHOLE_ORDERS = [*(int(a) for a in _DEFAULT_ORDERS if a % 1 == 0), 2048, 4096, 8192]


def pld(segments: Sequence[Segment], delta: float) -> float:
    """Epsilon by privacy loss distributions: tight, and never below the truth.

    Pessimistic connect-the-dots discretisation (Doroshenko et al., 2022) on a grid that follows the
    spread of the loss, composed by FFT. What the FFT's rounding could hide is taken off delta.
    Steps at rate 1 compose exactly (Balle and Wang, 2018). Beyond 24 distinct segments a step's
    loss is a mixture of two, and beyond 96 rates are rounded up and noise down: both bound it from
    above (``Mixtures``, ``merge``). Where the loss of one step is too wide for any grid (epsilon in
    the billions), the bound without amplification by sampling is given.

    Raises:
        ArgumentError: delta is too small for the FFT's precision.
    """
    if all(rate == 1 for rate, _, _ in segments):
        return _full_batch(segments, delta)
    segments = merge(segments, _MAX_DISTINCT)
    steps = sum(repeats for _, _, repeats in segments)
    unsure = 2 * _TAIL_MASS + _FFT_ERROR * steps
    if delta < 2 * unsure:
        raise ArgumentError(
            f"Expected delta above {2 * unsure:.1g} for accountant='pld' and {steps} steps, "
            f"got delta={delta:g}. Use accountant='rdp'."
        )
    interval = grid_interval(segments)
    if interval > _MAX_INTERVAL:
        return _full_batch(segments, delta)
    with np.errstate(all="ignore"):
        losses = one_step if len(segments) <= ANCHORS else Mixtures(segments).one_step
        steps_and_repeats = [
            (losses(rate, noise, interval), repeats) for rate, noise, repeats in segments
        ]
        removing = _compose([(both[0], repeats) for both, repeats in steps_and_repeats])
        adding = _compose([(both[-1], repeats) for both, repeats in steps_and_repeats])
        usable_delta = delta - _FFT_ERROR * steps
        worse = max(_epsilon_at(loss, usable_delta) for loss in (removing, adding))
    return float(worse)


def _compose(parts: Sequence[tuple[pld_pmf.DensePLDPmf, int]]) -> pld_pmf.DensePLDPmf:
    """The loss of all parts together, each repeated as often as stated, by one FFT.

    Kept is a window that all but ``_TAIL_MASS`` on either side falls into (Chernoff's bound); what
    falls above it counts as infinite loss.
    """
    probs = [np.asarray(part._probs) for part, _ in parts]
    repeats = np.array([count for _, count in parts])
    first, last = _window(probs, repeats)
    size = fft.next_fast_len(max(last - first + 1, *(len(p) for p in probs)), real=True)
    spectrum = np.ones(size // 2 + 1, dtype=complex)
    for p, count in zip(probs, repeats, strict=True):
        spectrum *= _power(fft.rfft(p, size), int(count))
    composed = np.roll(fft.irfft(spectrum, size), -first)[: last - first + 1]
    kept = math.fsum(n * math.log1p(-part._infinity_mass) for part, n in parts)
    return pld_pmf.DensePLDPmf(
        parts[0][0]._discretization,
        sum(part._lower_loss * count for part, count in parts) + first,
        np.maximum(composed, 0),
        2 * _TAIL_MASS - math.expm1(kept),
        pessimistic_estimate=True,
    )


def _power(base: NDArray[np.complex128], exponent: int) -> NDArray[np.complex128]:
    """``base ** exponent`` by squaring: NumPy's own goes through logarithms."""
    result = np.ones_like(base)
    while exponent:
        if exponent % 2:
            result *= base
        exponent //= 2
        if exponent:
            base = base * base
    return result


def _epsilon_at(loss: pld_pmf.DensePLDPmf, delta: float) -> float:
    """Smallest epsilon >= 0 with divergence at most delta, on every scale of the loss.

    dp-accounting's own search divides by exp(-loss), which underflows at losses of some 700.
    With losses l_j of mass p_j and infinite mass m, the divergence at l_i is U_i - W_i where
    U_i = m + sum over j >= i of p_j and W_i = sum over j >= i of p_j exp(l_i - l_j).
    """
    infinite = float(loss._infinity_mass)
    if infinite > delta:
        return math.inf
    descending = np.asarray(loss._probs)[::-1]
    upper = infinite + np.cumsum(descending)
    lower = signal.lfilter([1.0], [1.0, -math.exp(-loss._discretization)], descending)
    # The last index, going down, at which the divergence is still within delta.
    beyond = np.flatnonzero(upper - lower > delta)
    index = int(beyond[0]) - 1 if beyond.size else len(descending) - 1
    index = max(index, 0)
    top = float((loss._lower_loss + len(descending) - 1 - index) * loss._discretization)
    if upper[index] <= delta:
        return 0.0
    # Below that loss and above the next one only U - W exp(epsilon - loss) remains to be solved.
    return max(0.0, top + math.log(float((upper[index] - delta) / lower[index])))


def _window(probs: Sequence[NDArray[np.float64]], repeats: NDArray[Any]) -> tuple[int, int]:
    """First and last index of the composed masses outside which at most ``_TAIL_MASS`` lies."""
    longest = max(len(p) for p in probs)
    last = sum((len(p) - 1) * int(count) for p, count in zip(probs, repeats, strict=True))
    first = 0
    index = np.arange(longest)
    for size in np.geomspace(0.02, 600, 24) / longest:
        for order in (size, -size):
            # Scaled by the largest exponent, so that nothing overflows.
            shift = order * longest if order > 0 else 0.0
            weight = np.exp(order * index - shift)
            log_mgf = sum(
                int(count) * (math.log(p @ weight[: len(p)]) + shift)
                for p, count in zip(probs, repeats, strict=True)
            )
            bound = (log_mgf - math.log(_TAIL_MASS)) / order
            if not math.isfinite(bound):
                continue
            if order > 0:
                last = min(last, math.ceil(bound))
            else:
                first = max(first, math.floor(bound))
    return first, last


def _full_batch(segments: Sequence[Segment], delta: float) -> float:
    """Exact epsilon of Gaussian releases without sampling, which together are one Gaussian."""
    precision = math.fsum(repeats / noise**2 for _, noise, repeats in segments)
    with np.errstate(all="ignore"):
        return max(0.0, float(gaussian_mechanism.get_epsilon_gaussian(precision**-0.5, delta)))


def merge(segments: Sequence[Segment], most: int) -> list[Segment]:
    """At most ``most`` segments: beyond that rates are rounded up and noise down."""

    def counted(rounded: Iterator[Segment]) -> list[Segment]:
        counts: dict[tuple[float, float], int] = {}
        for rate, noise, repeats in rounded:
            counts[rate, noise] = counts.get((rate, noise), 0) + repeats
        return [(rate, noise, repeats) for (rate, noise), repeats in sorted(counts.items())]

    merged = counted(iter(segments))
    if len(merged) <= most:
        return merged
    rates = np.array([rate for rate, _, _ in merged])
    noises = np.array([noise for _, noise, _ in merged])
    both = rates.min() < rates.max() and noises.min() < noises.max()
    cells = math.isqrt(most) if both else most
    rates = _rounded_up(rates, cells)
    noises = 1 / _rounded_up(1 / noises, cells)
    repeats = [repeats for _, _, repeats in merged]
    return counted(zip(rates.tolist(), noises.tolist(), repeats, strict=True))


def _rounded_up(values: NDArray[np.float64], cells: int) -> NDArray[np.float64]:
    """Each value moved up to the largest value of its cell; cells are equal on the log scale."""
    logs = np.log(values)
    width = (logs.max() - logs.min()) / cells
    if width == 0:
        return values
    cell = np.minimum(((logs - logs.min()) / width).astype(int), cells - 1)
    largest = np.zeros(cells)
    np.maximum.at(largest, cell, values)
    rounded: NDArray[np.float64] = largest[cell]
    return rounded


def renyi(segments: Sequence[Segment], delta: float) -> float:
    """Epsilon by Renyi differential privacy (Mironov et al., 2019): loose by some 10 %, robust."""
    total = np.zeros(len(_FRACTIONAL_ORDERS) + len(_WHOLE_ORDERS))
    for rate, noise, repeats in merge(segments, _RDP_MAX_DISTINCT):
        total += repeats * _renyi_of_one_step(rate, noise)
    orders = [*_FRACTIONAL_ORDERS, *_WHOLE_ORDERS]
    return max(0.0, float(rdp.rdp_privacy_accountant.compute_epsilon(orders, total, delta)[0]))


@functools.lru_cache(maxsize=256)
def _renyi_of_one_step(rate: float, noise: float) -> NDArray[np.float64]:
    """Renyi divergence at each order: fractional ones by dp-accounting, whole ones in closed form.

    For a whole order a (Mironov et al., 2019, section 3.3), at rate q and noise s:
    exp((a - 1) D) = sum over k of binomial(a, k) (1 - q)^(a - k) q^k exp((k^2 - k) / (2 s^2)).
    """
    accountant = rdp.RdpAccountant(_FRACTIONAL_ORDERS)
    with _quiet_absl(), np.errstate(all="ignore"):
        accountant.compose(dp_event.PoissonSampledDpEvent(rate, dp_event.GaussianDpEvent(noise)))
        whole = []
        for a in _WHOLE_ORDERS:
            k = np.arange(a + 1)
            log_term = special.gammaln(a + 1) - special.gammaln(k + 1) - special.gammaln(a - k + 1)
            log_term += special.xlog1py(a - k, -rate) + k * math.log(rate)
            log_term += (k * k - k) / (2 * noise**2)
            whole.append(special.logsumexp(log_term) / (a - 1))
    divergence = np.array([*accountant.rdp, *whole], dtype=float)
    # A negative value is rounding; a missing one leaves that order out.
    return np.where(np.isnan(divergence), np.inf, np.maximum(divergence, 0))


@contextlib.contextmanager
def _quiet_absl() -> Iterator[None]:
    """Drops "this order is left out" while it lasts: other orders serve, the bound holds."""

    def drop(record: logging.LogRecord) -> bool:
        return "Excluding this order" not in record.getMessage()

    logger = logging.getLogger("absl")
    logger.addFilter(drop)
    try:
        yield
    finally:
        logger.removeFilter(drop)


def prv(segments: Sequence[Segment], delta: float) -> float:
    """Epsilon by Opacus's accountant on privacy random variables (Gopi et al., 2021).

    Raises:
        ArgumentError: outside the range in which Opacus's accountant can answer.
    """
    from opacus.accountants import PRVAccountant  # noqa: PLC0415  (slow to import)

    segments = merge(segments, _RDP_MAX_DISTINCT)
    steps = sum(repeats for _, _, repeats in segments)
    if renyi(segments, delta) == 0:  # Opacus has no answer where epsilon is 0
        return 0.0
    guess = renyi(segments, delta / 1000)
    # Its mesh is error / sqrt(steps * log(12000 / delta) / 2) on a domain of about +-(guess + 3).
    points_times_error = 2 * (guess + 3) * math.sqrt(steps * math.log(12_000 / delta) / 2)
    error = max(min(0.05, 0.002 * guess), points_times_error / _PRV_MAX_POINTS)
    refusal = ArgumentError(
        f"accountant='prv' cannot answer for {steps} steps at delta={delta:g} with epsilon up to "
        f"{guess:.3g}: its grid would be too large or too coarse. Use accountant='pld' or 'rdp'."
    )
    if guess > _PRV_MAX_EPSILON or error > max(0.01, 0.05 * guess):
        raise refusal
    accountant = PRVAccountant()
    accountant.history = [(noise, rate, repeats) for rate, noise, repeats in segments]
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        try:
            value = float(accountant.get_epsilon(delta, eps_error=error))
        except (ValueError, RuntimeError, OverflowError, ZeroDivisionError) as reason:
            raise refusal from reason
    if math.isnan(value):
        raise refusal
    return max(0.0, value)
