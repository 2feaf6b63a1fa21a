"""Texts -> rows of token ids -> padded batches, labels -> class numbers, and made-up rows.

No message of an error raised here holds a text or a label of a row: only column names, counts and
row numbers (from 0).
"""

from dppeft.text.collation import Collator, collator_for
from dppeft.text.labels import encode_labels
from dppeft.text.masking import MaskedRows, rows_for_masking
from dppeft.text.rows import TokenDataset, TokenizedRows, length_of, tokenize_rows
from dppeft.text.synthetic import synthetic_rows
from dppeft.text.templates import Template

__all__ = [
    "Collator",
    "MaskedRows",
    "Template",
    "TokenDataset",
    "TokenizedRows",
    "collator_for",
    "encode_labels",
    "length_of",
    "rows_for_masking",
    "synthetic_rows",
    "tokenize_rows",
]
