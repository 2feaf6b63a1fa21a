"""Rows, labels and batches: what a model reads is the row alone, and no message quotes a row."""

from __future__ import annotations

import collections
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn
from transformers import AutoTokenizer, BatchEncoding, T5Config, T5ForSequenceClassification

from dppeft.errors import ArgumentError, DataError
from dppeft.loss import default_loss
from dppeft.text import (
    Collator,
    TokenDataset,
    collator_for,
    encode_labels,
    length_of,
    synthetic_rows,
    tokenize_rows,
)
from tests.tiny import MODELS, PAD, VOCAB, build, make_batch, save_folder

SECRET = "secretword"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory):
    return AutoTokenizer.from_pretrained(save_folder(tmp_path_factory.mktemp("tokenizer")))


# --- tokens --------------------------------------------------------------------------------------


def test_rows_are_the_tokenizers_own_row_by_row(tokenizer) -> None:
    texts, pairs = ["good film", "the very poor plot a a", "bad"], ["fine", "a", "not very good"]
    rows, truncated = tokenize_rows(tokenizer, texts, pairs, max_length=7)
    expected = [
        dict(tokenizer(a, b, truncation=True, max_length=7))
        for a, b in zip(texts, pairs, strict=True)
    ]
    assert rows == expected
    assert truncated == 1  # 6 + 1 + 3 special tokens; "bad" with its pair has exactly 7
    assert tokenize_rows(tokenizer, texts, max_length=40).truncated == 0
    assert tokenize_rows(tokenizer, np.array(texts), max_length=40).rows[0] == dict(
        tokenizer(texts[0])
    )


def test_G4_bad_texts_are_counted_and_never_quoted(tokenizer) -> None:
    texts = [f"good {SECRET}", "  ", "bad", ""]
    with pytest.raises(DataError, match=r"2 of 4 rows have empty text; the first is row 1") as e:
        tokenize_rows(tokenizer, texts, max_length=8)
    assert SECRET not in str(e.value)
    assert tokenize_rows(tokenizer, ["", "a"], ["bad", "b"], max_length=8).truncated == 0
    with pytest.raises(DataError, match=r"1 of 2 rows hold a value that is no string.*row 1"):
        tokenize_rows(tokenizer, [SECRET, None], max_length=8)
    with pytest.raises(DataError, match="has no rows"):
        tokenize_rows(tokenizer, [], max_length=8)
    with pytest.raises(DataError, match="2 texts and 1 second texts"):
        tokenize_rows(tokenizer, ["a", "b"], ["c"], max_length=8)
    with pytest.raises(ArgumentError, match="max_length >= 1"):
        tokenize_rows(tokenizer, ["a"], max_length=0)


def test_dataset_and_lengths() -> None:
    data = TokenDataset([{"input_ids": [4, 5]}, {"input_ids": [6]}], [1, 0])
    assert len(data) == 2
    assert data[0] == {"input_ids": [4, 5], "labels": 1}
    assert [length_of(row) for row in data] == [2, 1]
    assert length_of({"input_ids": [4, 5, 0], "attention_mask": [1, 1, 0]}) == 2
    assert length_of({"input_ids": torch.tensor([4, 5, 0])}) == 3
    with pytest.raises(DataError, match="no rows"):
        TokenDataset([])
    with pytest.raises(DataError, match="2 rows and 1 labels"):
        TokenDataset([{"input_ids": [1]}] * 2, [1])


# --- labels --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "numbers", "names"),
    [
        (["no", "yes", "no"], [0, 1, 0], ["no", "yes"]),
        ([10, 9, 10], [1, 0, 1], ["9", "10"]),
        (["10", "9", "-1"], [2, 1, 0], ["-1", "9", "10"]),
        ([True, False], [1, 0], ["False", "True"]),
        ([1.0, 0.0, 2.0], [1, 0, 2], ["0", "1", "2"]),
        (np.array([3, 5]), [0, 1], ["3", "5"]),
        ([torch.tensor(1), torch.tensor(0)], [1, 0], ["0", "1"]),
    ],
)
def test_C2_labels_of_any_kind_become_numbers(values, numbers, names) -> None:
    assert encode_labels(values) == (numbers, names)
    assert encode_labels(values, names) == (numbers, names)


