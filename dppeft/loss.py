"""One loss value per example, by the kind of the model.

A private step needs the loss of each example on its own: a mean over the batch would let one
example's length or number of targets scale the gradients of the others. So the model is called
without labels and its logits are reduced here, per example. For a single row without padding the
value is what ``model(**row).loss`` gives.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from dppeft import _validate
from dppeft._kind import ModelKind, kind_of, unwrap
from dppeft._types import Batch, PerExampleLoss
from dppeft.errors import ArgumentError, DataError, UnsupportedModelError

IGNORED = -100  # the label of a position without a target, as everywhere in transformers
_TARGETS = ("labels", "start_positions", "end_positions")
_TOKEN_KINDS = ("causal_lm", "seq2seq_lm", "masked_lm", "token_classification")
_PASS_LOSS = "Pass loss=, a function (model, batch) -> tensor of shape (B,)."


def default_loss(model: nn.Module, *, label_smoothing: float = 0.0) -> PerExampleLoss:
    """The loss of each example, chosen by what the model is for.

    Sequence, image and audio classification: cross-entropy; squared error when
    ``config.problem_type`` says regression or there is one label column; binary cross-entropy, mean
    over the labels, when it says multi-label or the labels are floats of shape (B, C). Causal,
    sequence-to-sequence and masked language models and token classification: the mean over the
    example's own target tokens (label not -100); an example without targets gives 0. Extractive
    question answering: the mean of the start's and the end's cross-entropy. Any other model:
    treated as a classifier that returns logits (B, C), or an object with ``.logits``.

    Args:
        model: bare or wrapped (PEFT, torch.compile).
        label_smoothing: weight in [0, 1) of the uniform distribution in every cross-entropy.

    Returns:
        ``loss(model, batch) -> (B,)``, float32, or float64 where the logits are float64. ``batch``
        must hold ``labels``; the other entries are passed to the model by name.

    Raises:
        ArgumentError: ``label_smoothing`` is out of range; when called, the labels and logits fit
            no loss above.
        UnsupportedModelError: a part of the tuner's own loss belongs to no example (AdaLoRA).
    """
    check_smoothing(label_smoothing)
    refuse_own_loss(model)
    base = unwrap(model)
    accepted = inspect.signature(base.forward).parameters
    # A cache of keys and values is memory that no training step reads.
    fixed = {"use_cache": False} if "use_cache" in accepted else {}
    return _DefaultLoss(kind=kind_of(base), label_smoothing=label_smoothing, fixed_inputs=fixed)


@dataclass(frozen=True, kw_only=True)
class _DefaultLoss:
    """A value, so that it can be sent to another process and compared."""

    kind: ModelKind
    label_smoothing: float
    fixed_inputs: dict[str, Any]

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        inputs = {name: value for name, value in batch.items() if name not in _TARGETS}
        if self.kind == "question_answering":
            return self._question_answering(model, inputs, batch)
        labels = _target(batch, "labels")
        if self.kind == "seq2seq_lm" and not inputs.keys() & _DECODER_INPUTS:
            inputs["decoder_input_ids"] = _decoder_inputs(unwrap(model), labels)
        logits = _logits(model(**inputs, **self.fixed_inputs))
        if self.kind in _TOKEN_KINDS:
            return self._token_means(logits, labels)
        return self._classification(unwrap(model), logits, labels)

    def _token_means(self, logits: Tensor, labels: Tensor) -> Tensor:
        """Mean over each row's targets. logits: (B, P + T, V) behind P prompts; labels: (B, T)."""
        if labels.dim() != 2 or logits.dim() != 3 or labels.shape[1] > logits.shape[1]:
            raise ArgumentError(
                f"Labels of shape {tuple(labels.shape)} do not fit logits of shape "
                f"{tuple(logits.shape)}: a {self.kind} model needs one label per token, "
                f"{IGNORED} where there is no target. {_PASS_LOSS}"
            )
        # The labels are moved, not the logits: slicing (B, T, V) would copy it.
        targets = F.pad(labels.long(), (logits.shape[1] - labels.shape[1], 0), value=IGNORED)
        if self.kind == "causal_lm":  # position t predicts token t + 1
            targets = F.pad(targets[:, 1:], (0, 1), value=IGNORED)
        tokens = self._entropy(logits.flatten(0, 1), targets.flatten()).view_as(targets)
        return tokens.sum(dim=1) / (targets != IGNORED).sum(dim=1).clamp_min(1)

    def _classification(self, base: nn.Module, logits: Tensor, labels: Tensor) -> Tensor:
        problem = getattr(getattr(base, "config", None), "problem_type", None)
        problem = problem or _problem_from_shapes(self.kind, logits, labels)
        if problem == "single_label_classification":
            if labels.is_floating_point() or labels.numel() != len(logits) or logits.dim() != 2:
                raise _misfit(logits, labels, "one whole-number class per row")
            return self._entropy(logits, labels.reshape(-1).long())
        if self.label_smoothing:
            raise ArgumentError(
                f"label_smoothing={self.label_smoothing} is for cross-entropy; these labels ask "
                f"for {problem}. Set label_smoothing=0."
            )
        logits = logits.reshape(len(logits), -1)
        if labels.numel() != logits.numel():
            raise _misfit(logits, labels, f"one number per row and column for {problem}")
        targets = labels.reshape(logits.shape).to(_wide(logits))
        if problem == "regression":
            return (logits.to(targets.dtype) - targets).square().mean(dim=1)
        if problem == "multi_label_classification":
            tokens = F.binary_cross_entropy_with_logits(
                logits.to(targets.dtype), targets, reduction="none"
            )
            return tokens.mean(dim=1)
        raise ArgumentError(f"Unknown config.problem_type={problem!r}. {_PASS_LOSS}")

    def _question_answering(
        self, model: nn.Module, inputs: dict[str, Tensor], batch: Batch
    ) -> Tensor:
        targets = [_target(batch, name) for name in ("start_positions", "end_positions")]
        output = model(**inputs, **self.fixed_inputs)
        length = output.start_logits.shape[1]
        start, end = (
            # A position outside the row's tokens is no target, as in transformers.
            self._entropy(
                logits, target.reshape(-1).long().masked_fill(target.reshape(-1) >= length, IGNORED)
            )
            for logits, target in zip(
                (output.start_logits, output.end_logits), targets, strict=True
            )
        )
        return (start + end) / 2

    def _entropy(self, logits: Tensor, targets: Tensor) -> Tensor:
        return cross_entropy(logits, targets, label_smoothing=self.label_smoothing)


