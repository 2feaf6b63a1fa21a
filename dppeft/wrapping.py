"""``wrap``: a method's name -> a PEFT configuration that fits the model -> what trains, and no more."""

from __future__ import annotations

import copy
import difflib
import inspect
import re
import warnings
from typing import TYPE_CHECKING, Any

from torch import nn

from dppeft._kind import ModelKind, kind_of
from dppeft.errors import ArgumentError, ArgumentTypeError
from dppeft.tuners import registry, targets
from dppeft.tuners.registry import MethodInfo

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

_TASK_TYPES: dict[ModelKind, str] = {
    "classification": "SEQ_CLS",
    "token_classification": "TOKEN_CLS",
    "question_answering": "QUESTION_ANS",
    "causal_lm": "CAUSAL_LM",
    "seq2seq_lm": "SEQ_2_SEQ_LM",
}
# What PEFT's task-specific models hand on to the base model, present or not.
_TEXT_INPUTS = {"input_ids", "attention_mask", "inputs_embeds", "labels", "output_attentions"}
# What PEFT raises for a configuration that does not fit a model.
_PEFT_FAILURES = (
    ValueError,
    TypeError,
    KeyError,
    AttributeError,
    RuntimeError,
    AssertionError,
    ImportError,
    IndexError,
)


def wrap(
    model: nn.Module,
    method: str | PeftConfig = "lora",
    *,
    target_modules: list[str] | str | None = None,
    modules_to_save: list[str] | None = None,
    **options: Any,
) -> PeftModel:
    """The model with a fine-tuning method in place: only its tensors and the head train.

    Works in place, as PEFT does, and keeps the mode: call ``.train()`` on a model that
    ``from_pretrained`` left in evaluation mode before a loop of your own (the trainers do it).
    The head of a classifier is always trained and always saved; a language model has none. A
    pooler inside a pretrained backbone (BERT's) stays frozen; where it is not pretrained, train it
    with ``modules_to_save=["pooler"]``.

    Args:
        model: any ``transformers`` model or plain ``nn.Module``, not wrapped before.
        method: a name from ``dppeft.methods()``, or a ready ``peft.PeftConfig``.
        target_modules: names (last words are enough), ``"all-linear"`` or a regular expression.
            Default: PEFT's choice for the architecture, else attention query and value. On a plain
            ``nn.Module`` name them.
        modules_to_save: further modules to train and save whole. On a plain ``nn.Module``, whose
            head can only be guessed, they replace the guess (a child called ``classifier``,
            ``score``, ``head``..., else the last linear layer).
        **options: fields of the method's PEFT configuration (``r``, ``lora_alpha``, ...);
            ``dppeft.methods()[name].options`` has the defaults.

    Returns:
        The ``PeftModel``; for ``"full"`` the model itself, every parameter trainable.

    Raises:
        ArgumentError: unknown method, no matching target, nothing to train, wrapped before, or
            PEFT cannot build the method on this model.
        ArgumentTypeError: unknown option.
    """
    from peft import PeftConfig

    _refuse_unfit(model)
    kind = kind_of(model)
    head = targets.find_head(model, kind)
    if isinstance(method, PeftConfig):
        if target_modules is not None or modules_to_save is not None or options:
            given = sorted({*options, "target_modules", "modules_to_save"} if options else ())
            raise ArgumentTypeError(
                f"method is a ready {type(method).__name__}: set {', '.join(given) or 'its fields'}"
                " in it instead of passing them to wrap()."
            )
        config, name = copy.deepcopy(method), str(method.peft_type.value).lower()
    else:
        chosen = registry.info(method)
        name = chosen.name
        _check_options(chosen, target_modules, options)
        if chosen.peft_type is None:
            return _all_trainable(model, modules_to_save)
        config = _build_config(chosen, target_modules, modules_to_save, options)
    if name == "head" and not (head or modules_to_save):
        raise ArgumentError(
            f"method='head' trains a classification head and {type(model).__name__} has none. Load "
            "the model for classification (AutoModelForSequenceClassification), or use 'lora'."
        )
    if name == "bitfit":
        _check_biases(model, head)
    _complete(config, model, kind, head)
    _check_targets(config, model, target_modules)
    _set_pad_token(model, kind)
    wrapped = _inject(model, config, name)
    if name == "ffa_lora":
        registry.freeze_a(wrapped)
    wrapped.train(model.training)  # the new layers are born in training mode
    return wrapped


