"""The plan: the single owner of every number that a guarantee depends on."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from fractions import Fraction
from numbers import Rational, Real
from typing import Any

from dppeft import _validate
from dppeft.errors import ArgumentError, ArgumentTypeError, PrivacyWarning
from dppeft.privacy import accounting
from dppeft.privacy.adaptive import AdaptiveClipping

UNIT = "one row, add or remove"
SAMPLER = "Poisson: every row independently"


@dataclass(frozen=True, kw_only=True)
class PrivacyPlan:
    """What a private run will do, decided before any private row is used. Made by ``plan``.

    Attributes:
        num_examples: rows of the private data set, treated as public.
        expected_batch_size: expected rows per step, the divisor of every update; with a schedule
            the largest of it.
        steps: number of noised updates planned.
        noise_multiplier: noise std over the L2 bound of the clipped sum.
        delta: of the guarantee, in (0, 1).
        max_grad_norm: clipping threshold C.
        accountant: the one that calibrated the noise and that reports.
        target_epsilon: the budget, or None when the noise was given (or epsilon was infinite).
        epochs: as given, else None.
        batch_schedule: expected batch size of each step, or None when constant.
        adaptive: how the threshold follows the norms, or None where it stays. The noise multiplier
            is that of the whole release, counts included.
    """

    num_examples: int
    expected_batch_size: int
    steps: int
    noise_multiplier: float
    delta: float
    max_grad_norm: float = 1.0
    accountant: str = "pld"
    target_epsilon: float | None = None
    epochs: float | None = None
    batch_schedule: tuple[int, ...] | None = None
    adaptive: AdaptiveClipping | None = None

    def __post_init__(self) -> None:
        """Refuses numbers that no plan can have, however the object was made."""
        rows = _validate.positive_integer(num_examples=self.num_examples)
        batch = _validate.positive_integer(expected_batch_size=self.expected_batch_size)
        _validate.positive_integer(steps=self.steps)
        noise = _validate.non_negative(noise_multiplier=self.noise_multiplier)
        _validate.probability(delta=self.delta)
        accounting.known_accountant(self.accountant)
        _check_bound(self.max_grad_norm, noise)
        _check_batch("batch_size", batch, rows)
        if self.batch_schedule is not None:
            _check_schedule(self.batch_schedule, batch, rows, self.steps)
        if self.adaptive is not None:
            if math.isinf(self.max_grad_norm):
                raise ArgumentError(
                    "Expected a finite max_grad_norm with adaptive=, got inf: it is where the "
                    "threshold starts."
                )
            self._price_of_adapting()
        if self.target_epsilon is not None and self.epsilon() > self.target_epsilon:
            raise ArgumentError(
                f"These numbers spend epsilon={self.epsilon():.4g}, more than "
                f"target_epsilon={self.target_epsilon:g}. Make the plan with dppeft.plan, which "
                "finds the noise for the target."
            )

    @property
    def sample_rate(self) -> float:
        """Poisson rate: each row is drawn with this probability (with a schedule, the largest)."""
        return self.expected_batch_size / self.num_examples

    @property
    def rates(self) -> tuple[float, ...]:
        """Poisson rate of every planned step."""
        return tuple(self.sample_rate_at(step) for step in range(self.steps))

    def expected_batch_size_at(self, step: int) -> int:
        """Expected rows of ``step``, counted from 0; past a schedule's end its last value."""
        if self.batch_schedule is None:
            return self.expected_batch_size
        return self.batch_schedule[min(step, len(self.batch_schedule) - 1)]

    def sample_rate_at(self, step: int) -> float:
        """Poisson rate of ``step``, counted from 0; past a schedule's end its last value."""
        return self.expected_batch_size_at(step) / self.num_examples

    def epsilon(self, steps: int | None = None, accountant: str | None = None) -> float:
        """Epsilon at ``delta`` after ``steps`` updates (default: all planned ones).

        The same function calibrates the noise, so with the plan's accountant and steps it never
        exceeds ``target_epsilon``. Steps past the plan keep adding. No steps -> 0.0; no noise ->
        infinity.
        """
        steps = self.steps if steps is None else steps
        if self.batch_schedule is None:
            sizes, counts = [self.expected_batch_size], [steps]
        else:
            sizes, counts = _counted(self.batch_schedule, steps)
        return accounting.epsilon(
            sample_rate=[size / self.num_examples for size in sizes],
            noise_multiplier=self.noise_multiplier,
            steps=counts,
            delta=self.delta,
            accountant=self.accountant if accountant is None else accountant,
        )

    @property
    def has_guarantee(self) -> bool:
        """Whether there is any noise, so that epsilon is finite."""
        return self.noise_multiplier > 0

    def summary(self) -> dict[str, Any]:
        """The plan's numbers under their names, ready for JSON. All of them may be published."""
        return {
            "unit": UNIT,
            "sampler": SAMPLER,
            "num_examples": self.num_examples,
            "expected_batch_size": self.expected_batch_size,
            "sample_rate": self.sample_rate,
            "steps": self.steps,
            "epochs": float(self.epochs) if self.epochs is not None else None,
            "noise_multiplier": self.noise_multiplier,
            "max_grad_norm": self.max_grad_norm if math.isfinite(self.max_grad_norm) else "inf",
            "delta": self.delta,
            "accountant": self.accountant,
            "target_epsilon": self.target_epsilon,
            "batch_schedule": list(self.batch_schedule) if self.batch_schedule else None,
            "adaptive": None if self.adaptive is None else asdict(self.adaptive),
        }

    def explain(self) -> str:
        """The table a person reads before spending anything: plain text, two aligned columns."""
        sizes = self.batch_schedule or (self.expected_batch_size,)
        low, high = min(sizes), max(sizes)
        rows: list[tuple[str, str]] = [
            ("rows in the private data set", f"{self.num_examples:,}"),
            ("unit of privacy", UNIT),
            ("sampling", SAMPLER),
            ("expected batch size (B)", _span(low, high, ",")),
            ("sampling rate", _span(low / self.num_examples, high / self.num_examples, ".6g")),
            ("steps", f"{self.steps:,}"),
            ("passes over the data, expected", f"{self._passes():.4g}"),
            ("max_grad_norm (C)", f"{self.max_grad_norm:g}"),
            ("noise multiplier (sigma)", f"{self.noise_multiplier:.6g}"),
        ]
        if self.adaptive is not None:
            rows.append(("threshold", self._price_of_adapting()))
        if self.has_guarantee:
            scale = self.noise_multiplier * self.max_grad_norm
            noise = (
                f"{_span(scale / high, scale / low, '.4g')} in each coordinate (sigma C / batch)"
            )
            rows.append(("noise on the mean gradient", noise))
            rows.append((f"epsilon ({self.accountant})", f"{self.epsilon():.4f}"))
            if self.accountant != "rdp":
                rows.append(("epsilon (rdp, looser)", f"{self.epsilon(accountant='rdp'):.4f}"))
        else:
            rows.append(("epsilon", "infinite: NO GUARANTEE, there is no noise"))
        rows.append(("delta", f"{self.delta:g}"))
        if self.target_epsilon is not None:
            rows.append(("budget (target epsilon)", f"{self.target_epsilon:g}"))
        if self.delta >= 1 / self.num_examples:
            rows.append(("warning", _large_delta(self.delta, self.num_examples)))
        width = max(len(label) for label, _ in rows)
        return "\n".join(f"{label:<{width}}  {value}" for label, value in rows)

    def _price_of_adapting(self) -> str:
        """What one threshold's counts cost; an error where they cost more than the budget."""
        assert self.adaptive is not None
        sizes = self.batch_schedule or (self.expected_batch_size,)
        price = self.adaptive.price(
            thresholds=1,
            noise_multiplier=self.noise_multiplier,
            expected_batch_size=min(sizes),
        )
        return (
            f"follows the {self.adaptive.quantile:g} quantile of the norms from C on; noise on the "
            f"gradient x {price:.4g} for it (per threshold)"
        )

    def _passes(self) -> float:
        if self.batch_schedule is None:
            return self.steps * self.expected_batch_size / self.num_examples
        return sum(self.batch_schedule) / self.num_examples


