"""``compacter``: bottleneck adapters whose matrices are sums of Kronecker products.

``W = sum_i A_i (x) (s_i t_i)``: Karimi Mahabadi et al. (2021), with the A_i shared by all layers;
as a private method Yu et al. (2022), whose code shares nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from dppeft.tuners.bottleneck import (
    BottleneckLayer,
    BottleneckModel,
    check_bottleneck,
)
from dppeft.tuners.joining import peft_type
from dppeft.tuners.own import OwnConfig, check_counts

INITS = ("identity", "yu2022", "mahabadi2021")
_NETWORKS = "compacter_networks"  # in front of an adapter's name


@dataclass
class CompacterConfig(OwnConfig):
    """Configuration of Compacter.

    Args:
        bottleneck: width inside, a multiple of n. So must be the width of the layers.
        n: how many Kronecker products, and the size of each A_i, (n, n).
        shared: one set of A_i for all layers, and for both projections of each.
        rank: of s_i t_i.
        init: "identity", factors that keep the variance, but zero for the upward t, so that the
            model starts as it was; "yu2022", Xavier normal with gain sqrt(2) for each factor;
            "mahabadi2021", A_i from N(0, 0.01^2), s_i and t_i Xavier uniform with gain sqrt(2).
        placement: as for ``adapter``.
        activation: as for ``adapter``.
    """

    bottleneck: int = field(default=96)
    n: int = field(default=8)
    shared: bool = field(default=True)
    rank: int = field(default=1)
    init: str = field(default="identity")
    placement: str = field(default="houlsby")
    activation: str = field(default="gelu")

    def __post_init__(self) -> None:
        """Checks the values."""
        super().__post_init__()
        self.peft_type = peft_type("COMPACTER")
        check_bottleneck(self)
        check_counts(self, n=1, rank=1)
        if self.bottleneck % self.n:
            raise ValueError(f"bottleneck={self.bottleneck} is no multiple of n={self.n}.")
        if self.init not in INITS:
            raise ValueError(f"init={self.init!r}; expected one of {INITS}.")


class Mix(nn.Module):
    """The A_i, each applied across the blocks of its own part: weight (n, n, n) = (i, a, j)."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(n, n, n))

    def forward(self, x: Tensor) -> Tensor:
        """(B, i, a, P) -> (B, i, j, P)."""
        return self.weight.transpose(1, 2) @ x

    def example_gradients(self, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
        """Each example's gradient, (B, n, n, n)."""
        return {"weight": x @ grad.mT}

    @torch.no_grad()
    def start(self, init: str) -> None:
        """Start values."""
        for part in self.weight.unbind(0):
            if init == "identity":
                part.normal_(std=1 / math.sqrt(len(part)))
            elif init == "yu2022":
                nn.init.xavier_normal_(part, gain=math.sqrt(2))
            else:
                part.normal_(std=0.01)


class Kronecker(nn.Module):
    """``y = x W`` with ``W = sum_i A_i (x) (s_i t_i)``, (d, k), which is not formed.

    x is read as n blocks of d / n: s on each block; for each i, A_i across the blocks; t on each
    block. Three small layers, each with a closed form for one example's gradient. That takes
    n r (d + n^2 + k) products for a position, W takes d k: where W is cheaper (high ranks) it is
    used for inference, which needs no gradient of one example.

    Shapes: s.weight (n r, d / n), mix.weight (n, n, n), t.weight (k / n, n r).
    """

    def __init__(self, d: int, k: int, *, n: int, rank: int, mix: Mix) -> None:
        super().__init__()
        for width in (d, k):
            if width % n:
                raise ValueError(
                    f"The layer's width {width} is no multiple of n={n}. Choose n among its "
                    "divisors."
                )
        self.d, self.k, self.n, self.rank = d, k, n, rank
        self.s = nn.Linear(d // n, n * rank, bias=False)
        self.mix = mix
        self.t = nn.Linear(n * rank, k // n, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """(B, *, d) -> (B, *, k)."""
        n, rank, batch = self.n, self.rank, len(x)
        factored = n * rank * (self.d + n**2 + self.k)
        if not torch.is_grad_enabled() and self.d * self.k < factored:
            return x @ self.dense()
        positions = x[..., 0].numel() // max(batch, 1)
        y = self.s(x.reshape(batch, positions, n, self.d // n))  # (B, T, a, i r)
        y = y.view(batch, positions, n, n, rank).permute(0, 3, 2, 1, 4)  # (B, i, a, T, r)
        y = self.mix(y.reshape(batch, n, n, positions * rank))  # (B, i, j, T r)
        y = y.view(batch, n, n, positions, rank).permute(0, 3, 2, 1, 4)  # (B, T, j, i, r)
        y = self.t(y.reshape(batch, positions, n, n * rank))  # (B, T, j, k / n)
        return y.reshape(*x.shape[:-1], self.k)

    def dense(self) -> Tensor:
        """W (d, k)."""
        n, rank = self.n, self.rank
        s = self.s.weight.view(n, rank, self.d // n)
        t = self.t.weight.view(self.k // n, n, rank)
        return torch.einsum("iaj,irp,qir->apjq", self.mix.weight, s, t).reshape(self.d, self.k)

    @torch.no_grad()
    def start(self, init: str) -> None:
        """Start values of s and t."""
        n, rank = self.n, self.rank
        factors = [  # (fan in, each s_i and t_i)
            (self.d // n, self.s.weight.view(n, rank, self.d // n).unbind(0)),
            (n * rank, self.t.weight.view(self.k // n, n, rank).unbind(1)),
        ]
        for fan_in, parts in factors:
            for part in parts:
                if init == "identity":
                    part.normal_(std=1 / math.sqrt(fan_in))
                elif init == "yu2022":
                    nn.init.xavier_normal_(part, gain=math.sqrt(2))
                else:
                    nn.init.xavier_uniform_(part, gain=math.sqrt(2))


def _new_mix(n: int, init: str) -> Mix:
    mix = Mix(n)
    mix.start(init)
    return mix


class CompacterLayer(BottleneckLayer):
    """A linear layer with Kronecker networks behind it.

    Args:
        base_layer: the layer.
        adapter_name: of the first adapter.
        config: its configuration.
        shared: adapter -> its A_i, if another layer has made them.
    """

    adapter_layer_names = (_NETWORKS,)

    def __init__(
        self, base_layer: nn.Module, adapter_name: str, config: Any, shared: dict[str, Mix]
    ) -> None:
        self._shared = shared  # a plain dictionary: its modules are no children of this one
        super().__init__(base_layer, adapter_name, config)

    def projections(
        self, width: int, adapter_name: str, config: Any
    ) -> tuple[nn.Module, nn.Module]:
        """Both matrices; with init="identity" the upward one is zero."""
        inner = config.bottleneck
        down, up = (
            Kronecker(d, k, n=config.n, rank=config.rank, mix=self._mix(adapter_name, config))
            for d, k in ((width, inner), (inner, width))
        )
        down.start(config.init)
        up.start(config.init)
        if config.init == "identity":
            nn.init.zeros_(up.t.weight)
        return down, up

    def _mix(self, adapter_name: str, config: Any) -> Mix:
        if not config.shared:
            return _new_mix(config.n, config.init)
        if adapter_name not in self._shared:
            self._shared[adapter_name] = _new_mix(config.n, config.init)
        return self._shared[adapter_name]


class CompacterModel(BottleneckModel):
    """PEFT's tuner for the method ``compacter``."""

    prefix = "compacter_"
    tuner_layer_cls = CompacterLayer

    def make_layer(self, target: nn.Module, adapter_name: str, config: Any) -> nn.Module:
        """A Kronecker network behind a linear layer."""
        shared: dict[str, Mix] = vars(self).setdefault("_shared", {})
        return CompacterLayer(target, adapter_name, config, shared)

    def delete_adapter(self, adapter_name: str) -> None:
        """PEFT's, and the A_i that its layers shared."""
        super().delete_adapter(adapter_name)
        vars(self).get("_shared", {}).pop(adapter_name, None)

    @classmethod
    def _get_adapter_state_dict(
        cls,
        model: nn.Module,
        config: Any,
        adapter_name: str,
        state_dict: dict[str, Tensor],
        unwanted_adapter_names: list[str],
    ) -> dict[str, Tensor]:
        """PEFT's selection, with what is shared in it once."""
        found = super()._get_adapter_state_dict(
            model, config, adapter_name, state_dict, unwanted_adapter_names
        )
        copies = [name for name in found if _is_mix(name)][1:] if config.shared else []
        return {name: tensor for name, tensor in found.items() if name not in copies}

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, model: nn.Module, config: Any, adapter_name: str, state_dict: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """PEFT's names, with what is shared under each of its own."""
        found = super()._remap_adapter_state_dict_for_load(model, config, adapter_name, state_dict)
        written = [tensor for name, tensor in found.items() if _is_mix(name)]
        if config.shared and len(written) == 1:
            for name in model.state_dict():
                if _is_mix(name) and f".{_NETWORKS}.{adapter_name}." in name:
                    found.setdefault(name, written[0])
        return found


def _is_mix(name: str) -> bool:
    return name.endswith(".mix.weight")
