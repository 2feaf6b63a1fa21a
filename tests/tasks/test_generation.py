"""Texts written in batches are those written one by one, and those of the plain definition."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import nn

import dppeft
from dppeft.errors import ArgumentError
from tasks.generation import Decoding, _no_repeats, generate_texts, pad_left
from tests.tiny import build, wake

PROMPTS = [[5, 9, 2], [7], [11, 3, 8, 8, 20, 31, 4], [40, 41], [9, 9, 9, 9, 9], [33, 2, 50, 6]]
LENGTH = 8


class Numbers:
    """A tokenizer whose texts are the ids themselves, up to the end token."""

    def __init__(self, end: int, pad: int) -> None:
        self.eos_token_id, self.pad_token_id = end, pad

    def decode(self, ids: Sequence[int], skip_special_tokens: bool) -> str:
        kept = []
        for token in ids:
            if token == self.eos_token_id:
                break
            kept.append(str(token))
        return " ".join(kept)


def _greedy(
    model: nn.Module, prompt: Sequence[int], *, end: int | None = None, no_repeat: int = 0
) -> list[int]:
    """The likeliest token again and again: no padding, no cache, no batch."""
    written: list[int] = []
    while len(written) < LENGTH:
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([[*prompt, *written]])).logits[0, -1]
        if no_repeat:
            runs = {tuple(written[i : i + no_repeat]) for i in range(len(written) - no_repeat + 1)}
            head = tuple(written[len(written) - no_repeat + 1 :])
            for token in range(len(logits)):
                if (*head, token) in runs:
                    logits[token] = -torch.inf
        written.append(int(logits.argmax()))
        if written[-1] == end:
            return written[:-1]
    return written


def _model(name: str) -> nn.Module:
    # Untied: a tied random model only repeats its last token.
    return build(name, double=True, seed=3, tie_word_embeddings=False).eval()


def _text(ids: Sequence[int]) -> str:
    return " ".join(map(str, ids))


@pytest.mark.parametrize("no_repeat", [0, 2])
@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_greedy_texts_in_batches_are_those_of_the_definition(name: str, no_repeat: int) -> None:
    model = _model(name)
    end = _greedy(model, PROMPTS[0], no_repeat=no_repeat)[3]  # so that texts end early, too
    truth = [_text(_greedy(model, p, end=end, no_repeat=no_repeat)) for p in PROMPTS]
    assert len({len(text) for text in truth}) > 1
    for size in (1, 4, 6):
        found = generate_texts(
            model,
            Numbers(end, pad=end),  # as GPT-2 has it: padding is told apart by the mask alone
            PROMPTS,
            Decoding(
                num_beams=1,
                max_new_tokens=LENGTH,
                no_repeat_ngram_size=no_repeat,
                batch_size=size,
            ),
        )
        assert found == truth


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_beams_in_batches_are_those_of_one_prompt_at_a_time(name: str) -> None:
    model = _model(name)
    end = _greedy(model, PROMPTS[0])[3]
    options = {"num_beams": 3, "max_new_tokens": LENGTH, "no_repeat_ngram_size": 3}
    together, alone = (
        generate_texts(
            model,
            Numbers(end, pad=1),
            PROMPTS,
            Decoding(length_penalty=0.8, batch_size=size, **options),
        )
        for size in (6, 1)
    )
    assert together == alone
    assert together != generate_texts(
        model, Numbers(end, pad=1), PROMPTS, Decoding(num_beams=1, max_new_tokens=LENGTH)
    )


def test_a_wrapped_model_writes_with_its_adapter_and_keeps_its_mode() -> None:
    base = _model("llama")
    decoding = Decoding(num_beams=1, max_new_tokens=LENGTH)
    plain = generate_texts(base, Numbers(0, pad=1), PROMPTS, decoding)
    model = wake(dppeft.wrap(base, "lora"), std=1.0).train()
    found = generate_texts(model, Numbers(0, pad=1), PROMPTS, decoding)
    assert model.training
    assert found != plain
    assert found == [_text(_greedy(model.eval(), prompt, end=0)) for prompt in PROMPTS]


def test_the_models_own_settings_change_nothing() -> None:
    model, decoding = _model("gpt2"), Decoding(num_beams=1, max_new_tokens=LENGTH)
    truth = generate_texts(model, Numbers(0, pad=1), PROMPTS, decoding)
    own = model.generation_config
    own.do_sample, own.temperature, own.repetition_penalty, own.no_repeat_ngram_size = (
        True,
        5.0,
        3.0,
        1,
    )
    own.min_new_tokens, own.eos_token_id, own.bad_words_ids = 2, 5, [[7]]
    assert generate_texts(model, Numbers(0, pad=1), PROMPTS, decoding) == truth


def test_what_repeats_the_prompt_is_no_repetition() -> None:
    prompt, scores = [5, 6, 7, 9], torch.zeros(1, 10)
    rule = _no_repeats(3, len(prompt))
    copied = rule(torch.tensor([[*prompt, 5, 6]]), scores.clone())
    assert torch.equal(copied, scores)  # 5 6 7 may be written: a name of the source
    again = rule(torch.tensor([[*prompt, 5, 6, 7, 5, 6]]), scores.clone())
    assert (again == -torch.inf).nonzero().tolist() == [[0, 7]]


def test_progress_counts_texts() -> None:
    counts: list[int] = []
    decoding = Decoding(num_beams=1, max_new_tokens=2, batch_size=4)
    generate_texts(_model("gpt2"), Numbers(0, pad=1), PROMPTS, decoding, progress=counts.append)
    assert counts == [4, 6]


def test_padding_stands_on_the_left() -> None:
    ids, mask = pad_left([[5, 6], [7]], 9)
    assert ids.tolist() == [[5, 6], [9, 7]]
    assert mask.tolist() == [[1, 1], [0, 1]]


@pytest.mark.parametrize("name", ["num_beams", "max_new_tokens", "batch_size"])
def test_a_search_that_cannot_be_is_refused(name: str) -> None:
    with pytest.raises(ArgumentError, match=f"Expected {name} >= 1, got 0"):
        Decoding(**{name: 0})
    with pytest.raises(ArgumentError, match="Expected no_repeat_ngram_size >= 0, got -1"):
        Decoding(no_repeat_ngram_size=-1)


def test_texts_that_do_not_fit_are_refused() -> None:
    model = _model("gpt2").train()
    with pytest.raises(ArgumentError, match="has 7 tokens; with max_new_tokens=34.* 40 positions"):
        generate_texts(model, Numbers(0, pad=1), PROMPTS, Decoding(max_new_tokens=34))
    assert model.training