def plan(  # noqa: PLR0913  (the public contract's arguments)
    *,
    num_examples: int,
    batch_size: int,
    delta: float | None = None,
    epochs: float | None = None,
    steps: int | None = None,
    epsilon: float | None = None,
    noise_multiplier: float | None = None,
    max_grad_norm: float = 1.0,
    accountant: str = "pld",
    batch_schedule: Sequence[int] | None = None,
    adaptive: AdaptiveClipping | None = None,
) -> PrivacyPlan:
    """Decides rate, steps and noise of a private run, and refuses what cannot be honoured.

    The rate is ``batch_size / num_examples`` and ``steps = ceil(epochs * num_examples /
    batch_size)``, in exact arithmetic. Exactly one of ``epochs`` and ``steps``, and exactly one of
    ``epsilon`` (a budget: the smallest sufficient noise is found) and ``noise_multiplier``.
    ``epsilon=inf`` and ``noise_multiplier=0`` are allowed and claim no guarantee.

    Args:
        num_examples: rows of the private data set, after any filter.
        batch_size: expected rows per step; with a schedule its largest entry.
        delta: required, in (0, 1), well below 1 / num_examples.
        epochs: expected passes over the data; a fraction is allowed.
        steps: number of noised updates.
        epsilon: the target.
        noise_multiplier: noise std over the L2 bound of the clipped sum.
        max_grad_norm: clipping threshold; infinite only without noise.
        accountant: "pld", "rdp" or "prv".
        batch_schedule: expected batch size of each step, in place of ``epochs`` and ``steps``.
        adaptive: an ``AdaptiveClipping``: the threshold then starts at ``max_grad_norm`` and
            follows a quantile of the norms, within the same epsilon.

    Raises:
        ArgumentError: a value out of range, or arguments that contradict each other.
        ArgumentTypeError: a value of the wrong type, or ``delta`` missing.

    Warns:
        PrivacyWarning: delta >= 1 / num_examples.
    """
    rows = _validate.positive_integer(num_examples=num_examples)
    batch = _validate.positive_integer(batch_size=batch_size)
    _check_batch("batch_size", batch, rows)
    if delta is None:
        raise ArgumentTypeError(
            f"Expected delta, got none: give delta well below 1 / num_examples = {1 / rows:.2g}."
        )
    delta = _validate.probability(delta=delta)
    schedule = None if batch_schedule is None else _as_schedule(batch_schedule, batch, rows)
    planned = _steps(rows, batch, epochs, steps, schedule)
    noise, target = _noise(epsilon, noise_multiplier)
    accounting.known_accountant(accountant)
    _check_bound(max_grad_norm, noise)
    if target is not None:
        sizes, counts = ([batch], [planned]) if schedule is None else _counted(schedule, planned)
        noise = accounting.noise_multiplier(
            sample_rate=[size / rows for size in sizes],
            steps=counts,
            epsilon=target,
            delta=delta,
            accountant=accountant,
        )
    if delta >= 1 / rows:
        warnings.warn(_large_delta(delta, rows), PrivacyWarning, stacklevel=2)
    return PrivacyPlan(
        num_examples=rows,
        expected_batch_size=batch,
        steps=planned,
        noise_multiplier=noise,
        delta=delta,
        max_grad_norm=float(max_grad_norm),
        accountant=accountant,
        target_epsilon=target,
        epochs=None if epochs is None else float(epochs),
        batch_schedule=schedule,
        adaptive=adaptive,
    )


