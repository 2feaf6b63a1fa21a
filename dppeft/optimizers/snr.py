"""The signal-to-noise ratio of private gradients, estimated from released values alone.

A released gradient is g~ = g + z, z of independent N(0, s**2) coordinates, s = sigma C / B. So

    E ||g~||**2 = ||g||**2 + d s**2,

and ||g~||**2 - d s**2 estimates ||g||**2 without bias, by post-processing: no privacy is spent
(Anil et al., 2021, look at this ratio with the true g, which is private). Its standard deviation is
sqrt(2 d s**4 + 4 s**2 ||g||**2): where the noise is large, average over steps.

    monitor = SignalToNoise(private)
    for batch in private.batches(): private.step(batch)
    monitor.records[-1].signal_squared
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import nn

from dppeft.errors import ArgumentError, UnsupportedModelError

__all__ = ["SignalToNoise", "StepRecord", "mean_ratio"]


@dataclass(frozen=True, kw_only=True)
class StepRecord:
    """One released gradient. All of it may be published.

    Attributes:
        step: counted from 0, as in the ledger.
        size: coordinates d.
        released_squared: ||g~||**2.
        noise_std: s, of each coordinate of g~.
    """

    step: int
    size: int
    released_squared: float
    noise_std: float

    @property
    def noise_squared(self) -> float:
        """Expected squared norm of the noise, d s**2."""
        return self.size * self.noise_std**2

    @property
    def signal_squared(self) -> float:
        """Unbiased estimate of the squared norm of the clipped mean gradient; may be negative."""
        return self.released_squared - self.noise_squared

    @property
    def ratio(self) -> float:
        """Estimated ||g|| / E||z||, 0 where the estimate is negative; without noise infinite."""
        if self.noise_squared == 0:
            return math.inf
        return math.sqrt(max(self.signal_squared, 0.0) / self.noise_squared)

    @property
    def error(self) -> float:
        """Standard deviation of ``signal_squared``, the estimate standing for the signal in it."""
        variance = self.noise_std**2
        signal = max(self.signal_squared, 0.0)
        return math.sqrt(2 * self.size * variance**2 + 4 * variance * signal)


def mean_ratio(records: Sequence[StepRecord]) -> float:
    """The ratio over several steps: root of mean signal over mean noise, both squared."""
    if not records:
        raise ArgumentError("Expected at least one record: make a private step first.")
    noise = sum(record.noise_squared for record in records)
    if noise == 0:
        return math.inf
    return math.sqrt(max(sum(record.signal_squared for record in records), 0.0) / noise)


class _Run(Protocol):
    """What is read of a private run: all of it public."""

    model: nn.Module
    optimizer: torch.optim.Optimizer

    @property
    def ledger(self) -> Any: ...


class SignalToNoise:
    """Reads each released gradient when the optimizer gets it, and keeps one record of it.

    The noise's size comes from the run's ledger, where it was written for this very release: the
    L2 bound of the sum (which adaptive thresholds move), the noise multiplier and the expected
    batch size. Nothing is copied from the plan. Gradient hooks of your own on a parameter change
    what is read.

    Args:
        run: of ``dppeft.make_private``, before or between its steps.

    Raises:
        ArgumentError: the process keeps no ledger (only the main one of several does).
        UnsupportedModelError: the optimizer moves other tensors than those that are released
            (``rgp``), or scales gradients (``prescaled``): the noise of what it gets has another
            size.
    """

    def __init__(self, run: _Run) -> None:
        if run.ledger is None:
            raise ArgumentError(
                "This process keeps no ledger to read the noise from. Observe the main process."
            )
        if getattr(run.optimizer, "prescaled", False):
            raise UnsupportedModelError(
                "With second_moment='prescaled' the noise in what the optimizer gets has another "
                "size in each coordinate. Use another second_moment, or leave the observation out."
            )
        moved = {id(p) for group in run.optimizer.param_groups for p in group["params"]}
        trained = {id(p) for p in run.model.parameters() if p.requires_grad}
        if not trained <= moved:
            raise UnsupportedModelError(
                "The optimizer moves tensors that are computed from what is released, so the noise "
                "in them is no longer independent of equal size (method 'rgp'). Use another "
                "method, or leave the observation out."
            )
        self._run = run
        self.records: list[StepRecord] = []
        self._handle = run.optimizer.register_step_pre_hook(self._read)

    def close(self) -> None:
        """Stop reading."""
        self._handle.remove()

    def _read(self, optimizer: torch.optim.Optimizer, *_: Any) -> None:
        grads = [p.grad for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        release = self._run.ledger.entries[-1]  # written down before the optimizer may move
        squared = sum(float(grad.double().square().sum()) for grad in grads)
        self.records.append(
            StepRecord(
                step=release.step,
                size=sum(grad.numel() for grad in grads),
                released_squared=squared,
                noise_std=release.noise_multiplier * release.l2_bound / release.expected_batch_size,
            )
        )