def _refuse_unfit(model: nn.Module) -> None:
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


def _check_options(
    method: MethodInfo, target_modules: list[str] | str | None, options: dict[str, Any]
) -> None:
    allowed = list(method.options)
    for option in options:
        if option not in allowed:
            near = difflib.get_close_matches(option, allowed, n=1)
            hint = f" Did you mean {near[0]!r}?" if near else ""
            raise ArgumentTypeError(
                f"Unknown option {option!r} for method {method.name!r}.{hint} Its options: "
                f"{', '.join(sorted(allowed)) or 'none'}."
            )
    if target_modules is not None and not _takes_targets(method):
        raise ArgumentTypeError(
            f"target_modules={target_modules!r}: method {method.name!r} targets no modules of your "
            "choice. Leave target_modules out, or use a method that does, such as 'lora'."
        )


def _takes_targets(method: MethodInfo) -> bool:
    if method.peft_type is None or "target_modules" in method.fixed:
        return False
    return hasattr(registry.config_class(method), "target_modules")


def _build_config(
    method: MethodInfo,
    target_modules: list[str] | str | None,
    modules_to_save: list[str] | None,
    options: dict[str, Any],
) -> PeftConfig:
    fields = {**registry.METHODS[method.name].options} if method.name in registry.METHODS else {}
    fields |= method.fixed | options
    if target_modules is not None:
        fields["target_modules"] = target_modules
    if modules_to_save is not None:
        fields["modules_to_save"] = list(modules_to_save)
    try:
        return registry.config_class(method)(**fields)
    except _PEFT_FAILURES as error:
        raise ArgumentError(
            f"PEFT refuses these options for method {method.name!r}: {_one_line(error)}"
        ) from error


def _complete(config: PeftConfig, model: nn.Module, kind: ModelKind, head: list[str]) -> None:
    """Fills in the head, the task and the default targets, in place."""
    own = list(getattr(config, "modules_to_save", None) or [])
    if hasattr(config, "modules_to_save"):
        guessed = not hasattr(model, "base_model_prefix")
        extra = [] if own and guessed else [name for name in head if name not in own]
        config.modules_to_save = [*own, *extra] or None
        _check_modules_to_save(model, config.modules_to_save or [], head)
    elif head:
        raise ArgumentError(
            f"{type(config).__name__} cannot train the head ({', '.join(head)}) beside the "
            "adapter, and a new head must train. Use another method, such as 'lora'."
        )
    if config.task_type is None:
        config.task_type = _task_type(model, kind)
    if getattr(config, "target_modules", "") is None and not getattr(
        config, "target_parameters", None
    ):
        _fill_targets(config, model)


def _fill_targets(config: PeftConfig, model: nn.Module) -> None:
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING
    from peft.utils import constants

    kind = str(config.peft_type.value)
    table = getattr(PEFT_TYPE_TO_TUNER_MAPPING[config.peft_type], "target_module_mapping", None)
    if kind == "IA3":
        table = constants.TRANSFORMERS_MODELS_TO_IA3_TARGET_MODULES_MAPPING
    if not table:
        return  # the tuner finds its own places (trainable tokens, adaption prompt)
    found = targets.default_targets(model, table, norms=kind == "LN_TUNING")
    if found is None:
        raise ArgumentError(
            f"No default target_modules are known for {type(model).__name__}. Pass "
            f"target_modules=[...] or 'all-linear'. Linear layers here: "
            f"{targets.describe_linear_layers(model)}."
        )
    config.target_modules = found if isinstance(found, str) else set(found)
    if kind == "IA3":
        feedforward = constants.TRANSFORMERS_MODELS_TO_IA3_FEEDFORWARD_MODULES_MAPPING
        own = feedforward.get(getattr(model.config, "model_type", ""), []) if table else []
        config.feedforward_modules = {name for name in own if name in found}