def _noise(epsilon: float | None, noise_multiplier: float | None) -> tuple[float, float | None]:
    """(noise multiplier as far as known, finite target or None)."""
    if (epsilon is None) == (noise_multiplier is None):
        raise ArgumentError(
            "Expected exactly one of epsilon and noise_multiplier, got "
            f"epsilon={epsilon!r} and noise_multiplier={noise_multiplier!r}."
        )
    if epsilon is None:
        return _validate.non_negative(noise_multiplier=noise_multiplier), None
    target = _validate.positive(allow_inf=True, epsilon=epsilon)
    # Infinite: any noise would do, so none. Finite: found by calibration; 1 until then.
    return (0.0, None) if math.isinf(target) else (1.0, target)


def _steps(
    rows: int, batch: int, epochs: float | None, steps: int | None, schedule: tuple[int, ...] | None
) -> int:
    """Number of steps in exact arithmetic: a float epoch length loses or gains a step."""
    if schedule is not None:
        if epochs is not None or steps not in {None, len(schedule)}:
            raise ArgumentError(
                f"batch_schedule of {len(schedule)} entries sets the number of steps: leave out "
                f"epochs={epochs!r} and steps={steps!r}."
            )
        return len(schedule)
    if (epochs is None) == (steps is None):
        raise ArgumentError(
            f"Expected exactly one of epochs and steps, got epochs={epochs!r} and steps={steps!r}."
        )
    if epochs is None:
        return _validate.positive_integer(steps=steps)
    _validate.positive(epochs=epochs)
    exact = Fraction(epochs) if isinstance(epochs, Rational) else Fraction(repr(float(epochs)))
    return math.ceil(exact * rows / batch)


