"""Poisson sampling: at every step each row is drawn independently, at the plan's own rate."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from dppeft.errors import ArgumentError
from dppeft.privacy.secret import Secret


class SamplingPlan(Protocol):
    """What the sampler needs of a plan; ``PrivacyPlan`` has it."""

    @property
    def num_examples(self) -> int: ...

    def sample_rate_at(self, step: int) -> float: ...


class PoissonSampler:
    """Draws the rows of a step as a function of (secret, step).

    Guarantee: row i is in step t with probability ``plan.sample_rate_at(t)`` (to 2**-53),
    independently of all other rows and steps: the sampling that the accountants assume. Every
    process that holds the secret draws the same rows, and so does a run resumed with it.
    """

    def __init__(self, plan: SamplingPlan, secret: Secret) -> None:
        self._plan = plan
        self._secret = secret.spawn("sampling")

    def indices(self, step: int) -> Tensor:
        """Rows of ``step`` (counted from 0), ascending: (drawn,) int64 on the CPU; may be empty."""
        if step < 0:
            raise ArgumentError(f"Expected step >= 0, got step={step}.")
        generator = np.random.Generator(np.random.PCG64DXSM(self._secret.integer(step)))
        drawn = generator.random(self._plan.num_examples) < self._plan.sample_rate_at(step)
        return torch.from_numpy(np.flatnonzero(drawn).astype(np.int64, copy=False))
