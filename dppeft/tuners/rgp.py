"""``rgp``: full matrices trained through small gradient carriers (Yu et al. 2021).

A matrix W (p, d) moves within the tangent space of two carriers, L (p, r) with orthonormal columns
and R (r, d) with orthonormal rows, which come from released weights only. What one example
contributes are the coordinates of its gradient G there, ``dL = G R^T`` and ``dR = L^T G``; what is
clipped and noised has r (p + d) entries instead of p d; what the optimizer gets is the full matrix

    (I - L L^T) dL R + L dR  =  G - (I - L L^T) G (I - R^T R)

(with a minus sign before the overlap, as in the paper; its released language code has a plus).
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.linear import NonDynamicallyQuantizableLinear
from transformers.pytorch_utils import Conv1D

from dppeft.tuners import targets
from dppeft.tuners.carriers import Carriers, wide
from dppeft.tuners.joining import peft_type
from dppeft.tuners.own import OwnConfig, OwnLayer, OwnTuner, check_counts

HISTORIES = ("update", "normalised_update", "weight", "random")
SIDES = ("both", "left", "right")
CLIPS = ("tangent", "joint")


@dataclass
class RgpConfig(OwnConfig):
    """Configuration of RGP.

    Args:
        r: rank of the carriers, at most that of each matrix.
        history: what carriers are the leading directions of. "update": W_t - W_0 (the paper);
            "normalised_update": W_t / ||W_t|| - W_0 / ||W_0|| (its vision code); "weight": W_t (its
            language code); "random": of nothing, for comparison.
        power_iters: of the decomposition.
        warmup_steps: updates in which the weight itself is decomposed, as nothing has moved yet.
        decompose_every: updates for which carriers are kept.
        warm_start: iterate from the carriers before instead of from random ones.
        sides: "both" carriers, or "left" or "right" alone, with the update ``dL R`` or ``L dR``.
        clip: "tangent" measures an example's part of the update itself, "joint" the carriers'
            gradients (the paper), which count their overlap twice: never less, up to sqrt(2) more.
    """

    r: int = field(default=8)
    history: str = field(default="update")
    power_iters: int = field(default=1)
    warmup_steps: int = field(default=10)
    decompose_every: int = field(default=1)
    warm_start: bool = field(default=False)
    sides: str = field(default="both")
    clip: str = field(default="tangent")

    def __post_init__(self) -> None:
        """Checks the values."""
        super().__post_init__()
        self.peft_type = peft_type("RGP")
        check_counts(self, r=1, power_iters=1, warmup_steps=0, decompose_every=1)
        for name, known in (("history", HISTORIES), ("sides", SIDES), ("clip", CLIPS)):
            if getattr(self, name) not in known:
                raise ValueError(f"{name}={getattr(self, name)!r}; expected one of {known}.")


class RgpLayer(OwnLayer):
    """A layer whose weight W_t starts as the base layer's W_0, which stays where it is."""

    adapter_layer_names = ("rgp_carriers",)
    other_param_names = ("rgp_weight",)

    def __init__(self, base_layer: nn.Module, adapter_name: str, config: Any) -> None:
        super().__init__(base_layer, adapter_name)
        self.rgp_carriers = nn.ModuleDict()
        self.rgp_weight = nn.ParameterDict()
        self.configs: dict[str, Any] = {}
        self.update_layer(adapter_name, config)

    def update_layer(self, adapter_name: str, config: Any) -> None:
        """Adds an adapter: a copy of the weight, and carriers of the weight's own directions."""
        base = self.get_base_layer()
        _refuse_unfit(base)
        start = base.weight.detach()
        self.configs[adapter_name] = config
        self.rgp_weight[adapter_name] = nn.Parameter(start.clone(), requires_grad=False)
        p, d = self._matrix(start).shape
        self.rgp_carriers[adapter_name] = Carriers(
            (p, d), rank=config.r, sides=config.sides, clip=config.clip, geometry=_geometry(base)
        )
        self.finish(adapter_name, config)
        if start.dtype not in (torch.float32, torch.float64):
            self.rgp_carriers[adapter_name].float()  # directions in 16 bits are not orthonormal
        self.before_step(0, "", names=[adapter_name])

    def forward(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """The base layer's output (B, *, p) with W_t in the place of W_0."""
        names = self.present()
        if not names or self.merged:
            return self.base_layer(x, *args, **kwargs)
        if len(names) > 1:
            raise ValueError("RGP trains a weight whole: only one such adapter can be active.")
        y = self._with(x, self.rgp_weight[names[0]])
        return self.rgp_carriers[names[0]](x, y)

    def _with(self, x: Tensor, weight: Tensor) -> Tensor:
        base = self.get_base_layer()
        bias = base.bias
        if not torch.is_autocast_enabled(x.device.type):
            bias = None if bias is None else bias.to(weight.dtype)
        inner = x if torch.is_autocast_enabled(x.device.type) else x.to(weight.dtype)
        if isinstance(base, nn.Conv2d):
            return base._conv_forward(inner, weight, bias).to(x.dtype)
        matrix = weight.T if isinstance(base, Conv1D) else weight
        return F.linear(inner, matrix, bias).to(x.dtype)

    @torch.no_grad()
    def before_step(self, step: int, key: str, *, names: list[str] | None = None) -> None:
        """Carriers for update number ``step``, from released weights and a public generator.

        ``key`` is the layer's path: each layer draws for itself, and the same on every process.
        """
        for name in self.present() if names is None else names:
            config = self.configs[name]
            if self.rgp_weight[name].is_meta:  # values are yet to be loaded
                continue
            self._absorb(name)
            if step % config.decompose_every:
                continue
            seed = zlib.crc32(f"{key} {step}".encode())
            self.rgp_carriers[name].rebuild(
                self._history(name, step),
                power_iters=config.power_iters,
                generator=torch.Generator().manual_seed(seed),
                warm=config.warm_start and step > 0,
            )

    @torch.no_grad()
    def _absorb(self, name: str) -> None:
        """Coordinates that somebody else displaced belong to these carriers: into the weight."""
        carriers = self.rgp_carriers[name]
        own = [getattr(carriers, one) for one in carriers.names]
        if any(bool(part.any()) for part in own):
            self.rgp_weight[name].copy_(self._weight(self.matrix(name)))
            for part in own:
                part.zero_()

    def _history(self, name: str, step: int) -> Tensor:
        """What carriers are the leading directions of (p, d), float32 at least."""
        config = self.configs[name]
        now = wide(self._matrix(self.rgp_weight[name].detach()))
        if config.history == "random":
            return torch.zeros_like(now)
        if config.history == "weight" or step < config.warmup_steps:
            return now
        start = self._start()
        if config.history == "normalised_update":
            return now / now.norm() - start / start.norm()
        return now - start

    def change(self, name: str) -> Tensor:
        """``W_t - W_0`` (p, d) with the coordinates' part, if they were displaced."""
        return self.matrix(name) - self._start()

    def _start(self) -> Tensor:
        """W_0 (p, d)."""
        weight = self._unmerged if self.merged else self.get_base_layer().weight
        return wide(self._matrix(weight.detach()))

    def matrix(self, name: str) -> Tensor:
        """W_t (p, d) with the coordinates' part."""
        now = wide(self._matrix(self.rgp_weight[name].detach()))
        return now + self.rgp_carriers[name].displacement().detach().to(now.dtype)

    def _matrix(self, weight: Tensor) -> Tensor:
        """A weight as (p, d): out, in."""
        return weight.T if isinstance(self.get_base_layer(), Conv1D) else weight.flatten(1)

    def _weight(self, matrix: Tensor) -> Tensor:
        """The other way round."""
        base = self.get_base_layer()
        return matrix.T if isinstance(base, Conv1D) else matrix.view(base.weight.shape)

    def carries(self) -> dict[str, list[str]]:
        """The weight that an optimizer moves -> the carriers that are trained in its place."""
        found = {}
        for name in self.present():
            carriers = self.rgp_carriers[name]
            if any(parameter.requires_grad for parameter in carriers.parameters()):
                own = [f"rgp_carriers.{name}.{one}" for one in carriers.names]
                found[f"rgp_weight.{name}"] = own
        return found

    def lift(self, moved: str, released: dict[str, Tensor]) -> Tensor:
        """The gradient of that weight, from the released ones of its carriers."""
        carriers = self.rgp_carriers[moved.removeprefix("rgp_weight.")]
        parts = {name.rpartition(".")[2]: grad for name, grad in released.items()}
        return self._weight(carriers.lift(parts)).contiguous()

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """W_t into the base layer; W_0 takes its place until ``unmerge``."""
        names = self.present() if adapter_names is None else adapter_names
        for name in [n for n in names if n in self.rgp_carriers]:
            if name in self.merged_adapters:
                continue
            base = self.get_base_layer()
            merged = self._weight(self.matrix(name)).to(base.weight.dtype).contiguous()
            if safe_merge and not bool(torch.isfinite(merged).all()):
                raise ValueError(f"NaN or Inf in the weights of adapter {name!r}.")
            if self.merged_adapters:
                raise ValueError("RGP trains a weight whole: only one such adapter can be merged.")
            self._unmerged = base.weight.data
            base.weight.data = merged
            self.merged_adapters.append(name)

    def unmerge(self) -> None:
        """W_0 back, to the bit."""
        if self.merged_adapters:
            self.get_base_layer().weight.data = self._unmerged
            del self._unmerged
            self.merged_adapters.clear()


class RgpModel(OwnTuner):
    """PEFT's tuner for the method ``rgp``."""

    prefix = "rgp_"
    tuner_layer_cls = RgpLayer

    @staticmethod
    def default_targets(model: nn.Module, config: Any) -> set[str] | str | None:
        """All attention and feed-forward matrices, and convolutions, of the blocks."""
        return targets.block_matrices(
            model,
            list(config.modules_to_save or []),
            layers=config.layers_to_transform,
            pattern=config.layers_pattern,
        )

    def make_layer(self, target: nn.Module, adapter_name: str, config: Any) -> nn.Module:
        """Carriers beside a linear or convolution layer."""
        return RgpLayer(target, adapter_name, config)

    @classmethod
    def _get_adapter_state_dict(
        cls,
        model: nn.Module,
        config: Any,
        adapter_name: str,
        state_dict: dict[str, Tensor],
        unwanted_adapter_names: list[str],
    ) -> dict[str, Tensor]:
        """The weights alone: carriers are made anew before each update."""
        found = super()._get_adapter_state_dict(
            model, config, adapter_name, state_dict, unwanted_adapter_names
        )
        kept = {name: tensor for name, tensor in found.items() if ".rgp_carriers." not in name}
        for path, layer in model.named_modules():
            if isinstance(layer, RgpLayer) and f"{path}.rgp_weight.{adapter_name}" in kept:
                weight = layer._weight(layer.matrix(adapter_name)).contiguous()
                kept[f"{path}.rgp_weight.{adapter_name}"] = weight
        return kept

    @classmethod
    def _remap_adapter_state_dict_for_load(
        cls, model: nn.Module, config: Any, adapter_name: str, state_dict: dict[str, Tensor]
    ) -> dict[str, Tensor]:
        """PEFT's names, and carriers to begin with: nothing displaced, directions to be rebuilt."""
        found = super()._remap_adapter_state_dict_for_load(model, config, adapter_name, state_dict)
        for name, tensor in model.state_dict().items():
            if f".rgp_carriers.{adapter_name}." in name:
                start = torch.eye if ".basis_" in name else torch.zeros
                found.setdefault(name, start(*tensor.shape, dtype=tensor.dtype))
        return found

    def _cast_adapter_dtype(self, adapter_name: str, autocast_adapter_dtype: bool = True) -> None:
        super()._cast_adapter_dtype(adapter_name, autocast_adapter_dtype)
        for layer in self.model.modules():
            if isinstance(layer, RgpLayer) and adapter_name in layer.rgp_weight:
                weight = layer.rgp_weight[adapter_name]
                weight.requires_grad_(False)  # a tensor that was cast is a new one, and would


def _refuse_unfit(base: nn.Module) -> None:
    if not isinstance(base, nn.Linear | Conv1D | nn.Conv2d):
        raise TypeError(
            f"RGP takes linear and 2-d convolution layers, not {type(base).__name__}. Choose other "
            "target_modules."
        )
    if _computes_otherwise(base):
        raise TypeError(
            f"{type(base).__name__} has a forward of its own (or a hook), which RGP would "
            "replace by the plain product. Choose other target_modules, or remove the hook."
        )
    if isinstance(base, NonDynamicallyQuantizableLinear):
        raise TypeError(
            "torch's MultiheadAttention reads this layer's weight without calling the layer, so "
            "that RGP would move what is not read. Leave it out of target_modules."
        )
    if "weight" not in base._parameters or base._forward_pre_hooks:
        raise TypeError(
            "The weight of this layer is made anew in each forward (weight norm, spectral norm or "
            "another parametrization), so that RGP cannot move it. Remove that first."
        )
    if not base.weight.is_floating_point():
        raise TypeError(
            "RGP moves the weights themselves, which a quantised layer cannot. Load the model "
            "without quantisation, or choose method='lora'."
        )
    if isinstance(base, nn.Conv2d) and base.groups != 1:
        raise ValueError(
            f"A convolution with groups={base.groups} is several matrices in one. Leave it out of "
            "target_modules (exclude_modules=...)."
        )
    if isinstance(base, nn.Conv2d) and (
        base.padding_mode != "zeros" or isinstance(base.padding, str)
    ):
        raise ValueError(
            f"A convolution with padding={base.padding!r} ({base.padding_mode}) is not taken. Give "
            "its padding in numbers, of zeros."
        )


def _computes_otherwise(base: nn.Module) -> bool:
    """Whether calling the layer is more than its class's plain product."""
    kinds = (nn.Linear, Conv1D, nn.Conv2d)
    plain = any(type(base).forward is kind.forward for kind in kinds)
    if isinstance(base, nn.Conv2d):
        plain = plain and type(base)._conv_forward is nn.Conv2d._conv_forward
    return not plain or "forward" in vars(base) or bool(base._forward_hooks)


def _geometry(base: nn.Module) -> dict[str, Any] | None:
    """Kernel, stride, padding and dilation of a convolution; None of a linear layer."""
    if not isinstance(base, nn.Conv2d):
        return None
    names = ("kernel_size", "stride", "padding", "dilation")
    return {name: getattr(base, name) for name in names}
