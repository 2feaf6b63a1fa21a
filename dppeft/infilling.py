"""Classification as a missing word: texts in a template, one label word per class.

Li et al. (2022, arXiv 2110.05679, Sec. 3 and App.): a masked language model predicts a word at the
mask; the loss is the cross-entropy over the logits of the label words alone. No new layer is made,
so nothing starts from a random value, which private training would have to undo.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from dppeft import _validate
from dppeft._kind import unwrap
from dppeft._types import Batch
from dppeft.errors import ArgumentError, DataError
from dppeft.loss import check_smoothing, cross_entropy
from dppeft.masked_tokens import head_features, refuse_other_logits, refuse_unless_masked
from dppeft.text._refusal import refuse_rows
from dppeft.text.rows import TokenizedRows
from dppeft.text.synthetic import synthetic_rows
from dppeft.text.templates import Piece, Template

POSITION = "mask_position"  # the field of a row that says where its mask stands


class Infilling:
    """A template and its label words, for one tokenizer.

    ``encode`` makes rows, ``loss()`` trains on them, ``logits`` predicts; ``model`` is any masked
    language model, bare or wrapped, and stays one: what is shared loads into the plain model.

    Args:
        tokenizer: of ``transformers``, with a mask token.
        template: such as ``"{text} It was {mask}."``; see ``Template``.
        label_words: the word of each class, in the order of the class numbers.

    Raises:
        ArgumentError: no mask token, a label word that is not one token of the vocabulary, two
            classes with one word, a template without its places.
    """

    def __init__(self, tokenizer: Any, template: str, label_words: Sequence[str]) -> None:
        self.template = Template(template)
        self.label_words = tuple(label_words)
        self._tokenizer = tokenizer
        name = type(tokenizer).__name__
        if tokenizer.mask_token_id is None:
            raise ArgumentError(
                f"The tokenizer {name} has no mask token: infilling needs a masked language model "
                "(BERT, RoBERTa, DistilBERT). Train a classification head on other models."
            )
        if len(self.label_words) < 2:
            raise ArgumentError(f"Expected a label word for each class, got {self.label_words}.")
        self.word_ids = [self._word_id(word) for word in self.label_words]
        for word, number in zip(self.label_words, self.word_ids, strict=True):
            if self.word_ids.count(number) > 1:
                raise ArgumentError(
                    f"Label word {word!r} is the same token as another one of {self.label_words}: "
                    "two classes could not be told apart. Choose other words."
                )
        self._fixed = [[] if p.field else self._ids(p.words) for p in self.template.pieces]
        self._start, self._end = self._ends()

    def _word_id(self, word: str) -> int:
        # With a space before it: byte-pair vocabularies know another token for a word's start.
        ids = self._ids(f" {word.strip()}")
        if len(ids) != 1 or ids[0] == self._tokenizer.unk_token_id:
            pieces = self._tokenizer.convert_ids_to_tokens(ids)
            raise ArgumentError(
                f"Label word {word!r} is {len(ids)} tokens of this vocabulary ({pieces}); expected "
                "one that is known. Choose a commoner word."
            )
        return ids[0]

    def _ids(self, text: str) -> list[int]:
        # What looks like a special token in a row's text is text.
        return self._tokenizer(
            text, add_special_tokens=False, split_special_tokens=True, verbose=False
        )["input_ids"]

    def encode(
        self, texts: Sequence[str], pairs: Sequence[str] | None = None, *, max_length: int
    ) -> TokenizedRows:
        """Rows of ``input_ids``, ``attention_mask`` and ``mask_position``, without padding.

        The template is never cut: what is too long loses the end of its texts, the longer first.

        Raises:
            DataError: no rows, no text in a row, a value that is no string.
            ArgumentError: pairs given or missing against the template, or ``max_length`` too small.
        """
        if self.template.takes_pairs != (pairs is not None):
            raise ArgumentError(
                f"The template {self.template.template!r} "
                f"{'has a' if self.template.takes_pairs else 'has no'} place {{pair}}, and the "
                f"rows have {'one text' if pairs is None else 'two texts'}."
            )
        if len(texts) == 0:
            raise DataError("The data set has no rows. Check the file and the filters applied.")
        if pairs is not None and len(pairs) != len(texts):
            raise DataError(f"{len(texts)} texts and {len(pairs)} second texts: one of each a row.")
        columns = {"text": texts} if pairs is None else {"text": texts, "pair": pairs}
        for column in columns.values():
            refuse_rows(
                [not isinstance(text, str) or not text.strip() for text in column],
                "have no text",
                "Fill it in, or drop those rows",
            )
        filled = {
            piece.field: self._filled(piece, columns[piece.field])
            for piece in self.template.pieces
            if piece.field in columns
        }
        limit = _validate.positive_integer(max_length=max_length)
        made = [
            self._row({field: ids[row] for field, ids in filled.items()}, limit)
            for row in range(len(texts))
        ]
        return TokenizedRows([row for row, _ in made], sum(cut for _, cut in made))

    def _filled(self, piece: Piece, column: Sequence[str]) -> list[list[int]]:
        """The token ids of a place, for all rows at once."""
        texts = [piece.fill(text) for text in column]
        return self._tokenizer(
            texts, add_special_tokens=False, split_special_tokens=True, verbose=False
        )["input_ids"]

    def _row(self, texts: dict[str, list[int]], limit: int) -> tuple[dict[str, Any], bool]:
        """One row and whether it was cut."""
        around = len(self._start) + sum(map(len, self._fixed)) + 1 + len(self._end)  # 1: the mask
        room = limit - around
        if room < len(texts):
            raise ArgumentError(
                f"max_length={limit} leaves no room for a text in the template "
                f"{self.template.template!r}. Expected at least {around + len(texts)}."
            )
        kept = _cut_longer(texts, room)
        ids, position = list(self._start), 0
        for piece, words in zip(self.template.pieces, self._fixed, strict=True):
            if piece.field == "mask":
                position = len(ids)
                ids.append(self._tokenizer.mask_token_id)
            else:
                ids += kept.get(piece.field, words)
        ids += self._end
        row = {"input_ids": ids, "attention_mask": [1] * len(ids), POSITION: position}
        return row, kept != texts

    def _ends(self) -> tuple[list[int], list[int]]:
        """The special tokens around one text, as the tokenizer itself puts them."""
        bare, whole = self._ids("a"), self._tokenizer("a", verbose=False)["input_ids"]
        start = next(i for i in range(len(whole)) if whole[i : i + len(bare)] == bare)
        return whole[:start], whole[start + len(bare) :]

    def loss(self, *, label_smoothing: float = 0.0) -> InfillingLoss:
        """The loss of each row: cross-entropy over the label words, ``(model, batch) -> (B,)``."""
        check_smoothing(label_smoothing)
        return InfillingLoss(infilling=self, label_smoothing=label_smoothing)

    def logits(self, model: nn.Module, batch: Batch) -> Tensor:
        """Logits of the label words at each row's mask, (B, classes).

        Args:
            model: a masked language model, bare or wrapped.
            batch: ``input_ids`` and ``attention_mask`` (B, T), ``mask_position`` (B,).
        """
        if POSITION not in batch:
            raise ArgumentError(
                f"The batch has no {POSITION!r}; it holds {', '.join(sorted(batch))}. Make the "
                "rows with Infilling.encode; a Trainer needs remove_unused_columns=False."
            )
        self._check_positions(batch)
        base = unwrap(model)
        body = getattr(base, base.base_model_prefix)
        inputs = {name: value for name, value in batch.items() if name not in (POSITION, "labels")}
        hidden = body(**inputs)[0]  # (B, T, d)
        rows = torch.arange(len(hidden), device=hidden.device)
        # Only the mask goes on: the rest of the vocabulary's projection would be thrown away.
        at_mask = head_features(base, hidden[rows, batch[POSITION]].unsqueeze(1))
        return self._word_logits(base, at_mask)

    def _check_positions(self, batch: Batch) -> None:
        """A collator that pads on the left would move the mask. On a GPU a look would wait."""
        ids, positions = batch["input_ids"], batch[POSITION]
        if ids.device.type != "cpu":
            return
        if not bool((ids.gather(1, positions[:, None]) == self._tokenizer.mask_token_id).all()):
            raise ArgumentError(
                "A row's mask is not at its mask_position: the collator pads on the left, or cuts. "
                "Use dppeft.text.collator_for(tokenizer), which pads on the right."
            )

    def _word_logits(self, base: nn.Module, at_mask: Tensor) -> Tensor:
        """(B, 1, d) -> (B, classes)."""
        decoder, embedding = base.get_output_embeddings(), base.get_input_embeddings()
        ids = torch.tensor(self.word_ids, device=at_mask.device)
        tied = type(embedding) is nn.Embedding and type(decoder) is nn.Linear
        tied = tied and decoder.weight is embedding.weight
        if not tied or (decoder.bias is not None and decoder.bias.requires_grad):
            return decoder(at_mask).squeeze(1)[:, ids]
        # Tied: the rows of the table that are the label words, read as any other words are.
        words = embedding(ids.expand(len(at_mask), -1))  # (B, classes, d)
        logits = (words @ at_mask.transpose(1, 2)).squeeze(2)
        return logits if decoder.bias is None else logits + decoder.bias[ids]

    def check(self, model: nn.Module) -> None:
        """Refuses a model whose word at the mask is not computed as here.

        Raises:
            UnsupportedModelError: no masked-language-modelling head, one that is not known, or a
                method that adds tokens to the input or a term to the loss.
        """
        refuse_unless_masked(model)
        batch = self.made_up_rows(model)
        inputs = {name: v for name, v in batch.items() if name not in (POSITION, "labels")}
        rows, at = torch.arange(len(batch[POSITION])), batch[POSITION]
        refuse_other_logits(
            model,
            inputs,
            lambda: self.logits(model, batch),
            lambda whole: whole[rows.to(whole.device), at][:, self.word_ids],
        )

    def freeze_bias(self, model: nn.Module) -> None:
        """Full fine-tuning without the vocabulary's biases, of which infilling reads one per class.

        It is quicker: only the rows of the tied table that are label words are read then, not the
        whole projection.
        """
        bias = getattr(unwrap(model).get_output_embeddings(), "bias", None)
        if bias is not None:
            bias.requires_grad_(False)

    def made_up_rows(self, model: nn.Module) -> dict[str, Tensor]:
        """Ragged rows from the vocabulary, with a mask and a class each; on the model's device."""
        made = dict(synthetic_rows(unwrap(model)))
        size = len(made["input_ids"])
        positions = made["attention_mask"].sum(dim=1) - 1
        made["input_ids"][torch.arange(size), positions] = self._tokenizer.mask_token_id
        made[POSITION] = positions
        made["labels"] = torch.arange(size) % len(self.word_ids)
        device = next(model.parameters()).device
        return {name: value.to(device) for name, value in made.items()}


@dataclass(frozen=True, kw_only=True)
class InfillingLoss:
    """``(model, batch) -> (B,)``, float32 or wider. Made by ``Infilling.loss``."""

    infilling: Infilling
    label_smoothing: float = 0.0

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """The loss of each row; ``batch["labels"]`` are class numbers (B,), -100 for none."""
        logits = self.infilling.logits(model, batch)
        labels = batch["labels"].long()
        return cross_entropy(logits, labels, label_smoothing=self.label_smoothing)

    def made_up_rows(self, model: nn.Module) -> dict[str, Tensor]:
        """Rows to prove the model on before any private row is used, once it is known to fit."""
        self.infilling.check(model)
        return self.infilling.made_up_rows(model)


def _cut_longer(texts: dict[str, list[int]], room: int) -> dict[str, list[int]]:
    """The texts in so many tokens together: the longer ones lose the most."""
    limit, left = room, dict(texts)
    while left and (limit := room // len(left)) >= min(map(len, left.values())):
        field = min(left, key=lambda name: len(left[name]))
        room -= len(left.pop(field))  # fits whole; the others share what it leaves
    return {field: ids[:limit] if field in left else ids for field, ids in texts.items()}
