"""Completes a PEFT configuration for one model, and refuses what PEFT would silently pass over."""

from __future__ import annotations

import inspect
import re
import warnings
from typing import TYPE_CHECKING

from torch import nn

from dppeft._kind import ModelKind
from dppeft.errors import ArgumentError, ArgumentTypeError
from dppeft.tuners import registry, targets

if TYPE_CHECKING:
    from peft import PeftConfig

_TASK_TYPES: dict[ModelKind, str] = {
    "classification": "SEQ_CLS",
    "token_classification": "TOKEN_CLS",
    "question_answering": "QUESTION_ANS",
    "causal_lm": "CAUSAL_LM",
    "seq2seq_lm": "SEQ_2_SEQ_LM",
}
# What PEFT raises for a configuration that does not fit a model.
PEFT_FAILURES = (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    RuntimeError,
    AssertionError,
    ImportError,
    IndexError,
)
_HEAD_TASKS = ("SEQ_CLS", "TOKEN_CLS", "QUESTION_ANS")
# Names of modules that PEFT itself puts into a model.
_PEFT_NAMES = (
    "base_layer",
    "default",
    "lora_A",
    "lora_B",
    "lora_dropout",
    "lora_embedding_A",
    "lora_embedding_B",
    "lora_magnitude_vector",
    "modules_to_save",
    "original_module",
    "prompt_encoder",
)
# What PEFT's task-specific models hand on to the base model, present or not.
_TEXT_INPUTS = {"input_ids", "attention_mask", "inputs_embeds", "labels", "output_attentions"}


def refuse_unfit(model: nn.Module) -> None:
    """An error unless ``model`` is a module without an adapter in it."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    if not isinstance(model, nn.Module):
        raise ArgumentTypeError(
            f"Expected model to be a torch.nn.Module, got {type(model).__name__}. Load it first, "
            "e.g. AutoModelForSequenceClassification.from_pretrained(name)."
        )
    wrappers = BaseTunerLayer | AuxiliaryTrainingWrapper
    if hasattr(model, "peft_config") or any(isinstance(m, wrappers) for m in model.modules()):
        raise ArgumentError(
            f"This {type(model).__name__} is wrapped already: a second wrap would stack adapters. "
            "Load the base model again, or fold the adapter in first with dppeft.merge(model)."
        )


def set_pad_token(model: nn.Module, kind: ModelKind) -> None:
    """A decoder's classifier reads the last token that is not padding: it must know the padding."""
    if kind != "classification" or "use_cache" not in inspect.signature(model.forward).parameters:
        return
    config = model.config.get_text_config()
    if config.pad_token_id is not None:
        return
    end = config.eos_token_id
    end = end[0] if isinstance(end, list | tuple) and end else end
    if end is None or not 0 <= end < config.vocab_size:
        raise ArgumentError(
            f"{type(model).__name__} has config.pad_token_id=None and no end token inside its "
            f"vocabulary to take instead (eos_token_id={end}, vocab_size={config.vocab_size}). Set "
            "model.config.pad_token_id to the id that your collator pads with."
        )
    config.pad_token_id = end
    warnings.warn(
        f"config.pad_token_id was not set; it is now the end token's id, {end}. Rows must be "
        "padded with that id (tokenizer.pad_token = tokenizer.eos_token).",
        stacklevel=3,
    )


def task_type(model: nn.Module, kind: ModelKind) -> str | None:
    """PEFT's task, where its task-specific forward fits the model; None: the general PeftModel."""
    accepted = inspect.signature(model.forward).parameters
    any_name = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    if "input_ids" not in accepted or not (any_name or accepted.keys() >= _TEXT_INPUTS):
        return None
    return _TASK_TYPES.get(kind)


def complete(
    config: PeftConfig, model: nn.Module, kind: ModelKind, head: list[str], *, ready: bool
) -> None:
    """Fills in the head, the task and the default targets, in place."""
    own = list(getattr(config, "modules_to_save", None) or [])
    if hasattr(config, "modules_to_save"):
        if own and not hasattr(model, "base_model_prefix"):
            head = []  # only guessed: the user's word replaces it
        config.modules_to_save = [*own, *(name for name in head if name not in own)] or None
        _check_modules_to_save(config, model, head)
    elif head:
        remedy = (
            f"PEFT's {type(config).__name__} cannot train the head ({', '.join(head)}) beside the "
            "adapter. Use 'lora', with trainable_token_indices=[...] for single tokens."
        )
        if not ready:
            raise ArgumentError(remedy)
        warnings.warn(f"The head stays as it is: {remedy}", stacklevel=3)
    if config.task_type is None:
        config.task_type = task_type(model, kind)
    if config.is_prompt_learning:
        _fill_sizes(config, model)
        _check_prefix(config, model)
    wanted = getattr(config, "target_modules", "")
    if wanted is None and not getattr(config, "target_parameters", None):
        _fill_targets(config, model)
    elif isinstance(wanted, str) and wanted.lower() == "all-linear":
        config.target_modules = targets.all_linear(model, [*head, *own])


