"""Gaussian noise: the one place where a private sum turns into something that may be released."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from dppeft import _validate
from dppeft._types import ClippedSum
from dppeft.errors import ArgumentError
from dppeft.privacy.secret import Secret, fresh_secret

__all__ = ["GaussianNoise", "Secret", "fresh_secret"]

_ON_DEVICE = 1  # index under which accelerators' generators are seeded


class GaussianNoise:
    """Adds noise that is a function of (secret, step), independent across steps and tensors.

    Torch's global generator is neither read nor advanced. Equal steps give equal noise, so one
    step number must belong to one release: adding it to two different sums reveals their
    difference.
    """

    def __init__(self, secret: Secret) -> None:
        self._secret = secret.spawn("noise")

    def add(self, clipped: ClippedSum, *, noise_multiplier: float, step: int) -> dict[str, Tensor]:
        """The noisy sum, float32, on each tensor's own device; ``clipped`` is left as it is.

        Guarantee: every coordinate gets an independent N(0, (noise_multiplier * l2_bound)**2): the
        Gaussian mechanism (Dwork and Roth, 2014, appendix A) on a sum of that L2 sensitivity.
        Edges: noise_multiplier 0 -> the plain sum, which is no release.

        Raises:
            ArgumentError: noise is asked for but the bound is infinite (or not a number).
        """
        noise_multiplier = _validate.non_negative(noise_multiplier=noise_multiplier)
        if noise_multiplier == 0:
            return {name: grad.to(torch.float32, copy=True) for name, grad in clipped.grads.items()}
        if not (math.isfinite(clipped.l2_bound) and clipped.l2_bound >= 0):
            raise ArgumentError(
                f"Expected a finite l2_bound with noise, got l2_bound={clipped.l2_bound}: noise "
                "has no scale without a bound. Give a finite max_grad_norm, or noise_multiplier=0."
            )
        std = noise_multiplier * clipped.l2_bound
        draw = _Normal(self._secret, step)
        # In one fixed order, so that the draws do not depend on how the model lists its tensors.
        noise = {name: draw.like(clipped.grads[name]).mul_(std) for name in sorted(clipped.grads)}
        return {name: noise[name].add_(grad) for name, grad in clipped.grads.items()}


class _Normal:
    """Standard normal draws of one step, from one generator per kind of device."""

    def __init__(self, secret: Secret, step: int) -> None:
        # On the CPU NumPy's generator: torch's keeps only 32 bits of its seed there, few enough to
        # try them all and for two steps of a long run to share their noise.
        self._host = np.random.Generator(np.random.PCG64DXSM(secret.integer(step)))
        self._seed = secret.integer(step, _ON_DEVICE) % 2**63
        self._devices: dict[torch.device, torch.Generator] = {}

    def like(self, tensor: Tensor) -> Tensor:
        """Standard normal, float32, shape and device of ``tensor``."""
        if tensor.device.type == "cpu":
            return torch.from_numpy(self._host.standard_normal(tuple(tensor.shape), np.float32))
        if tensor.device not in self._devices:
            generator = torch.Generator(device=tensor.device)
            # The device's index keeps two devices of one model from sharing their noise.
            generator.manual_seed((self._seed + (tensor.device.index or 0)) % 2**63)
            self._devices[tensor.device] = generator
        return torch.randn(
            tensor.shape,
            generator=self._devices[tensor.device],
            device=tensor.device,
            dtype=torch.float32,
        )
