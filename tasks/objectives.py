"""What a classifier is trained for: a head on the encoder, or the word at a mask."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from torch import Tensor, nn

from dppeft.errors import ArgumentError
from dppeft.infilling import Infilling
from dppeft.loss import default_loss
from dppeft.text import TokenizedRows
from tasks.classifier import build_classifier, stated_pooling
from tasks.common import Recipe, Rows
from tasks.training import encode

Batch = Mapping[str, Tensor]
PerExampleLoss = Callable[[nn.Module, Batch], Tensor]
OBJECTIVES = ("head", "infilling")


class Objective(Protocol):
    """How rows become tokens, tokens become logits, and logits a loss."""

    tokenizer: Any

    @property
    def warms_up(self) -> bool:
        """Whether the head can be trained first, on features of the frozen encoder."""

    def encode(self, rows: Rows, recipe: Recipe) -> TokenizedRows:
        """Token ids, and how many rows were cut."""

    def build(self) -> nn.Module:
        """The base model, as published."""

    def prepare(self, model: nn.Module) -> None:
        """What is to be set after ``dppeft.wrap``."""

    def loss(self, model: nn.Module, recipe: Recipe) -> PerExampleLoss:
        """``(model, batch) -> (B,)``."""

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """(B, classes)."""


@dataclass(frozen=True, kw_only=True)
class Head:
    """A new linear layer on the encoder."""

    folder: str
    tokenizer: Any
    num_labels: int

    @property
    def warms_up(self) -> bool:
        """Where the head reads nothing but the encoder's features."""
        return stated_pooling(Path(self.folder)) is not None

    def encode(self, rows: Rows, recipe: Recipe) -> TokenizedRows:
        return encode(rows, self.tokenizer, recipe)

    def build(self) -> nn.Module:
        return build_classifier(self.folder, num_labels=self.num_labels)

    def prepare(self, model: nn.Module) -> None:
        pass

    def loss(self, model: nn.Module, recipe: Recipe) -> PerExampleLoss:
        return default_loss(model, label_smoothing=recipe.label_smoothing)

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        return model(**batch).logits


@dataclass(frozen=True, kw_only=True)
class MaskedWord:
    """One of the label words, at the mask of a template; no new layer."""

    folder: str
    tokenizer: Any
    infilling: Infilling
    warms_up: bool = False

    def encode(self, rows: Rows, recipe: Recipe) -> TokenizedRows:
        return self.infilling.encode(rows.texts, rows.pairs, max_length=recipe.max_length)

    def build(self) -> nn.Module:
        from transformers import AutoModelForMaskedLM

        off = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        load = functools.partial(
            AutoModelForMaskedLM.from_pretrained, self.folder, output_loading_info=True
        )
        try:
            model, found = load(**off)
        except TypeError:  # DistilBERT has other names
            model, found = load(dropout=0.0, attention_dropout=0.0)
        except ValueError as error:
            raise ArgumentError(
                f"{self.folder} is no masked language model: {error}. Pass --model with one, or "
                "--objective head."
            ) from error
        # A bias may be stored once for two names; a matrix that is missing starts at random.
        matrices = {name for name, p in model.named_parameters() if p.dim() > 1}
        new = matrices.intersection(found["missing_keys"])
        if new:
            raise ArgumentError(
                f"{Path(self.folder).name} has no head for masked words ({min(new)} is missing): "
                "it would start at random and know no label word. Pass --model with a masked "
                "language model, or --objective head."
            )
        self.infilling.check(model)
        return model

    def prepare(self, model: nn.Module) -> None:
        self.infilling.freeze_bias(model)

    def loss(self, model: nn.Module, recipe: Recipe) -> PerExampleLoss:
        return self.infilling.loss(label_smoothing=recipe.label_smoothing)

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        return self.infilling.logits(model, batch)


def make_objective(
    name: str,
    folder: str,
    tokenizer: Any,
    *,
    classes: Sequence[str],
    template: str,
    label_words: Sequence[str],
) -> Objective:
    """The objective of that name; a head looks at neither template nor words.

    Raises:
        ArgumentError: unknown name, or words that do not fit.
    """
    if name not in OBJECTIVES:
        raise ArgumentError(f"Unknown objective {name!r}. Expected one of {', '.join(OBJECTIVES)}.")
    if name == "head":
        return Head(folder=folder, tokenizer=tokenizer, num_labels=len(classes))
    if len(label_words) != len(classes):
        raise ArgumentError(
            f"{len(label_words)} label words for {len(classes)} classes ({', '.join(classes)}): "
            "give one --label-word for each, in that order."
        )
    infilling = Infilling(tokenizer, template, label_words)
    return MaskedWord(folder=folder, tokenizer=tokenizer, infilling=infilling)
