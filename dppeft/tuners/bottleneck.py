"""``adapter``: a small network behind the attention and feed-forward outputs of each block.

Houlsby et al. (2019); as a private method Yu et al. (2022), Section 4.2.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.pytorch_utils import Conv1D

from dppeft.errors import ArgumentError
from dppeft.tuners import targets
from dppeft.tuners.joining import peft_type
from dppeft.tuners.own import OwnConfig, OwnLayer, OwnTuner, check_counts

PLACEMENTS = ("houlsby", "pfeiffer")


@dataclass
class BottleneckConfig(OwnConfig):
    """Configuration of a bottleneck adapter, ``h + U f(D h)``.

    Args:
        bottleneck: width of the network inside.
        placement: "houlsby", behind attention and feed-forward outputs; "pfeiffer", behind the
            feed-forward output alone. Before dropout, residual and norm in both.
        activation: f, by transformers' name.
        bias: whether D and U have biases (Yu et al. train none).
    """

    bottleneck: int = field(default=48)
    placement: str = field(default="houlsby")
    activation: str = field(default="gelu")
    bias: bool = field(default=False)

    def __post_init__(self) -> None:
        """Checks the values."""
        super().__post_init__()
        self.peft_type = peft_type("ADAPTER")
        check_bottleneck(self)


def check_bottleneck(config: Any) -> None:
    """A ValueError for values that no adapter can be built with."""
    check_counts(config, bottleneck=1)
    if config.placement not in PLACEMENTS:
        raise ValueError(f"placement={config.placement!r}; expected one of {PLACEMENTS}.")
    if config.activation not in ACT2FN:
        known = ", ".join(sorted(ACT2FN))
        raise ValueError(f"activation={config.activation!r}; expected one of {known}.")


class Network(nn.Module):
    """``h + up(f(down(h)))``, for h of shape (B, *, width)."""

    def __init__(self, down: nn.Module, activation: nn.Module, up: nn.Module) -> None:
        super().__init__()
        self.down = down
        self.activation = activation
        self.up = up

    def forward(self, h: Tensor) -> Tensor:
        """In the precision of its own weights, unless autocast has its say."""
        inner = h
        if not torch.is_autocast_enabled(h.device.type):
            inner = h.to(next(self.parameters()).dtype)
        return h + self.up(self.activation(self.down(inner))).to(h.dtype)


class BottleneckLayer(OwnLayer):
    """A linear layer with networks behind it; several active ones follow each other."""

    adapter_layer_names = ("bottleneck_networks",)

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: Any) -> None:
        super().__init__(base_layer, adapter_name)
        setattr(self, self.adapter_layer_names[0], nn.ModuleDict())
        self.update_layer(adapter_name, config)

    @property
    def networks(self) -> nn.ModuleDict:
        """By the adapter's name."""
        return getattr(self, self.adapter_layer_names[0])

    def update_layer(self, adapter_name: str, config: Any) -> None:
        """Adds an adapter."""
        width = _output_width(self.get_base_layer())
        down, up = self.projections(width, adapter_name, config)
        self.networks[adapter_name] = Network(down, ACT2FN[config.activation], up)
        self.finish(adapter_name, config)

    def projections(
        self, width: int, _adapter_name: str, config: Any
    ) -> tuple[nn.Module, nn.Module]:
        """D and U; U starts at zero, so that the model starts as it was."""
        down = nn.Linear(width, config.bottleneck, bias=config.bias)
        up = nn.Linear(config.bottleneck, width, bias=config.bias)
        nn.init.xavier_normal_(down.weight)
        nn.init.zeros_(up.weight)
        if config.bias:
            nn.init.zeros_(down.bias)
            nn.init.zeros_(up.bias)
        return down, up

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The base layer's output (B, *, width), through the active networks."""
        h = self.base_layer(x, *args, **kwargs)
        for name in self.present():
            h = self.networks[name](h)
        return h

    def unload_and_optionally_merge_module(
        self, merge: bool, safe_merge: bool, adapter_names: list[str] | None
    ) -> nn.Module:
        """PEFT's way out for layers that are more than an addition to a weight."""
        base = self.get_base_layer()
        if not merge:
            return base
        wanted = self.present() if adapter_names is None else adapter_names
        return Folded(base, [self.networks[name] for name in wanted if name in self.networks])

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Refused: ``U f(D h)`` is no matrix."""
        raise NotImplementedError(
            "A bottleneck is no linear map, so that no weight can take it in. merge_and_unload() "
            "returns a model that has the networks as plain modules."
        )

    def unmerge(self) -> None:
        """Nothing is ever merged."""


class Folded(nn.Module):
    """A layer and the networks behind it, without PEFT: for serving, not for saving."""

    def __init__(self, base_layer: nn.Module, networks: list[nn.Module]) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.networks = nn.ModuleList(networks)
        self.register_state_dict_pre_hook(_refuse_saving)

    @property
    def weight(self) -> Tensor:
        """The base layer's: models look at its dtype."""
        return self.base_layer.weight  # type: ignore[return-value]

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """As the tuner's layer."""
        h = self.base_layer(x, *args, **kwargs)
        for network in self.networks:
            h = network(h)
        return h


def _refuse_saving(*_: Any) -> None:
    raise ArgumentError(
        "This model has bottleneck networks inside that its class does not know: from a saved copy "
        "they would be missing. Save the adapter (dppeft.export) before it is folded in."
    )


class BottleneckModel(OwnTuner):
    """PEFT's tuner for the method ``adapter``."""

    prefix = "bottleneck_"
    tuner_layer_cls = BottleneckLayer

    @staticmethod
    def default_targets(model: nn.Module, config: Any) -> set[str] | str | None:
        """Output projections of the blocks, by the architectures' naming conventions."""
        return targets.block_outputs(
            model,
            attention=config.placement == "houlsby",
            layers=config.layers_to_transform,
            pattern=config.layers_pattern,
        )

    def make_layer(self, target: nn.Module, adapter_name: str, config: Any) -> nn.Module:
        """A network behind a linear layer."""
        return BottleneckLayer(target, adapter_name, config)


def _output_width(layer: nn.Module) -> int:
    if isinstance(layer, nn.Linear):
        return layer.out_features
    if isinstance(layer, Conv1D):
        return layer.nf
    raise TypeError(
        f"{type(layer).__name__} is no linear layer, so the width behind it is unknown. Target the "
        "output projections of attention and feed-forward parts."
    )
