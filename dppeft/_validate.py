"""One-line validators: ``positive(epochs=3)`` raises an error with name, value and remedy."""

from __future__ import annotations

import difflib
import math
from collections.abc import Collection
from numbers import Integral, Real

from dppeft.errors import ArgumentError, ArgumentTypeError


def _one(named: dict[str, object]) -> tuple[str, object]:
    ((name, value),) = named.items()
    return name, value


def _real(named: dict[str, object]) -> tuple[str, float]:
    name, value = _one(named)
    if isinstance(value, bool) or not isinstance(value, Real):
        raise ArgumentTypeError(f"Expected {name}={value!r} to be a number.")
    return name, float(value)


def positive(*, allow_inf: bool = False, **named: object) -> float:
    """The value as a float; an error unless it is a number above 0."""
    name, value = _real(named)
    if not value > 0 or (math.isinf(value) and not allow_inf):
        raise ArgumentError(f"Expected a finite {name} > 0, got {name}={value:g}.")
    return value


def non_negative(**named: object) -> float:
    """The value as a float; an error unless it is a finite number >= 0."""
    name, value = _real(named)
    if not value >= 0 or math.isinf(value):
        raise ArgumentError(f"Expected a finite {name} >= 0, got {name}={value:g}.")
    return value


def positive_integer(**named: object) -> int:
    """The value as an int; an error unless it is a whole number above 0."""
    name, value = _one(named)
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise ArgumentTypeError(f"Expected {name}={value!r} to be a whole number.")
    if value <= 0:
        raise ArgumentError(f"Expected {name} >= 1, got {name}={value}.")
    return int(value)


def probability(*, open_interval: bool = True, **named: object) -> float:
    """The value as a float; an error unless it lies in (0, 1), or in [0, 1] when not open."""
    name, value = _real(named)
    inside = 0 < value < 1 if open_interval else 0 <= value <= 1
    if not inside:
        interval = "(0, 1)" if open_interval else "[0, 1]"
        raise ArgumentError(f"Expected {name} in {interval}, got {name}={value:g}.")
    return value


def one_of(choices: Collection[str], **named: object) -> str:
    """The value itself, if it is among the choices; else an error that lists them."""
    name, value = _one(named)
    if not isinstance(value, str) or value not in choices:
        near = difflib.get_close_matches(str(value), list(choices), n=1)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ArgumentError(f"Unknown {name}={value!r}. Choices: {', '.join(choices)}.{hint}")
    return value
