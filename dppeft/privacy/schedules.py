"""Batch schedules: the expected batch size of each step, as ``dppeft.plan(batch_schedule=)`` takes.

The noise multiplier is one number for the whole run, so a step with a larger batch has less noise
on its mean gradient. Anil et al. (2021) grow the batch while the gradients' signal fades: fewer
examples are visited for the same result. A schedule is fixed before the run and public.

    growing = dppeft.schedules.geometric(262_144, 1_048_576, every=7_500, steps=20_000)
    plan = dppeft.plan(batch_schedule=growing, batch_size=max(growing), ...)

The time that accounting takes grows with the number of distinct sizes up to some hundred, and no
further: beyond, rates are rounded up, which bounds epsilon from above.
"""

from __future__ import annotations

from collections.abc import Sequence

from dppeft import _validate
from dppeft.errors import ArgumentError, ArgumentTypeError

__all__ = ["constant", "geometric", "linear", "steps"]

Schedule = tuple[int, ...]


def constant(batch_size: int, steps: int) -> Schedule:
    """One size throughout.

    Args:
        batch_size: expected rows of each step.
        steps: number of updates.

    Raises:
        ArgumentError: a number below 1.
    """
    size = _validate.positive_integer(batch_size=batch_size)
    return (size,) * _validate.positive_integer(steps=steps)


def steps(changes: Sequence[tuple[int, int]], steps: int) -> Schedule:
    """A size from a step on, until the next change.

    Args:
        changes: pairs (first step, batch size), in order; steps count from 0, where the first
            pair must start.
        steps: number of updates.

    Raises:
        ArgumentError: no change, one that does not start at 0, steps out of order or past the end,
            or a size below 1.
        ArgumentTypeError: an entry is not a pair of whole numbers.
    """
    total = _validate.positive_integer(steps=steps)
    starts, sizes = [], []
    for change in changes:
        if isinstance(change, str | bytes) or not isinstance(change, Sequence) or len(change) != 2:
            raise ArgumentTypeError(
                f"Expected changes to hold pairs (first step, batch size), got {change!r}."
            )
        first, size = change
        starts.append(0 if first == 0 else _validate.positive_integer(first_step=first))
        sizes.append(_validate.positive_integer(batch_size=size))
    if not starts or starts[0] != 0:
        raise ArgumentError(
            f"Expected the first change at step 0, got changes={list(changes)!r:.80}: every step "
            "needs a size. Let the first pair be (0, batch_size)."
        )
    if any(after <= before for before, after in zip(starts, starts[1:], strict=False)):
        raise ArgumentError(
            f"Expected the changes at rising steps, got steps {starts}. Put them in order, one for "
            "each step."
        )
    if starts[-1] >= total:
        raise ArgumentError(
            f"The change at step {starts[-1]} comes after the last of {total} steps. Leave it out, "
            "or plan more steps."
        )
    lengths = [after - before for before, after in zip(starts, [*starts[1:], total], strict=True)]
    return tuple(size for size, count in zip(sizes, lengths, strict=True) for _ in range(count))


def geometric(first: int, last: int, *, every: int, steps: int) -> Schedule:
    """Multiplied by one factor every so many steps, from ``first`` to ``last``.

    With n = ceil(steps / every) stages, stage k has size first * (last / first)**(k / (n - 1)),
    rounded. One stage alone has ``last``, the size that the plan's rate is made for.

    Args:
        first: expected rows of the first stage.
        last: expected rows of the last one; may be smaller.
        every: steps of a stage (the last may be shorter).
        steps: number of updates.

    Raises:
        ArgumentError: a number below 1.
    """
    low, high, stages = _stages(first, last, every, steps)
    share = 1 / max(stages - 1, 1)
    sizes = [round(low * (high / low) ** (stage * share)) for stage in range(stages)]
    return _spread([*sizes[:-1], high], every, steps)


def linear(first: int, last: int, *, every: int, steps: int) -> Schedule:
    """Raised by one difference every so many steps, from ``first`` to ``last``.

    Args:
        first: expected rows of the first stage.
        last: expected rows of the last one; may be smaller.
        every: steps of a stage (the last may be shorter). 1: another size at each step.
        steps: number of updates.

    Raises:
        ArgumentError: a number below 1.
    """
    low, high, stages = _stages(first, last, every, steps)
    share = 1 / max(stages - 1, 1)
    sizes = [round(low + (high - low) * stage * share) for stage in range(stages)]
    return _spread([*sizes[:-1], high], every, steps)


def _stages(first: int, last: int, every: int, steps: int) -> tuple[int, int, int]:
    low = _validate.positive_integer(first=first)
    high = _validate.positive_integer(last=last)
    length = _validate.positive_integer(every=every)
    return low, high, -(-_validate.positive_integer(steps=steps) // length)


def _spread(sizes: Sequence[int], every: int, steps: int) -> Schedule:
    return tuple(sizes[step // every] for step in range(steps))
