"""PEFT layers whose forward gives an example no gradient of its own, put right when they are made.

Each repair is a subclass that takes the place of PEFT's class on the layers of one wrapped model:
names, tensors and files stay PEFT's. Imported only once PEFT is needed.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch
from peft.tuners.adamss.layer import Linear as AdamssLinear
from peft.tuners.pvera.layer import Linear as PveraLinear
from torch import Tensor, nn


class AdamssInItsWeightsType(AdamssLinear):
    """PEFT notes the dtype at construction, so that ``model.double()`` breaks the forward."""

    @property
    def dtype(self) -> torch.dtype:
        """That of the base weight now."""
        return self.get_base_layer().weight.dtype

    @dtype.setter
    def dtype(self, _value: torch.dtype) -> None:
        """PEFT's own note is not needed."""


class PveraWithOneDraw(PveraLinear):
    """PVeRA's noise, drawn for positions rather than for places in a batch, once for each update.

    PEFT draws a whole batch's noise in one call, so that a row's gradient depends on how many rows
    stand before it. Here the draw is a public function of the layer, the update and the position.
    It has PVeRA's distribution in each row; rows of one update share it.
    """

    path: str
    update: int

    def _reparametrize(self, mu: Tensor, logvar: Tensor, adapter_name: str) -> Tensor:
        if not (self.training or self.sample_at_inference[adapter_name]):
            return mu
        key = [zlib.crc32(self.path.encode()), self.update]
        # numpy's normals come one after another: a longer row begins like a shorter one.
        draw = np.random.Generator(np.random.Philox(key=key))
        noise = draw.standard_normal(tuple(mu.shape[1:]), np.float32)
        return mu + torch.from_numpy(noise).to(mu) * torch.exp(0.5 * logvar)


def repair(model: nn.Module) -> None:
    """Exchanges the classes of the layers concerned, in place."""
    for path, module in model.named_modules():
        kind: Any = type(module)
        if kind is AdamssLinear:
            module.__class__ = AdamssInItsWeightsType
        elif kind is PveraLinear:
            module.__class__ = PveraWithOneDraw
            module.path, module.update = path, 0  # type: ignore[assignment]
