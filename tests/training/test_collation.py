"""The fast padding equals transformers' own, or steps aside."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, DataCollatorWithPadding

from dppeft.training.collation import TokenPadding, choose_collate
from tests.training.runs import token_rows


def with_types(row: dict[str, Any]) -> dict[str, Any]:
    length = len(row["input_ids"])
    return {**row, "token_type_ids": [0] + [1] * (length - 1)}


def renamed(row: dict[str, Any]) -> dict[str, Any]:
    return {("label" if name == "labels" else name): value for name, value in row.items()}


FORMS = {
    "plain": lambda row: row,
    "token types": with_types,
    "label": renamed,
    "float labels": lambda row: {**row, "labels": row["labels"] / 2},
    "vector labels": lambda row: {**row, "labels": [row["labels"], 1]},
    "tensors": lambda row: {**row, "input_ids": torch.tensor(row["input_ids"])},
    "masked": lambda row: {**row, "attention_mask": [0] + row["attention_mask"][1:]},
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("multiple", [None, 8])
def test_fast_padding_equals_the_collator(
    base_folder: Path, form: str, side: str, multiple: int | None
) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base_folder, padding_side=side)
    original = DataCollatorWithPadding(tokenizer, pad_to_multiple_of=multiple)
    fast = choose_collate(original, torch.nn.Identity(), None)
    assert isinstance(fast, TokenPadding)
    rows = [FORMS[form](row) for row in token_rows(9)]
    expected, found = dict(original(rows)), dict(fast(rows))
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert value.dtype == found[name].dtype
        assert torch.equal(value, found[name])


def test_other_collators_are_left_alone(base_folder: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base_folder)

    class Own(DataCollatorWithPadding):
        pass

    for collate in (Own(tokenizer), DataCollatorWithPadding(tokenizer, padding="max_length"), len):
        assert choose_collate(collate, torch.nn.Identity(), None) is collate
