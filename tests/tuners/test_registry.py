"""The table of methods names what PEFT has, with PEFT's own defaults."""

from __future__ import annotations

import dataclasses

import peft
import pytest
import torch
from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
from torch import nn

import dppeft
from dppeft.errors import ArgumentError
from dppeft.tuners import registry
from tests.tiny import build


def test_every_peft_tuner_has_its_lower_case_name() -> None:
    names = set(dppeft.methods())
    assert {kind.value.lower() for kind in PEFT_TYPE_TO_CONFIG_MAPPING} <= names
    assert {"lora", "dora", "ffa_lora", "bitfit", "head", "full"} <= names
    assert {"ia3", "vera", "loha", "prompt_tuning", "prefix_tuning", "p_tuning"} <= names


@pytest.mark.parametrize("name", dppeft.methods())
def test_options_are_fields_of_the_configuration_with_its_defaults(name: str) -> None:
    method = dppeft.methods()[name]
    assert method.name == name
    assert "\n" not in method.description
    assert method.description.endswith(".")
    assert not method.paper or method.paper.startswith("https://")
    if method.peft_type is None:
        assert name == "full"
        return
    config = registry.config_class(method)
    fields = {item.name: item for item in dataclasses.fields(config)}
    assert method.options.keys() | method.fixed.keys() <= fields.keys()
    ours = registry.METHODS[name].options if name in registry.METHODS else {}
    for option, value in method.options.items():
        default = fields[option].default
        if option not in ours and default is not dataclasses.MISSING:
            assert value == default


def test_the_table_cannot_be_changed_from_outside() -> None:
    dppeft.methods().clear()
    assert "lora" in dppeft.methods()
    with pytest.raises(dataclasses.FrozenInstanceError):
        dppeft.methods()["lora"].name = "other"  # type: ignore[misc]


def test_unknown_names_list_the_choices_and_the_nearest() -> None:
    with pytest.raises(
        ArgumentError, match="Unknown method='prompt_tunin'.*Did you mean 'prompt_t"
    ):
        registry.info("prompt_tunin")
    with pytest.raises(ArgumentError, match="Unknown method=None. Choices: .*lora"):
        registry.info(None)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["lora", "dora", "ffa_lora", "bitfit", "head", "ia3", "vera"])
def test_the_method_of_a_model_is_read_from_the_model(name: str) -> None:
    assert registry.method_of(dppeft.wrap(build("bert"), name)) == name


def test_peft_still_keeps_declared_weights_frozen() -> None:
    """FFA-LoRA rests on this attribute of PEFT 0.21; when it moves, freeze_a must move with it."""
    model = peft.get_peft_model(build("bert"), peft.LoraConfig())
    registry.freeze_a(model)
    model.set_adapter("default")
    frozen = {n: p.requires_grad for n, p in model.named_parameters() if "lora_A" in n}
    assert len(frozen) == 4
    assert not any(frozen.values())
    assert registry.is_ffa(model)
    assert not registry.is_ffa(dppeft.wrap(build("bert")))


def test_peft_still_has_a_name_for_no_targets() -> None:
    """head and bitfit rest on this constant of PEFT 0.21."""
    from peft.utils.constants import DUMMY_TARGET_MODULES

    assert registry.NO_TARGETS == DUMMY_TARGET_MODULES
    model = peft.get_peft_model(
        nn.Sequential(nn.Linear(2, 2)), peft.LoraConfig(target_modules=DUMMY_TARGET_MODULES)
    )
    assert torch.equal(model(torch.ones(1, 2)), model.get_base_model()(torch.ones(1, 2)))