def test_G4_bad_labels_are_counted_and_never_quoted() -> None:
    with pytest.raises(DataError, match="constant over its 3 rows.*Choose another") as e:
        encode_labels([SECRET] * 3)
    assert SECRET not in str(e.value)
    with pytest.raises(DataError, match="1 of 3 rows have a label that is not among the 2 classes"):
        encode_labels(["no", SECRET, "yes"], ["no", "yes"])
    with pytest.raises(DataError, match="2 of 4 rows have no label; the first is row 1"):
        encode_labels([SECRET, None, "a", float("nan")])
    with pytest.raises(DataError, match="fractional label.*num_labels=1"):
        encode_labels([0.0, 0.5])
    with pytest.raises(DataError, match="no rows"):
        encode_labels([])
    # A constant column is no fault when evaluating.
    assert encode_labels(["yes", "yes"], ["no", "yes"]) == ([1, 1], ["no", "yes"])


# --- batches -------------------------------------------------------------------------------------

COLLATE = Collator(pad_token_id=PAD, pad_token_type_id=3)


def test_padding_is_what_the_tokenizer_makes(tokenizer) -> None:
    texts = ["good film", "a very bad plot", "fine"]
    rows, _ = tokenize_rows(tokenizer, texts, max_length=8)
    batch = collator_for(tokenizer)(rows)
    expected = tokenizer(texts, padding=True, return_tensors="pt")
    assert batch.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(batch[name], value)


@pytest.mark.parametrize("as_type", [list, np.array, torch.tensor])
def test_C2_ragged_rows_of_lists_arrays_and_tensors(as_type) -> None:
    rows = [
        {"input_ids": as_type([4, 5, 6]), "token_type_ids": as_type([0, 0, 1])},
        {"input_ids": as_type([7]), "token_type_ids": as_type([0])},
    ]
    batch = COLLATE(rows)
    assert batch["input_ids"].tolist() == [[4, 5, 6], [7, PAD, PAD]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 0, 0]]
    assert batch["token_type_ids"].tolist() == [[0, 0, 1], [0, 3, 3]]


@pytest.mark.parametrize("name", ["label", "labels", "label_ids"])
@pytest.mark.parametrize(
    ("labels", "dtype"),
    [
        ([1, 0], torch.int64),
        ([np.int64(1), np.int64(0)], torch.int64),
        ([np.int32(1), 0], torch.int64),
        ([torch.tensor(1), torch.tensor(0)], torch.int64),
        ([True, False], torch.int64),
        ([1.0, 0.5], torch.float32),
        ([1, 0.5], torch.float32),
        ([np.float64(1), torch.tensor(0.5)], torch.float32),
        ([[1.0, 0.0], [0.0, 0.0]], torch.float32),
        ([[1, 0], [0, 0]], torch.int64),
        ([torch.tensor([1.0, 0.0]), np.array([0.0, 1.0])], torch.float32),
    ],
)
def test_C2_labels_of_any_kind(name: str, labels: list, dtype: torch.dtype) -> None:
    batch = COLLATE([{"input_ids": [4], name: label} for label in labels])
    assert batch["labels"].dtype == dtype
    expected = np.stack([np.asarray(label, dtype=np.float64) for label in labels])
    assert batch["labels"].tolist() == expected.tolist()


def test_token_labels_are_padded_with_minus_100() -> None:
    batch = COLLATE([{"input_ids": [4, 5], "labels": [4, 5]}, {"input_ids": [6], "labels": [6]}])
    assert batch["labels"].tolist() == [[4, 5], [6, -100]]


def test_C2_rows_as_batch_encodings_and_named_tuples() -> None:
    Row = collections.namedtuple("Row", "input_ids labels")
    expected = COLLATE([{"input_ids": [4, 5], "labels": 1}, {"input_ids": [6], "labels": 0}])
    for rows in (
        [Row([4, 5], 1), Row([6], 0)],
        [BatchEncoding({"input_ids": [4, 5], "labels": 1}), {"input_ids": [6], "labels": 0}],
    ):
        batch = COLLATE(rows)
        assert {k: v.tolist() for k, v in batch.items()} == {
            k: v.tolist() for k, v in expected.items()
        }


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"input_ids": [4], "labels": SECRET}], "'labels' holds strings.*encode_labels"),
        (
            [{"input_ids": [4], "text": SECRET}],
            "'text' holds values that are no numbers .str.*Drop",
        ),
        ([{"input_ids": [4], "labels": None}], "'labels' holds values that are no numbers"),
        ([{"input_ids": [4], "x": [1, 2]}, {"input_ids": [4], "x": [1]}], "'x' has different leng"),
        (
            [{"input_ids": [4], "labels": [0.5]}, {"input_ids": [4], "labels": [0.5, 1]}],
            "'labels' has different lengths",
        ),
        (
            [{"input_ids": [4], "labels": 1}, {"input_ids": [4], "labels": [1]}],
            "'labels' has different shapes",
        ),
        ([{"input_ids": [4], "x": [[1], [1, 2]]}], "'x' holds values that are no numbers"),
        ([{"input_ids": [4], "labels": 1}, {"input_ids": [4]}], "'labels' is in some rows"),
        ([{"input_ids": [4], "labels": 1, "label": 1}], "fields label and labels"),
        ([{"input_ids": []}], "'input_ids' is empty in a row"),
        ([{"input_ids": [4]}, {"input_ids": []}], "'input_ids' is empty in a row"),
        ([{"input_ids": [0.5]}], "'input_ids' must hold a list of whole numbers"),
        ([{"input_ids": 4}], "'input_ids' must hold a list of whole numbers"),
        ([(SECRET, 1)], "A row is a tuple: expected a dict"),
        ([], "at least one row"),
    ],
)
def test_C2_what_cannot_be_a_batch_names_the_field_and_quotes_nothing(rows, message: str) -> None:
    with pytest.raises(DataError, match=message) as e:
        COLLATE(rows)
    assert SECRET not in str(e.value)


