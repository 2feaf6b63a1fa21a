"""Masks: their shares, their independence of other rows, and the loss that is made of them."""

from __future__ import annotations

import math

import pytest
import torch
from transformers import AutoTokenizer

import dppeft
from dppeft.errors import ArgumentError, DataError
from dppeft.loss import default_loss
from dppeft.text import Collator, MaskedRows, collator_for, rows_for_masking
from tests.tiny import build, opinions

VOCAB = 17  # of tests.tiny.save_folder: five special tokens and twelve words


@pytest.fixture(scope="module")
def tokenizer(base_folder):
    return AutoTokenizer.from_pretrained(base_folder)


@pytest.fixture(scope="module")
def rows(tokenizer):
    texts, _ = opinions(400)
    return rows_for_masking(tokenizer, texts, max_length=16)


def test_the_shares_are_berts(tokenizer):
    """20,000 tokens of one word: 15 % targets; of these 80 % mask, 10 % random, 10 % the word."""
    row = {"input_ids": [2, *[5] * 20_000, 3]}
    masked = MaskedRows([row], tokenizer, seed=0)[0]
    ids, labels = torch.tensor(masked["input_ids"]), torch.tensor(masked["labels"])
    target = labels != -100
    assert set(labels[target].tolist()) == {5}
    assert torch.equal(ids[~target], torch.tensor(row["input_ids"])[~target])
    n = int(target.sum())
    assert n / 20_000 == pytest.approx(0.15, abs=5 * math.sqrt(0.15 * 0.85 / 20_000))
    counts = torch.bincount(ids[target], minlength=VOCAB)
    margin = 5 * math.sqrt(0.8 * 0.2 / n)
    assert float(counts[4]) / n == pytest.approx(0.8, abs=margin)
    # One replacement in twelve is the word itself.
    assert float(counts[5]) / n == pytest.approx(0.1 + 0.1 / 12, abs=margin)
    assert int(counts[:4].sum()) == 0  # no special token is drawn
    assert int((counts[6:] > 0).sum()) == 11


def test_special_tokens_are_never_targets(tokenizer, rows):
    masked = MaskedRows(rows, tokenizer, probability=0.999, seed=0)
    for index, row in enumerate(rows):
        labels = masked[index]["labels"]
        assert labels[0] == labels[-1] == -100
        assert sum(label != -100 for label in labels) >= len(labels) - 3
        assert masked[index]["input_ids"][0] == row["input_ids"][0]


def test_a_rows_masks_do_not_depend_on_the_other_rows(tokenizer, rows):
    """Even for whoever knows the seed: in another order, alone, and among other rows."""
    first = MaskedRows(rows, tokenizer, seed=5)
    other = MaskedRows(rows, tokenizer, seed=5)
    forward = {i: first[i] for i in range(100)}
    for i in [7, *range(399, 99, -1)]:
        _ = other[i]
    assert other[7] == first[7]  # the second reading of both
    for i in (99, 50, 3):
        assert other[i] == forward[i]
    # Another row in one place leaves the others alone.
    changed = [*rows]
    changed[20] = {name: value[:3] for name, value in rows[20].items()}
    again = MaskedRows(changed, tokenizer, seed=5)
    assert all(again[i] == forward[i] for i in range(100) if i != 20)


def test_masks_are_new_at_each_reading_unless_fixed(tokenizer, rows):
    moving = MaskedRows(rows, tokenizer, seed=1)
    assert any(moving[i] != moving[i] for i in range(20))
    still = MaskedRows(rows, tokenizer, seed=1, fixed=True)
    assert all(still[i] == still[i] for i in range(20))
    assert any(MaskedRows(rows, tokenizer, seed=2)[i] != still[i] for i in range(20))
    fresh = [MaskedRows(rows, tokenizer) for _ in range(2)]
    torch.manual_seed(0)
    one = [fresh[0][i] for i in range(20)]
    torch.manual_seed(0)
    assert one != [fresh[1][i] for i in range(20)]  # the global seed plays no part


def test_whole_words_are_masked_whole(tokenizer):
    row = {
        "input_ids": [2, *[5, 6, 7] * 500, 3],
        "word_ids": [-1, *[word for word in range(500) for _ in range(3)], -1],
    }
    masked = MaskedRows([row], tokenizer, whole_words=True, seed=0)[0]
    assert "word_ids" not in masked
    targets = (torch.tensor(masked["labels"][1:-1]) != -100).view(500, 3)
    assert torch.equal(targets.any(dim=1), targets.all(dim=1))
    assert float(targets.float().mean()) == pytest.approx(0.15, abs=0.08)
    single = MaskedRows([row], tokenizer, seed=0)[0]
    targets = (torch.tensor(single["labels"][1:-1]) != -100).view(500, 3)
    assert not torch.equal(targets.any(dim=1), targets.all(dim=1))