def _fill_sizes(config: PeftConfig, model: nn.Module) -> None:
    """Widths that PEFT reads under the names of most models only (DistilBERT has its own)."""
    own = getattr(model, "config", None)
    if own is None or {"hidden_size", "n_embd", "d_model"} & own.to_dict().keys():
        return
    for field, name in (
        ("token_dim", "hidden_size"),
        ("num_layers", "num_hidden_layers"),
        ("num_attention_heads", "num_attention_heads"),
    ):
        if getattr(config, field) is None:
            setattr(config, field, getattr(own, name, None))


def _fill_targets(config: PeftConfig, model: nn.Module) -> None:
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
    from peft.utils import constants

    kind = str(config.peft_type.value)
    tuner = PEFT_TYPE_TO_TUNER_MAPPING[config.peft_type]
    table = getattr(tuner, "target_module_mapping", None)
    if hasattr(tuner, "default_targets"):  # one of ours: read from the model itself
        _set_targets(config, model, tuner.default_targets(model, config))
        return
    if kind == "IA3":
        table = constants.TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING
    if not table:
        return  # the tuner finds its own places (trainable tokens, adaption prompt)
    _set_targets(config, model, targets.default_targets(model, table, norms=kind == "LN_TUNING"))
    if kind == "IA3":
        feedforward = constants.TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING
        own = feedforward.get(getattr(model.config, "model_type", ""), []) if table else []
        config.feedforward_modules = {name for name in own if name in config.target_modules}


def _set_targets(
    config: PeftConfig, model: nn.Module, found: list[str] | set[str] | str | None
) -> None:
    if not found:
        raise ArgumentError(
            f"No default target_modules are known for {type(model).__name__}. Pass "
            f"target_modules=[...] or 'all-linear'. Linear layers here: "
            f"{targets.describe_linear_layers(model)}."
        )
    config.target_modules = found if isinstance(found, str) else set(found)


def _check_prefix(config: PeftConfig, model: nn.Module) -> None:
    """Prefix tuning hands the prefix over as past keys and values, where the model takes them."""
    if str(config.peft_type.value) != "PREFIX_TUNING" or config.task_type not in _HEAD_TASKS:
        return
    backbone = getattr(model, getattr(model, "base_model_prefix", ""), model)
    inputs = [inspect.signature(part.forward).parameters for part in (model, backbone)]
    if not any("past_key_values" in names for names in inputs):
        raise ArgumentError(
            f"PEFT's prefix tuning needs a model that takes past_key_values, and "
            f"{type(model).__name__} of this transformers version takes none. Use 'prompt_tuning' "
            "or 'lora'."
        )


def _check_modules_to_save(config: PeftConfig, model: nn.Module, head: list[str]) -> None:
    """Refuses what PEFT would match to more than what is meant.

    PEFT compares the ends of names without looking for a dot: "2" takes "12" along, "out" its own
    "lora_dropout", and a head called "dense" every other dense layer.
    """
    names = [n for n, m in model.named_modules() if n and next(m.parameters(), None) is not None]
    adapted = getattr(config, "target_modules", None) != registry.NO_TARGETS
    for entry in config.modules_to_save or []:
        found = {name for name in names if name == entry or name.endswith(f".{entry}")}
        if not found:
            raise ArgumentError(
                f"modules_to_save={entry!r} is no module of {type(model).__name__}. Its children: "
                f"{', '.join(name for name, _ in model.named_children())}."
            )
        meant = {*head} if entry in head else {*head, *found}
        hits = [*names, *_PEFT_NAMES] if adapted else names
        more = [name for name in hits if name.endswith(entry) and name not in meant]
        if more:
            raise ArgumentError(
                f"The module {entry!r} cannot be trained whole under this name: PEFT compares the "
                f"ends of names and would take {', '.join(more[:3])} too. Rename it, e.g. to "
                "'classifier'."
            )


def check_targets(config: PeftConfig, model: nn.Module, given: list[str] | str | None) -> None:
    """An error unless the targets match something, and each one the user named does."""
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING

    wanted = getattr(config, "target_modules", None)
    if (
        wanted is None
        or wanted == registry.NO_TARGETS
        or getattr(config, "target_parameters", None)
    ):
        return
    linear = f"Linear layers here: {targets.describe_linear_layers(model)}."
    lost = targets.missing_targets(model, given) if isinstance(given, list | tuple | set) else []
    if lost:
        raise ArgumentError(f"target_modules={lost} match no module. {linear}")
    tuner = PEFT_TYPE_TO_TUNER_MAPPING[config.peft_type]
    matches = getattr(tuner, "_check_target_module_exists", None)
    if matches is None:
        return
    try:
        found = any(matches(config, name) for name, _ in model.named_modules() if name)
    except re.error as error:
        raise ArgumentError(
            f"target_modules={wanted!r} is no regular expression: {error}."
        ) from error
    if not found:
        shown = wanted if isinstance(wanted, str) else sorted(wanted)
        raise ArgumentError(
            f"target_modules={shown!r} match no module that is not trained whole. {linear}"
        )


def all_transposed(model: nn.Module, config: PeftConfig) -> bool:
    """Whether every target keeps its weight as (in, out): GPT-2's Conv1D."""
    from peft.tuners.tuners_utils import check_target_module_exists
    from transformers.pytorch_utils import Conv1D

    if config.target_modules is None:
        return False
    hit = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D | nn.Embedding)
        and check_target_module_exists(config, name) is True
    ]
    return bool(hit) and all(isinstance(module, Conv1D) for module in hit)