def test_C3_a_tokenizer_without_a_padding_token(tmp_path: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(save_folder(tmp_path, pad_token=False))
    with pytest.raises(DataError, match="neither a padding nor an end token. Set"):
        collator_for(tokenizer)
    tokenizer.eos_token = "[SEP]"
    with pytest.warns(UserWarning, match=r"now pads with its end token '\[SEP\]'"):
        collate = collator_for(tokenizer)
    assert collate.pad_token_id == tokenizer.eos_token_id == tokenizer.pad_token_id


@pytest.mark.parametrize("name", ["bert", "gpt2", "gpt2-classify", "llama", "t5", "bert-tokens"])
def test_padding_on_the_right_does_not_change_a_rows_loss(name: str) -> None:
    model, batch = build(name, double=True).eval(), make_batch(name)
    rows = []
    for index in range(4):
        used = batch["attention_mask"][index].bool()
        labels = batch["labels"][index]
        if labels.dim():
            labels = labels[labels != -100] if name == "t5" else labels[used]
        rows.append({"input_ids": batch["input_ids"][index][used].tolist(), "labels": labels})
    loss = default_loss(model)
    alone = torch.cat([loss(model, COLLATE([one])) for one in rows])
    torch.testing.assert_close(loss(model, COLLATE(rows)), alone)


# --- made-up rows --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", MODELS)
def test_made_up_rows_fit_every_kind_of_model(name: str) -> None:
    model = build(name)
    state = torch.get_rng_state()
    batch = synthetic_rows(model)
    assert torch.equal(torch.get_rng_state(), state)
    losses = default_loss(model)(model, batch)
    assert losses.shape == (3,)
    assert torch.isfinite(losses).all()
    assert (losses > 0).all()
    lengths = batch["attention_mask"].sum(dim=1)
    assert len(set(lengths.tolist())) == 3  # ragged
    used = batch["input_ids"][batch["attention_mask"].bool()]
    special = {PAD, getattr(model.config, "bos_token_id", None), model.config.eos_token_id}
    assert not special & set(used.tolist())
    assert used.max() < VOCAB
    again, other = synthetic_rows(model), synthetic_rows(model, seed=1)
    assert all(torch.equal(batch[key], again[key]) for key in batch)
    assert not torch.equal(batch["input_ids"], other["input_ids"])


@pytest.mark.parametrize("problem", ["regression", "multi_label_classification"])
@pytest.mark.parametrize("columns", [1, 3])
def test_made_up_labels_follow_the_problem(problem: str, columns: int) -> None:
    model = build("bert", num_labels=columns, problem_type=problem)
    batch = synthetic_rows(model, n_rows=5, length=4)
    assert batch["labels"].is_floating_point()
    assert default_loss(model)(model, batch).shape == (5,)


def test_made_up_rows_end_where_an_encoder_decoder_classifies() -> None:
    config = T5Config(
        vocab_size=VOCAB, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2, num_labels=3,
        pad_token_id=0, eos_token_id=1, decoder_start_token_id=0,
    )  # fmt: skip
    model = T5ForSequenceClassification(config)
    assert default_loss(model)(model, synthetic_rows(model)).shape == (3,)


def test_rows_for_a_plain_module_cannot_be_made_up() -> None:
    with pytest.raises(ArgumentError, match="No rows can be made up for Linear"):
        synthetic_rows(nn.Linear(2, 2))
    with pytest.raises(ArgumentError, match="n_rows >= 1"):
        synthetic_rows(build("bert"), n_rows=0)