def cross_entropy(logits: Tensor, targets: Tensor, *, label_smoothing: float = 0.0) -> Tensor:
    """-log p(target) per row, 0 where the target is -100. logits: (N, C); targets: (N,).

    Raises:
        DataError: a target outside the classes (looked at on the CPU only).
    """
    _refuse_other_classes(targets, logits.shape[-1])
    # Casting inside log_softmax keeps a half-precision (B, T, V) from being copied first.
    log_probs = F.log_softmax(logits, dim=-1, dtype=_wide(logits))
    losses = F.nll_loss(log_probs, targets, reduction="none", ignore_index=IGNORED)
    if not label_smoothing:
        return losses
    uniform = -log_probs.mean(dim=-1).masked_fill(targets == IGNORED, 0.0)
    return (1 - label_smoothing) * losses + label_smoothing * uniform


def check_smoothing(label_smoothing: float) -> None:
    """An error unless it lies in [0, 1)."""
    _validate.non_negative(label_smoothing=label_smoothing)
    if label_smoothing >= 1:
        raise ArgumentError(
            f"Expected label_smoothing < 1, got label_smoothing={label_smoothing}: no weight would "
            "be left for the labels. Usual values are 0 to 0.2."
        )


def _refuse_other_classes(targets: Tensor, classes: int) -> None:
    """Torch's own error shows the label. On a GPU a look would wait for the device in each step."""
    if targets.device.type != "cpu" or not targets.numel():
        return
    lowest, highest = torch.aminmax(targets.masked_fill(targets == IGNORED, 0))
    if int(lowest) < 0 or int(highest) >= classes:
        raise DataError(
            f"A label lies outside 0 to {classes - 1}, all that the model has (num_labels, or the "
            f"vocabulary); {IGNORED} marks what is no target. Load the model with as many labels "
            "as there are, and number the classes from 0."
        )


