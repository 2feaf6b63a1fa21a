"""Rows -> one batch: the user's collator, or a padding one that costs little.

Padding through a tokenizer turns each value into Python objects several times. Where the collator
is transformers' own ``DataCollatorWithPadding`` on ordinary rows, the same batch is made here with
one array per column.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import default_collate

from dppeft._kind import unwrap

_LABELS = ("label", "labels", "label_ids")


def choose_collate(
    collate_fn: Callable[[list[Any]], Any] | None, model: nn.Module, first_row: Any
) -> Callable[[list[Any]], Any]:
    """The collator asked for, in a faster equal form if there is one; else a default.

    Default: rows with ``input_ids`` are padded on the right with the model's padding token, their
    labels with -100; other rows are stacked by torch's ``default_collate``.
    """
    if collate_fn is not None:
        return _faster(collate_fn)
    if isinstance(first_row, Mapping) and "input_ids" in first_row:
        from dppeft.text import Collator

        config = getattr(unwrap(model), "config", None)
        return Collator(pad_token_id=getattr(config, "pad_token_id", None) or 0)
    return default_collate


@dataclass(frozen=True)
class TokenPadding:
    """What ``DataCollatorWithPadding`` makes, for rows of token lists and whole-number labels.

    Attributes:
        original: the collator that is matched; it gets every list of rows of another form.
        fill: column -> value on the padding.
        left: padding stands before the tokens.
        multiple: widths are rounded up to a multiple of this.
    """

    original: Callable[[list[Any]], Any]
    fill: dict[str, int]
    left: bool
    multiple: int

    def __call__(self, rows: list[Any]) -> Any:
        columns = set(rows[0])
        labels = [name for name in _LABELS if name in columns]
        known = {"input_ids", "attention_mask"} <= columns <= self.fill.keys() | set(labels)
        if not known or len(labels) > 1 or any(set(row) != columns for row in rows):
            return self.original(rows)
        lengths = np.fromiter((len(row["input_ids"]) for row in rows), np.int64, len(rows))
        width = -(-int(lengths.max()) // self.multiple) * self.multiple
        used = np.arange(width) < lengths[:, None]  # (B, T)
        if self.left:
            used = used[:, ::-1]
        batch: dict[str, Tensor] = {}
        for name in columns & self.fill.keys():
            column = [row[name] for row in rows]
            same_lengths = all(map(int.__eq__, map(len, column), lengths.tolist()))
            if not same_lengths or not all(type(tokens) is list for tokens in column):
                return self.original(rows)
            try:
                values = np.fromiter(itertools.chain.from_iterable(column), np.int64)
            except (TypeError, ValueError):
                return self.original(rows)
            padded = np.full(used.shape, self.fill[name], dtype=np.int64)
            padded[used] = values
            batch[name] = torch.from_numpy(padded)
        for name in labels:
            column = [row[name] for row in rows]
            if not all(type(label) in (int, bool) for label in column):
                return self.original(rows)
            batch["labels"] = torch.tensor(column)
        return batch


def _faster(collate_fn: Callable[[list[Any]], Any]) -> Callable[[list[Any]], Any]:
    """An equal collator without the tokenizer, where ``collate_fn`` is one whose result we know."""
    from transformers import DataCollatorWithPadding, PreTrainedTokenizerBase

    if type(collate_fn) is not DataCollatorWithPadding:
        return collate_fn
    tokenizer = collate_fn.tokenizer
    own_methods = all(
        getattr(type(tokenizer), name, None) is getattr(PreTrainedTokenizerBase, name)
        for name in ("pad", "_pad")
    )
    plain = collate_fn.padding in (True, "longest") and collate_fn.return_tensors == "pt"
    if not own_methods or not plain or tokenizer.pad_token_id is None:
        return collate_fn
    if tokenizer.model_input_names[0] != "input_ids":
        return collate_fn
    return TokenPadding(
        original=collate_fn,
        fill={
            "input_ids": tokenizer.pad_token_id,
            "attention_mask": 0,
            "token_type_ids": tokenizer.pad_token_type_id,
            "special_tokens_mask": 1,
        },
        left=tokenizer.padding_side == "left",
        multiple=collate_fn.pad_to_multiple_of or 1,
    )
