"""Pairs of source and target -> rows of token ids for a causal language model, and prompts.

A row is ``" {source}" {separator} " {target}" {end}``, with targets (labels) on the target and its
end token only: the layout of Li et al. (2022, arXiv 2110.05679). The parts are tokenised one by
one, so that a prompt is exactly the beginning of a training row; in one string the blank before the
separator would be a token of its own and the one behind it would belong to the target.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from dppeft.errors import ArgumentError, DataError
from tasks.pairs import Pairs

IGNORED = -100  # the label of a position without a target, as everywhere in transformers


class PromptRows(NamedTuple):
    """Rows without padding; how many lost tokens; how many of these lost their whole target.

    Both counts are private. A row without a target adds nothing to a private sum (its loss is 0
    whatever the weights are), but is drawn and counted like any other.
    """

    rows: list[dict[str, list[int]]]
    cut: int
    without_target: int


def with_padding(tokenizer: Any) -> Any:
    """The tokenizer, with its end token for padding where it has none of its own (GPT-2, Llama).

    A new token would need a new, trained row of the embedding. The end token does: the attention
    mask hides padding from every other token, and labels there are -100, while the end token of a
    target keeps its label. What tells them apart is the mask, never the id.

    Raises:
        DataError: the tokenizer has no end token (an encoder's).
    """
    if tokenizer.eos_token_id is None:
        raise DataError(
            f"The tokenizer {type(tokenizer).__name__} has no end token, without which no text "
            "ends. Choose a causal language model such as gpt2, or set tokenizer.eos_token."
        )
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def separator_of(tokenizer: Any) -> int:
    """The token between source and target: the beginning's, else the end's (GPT-2: the same).

    To a model for chat the beginning is that of a turn, behind which it names a speaker. There it
    is the end of the line, where that is one token: SmolLM2's loss on E2E's targets is 3.09 behind
    it before any training, and 3.43 behind its beginning's token.
    """
    if getattr(tokenizer, "chat_template", None):
        line_end = tokenizer("\n", add_special_tokens=False)["input_ids"]
        if len(line_end) == 1:
            return line_end[0]
    begin = tokenizer.bos_token_id
    return tokenizer.eos_token_id if begin is None else begin


def encode_sources(tokenizer: Any, sources: Sequence[str]) -> list[list[int]]:
    """The prompt of each source: its tokens and the separator. Prompts are never cut."""
    separator = separator_of(tokenizer)
    return [[*ids, separator] for ids in _tokens(tokenizer, sources)]


def encode_pairs(tokenizer: Any, pairs: Pairs, *, max_length: int) -> PromptRows:
    """Rows of ``input_ids`` and ``labels``, cut on the right to ``max_length`` tokens.

    Args:
        tokenizer: of a causal language model, from ``with_padding``.
        pairs: sources and targets.
        max_length: tokens kept of a row, source and special tokens included.

    Raises:
        ArgumentError: ``max_length`` is below 1.
        DataError: no rows.
    """
    if max_length < 1:
        raise ArgumentError(f"Expected max_length >= 1, got {max_length}.")
    if len(pairs) == 0:
        raise DataError(f"{pairs.name} has no rows. Check the file.")
    rows, cut, empty = [], 0, 0
    prompts = encode_sources(tokenizer, pairs.sources)
    for prompt, target in zip(prompts, _tokens(tokenizer, pairs.targets), strict=True):
        target = [*target, tokenizer.eos_token_id]
        cut += len(prompt) + len(target) > max_length
        empty += len(prompt) >= max_length
        rows.append({
            "input_ids": [*prompt, *target][:max_length],
            "labels": [*[IGNORED] * len(prompt), *target][:max_length],
        })
    return PromptRows(rows, cut, empty)


def _tokens(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    """Token ids of each text behind a blank, without special tokens around it."""
    return tokenizer(
        [f" {text.strip()}" for text in texts], add_special_tokens=False, verbose=False
    )["input_ids"]