_DECODER_INPUTS = {"decoder_input_ids", "decoder_inputs_embeds"}


# PEFT type -> the option that weighs what it adds to the model's loss (None: a loss of its own).
_OWN_LOSS = {"ADALORA": "orth_reg_weight", "SHADOW": "auxiliary_loss_weight", "CPT": None}


def refuse_own_loss(model: nn.Module) -> None:
    """A tuner whose loss has a part that the logits do not show, and that would be dropped."""
    for config in (getattr(model, "peft_config", None) or {}).values():
        kind = str(getattr(config.peft_type, "value", config.peft_type))
        option = _OWN_LOSS.get(kind)
        if kind in _OWN_LOSS and (option is None or getattr(config, option, 0)):
            weight = f" ({option}={getattr(config, option)})" if option else ""
            raise UnsupportedModelError(
                f"PEFT's {type(config).__name__} trains with a loss term of its own{weight}, which "
                "the losses of single examples do not have. Use 'lora', or pass loss=, a function "
                "(model, batch) -> tensor of shape (B,), to train with that loss alone."
            )


def _wide(logits: Tensor) -> torch.dtype:
    """float32 at least."""
    return torch.promote_types(logits.dtype, torch.float32)


def _target(batch: Batch, name: str) -> Tensor:
    if batch.get(name) is None:
        raise ArgumentError(
            f"The batch has no {name!r}; it holds {', '.join(sorted(batch))}. Name the target "
            f"column {name!r}, or pass loss=, a function (model, batch) -> tensor of shape (B,)."
        )
    return batch[name]


def _logits(output: object) -> Tensor:
    """The logits of a model output, of a tuple that starts with them, or the tensor itself."""
    if isinstance(output, Mapping):
        output = output.get("logits")
    elif not isinstance(output, Tensor):
        first = output[0] if isinstance(output, tuple | list) and output else None
        output = getattr(output, "logits", first)
    if not isinstance(output, Tensor):
        raise ArgumentError(f"The model returns no logits. {_PASS_LOSS}")
    return output


def _decoder_inputs(base: nn.Module, labels: Tensor) -> Tensor:
    """The labels shifted right behind the start token, as the model itself does. labels: (B, T)."""
    prepare = getattr(base, "prepare_decoder_input_ids_from_labels", None)
    if prepare is not None:
        return prepare(labels=labels.long())
    pad, start = base.config.pad_token_id, base.config.decoder_start_token_id
    if pad is None or start is None:
        raise ArgumentError(
            f"config.pad_token_id={pad} and config.decoder_start_token_id={start}: both must be "
            "set to make decoder inputs from labels. Set them, or put decoder_input_ids in the "
            "batch."
        )
    shifted = F.pad(labels.long()[:, :-1], (1, 0), value=start)
    return shifted.masked_fill(shifted == IGNORED, pad)


def _problem_from_shapes(kind: ModelKind, logits: Tensor, labels: Tensor) -> str:
    """The problem type that transformers would choose, from the number of columns and the dtype."""
    columns = logits.shape[1] if logits.dim() == 2 else 1
    per_column = labels.dim() == 2 and labels.shape[1] == columns > 1
    if logits.dim() > 2 or (logits.dim() == 2 and len(labels) != len(logits)):
        raise _misfit(logits, labels, "logits (B, C) and labels (B,) or (B, C)")
    if columns == 1:
        if kind == "other" and not labels.is_floating_point():
            raise _misfit(logits, labels, "float labels for one column (squared error)")
        return "regression"
    return "multi_label_classification" if per_column else "single_label_classification"


def _misfit(logits: Tensor, labels: Tensor, expected: str) -> ArgumentError:
    return ArgumentError(
        f"Labels of dtype {str(labels.dtype).removeprefix('torch.')} and shape "
        f"{tuple(labels.shape)} with logits of shape {tuple(logits.shape)}: expected {expected}. "
        f"Convert the labels, set config.problem_type and num_labels, or pass loss=, a function "
        "(model, batch) -> tensor of shape (B,)."
    )
