"""What a model is for, read from its class: decides the loss, the head and the probe rows.

With what everybody needs who calls one: the bare model, and its modes put back afterwards.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

from torch import nn

ModelKind = Literal[
    "classification",
    "token_classification",
    "question_answering",
    "causal_lm",
    "seq2seq_lm",
    "masked_lm",
    "other",
]

# Order matters: BART and T5 stand in transformers' masked and causal tables too.
_TABLES: dict[ModelKind, tuple[str, ...]] = {
    "seq2seq_lm": ("SEQ_TO_SEQ_CAUSAL_LM", "SPEECH_SEQ_2_SEQ"),
    "classification": (
        "SEQUENCE_CLASSIFICATION",
        "IMAGE_CLASSIFICATION",
        "VIDEO_CLASSIFICATION",
        "AUDIO_CLASSIFICATION",
    ),
    "token_classification": ("TOKEN_CLASSIFICATION",),
    "question_answering": ("QUESTION_ANSWERING",),
    "causal_lm": ("CAUSAL_LM",),
    "masked_lm": ("MASKED_LM",),
}


def unwrap(model: nn.Module) -> nn.Module:
    """The model that a PEFT, compiled or data-parallel wrapper holds; a bare model unchanged."""
    while True:
        if isinstance(getattr(model, "_orig_mod", None), nn.Module):  # torch.compile
            model = model._orig_mod
        elif isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        elif callable(getattr(model, "get_base_model", None)):  # PeftModel
            model = model.get_base_model()
        else:
            return model


def kind_of(model: nn.Module) -> ModelKind:
    """The kind of a ``transformers`` model or of a subclass of one; ``"other"`` when unknown."""
    kinds = _kinds_by_class_name()
    for base in type(unwrap(model)).__mro__:
        if base.__module__.startswith("transformers.") and base.__name__ in kinds:
            return kinds[base.__name__]
    return "other"


@functools.cache
def _kinds_by_class_name() -> dict[str, ModelKind]:
    from transformers.models.auto import modeling_auto

    kinds: dict[str, ModelKind] = {}
    for kind, tables in _TABLES.items():
        for table in tables:
            for names in getattr(modeling_auto, f"MODEL_FOR_{table}_MAPPING_NAMES").values():
                for name in (names,) if isinstance(names, str) else names:
                    kinds.setdefault(name, kind)
    return kinds


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Whatever mode the model is put in, each module's own is put back on exit."""
    modes = {module: module.training for module in model.modules()}
    try:
        yield
    finally:
        for module, mode in modes.items():
            module.training = mode
