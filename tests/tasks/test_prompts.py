"""Rows of a causal language model: their layout, what a cut leaves, the loss that they define."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoTokenizer

import dppeft
from dppeft.errors import ArgumentError, DataError
from dppeft.loss import default_loss
from dppeft.text import collator_for
from tasks.pairs import Pairs
from tasks.prompts import IGNORED, encode_pairs, encode_sources, separator_of, with_padding
from tests.tiny import build, descriptions, save_decoder, wake


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory):
    return with_padding(
        AutoTokenizer.from_pretrained(save_decoder(tmp_path_factory.mktemp("decoder")))
    )


def _pairs(count: int = 6) -> Pairs:
    sources, targets = zip(*descriptions(count), strict=True)
    return Pairs(name="rows", sources=sources, targets=targets)


def test_a_row_is_its_prompt_then_its_target_and_the_end(tokenizer) -> None:
    pairs = _pairs()
    rows, cut, without_target = encode_pairs(tokenizer, pairs, max_length=40)
    assert (cut, without_target) == (0, 0)
    for row, prompt, source, target in zip(
        rows, encode_sources(tokenizer, pairs.sources), pairs.sources, pairs.targets, strict=True
    ):
        ids, labels = row["input_ids"], row["labels"]
        assert ids[: len(prompt)] == prompt
        assert tokenizer.decode(prompt[:-1]) == source
        assert prompt[-1] == tokenizer.bos_token_id
        assert tokenizer.decode(ids[len(prompt) : -1]) == target
        assert ids[-1] == tokenizer.eos_token_id
        assert labels == [IGNORED] * len(prompt) + ids[len(prompt) :]


def test_the_end_token_pads_where_there_is_no_other_and_separates_where_none_begins(
    tokenizer, base_folder: Path
) -> None:
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    with pytest.raises(DataError, match="has no end token, without which no text ends"):
        with_padding(AutoTokenizer.from_pretrained(base_folder))

    class NoBeginning:
        bos_token_id, eos_token_id = None, 7

    assert separator_of(NoBeginning()) == 7


def test_a_model_for_chat_is_not_told_that_a_turn_begins(
    tokenizer, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert separator_of(tokenizer) == tokenizer.bos_token_id

    class Chat:
        chat_template, bos_token_id, eos_token_id = "{{ messages }}", 1, 2
        line_end = (198,)

        def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
            assert text == "\n"
            assert not add_special_tokens
            return {"input_ids": list(self.line_end)}

    assert separator_of(Chat()) == 198
    monkeypatch.setattr(Chat, "line_end", (5, 6))
    assert separator_of(Chat()) == 1


def test_a_cut_takes_the_end_of_the_target_first_and_is_counted(tokenizer) -> None:
    pairs = _pairs(8)
    whole = encode_pairs(tokenizer, pairs, max_length=40).rows
    prompt = len(encode_sources(tokenizer, pairs.sources)[0])  # all of one length here
    shorter = encode_pairs(tokenizer, pairs, max_length=prompt + 1)
    assert (shorter.cut, shorter.without_target) == (8, 0)
    for row, full in zip(shorter.rows, whole, strict=True):
        assert row == {name: values[: prompt + 1] for name, values in full.items()}
    bare = encode_pairs(tokenizer, pairs, max_length=prompt)
    assert (bare.cut, bare.without_target) == (8, 8)
    assert all(set(row["labels"]) == {IGNORED} for row in bare.rows)


def test_bad_arguments_are_named(tokenizer) -> None:
    with pytest.raises(ArgumentError, match="Expected max_length >= 1, got 0"):
        encode_pairs(tokenizer, _pairs(), max_length=0)
    with pytest.raises(DataError, match="rows has no rows"):
        encode_pairs(tokenizer, Pairs(name="rows", sources=[], targets=[]), max_length=9)


def _by_definition(model, row: dict[str, list[int]], smoothing: float = 0.0) -> float:
    """Mean over targets of -log p(target | all before it), one prefix at a time, in float64."""
    values = []
    for position, label in enumerate(row["labels"]):
        if label == IGNORED:
            continue
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([row["input_ids"][:position]])).logits[0, -1]
        numbers = logits.double().tolist()
        top = max(numbers)
        log_total = top + math.log(sum(math.exp(x - top) for x in numbers))
        log_p = [x - log_total for x in numbers]
        loss = -(1 - smoothing) * log_p[label] - smoothing * sum(log_p) / len(log_p)
        values.append(loss)
    return sum(values) / len(values)


def _model(tokenizer, name: str = "gpt2"):
    end = tokenizer.eos_token_id
    return build(name, double=True, vocab_size=len(tokenizer), pad_token_id=end)


def _ragged(tokenizer) -> list[dict[str, list[int]]]:
    pairs = Pairs(
        name="rows",
        sources=["name : zizzi | food : french", "food : italian", "name : strada"],
        targets=["zizzi is a french place .", "the place", "strada serves italian with a zizzi"],
    )
    return encode_pairs(tokenizer, pairs, max_length=40).rows


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_of_a_row_is_the_mean_over_its_own_targets_however_it_is_padded(
    tokenizer, smoothing: float
) -> None:
    model, rows = _model(tokenizer), _ragged(tokenizer)
    loss, collate = default_loss(model, label_smoothing=smoothing), collator_for(tokenizer)
    truth = torch.tensor(
        [_by_definition(model, row, smoothing) for row in rows], dtype=torch.float64
    )
    together: Tensor = loss(model, collate(rows))
    torch.testing.assert_close(together, truth, rtol=1e-10, atol=0)
    for row, value in zip(rows, truth, strict=True):
        torch.testing.assert_close(loss(model, collate([row])), value[None], rtol=1e-10, atol=0)


def test_the_end_of_a_target_is_learned_though_it_is_the_padding_token(tokenizer) -> None:
    rows = _ragged(tokenizer)
    batch = collator_for(tokenizer)(rows)
    ends = (batch["labels"] == tokenizer.eos_token_id).sum(dim=1)
    assert ends.tolist() == [1, 1, 1]
    padding = batch["attention_mask"] == 0
    assert padding.any()
    assert (batch["labels"][padding] == IGNORED).all()
    assert (batch["input_ids"][padding] == tokenizer.eos_token_id).all()


def test_a_row_without_a_target_adds_exactly_nothing(tokenizer) -> None:
    model = wake(dppeft.wrap(_model(tokenizer), "lora", r=4, lora_alpha=32))
    rows, collate = _ragged(tokenizer), collator_for(tokenizer)
    bare = {**rows[1], "labels": [IGNORED] * len(rows[1]["labels"])}
    grads = dppeft.per_example_grads(model, collate([rows[0], bare, rows[2]]))
    assert all(not grad[1].any() for grad in grads.values())
    assert any(grad[0].any() for grad in grads.values())
    with_it = dppeft.clipped_sum(model, collate([rows[0], bare, rows[2]]), max_grad_norm=0.1)
    without = dppeft.clipped_sum(model, collate([rows[0], rows[2]]), max_grad_norm=0.1)
    assert float(with_it.norms[1]) == 0
    for name, value in without.grads.items():
        torch.testing.assert_close(with_it.grads[name], value, rtol=1e-6, atol=1e-9)
