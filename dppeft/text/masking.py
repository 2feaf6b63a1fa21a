"""Masked language modelling: rows of tokens -> rows with masked tokens and their labels.

BERT's rule (Devlin et al., 2019): 15 % of the tokens are targets; of these 80 % are replaced by the
mask token, 10 % by a random one, 10 % stay. Here each token (or word) is a target independently.

What the guarantee needs. It bounds how far one row moves the sum, so a row's gradient must depend
on that row and on randomness that the other rows have no part in. A mask drawn for a whole padded
batch from one seeded stream breaks this for whoever knows the seed: one more row shifts the draws
of all others. So each row's masks come from a generator of its own, keyed by a secret, the row's
index and how often that row was read. The batch, its padding and its order play no part.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from dppeft import _validate
from dppeft.errors import ArgumentError, DataError
from dppeft.text.rows import tokenize_rows

IGNORED = -100  # the label of a position without a target, as everywhere in transformers
WORDS = "word_ids"  # field of a row: the number of each token's word, -1 for special tokens
_MASKED, _RANDOM = 0.8, 0.1  # shares of the targets; the rest stays


def rows_for_masking(
    tokenizer: Any, texts: Sequence[str], *, max_length: int, whole_words: bool = False
) -> list[dict[str, list[int]]]:
    """Token ids of each text, cut to ``max_length``; with the words' numbers where asked for.

    Args:
        tokenizer: of ``transformers``; for whole words a fast one.
        texts: one per row.
        max_length: tokens kept of each row, special ones included.
        whole_words: add the field that masking whole words needs.

    Raises:
        DataError: no rows, a row without text, a value that is no string, or a tokenizer that does
            not know which word a token is of.
    """
    rows = tokenize_rows(tokenizer, texts, max_length=max_length).rows
    if not whole_words:
        return rows
    if not getattr(tokenizer, "is_fast", False):
        raise DataError(
            f"{type(tokenizer).__name__} does not say which word a token belongs to. Use a fast "
            "tokenizer (AutoTokenizer's default), or mask single tokens."
        )
    encoded = tokenizer(list(texts), truncation=True, max_length=max_length, verbose=False)
    for index, row in enumerate(rows):
        row[WORDS] = [-1 if word is None else word for word in encoded.word_ids(index)]
    return rows


class MaskedRows(torch.utils.data.Dataset[dict[str, Any]]):
    """Rows by index, masked anew each time one is read; ``labels`` hold the targets, else -100.

    Guarantee: the masks of row i are a function of (secret, i, how often row i was read from this
    object) and of row i's own tokens. Without ``seed`` the secret is from the operating system;
    torch's global generator, whose seed a script may publish, is never used. With a seed the
    guarantee holds also towards those who know it, in a run of one process; with several, which
    process reads a row, and so how often it has read it before, depends on the others.
    Edges: special tokens are never targets, nor drawn as replacements. A row without any target
    has all its labels -100: its loss and gradient are 0, so it counts as a row and adds nothing.

    Args:
        rows: of :func:`rows_for_masking`.
        tokenizer: tells the mask token, the special tokens and the vocabulary.
        probability: with which each token, or each whole word, is a target.
        whole_words: all tokens of a word or none.
        seed: of the masks, reproducible; None: fresh.
        fixed: the same masks at each reading of a row, as for evaluation.

    Raises:
        DataError: no rows, or rows without the words' numbers though ``whole_words``.
        ArgumentError: a probability outside (0, 1), or a tokenizer without a mask token.
    """

    def __init__(  # noqa: PLR0913 - data, tokenizer and four ways to mask
        self,
        rows: Sequence[Mapping[str, Any]],
        tokenizer: Any,
        *,
        probability: float = 0.15,
        whole_words: bool = False,
        seed: int | None = None,
        fixed: bool = False,
    ) -> None:
        if len(rows) == 0:
            raise DataError("The data set has no rows. Check the file and the filters applied.")
        if getattr(tokenizer, "mask_token_id", None) is None:
            raise ArgumentError(
                f"{type(tokenizer).__name__} has no mask token. Use the tokenizer of a masked "
                "language model (BERT, RoBERTa), or set tokenizer.mask_token."
            )
        if whole_words and WORDS not in rows[0]:
            raise DataError(
                f"The rows have no field {WORDS!r}, which whole words need. Make them with "
                "rows_for_masking(..., whole_words=True)."
            )
        self._rows, self._whole_words, self._fixed = rows, whole_words, fixed
        self._probability = _validate.probability(probability=probability)
        self._mask = int(tokenizer.mask_token_id)
        special = sorted({*tokenizer.all_special_ids, self._mask})
        self._special = np.array(special, dtype=np.int64)
        self._vocabulary = np.setdiff1d(np.arange(len(tokenizer)), self._special)
        self._secret = os.urandom(32) if seed is None else str(int(seed)).encode()
        self._reads = np.zeros(len(rows), dtype=np.int64)

    def __len__(self) -> int:
        """The number of rows."""
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        """One row with its targets under ``labels``; the words' numbers are left out."""
        index = range(len(self._rows))[index]  # -1 is the last row, past the end an IndexError
        row = {name: value for name, value in self._rows[index].items() if name != WORDS}
        generator = self._generator(index, 0 if self._fixed else int(self._reads[index]))
        self._reads[index] += 1
        ids = np.array(row["input_ids"], dtype=np.int64)
        targets = self._targets(ids, self._rows[index], generator)
        fate = generator.random(len(ids))
        drawn = self._vocabulary[generator.integers(len(self._vocabulary), size=len(ids))]
        masked = np.where(targets & (fate < _MASKED), self._mask, ids)
        swapped = targets & (fate >= _MASKED) & (fate < _MASKED + _RANDOM)
        row["input_ids"] = np.where(swapped, drawn, masked).tolist()
        row["labels"] = np.where(targets, ids, IGNORED).tolist()
        return row

    def _generator(self, index: int, read: int) -> np.random.Generator:
        key = hashlib.blake2b(f"{index}:{read}".encode(), key=self._secret[:64], digest_size=16)
        return np.random.Generator(np.random.Philox(key=int.from_bytes(key.digest(), "big")))

    def _targets(
        self, ids: NDArray[np.int64], row: Mapping[str, Any], generator: np.random.Generator
    ) -> NDArray[np.bool_]:
        """(T,) which tokens are to be predicted."""
        allowed = ~np.isin(ids, self._special)
        if not self._whole_words:
            return allowed & (generator.random(len(ids)) < self._probability)
        words = np.array(row[WORDS], dtype=np.int64)
        chosen = generator.random(int(words.max(initial=-1)) + 1) < self._probability
        hit = np.zeros(len(ids), dtype=bool)
        hit[words >= 0] = chosen[words[words >= 0]]
        return allowed & hit
