"""``wrap``: a method's name -> a PEFT configuration that fits the model -> what trains."""

from __future__ import annotations

import copy
import difflib
import warnings
from typing import TYPE_CHECKING, Any

from torch import nn

from dppeft._kind import kind_of
from dppeft.errors import ArgumentError, ArgumentTypeError
from dppeft.tuners import fitting, registry, targets
from dppeft.tuners.registry import MethodInfo

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel


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

    fitting.refuse_unfit(model)
    kind = kind_of(model)
    head = targets.find_head(model, kind)
    if isinstance(method, PeftConfig):
        given = dict(options, target_modules=target_modules, modules_to_save=modules_to_save)
        if extra := sorted(key for key, value in given.items() if value is not None):
            raise ArgumentTypeError(
                f"method is a ready {type(method).__name__}: set {', '.join(extra)} in it instead "
                "of passing it to wrap()."
            )
        config, name = copy.deepcopy(method), str(method.peft_type.value).lower()
    else:
        chosen = registry.info(method)
        if chosen.name == "bitfit" and not _has_biases(model, head):
            chosen = _norms_instead(model)
        name = chosen.name
        _check_options(chosen, target_modules, options)
        if chosen.peft_type is None:
            return _all_trainable(model, modules_to_save)
        fields = dict(options)
        if target_modules is not None:
            fields["target_modules"] = target_modules
        if modules_to_save is not None:
            fields["modules_to_save"] = list(modules_to_save)
        config = _build_config(chosen, fields, fitting.task_type(model, kind))
    if name == "head" and not (head or modules_to_save):
        raise ArgumentError(
            f"method='head' trains a classification head and {type(model).__name__} has none. Load "
            "the model for classification (AutoModelForSequenceClassification), or use 'lora'."
        )
    fitting.complete(config, model, kind, head, ready=isinstance(method, PeftConfig))
    fitting.check_targets(config, model, target_modules)
    fitting.set_pad_token(model, kind)
    wrapped = _inject(model, config, name)
    if name == "ffa_lora":
        registry.freeze_a(wrapped)
    wrapped.train(model.training)  # the new layers are born in training mode
    return wrapped


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


def _build_config(method: MethodInfo, fields: dict[str, Any], task: str | None) -> PeftConfig:
    defaults = registry.METHODS[method.name].options if method.name in registry.METHODS else {}
    try:
        return registry.config_class(method)(**{
            "task_type": task,
            **defaults,
            **method.fixed,
            **fields,
        })
    except fitting.PEFT_FAILURES as error:
        raise ArgumentError(
            f"PEFT refuses these options for method {method.name!r}: {_one_line(error)}"
        ) from error


def _has_biases(model: nn.Module, head: list[str]) -> bool:
    inside = tuple(f"{name}." for name in head)
    # ".bias", not "bias": T5's relative_attention_bias.weight is an embedding.
    return any(
        (name == "bias" or name.endswith(".bias")) and not name.startswith(inside)
        for name, _ in model.named_parameters()
    )


def _norms_instead(model: nn.Module) -> MethodInfo:
    warnings.warn(
        f"method='bitfit' trains biases and {type(model).__name__} has none outside its head: the "
        "scales of its norms, its only other vectors, train in their place ('ln_tuning').",
        stacklevel=3,
    )
    return registry.info("ln_tuning")


def _inject(model: nn.Module, config: PeftConfig, name: str) -> PeftModel:
    from peft import get_peft_model

    from dppeft.tuners.repairs import repair

    if getattr(config, "fan_in_fan_out", None) is False:
        config.fan_in_fan_out = fitting.all_transposed(model, config)
    config.base_model_name_or_path = None
    try:
        wrapped = get_peft_model(model, config)
    except fitting.PEFT_FAILURES as error:
        unset = [field for field, value in vars(config).items() if value is None]
        hint = f" Options left unset: {', '.join(unset)}." if isinstance(error, TypeError) else ""
        raise ArgumentError(
            f"PEFT cannot build {name!r} on {type(model).__name__}: {_one_line(error)}{hint} Load "
            "the model again before the next try."
        ) from error
    if not any(parameter.requires_grad for parameter in wrapped.parameters()):
        raise ArgumentError(
            f"Method {name!r} leaves nothing to train in {type(model).__name__}. Choose other "
            "target_modules, or a configuration with inference_mode=False."
        )
    repair(wrapped)
    return wrapped


def _all_trainable(model: nn.Module, modules_to_save: list[str] | None) -> nn.Module:
    if modules_to_save is not None:
        raise ArgumentTypeError(
            f"modules_to_save={modules_to_save!r}: method 'full' trains everything. Leave it out."
        )
    for parameter in model.parameters():
        parameter.requires_grad_(parameter.is_floating_point())
    fitting.set_pad_token(model, kind_of(model))
    return model


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()) or type(error).__name__
    return text if text.endswith(".") else f"{text}."
