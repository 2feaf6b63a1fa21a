"""Rows of token ids -> one padded batch."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from dppeft.errors import DataError

IGNORED = -100  # the label of a position without a target, as everywhere in transformers
_LABEL_NAMES = ("label", "labels", "label_ids")
# Value on the padding of each field that may be ragged; input_ids take the padding token.
_FILL = {
    "attention_mask": 0,
    "token_type_ids": 0,
    "special_tokens_mask": 1,
    "position_ids": 0,
    "decoder_attention_mask": 0,
    "labels": IGNORED,
}
_TOKEN_FIELDS = {"input_ids", "decoder_input_ids", *_FILL}


def collator_for(tokenizer: Any) -> Collator:
    """A collator that pads with the tokenizer's padding token.

    A tokenizer without one (GPT-2, Llama) gets its end token for it, with a warning; the attention
    mask hides the padding. A classifier needs the same id in ``config.pad_token_id`` (``wrap`` sets
    it so).
    """
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token is None:
            raise DataError(
                f"The tokenizer {type(tokenizer).__name__} has neither a padding nor an end token. "
                "Set tokenizer.pad_token to one of its tokens."
            )
        tokenizer.pad_token = tokenizer.eos_token
        warnings.warn(
            f"The tokenizer has no padding token; it now pads with its end token "
            f"{tokenizer.eos_token!r}.",
            stacklevel=2,
        )
    return Collator(
        pad_token_id=tokenizer.pad_token_id, pad_token_type_id=tokenizer.pad_token_type_id
    )


@dataclass(frozen=True, kw_only=True)
class Collator:
    """Rows -> one batch, padded on the right to the longest row of the batch.

    On the right for every model: the positions of a row's tokens are then those of the row alone,
    so that padding cannot change its result. ``label`` and ``label_ids`` become ``labels``: whole
    numbers and bools int64, floats float32, vectors of token labels padded with -100. An
    ``attention_mask`` is made where the rows have none.

    Attributes:
        pad_token_id: what ``input_ids`` are padded with.
        pad_token_type_id: what ``token_type_ids`` are padded with.
    """

    pad_token_id: int
    pad_token_type_id: int = 0

    def __call__(self, rows: Sequence[Mapping[str, Any]]) -> dict[str, Tensor]:
        """The batch of one or more rows. Raises DataError, naming the field that does not fit."""
        columns = _columns(rows)
        batch = {name: self._column(name, column) for name, column in columns.items()}
        if "input_ids" in columns and "attention_mask" not in batch:
            lengths = torch.tensor([len(ids) for ids in columns["input_ids"]])
            batch["attention_mask"] = (
                torch.arange(batch["input_ids"].shape[1]) < lengths[:, None]
            ).long()
        return batch

    def _column(self, name: str, column: list[Any]) -> Tensor:
        arrays = [_array(name, value) for value in column]
        shapes = {array.shape for array in arrays}
        whole = all(array.dtype == np.int64 for array in arrays)
        if name in ("input_ids", "decoder_input_ids"):
            if not whole or any(array.ndim != 1 for array in arrays):
                raise DataError(f"Field {name!r} must hold a list of whole numbers in each row.")
            if () in shapes or (0,) in shapes:
                raise DataError(f"Field {name!r} is empty in a row of the batch. Drop such rows.")
        if len(shapes) == 1:
            stacked = np.stack(arrays)  # whole numbers among fractions make it float64
            return torch.from_numpy(stacked if whole else stacked.astype(np.float32))
        if name not in _TOKEN_FIELDS or not whole or any(len(shape) != 1 for shape in shapes):
            kind = "lengths" if all(len(shape) == 1 for shape in shapes) else "shapes"
            raise DataError(
                f"Field {name!r} has different {kind} in the rows of a batch and no rule to pad "
                "it. Drop the field, make it equally long, or pass a collator of your own."
            )
        return self._padded(name, arrays)

    def _padded(self, name: str, arrays: list[np.ndarray]) -> Tensor:
        fill = _FILL | {
            "input_ids": self.pad_token_id,
            "decoder_input_ids": self.pad_token_id,
            "token_type_ids": self.pad_token_type_id,
        }
        lengths = np.fromiter(map(len, arrays), np.int64, len(arrays))
        padded = np.full((len(arrays), lengths.max()), fill[name], dtype=np.int64)
        padded[np.arange(padded.shape[1]) < lengths[:, None]] = np.concatenate(arrays)
        return torch.from_numpy(padded)


def _columns(rows: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Field -> its value in each row; the label under the name the models know."""
    if len(rows) == 0:
        raise DataError("A batch needs at least one row.")
    rows = [row._asdict() if hasattr(row, "_asdict") else row for row in rows]  # named tuples
    if not all(isinstance(row, Mapping) for row in rows):
        raise DataError(
            f"A row is a {type(rows[0]).__name__}: expected a dict with input_ids and labels. "
            "Return dicts from the data set, or pass a collator of your own."
        )
    names = list(rows[0])
    for row in rows:
        if row.keys() != rows[0].keys():
            odd = sorted(row.keys() ^ rows[0].keys())
            raise DataError(f"Field {odd[0]!r} is in some rows of the batch only. Give all of it.")
    labels = [name for name in _LABEL_NAMES if name in names]
    if len(labels) > 1:
        raise DataError(f"Rows have the fields {' and '.join(labels)}. Keep one of them.")
    renamed = dict.fromkeys(labels, "labels")
    return {renamed.get(name, name): [row[name] for row in rows] for name in names}


def _array(name: str, value: Any) -> np.ndarray:
    """A row's value of one field as an int64 or float32 array; an error that names the field."""
    if type(value) is list and value and type(value[0]) is int:  # the common case, made fast
        try:
            return np.fromiter(value, np.int64, len(value))
        except (TypeError, ValueError, OverflowError):
            pass
    try:
        array = np.asarray(value.detach().cpu() if isinstance(value, Tensor) else value)
    except ValueError:
        array = np.empty(0, dtype=object)  # nested lists of different lengths
    if array.dtype.kind in "biu":
        return array.astype(np.int64)
    if array.dtype.kind == "f":
        # An empty list has no numbers to tell its type by; no float would change its meaning.
        return array.astype(np.float32 if array.size else np.int64)
    if name == "labels" and array.dtype.kind in "US":
        raise DataError(
            "Field 'labels' holds strings. Turn them into class numbers first: "
            "numbers, names = dppeft.text.encode_labels(labels)."
        )
    raise DataError(
        f"Field {name!r} holds values that are no numbers ({type(value).__name__}). Drop it from "
        "the rows, or pass a collator of your own."
    )