def test_words_are_numbered_by_the_tokenizer(tokenizer):
    made = rows_for_masking(tokenizer, ["good film", "bad"], max_length=8, whole_words=True)
    assert [row["word_ids"] for row in made] == [[-1, 0, 1, -1], [-1, 0, -1]]
    cut = rows_for_masking(tokenizer, ["good good film bad"], max_length=4, whole_words=True)
    assert cut[0]["word_ids"] == [-1, 0, 1, -1]


def test_what_cannot_be_masked_is_refused(tokenizer, rows):
    with pytest.raises(DataError, match="has no rows"):
        MaskedRows([], tokenizer)
    with pytest.raises(DataError, match="no field 'word_ids'"):
        MaskedRows(rows, tokenizer, whole_words=True)
    with pytest.raises(ArgumentError, match=r"probability in \(0, 1\)"):
        MaskedRows(rows, tokenizer, probability=0.0)
    with pytest.raises(IndexError):
        MaskedRows(rows, tokenizer)[len(rows)]

    class Without:
        mask_token_id = None

    with pytest.raises(ArgumentError, match="Without has no mask token"):
        MaskedRows(rows, Without())


# ---- the loss of masked rows


def _batch(tokenizer, rows, count=6):
    masked = MaskedRows(rows, tokenizer, probability=0.4, seed=3, fixed=True)
    return collator_for(tokenizer)([masked[i] for i in range(count)])


def test_the_loss_is_the_definition_in_float64(tokenizer, rows):
    model = build("bert-mlm", vocab_size=64, double=True).eval()
    batch = _batch(tokenizer, rows)
    losses = default_loss(model)(model, batch)
    for i in range(len(losses)):
        length = int(batch["attention_mask"][i].sum())
        logits = model(input_ids=batch["input_ids"][i : i + 1, :length]).logits[0]
        terms = []
        for t, label in enumerate(batch["labels"][i, :length].tolist()):
            if label != -100:
                scores = [math.exp(value) for value in logits[t].tolist()]
                terms.append(-math.log(scores[label] / sum(scores)))
        expected = sum(terms) / len(terms) if terms else 0.0
        assert float(losses[i].detach()) == pytest.approx(expected, abs=1e-10)


def test_padding_and_neighbours_change_nothing(tokenizer, rows):
    model = build("bert-mlm", double=True)
    together = dppeft.per_example_grads(model, _batch(tokenizer, rows))
    masked = MaskedRows(rows, tokenizer, probability=0.4, seed=3, fixed=True)
    wide = {"input_ids": [2, *[5] * 30, 3], "labels": [-100, 5, *[-100] * 30]}
    wide |= {
        name: [1] * 32 if name == "attention_mask" else [0] * 32
        for name in masked[0]
        if name not in wide
    }
    for i in range(6):
        alone = dppeft.per_example_grads(model, collator_for(tokenizer)([masked[i], wide]))
        for name, grads in alone.items():
            torch.testing.assert_close(grads[0], together[name][i], rtol=1e-8, atol=1e-10)


def test_a_row_without_targets_adds_nothing(tokenizer, rows):
    """Its clipped gradient is 0, while it counts as an example; automatic clipping too."""
    model = build("bert-mlm")
    row = {"input_ids": [2, 5, 6, 3], "attention_mask": [1] * 4}
    empty = Collator(pad_token_id=0)([
        {**row, "labels": [-100] * 4},
        {**row, "labels": [-100, 5, -100, -100]},
    ])
    only = Collator(pad_token_id=0)([{**row, "labels": [-100, 5, -100, -100]}])
    for clipping in ("flat", "automatic"):
        both, one = (
            dppeft.clipped_sum(model, batch, max_grad_norm=0.5, clipping=clipping)
            for batch in (empty, only)
        )
        assert float(both.norms[0]) == 0.0
        assert float(both.norms[1]) > 0.0
        for name, grad in one.grads.items():
            torch.testing.assert_close(both.grads[name], grad, rtol=1e-5, atol=1e-7)
