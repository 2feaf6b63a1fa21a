"""Texts -> rows of token ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from dppeft import _validate
from dppeft.errors import DataError
from dppeft.text._refusal import refuse_rows


class TokenizedRows(NamedTuple):
    """Rows without padding, and how many of them were cut. The count is not private."""

    rows: list[dict[str, list[int]]]
    truncated: int


def tokenize_rows(
    tokenizer: Any,
    texts: Sequence[str],
    pairs: Sequence[str] | None = None,
    *,
    max_length: int,
) -> TokenizedRows:
    """Token ids of each text, or of each pair of texts, cut to ``max_length`` tokens.

    Nothing is learned from the texts: a row's tokens depend on that row alone.

    Args:
        tokenizer: of ``transformers``.
        texts: one per row.
        pairs: the second text of each row, for tasks on pairs of sentences.
        max_length: tokens kept of each row, special ones included.

    Raises:
        DataError: no rows, a row without any text, a value that is no string.
    """
    max_length = _validate.positive_integer(max_length=max_length)
    if len(texts) == 0:
        raise DataError("The data set has no rows. Check the file and the filters applied to it.")
    if pairs is not None and len(pairs) != len(texts):
        raise DataError(
            f"{len(texts)} texts and {len(pairs)} second texts: give one of each per row."
        )
    columns = [list(texts)] if pairs is None else [list(texts), list(pairs)]
    for column in columns:
        refuse_rows(
            [not isinstance(text, str) for text in column],
            "hold a value that is no string (missing?)",
            "Fill it in, or drop those rows",
        )
    refuse_rows(
        [not any(text.strip() for text in row) for row in zip(*columns, strict=True)],
        "have empty text",
        "Drop those rows, or choose another text column",
    )
    encoded = tokenizer(*columns, truncation=False, verbose=False)
    long = [i for i, ids in enumerate(encoded["input_ids"]) if len(ids) > max_length]
    names = list(encoded)
    rows = [
        dict(zip(names, values, strict=True))
        for values in zip(*(encoded[name] for name in names), strict=True)
    ]
    if long:
        chosen = [[column[i] for i in long] for column in columns]
        cut = tokenizer(*chosen, truncation=True, max_length=max_length, verbose=False)
        for position, i in enumerate(long):
            rows[i] = {name: cut[name][position] for name in names}
    refuse_rows(
        [not row["input_ids"] for row in rows],
        "have no tokens",
        "Drop those rows, or use a tokenizer that knows their characters",
    )
    return TokenizedRows(rows, len(long))


class TokenDataset(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows of token ids by index, with their labels.

    Args:
        rows: of ``tokenize_rows``.
        labels: one per row (class number, float, or a vector), or None.
    """

    def __init__(
        self, rows: Sequence[Mapping[str, Any]], labels: Sequence[Any] | None = None
    ) -> None:
        if len(rows) == 0:
            raise DataError("The data set has no rows. Check the file and the filters applied.")
        if labels is not None and len(labels) != len(rows):
            raise DataError(f"{len(rows)} rows and {len(labels)} labels: give one label per row.")
        self._rows, self._labels = rows, labels

    def __len__(self) -> int:
        """The number of rows."""
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One row, its label under ``labels``."""
        row = dict(self._rows[index])
        if self._labels is not None:
            row["labels"] = self._labels[index]
        return row


def length_of(row: Mapping[str, Any]) -> int:
    """Tokens of one unpadded or padded row: the sum of its attention mask, else its ids' number."""
    mask = row.get("attention_mask")
    return len(row["input_ids"]) if mask is None else int(sum(mask))