def _check_modules_to_save(model: nn.Module, entries: list[str], head: list[str]) -> None:
    """PEFT matches by the end of the name, without a dot: "2" would take "12" along."""
    names = [name for name, _ in model.named_modules() if name]
    for entry in entries:
        hits = [name for name in names if name == entry or name.endswith(f".{entry}")]
        if not hits:
            raise ArgumentError(
                f"modules_to_save={entry!r} is no module of {type(model).__name__}. Its children: "
                f"{', '.join(name for name, _ in model.named_children())}."
            )
        more = [n for n in names if n.endswith(entry) and n not in hits and n not in head]
        if more:
            raise ArgumentError(
                f"modules_to_save={entry!r} would train {', '.join(more)} too, because PEFT "
                "compares the ends of names. Give the module a name that ends no other."
            )


def _check_targets(
    config: PeftConfig, model: nn.Module, given: list[str] | str | None
) -> None:
    from peft.mapping import PEFT_TYPE_TO_TUNER_MAPPING

    wanted = getattr(config, "target_modules", None)
    if wanted is None or wanted == registry.NO_TARGETS or getattr(config, "target_parameters", None):
        return
    if isinstance(wanted, str) and wanted.lower() == "all-linear":
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
        raise ArgumentError(f"target_modules={wanted!r} is no regular expression: {error}.") from error
    if not found:
        shown = wanted if isinstance(wanted, str) else sorted(wanted)
        raise ArgumentError(
            f"target_modules={shown!r} match no module that is not trained whole. {linear}"
        )


def _check_biases(model: nn.Module, head: list[str]) -> None:
    inside = tuple(f"{name}." for name in head)
    # ".bias", not "bias": T5's relative_attention_bias.weight is an embedding.
    if not any(
        (name == "bias" or name.endswith(".bias")) and not name.startswith(inside)
        for name, _ in model.named_parameters()
    ):
        raise ArgumentError(
            f"method='bitfit' trains biases and {type(model).__name__} has none outside its head. "
            "Use 'lora', or 'head' for the head alone."
        )


def _task_type(model: nn.Module, kind: ModelKind) -> str | None:
    """PEFT's task, where its task-specific forward fits the model; None: the general PeftModel."""
    accepted = inspect.signature(model.forward).parameters
    any_name = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in accepted.values())
    if "input_ids" not in accepted or not (any_name or accepted.keys() >= _TEXT_INPUTS):
        return None
    return _TASK_TYPES.get(kind)


def _set_pad_token(model: nn.Module, kind: ModelKind) -> None:
    """A decoder's classifier reads the last token that is not padding, so it must know the padding."""
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


def _inject(model: nn.Module, config: PeftConfig, name: str) -> PeftModel:
    from peft import get_peft_model

    if getattr(config, "fan_in_fan_out", None) is False:
        config.fan_in_fan_out = _all_transposed(model, config)
    config.base_model_name_or_path = None
    try:
        wrapped = get_peft_model(model, config)
    except _PEFT_FAILURES as error:
        raise ArgumentError(
            f"PEFT cannot build {name!r} on {type(model).__name__}: {_one_line(error)} Load the "
            "model again before the next try."
        ) from error
    if not any(parameter.requires_grad for parameter in wrapped.parameters()):
        raise ArgumentError(
            f"Method {name!r} leaves nothing to train in {type(model).__name__}. Choose other "
            "target_modules, or a configuration with inference_mode=False."
        )
    return wrapped


def _all_transposed(model: nn.Module, config: PeftConfig) -> bool:
    """Whether every target keeps its weight as (in, out): GPT-2's Conv1D."""
    from peft.tuners.tuners_utils import check_target_module_exists
    from transformers.pytorch_utils import Conv1D

    wanted = config.target_modules
    everything = isinstance(wanted, str) and wanted.lower() == "all-linear"
    output = getattr(model, "get_output_embeddings", lambda: None)()
    hit = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear | Conv1D | nn.Embedding)
        and module is not output
        and (
            isinstance(module, nn.Linear | Conv1D)
            if everything
            else wanted is not None and check_target_module_exists(config, name)
        )
        and name not in (config.modules_to_save or [])
    ]
    return bool(hit) and all(isinstance(module, Conv1D) for module in hit)


def _all_trainable(model: nn.Module, modules_to_save: list[str] | None) -> nn.Module:
    if modules_to_save is not None:
        raise ArgumentTypeError(
            f"modules_to_save={modules_to_save!r}: method 'full' trains everything. Leave it out."
        )
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    _set_pad_token(model, kind_of(model))
    return model


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if text.endswith(".") else f"{text}."
