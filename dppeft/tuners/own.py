"""What our tuners have in common: which modules they take, and how PEFT builds and takes them out.

Imported only once PEFT is.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from peft.config import PeftConfig
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer
from torch import Tensor, nn


@dataclass
class OwnConfig(PeftConfig):
    """Fields that every tuner of ours has, with PEFT's meanings."""

    target_modules: list[str] | set[str] | str | None = field(default=None)
    exclude_modules: list[str] | set[str] | str | None = field(default=None)
    modules_to_save: list[str] | None = field(default=None)
    layers_to_transform: list[int] | int | None = field(default=None)
    layers_pattern: list[str] | str | None = field(default=None)

    def __post_init__(self) -> None:
        """Checks the values."""
        super().__post_init__()
        for name in ("target_modules", "exclude_modules"):
            value = getattr(self, name)
            if isinstance(value, list):
                setattr(self, name, set(value))


def check_counts(config: Any, **least: int) -> None:
    """A ValueError unless each named field is a whole number, so large or larger."""
    for name, smallest in least.items():
        value = getattr(config, name)
        if not isinstance(value, int) or isinstance(value, bool) or value < smallest:
            raise ValueError(f"{name}={value!r}; expected a whole number, {smallest} or more.")


class OwnTuner(BaseTuner):
    """PEFT's tuner with default targets read from the model instead of a table of model types.

    In PEFT ``bias`` says which of the base model's biases train; in ours it is the adapter's own.
    """

    @staticmethod
    def default_targets(model: nn.Module, config: Any) -> set[str] | str | None:
        """Targets for a model whose user names none; None where the architecture is unknown."""
        raise NotImplementedError

    def make_layer(self, target: nn.Module, adapter_name: str, config: Any) -> nn.Module:
        """The tuner layer around a module; a ValueError or TypeError where it cannot be."""
        raise NotImplementedError

    def _prepare_adapter_config(self, peft_config: Any, model_config: dict[str, Any]) -> Any:
        if peft_config.target_modules is None:
            others = [c for c in self.peft_config.values() if c is not peft_config]
            if others:
                self._check_same_places(peft_config, others[0])
                found = others[0].target_modules
            else:
                found = self.default_targets(self.model, peft_config)
            if not found:
                raise ValueError("No default targets are known here: set target_modules.")
            peft_config.target_modules = found
        by_pattern = isinstance(peft_config.target_modules, str)
        if by_pattern and peft_config.layers_to_transform is not None:
            raise ValueError(  # PEFT would pass over it in silence
                "layers_to_transform has no effect on target_modules that are a regular "
                "expression: put the layers into the expression, or list the modules."
            )
        return peft_config

    @staticmethod
    def _check_same_places(config: Any, first: Any) -> None:
        """A further adapter takes the first one's places, whose layers are hidden by now."""
        for name in ("placement", "layers_to_transform", "layers_pattern"):
            if getattr(config, name, None) != getattr(first, name, None):
                raise ValueError(
                    f"{name} of a further adapter differs from the first one's: set target_modules."
                )

    def _create_and_replace(
        self,
        peft_config: Any,
        adapter_name: str,
        target: nn.Module,
        target_name: str,
        parent: nn.Module,
        current_key: str,
        **_optional: Any,
    ) -> None:
        if isinstance(target, self.tuner_layer_cls):
            target.update_layer(adapter_name, peft_config)  # type: ignore[attr-defined]
            return
        layer = self.make_layer(target, adapter_name, peft_config)
        if adapter_name not in self.active_adapters:
            layer.requires_grad_(False)
        self._replace_module(parent, target_name, layer, target)

    def _replace_module(
        self, parent: nn.Module, child_name: str, new_module: nn.Module, child: nn.Module
    ) -> None:
        # PEFT's own also moves devices, which our layers do, and copies ``weight`` onto whatever
        # comes back from a module that is trained whole, which may have none.
        setattr(parent, child_name, new_module)

    def _mark_only_adapters_as_trainable(self, model: nn.Module) -> None:
        own = {name: config.bias for name, config in self.peft_config.items() if _has_bias(config)}
        for name in own:
            self.peft_config[name].bias = "none"  # PEFT would read it as "which of the model's"
        try:
            super()._mark_only_adapters_as_trainable(model)
        finally:
            for name, bias in own.items():
                self.peft_config[name].bias = bias

    def disable_adapter_layers(self) -> None:
        """The base model's outputs, until ``enable_adapter_layers``."""
        self._enable_adapter_layers(enabled=False)

    def _check_new_adapter_config(self, config: PeftConfig) -> None:
        """PEFT allows one adapter with biases, meaning the base model's."""

    @classmethod
    def _remove_adapter_name_from_key(cls, key: str, adapter_name: str) -> str:
        # PEFT's own looks for the name before the last word only; our layers are nested deeper.
        layer = cls.tuner_layer_cls
        for part in (*layer.adapter_layer_names, *layer.other_param_names):
            before, found, after = f"{key}.".partition(f".{part}.{adapter_name}.")
            if found:
                return f"{before}.{part}.{after}".removesuffix(".")
        return super()._remove_adapter_name_from_key(key, adapter_name)

    @classmethod
    def _get_learnable_bias_state_dict(cls, *_: Any, **__: Any) -> dict[str, Tensor]:
        return {}


def _has_bias(config: Any) -> bool:
    return hasattr(config, "bias")


class OwnLayer(nn.Module, BaseTunerLayer):
    """A module with adapters around it, by name.

    The first of ``adapter_layer_names`` is the dictionary of the adapters.
    """

    def __init__(self, base_layer: nn.Module, adapter_name: str) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.merged_adapters: list[str] = []
        self._disable_adapters = False
        self._active_adapter = adapter_name

    def present(self) -> list[str]:
        """The active adapters that this layer has; none while adapters are disabled."""
        if self.disable_adapters:
            return []
        made = getattr(self, self.adapter_layer_names[0])
        return [name for name in self.active_adapters if name in made]

    def finish(self, adapter_name: str, config: Any) -> None:
        """Puts a new adapter where the base layer is, and switches the active ones on."""
        self._move_adapter_to_device_of_base_layer(adapter_name)
        self.set_adapter(self.active_adapters, inference_mode=config.inference_mode)
