"""Our tuners in PEFT's registry: the one place that reaches into how PEFT keeps its names."""

from __future__ import annotations

from typing import Any


def join_peft() -> None:
    """Makes PEFT know ``adapter``, ``compacter`` and ``rgp``. Calling it again changes nothing."""
    from dppeft.tuners.bottleneck import BottleneckConfig, BottleneckModel
    from dppeft.tuners.compacter import CompacterConfig, CompacterModel
    from dppeft.tuners.rgp import RgpConfig, RgpModel

    _register("adapter", BottleneckConfig, BottleneckModel)
    _register("compacter", CompacterConfig, CompacterModel)
    _register("rgp", RgpConfig, RgpModel)


def peft_type(name: str) -> Any:
    """PEFT's enum member of that name. The enum has no open end, so a member is added to it."""
    from peft.utils import PeftType

    if name not in PeftType.__members__:
        member = str.__new__(PeftType, name)
        member._name_, member._value_ = name, name
        setattr(PeftType, name, member)
        PeftType._member_names_.append(name)
        PeftType._member_map_[name] = member
        PeftType._value2member_map_[name] = member
    return PeftType[name]


def _register(name: str, config: type, model: type) -> None:
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
    from peft.utils import register_peft_method

    if PEFT_TYPE_TO_CONFIG_MAPPING.get(peft_type(name.upper())) is not config:
        register_peft_method(name=name, config_cls=config, model_cls=model, prefix=model.prefix)  # type: ignore[attr-defined]
