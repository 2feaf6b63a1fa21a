"""PEFT layers whose gradient of one example is missing, or slow, put right when they are made.

Each repair is a subclass that takes the place of PEFT's class on the layers of one wrapped model:
names, tensors and files stay PEFT's. Imported only once PEFT is needed.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from peft.tuners.adamss.layer import Linear as AdamssLinear
from peft.tuners.loha.layer import Linear as LohaLinear
from peft.tuners.lokr.layer import Linear as LokrLinear
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


class _DrawsForDropoutOnly:
    """LoHa's and LoKr's forward, without the random number that PEFT draws for a dropout of 0.

    A layer that draws is replayed for all rows with the forward's draw, which is slow.
    """

    def forward(self: Any, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """What PEFT computes, for x of shape (B, *, d_in)."""
        ours = [name for name in self.active_adapters if name in self._available_adapters]
        drops = self.training and any(self.module_dropout[n] or self.rank_dropout[n] for n in ours)
        if drops or self.disable_adapters or self.merged:
            return super().forward(x, *args, **kwargs)  # type: ignore[misc]
        result = self.base_layer(x, *args, **kwargs)
        for name in ours:
            result = result + self._get_delta_activations(name, x)
        return result.to(x.dtype)


class LokrQuiet(_DrawsForDropoutOnly, LokrLinear):
    """LoKr that draws nothing where nothing is dropped."""


class LohaInFactors(_DrawsForDropoutOnly, LohaLinear):
    """LoHa applied as two thin matrices, ``(A1 B1) * (A2 B2) = (A1 ; A2)(B1 ; B2)``.

    ``;`` is the Khatri-Rao product: all r^2 products of the columns of A1 and A2, and of the rows
    of B1 and B2. PEFT multiplies the full matrix out, in an autograd function of its own, and one
    example's gradient would need such a matrix for each example.
    """

    def _get_delta_activations(
        self, adapter_name: str, x: Tensor, *args: Any, **kwargs: Any
    ) -> Tensor:
        a1, b1 = self.hada_w1_a[adapter_name], self.hada_w1_b[adapter_name]
        a2, b2 = self.hada_w2_a[adapter_name], self.hada_w2_b[adapter_name]
        drops = self.training and self.rank_dropout[adapter_name] > 0
        if drops or len(b1) ** 2 > min(len(a1), b1.shape[1]):
            return super()._get_delta_activations(adapter_name, x, *args, **kwargs)
        left = (a1[:, :, None] * a2[:, None, :]).flatten(1)  # (d_out, r^2)
        right = (b1[:, None] * b2[None]).flatten(0, 1)  # (r^2, d_in)
        x = self._cast_input_dtype(x, left.dtype)
        return F.linear(F.linear(x, right), left) * self.scaling[adapter_name]


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


_REPAIRED: dict[type, type] = {
    AdamssLinear: AdamssInItsWeightsType,
    LohaLinear: LohaInFactors,
    LokrLinear: LokrQuiet,
    PveraLinear: PveraWithOneDraw,
}


def repair(model: nn.Module) -> None:
    """Exchanges the classes of the layers concerned, in place."""
    for path, module in model.named_modules():
        kind = _REPAIRED.get(type(module))
        if kind is not None:
            module.__class__ = kind
            if isinstance(module, PveraWithOneDraw):
                module.path, module.update = path, 0