def _check_batch(name: str, batch: int, rows: int) -> None:
    if batch > rows:
        raise ArgumentError(
            f"Expected {name} <= num_examples={rows}, got {name}={batch}: Poisson sampling draws "
            "each row at most once per step. Use a smaller batch or more steps."
        )


def _check_bound(max_grad_norm: float, noise: float) -> None:
    bound = _validate.positive(allow_inf=True, max_grad_norm=max_grad_norm)
    if math.isinf(bound) and noise > 0:
        raise ArgumentError(
            "Expected a finite max_grad_norm with noise, got max_grad_norm=inf: noise has no scale "
            "without a bound. Give a finite threshold, or noise_multiplier=0 for no guarantee."
        )


def _as_schedule(schedule: Sequence[int], batch: int, rows: int) -> tuple[int, ...]:
    if isinstance(schedule, str | bytes | Real) or not hasattr(schedule, "__iter__"):
        raise ArgumentTypeError(
            f"Expected batch_schedule to hold one expected batch size per step, got {schedule!r}."
        )
    sizes = tuple(_validate.positive_integer(batch_schedule=size) for size in schedule)
    _check_schedule(sizes, batch, rows, len(sizes))
    return sizes


def _check_schedule(sizes: tuple[int, ...], batch: int, rows: int, steps: int) -> None:
    if not sizes or len(sizes) != steps:
        raise ArgumentError(
            f"Expected batch_schedule to hold one entry per step (at least one), got {len(sizes)} "
            f"entries for {steps} steps."
        )
    for size in sizes:
        _check_batch("batch_schedule entry", size, rows)
    if max(sizes) != batch:
        raise ArgumentError(
            f"Expected batch_size={batch} to be the largest entry of batch_schedule, which is "
            f"{max(sizes)}: give batch_size={max(sizes)}."
        )


def _counted(schedule: tuple[int, ...], steps: int) -> tuple[list[int], list[int]]:
    """(sizes, how often each occurs) in the first ``steps`` steps; the last size goes on."""
    counts = Counter(schedule[:steps])
    if steps > len(schedule):
        counts[schedule[-1]] += steps - len(schedule)
    sizes = sorted(counts) or [schedule[0]]
    return sizes, [counts[size] for size in sizes]


def _large_delta(delta: float, rows: int) -> str:
    return (
        f"delta={delta:g} is not below 1 / num_examples = {1 / rows:.2g}: such a guarantee would "
        "allow publishing a whole row. Choose a smaller delta."
    )


def _span(low: float, high: float, form: str) -> str:
    return f"{low:{form}}" if low == high else f"{low:{form}} to {high:{form}} (schedule)"
