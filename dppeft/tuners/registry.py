"""The table of fine-tuning methods: which tensors train, and which PEFT configuration says so.

``METHODS`` holds what dppeft names itself. Every other PEFT tuner is found in PEFT's own registry
under its lower-case name, when somebody asks.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from dppeft import _validate
from dppeft.tuners.joining import join_peft

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

# PEFT's name for "match no module": such a configuration trains only its bias= and
# modules_to_save=, and plain PEFT saves and loads it.
NO_TARGETS = "dummy-target-modules"


@dataclass(frozen=True, kw_only=True)
class MethodInfo:
    """One fine-tuning method.

    Attributes:
        name: what ``wrap(model, method=name)`` takes.
        description: one line: what trains.
        paper: address of the paper, "" where there is none.
        options: option -> default, as ``wrap(model, name, **options)`` takes them.
        peft_type: key of PEFT's registry; None when no PEFT tuner is involved (``full``).
        fixed: fields of the PEFT configuration that make the method what it is.
    """

    name: str
    description: str
    paper: str = ""
    options: Mapping[str, Any] = field(default_factory=dict)
    peft_type: str | None = None
    fixed: Mapping[str, Any] = field(default_factory=dict)


# Rank and scale: the noise grows with the number of trained parameters, so ranks stay low;
# alpha = 2 r is the usual scale (Hu et al. 2021 tune alpha once and keep it).
_LORA = {"r": 8, "lora_alpha": 16, "lora_dropout": 0.0}

METHODS: dict[str, MethodInfo] = {
    "lora": MethodInfo(
        name="lora",
        description="A product of two low-rank matrices beside each targeted weight.",
        paper="https://arxiv.org/abs/2106.09685",
        options=_LORA,
        peft_type="LORA",
    ),
    "dora": MethodInfo(
        name="dora",
        description="LoRA for the direction of each weight's columns, and a vector of lengths.",
        paper="https://arxiv.org/abs/2402.09353",
        options=_LORA,
        peft_type="LORA",
        fixed={"use_dora": True},
    ),
    "ffa_lora": MethodInfo(
        name="ffa_lora",
        description="LoRA with A frozen at its random start, so that noise enters linearly.",
        paper="https://arxiv.org/abs/2403.12313",
        options=_LORA,
        peft_type="LORA",
    ),
    "adapter": MethodInfo(
        name="adapter",
        description="A bottleneck network behind attention and feed-forward part of each block.",
        paper="https://arxiv.org/abs/1902.00751",
        options={"bottleneck": 48, "placement": "houlsby", "activation": "gelu", "bias": False},
        peft_type="ADAPTER",
    ),
    "compacter": MethodInfo(
        name="compacter",
        description="Bottleneck networks whose matrices are sums of small Kronecker products.",
        paper="https://arxiv.org/abs/2106.04647",
        options={"bottleneck": 96, "n": 8, "shared": True},
        peft_type="COMPACTER",
    ),
    "rgp": MethodInfo(
        name="rgp",
        description="Full matrices, through low-rank carriers of each example's gradient.",
        paper="https://arxiv.org/abs/2106.09352",
        options={"r": 8, "history": "update", "sides": "both", "clip": "tangent"},
        peft_type="RGP",
    ),
    "bitfit": MethodInfo(
        name="bitfit",
        description="Every bias of the model (without any: its norms' scales), and the head.",
        paper="https://arxiv.org/abs/2106.10199",
        peft_type="LORA",
        fixed={"target_modules": NO_TARGETS, "bias": "all"},
    ),
    "head": MethodInfo(
        name="head",
        description="Only the classification head.",
        peft_type="LORA",
        fixed={"target_modules": NO_TARGETS},
    ),
    # PEFT has no default for the number of virtual tokens; 20 is what its examples take.
    "prompt_tuning": MethodInfo(
        name="prompt_tuning",
        description="Trained vectors in front of the input embeddings.",
        paper="https://arxiv.org/abs/2104.08691",
        options={"num_virtual_tokens": 20},
        peft_type="PROMPT_TUNING",
    ),
    "p_tuning": MethodInfo(
        name="p_tuning",
        description="Vectors in front of the input embeddings, made by a small trained network.",
        paper="https://arxiv.org/abs/2103.10385",
        options={"num_virtual_tokens": 20},
        peft_type="P_TUNING",
    ),
    "prefix_tuning": MethodInfo(
        name="prefix_tuning",
        description="Trained keys and values in front of those of every attention layer.",
        paper="https://arxiv.org/abs/2101.00190",
        options={"num_virtual_tokens": 20},
        peft_type="PREFIX_TUNING",
    ),
    "full": MethodInfo(name="full", description="Every parameter; the model itself is returned."),
}

# Fields of every PEFT configuration that wrap() fills in itself.
_NOT_OPTIONS = {
    "auto_mapping",
    "base_model_name_or_path",
    "inference_mode",
    "modules_to_save",
    "peft_type",
    "peft_version",
    "revision",
    "runtime_config",
    "target_modules",
    "task_type",
}


def methods() -> dict[str, MethodInfo]:
    """Every method that ``wrap`` knows by name, with its options and their defaults.

    Example:
        >>> methods()["lora"].options["r"]
        8
    """
    return dict(_all_methods())


def info(name: str) -> MethodInfo:
    """The method of that name; an error that lists the names, and the nearest one, otherwise."""
    table = _all_methods()
    return table[_validate.one_of(sorted(table), method=name)]


def config_class(method: MethodInfo) -> type[PeftConfig]:
    """The class of PEFT configuration that a method (not ``full``) is described by."""
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING
    from peft.utils import PeftType

    join_peft()
    return PEFT_TYPE_TO_CONFIG_MAPPING[PeftType(method.peft_type)]


def method_of(model: PeftModel) -> str:
    """The name of the method that a wrapped model trains with, read from the model itself."""
    config = model.active_peft_config
    if getattr(config, "target_modules", None) == NO_TARGETS:
        return "bitfit" if config.bias == "all" else "head"
    if str(config.peft_type.value) == "LORA":
        if config.use_dora:
            return "dora"
        if is_ffa(model):
            return "ffa_lora"
    return str(config.peft_type.value).lower()


def is_ffa(model: PeftModel) -> bool:
    """Whether every LoRA layer keeps its A frozen (FFA-LoRA)."""
    layers = _lora_layers(model)
    adapter = model.active_adapter
    return bool(layers) and all(
        "lora_A" in layer.frozen_peft_weight_names.get(adapter, ()) for layer in layers
    )


def freeze_a(model: PeftModel) -> None:
    """Freezes every LoRA A: FFA-LoRA (Sun et al. 2024, section 3).

    Declared in the way PEFT's own variants declare it, so that it holds after ``disable_adapter``
    and ``set_adapter``, which set requires_grad of everything else.
    """
    for layer in _lora_layers(model):
        frozen = dict(layer.frozen_peft_weight_names)
        for adapter in layer.active_adapters:
            frozen[adapter] = (*frozen.get(adapter, ()), "lora_A", "lora_embedding_A")
        layer.frozen_peft_weight_names = frozen
        layer._freeze_non_trainable_peft_weights()


def _lora_layers(model: PeftModel) -> list[Any]:
    from peft.tuners.lora import LoraLayer

    return [module for module in model.modules() if isinstance(module, LoraLayer)]


@functools.cache
def _all_methods() -> dict[str, MethodInfo]:
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING, PEFT_TYPE_TO_TUNER_MAPPING

    join_peft()
    table: dict[str, MethodInfo] = {}
    for name, method in METHODS.items():
        options = dict(method.options)
        if options:  # a method without options of its own takes none of PEFT's either
            options = {**_fields(config_class(method)), **options}
        known = options.keys() - method.fixed.keys()
        kept = {option: value for option, value in options.items() if option in known}
        table[name] = dataclasses.replace(method, options=kept)
    for peft_type, config in PEFT_TYPE_TO_CONFIG_MAPPING.items():
        name = str(peft_type.value).lower()
        if name not in table:
            description, paper = _read_docs(PEFT_TYPE_TO_TUNER_MAPPING[peft_type], config, name)
            table[name] = MethodInfo(
                name=name,
                description=description,
                paper=paper,
                options=_fields(config),
                peft_type=str(peft_type.value),
            )
    return table


def _fields(config: type[PeftConfig]) -> dict[str, Any]:
    """Option -> default of a PEFT configuration class; None where PEFT has no default."""
    options: dict[str, Any] = {}
    for item in dataclasses.fields(config):
        if not item.init or item.name in _NOT_OPTIONS:
            continue
        if item.default is not dataclasses.MISSING:
            options[item.name] = item.default
        elif item.default_factory is not dataclasses.MISSING:
            options[item.name] = item.default_factory()
        else:
            options[item.name] = None
    return options


def _read_docs(tuner: type, config: type[PeftConfig], name: str) -> tuple[str, str]:
    """PEFT's own first sentence about a tuner, and the first paper that its texts point to."""
    # vars(): inspect.getdoc would hand down the docstring of BaseTuner or nn.Module.
    texts = [inspect.cleandoc(vars(part).get("__doc__") or "") for part in (tuner, config)]
    paragraph = " ".join(re.split(r"\n\s*\n", texts[0])[0].split())
    sentence = re.split(r"(?<=[a-z)])\. |\.$| Paper:", paragraph)[0].strip()
    module = inspect.getmodule(config)
    sources = [*texts, inspect.getsource(module) if module else ""]
    papers = re.findall(
        r"https://(?:huggingface\.co/papers|arxiv\.org/(?:abs|pdf))/[\d.]+\d", " ".join(sources)
    )
    return f"{sentence or f'PEFT tuner {name}'}.", papers[0] if papers else ""
