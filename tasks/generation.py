"""Texts from a causal language model: many prompts at a time, each as if it were alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from dppeft.errors import ArgumentError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn


@dataclass(frozen=True, kw_only=True)
class Decoding:
    """How a text is chosen. Never by sampling: the same model gives the same text.

    Attributes:
        num_beams: beams of the search; 1 takes the likeliest token each time.
        max_new_tokens: most tokens of a text, its end token included.
        length_penalty: a finished beam's log-probability is divided by its length to this power.
        no_repeat_ngram_size: no run of so many tokens comes twice in a text; 0: no such rule. What
            repeats the prompt is allowed: names are copied from there.
        batch_size: prompts at a time. Changes speed and memory only.
    """

    num_beams: int = 5
    max_new_tokens: int = 64
    length_penalty: float = 1.0
    no_repeat_ngram_size: int = 0
    batch_size: int = 32

    def __post_init__(self) -> None:
        """Refuses what no search can do."""
        for name in ("num_beams", "max_new_tokens", "batch_size"):
            if getattr(self, name) < 1:
                raise ArgumentError(f"Expected {name} >= 1, got {getattr(self, name)}.")
        if self.no_repeat_ngram_size < 0:
            raise ArgumentError(
                f"Expected no_repeat_ngram_size >= 0, got {self.no_repeat_ngram_size}."
            )


def generate_texts(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[Sequence[int]],
    decoding: Decoding,
    *,
    progress: Callable[[int], None] | None = None,
) -> list[str]:
    """One text for each prompt, in the order of the prompts.

    Prompts of like length share a batch, the longest first, padded on the left: the text then
    follows its prompt directly, and positions count the prompt's own tokens only.

    Args:
        model: a causal language model, bare or wrapped; put into evaluation mode for the call.
        tokenizer: with a padding token (see ``tasks.prompts.with_padding``).
        prompts: token ids of each.
        decoding: how to search.
        progress: called with the number of texts done so far.

    Raises:
        ArgumentError: a prompt and its text do not fit into the model's positions.
    """
    import torch

    check_room(model, prompts, decoding.max_new_tokens)
    order = sorted(range(len(prompts)), key=lambda index: -len(prompts[index]))
    device = next(model.parameters()).device
    texts = [""] * len(prompts)
    training = model.training
    model.eval()
    try:
        for start in range(0, len(order), decoding.batch_size):
            chosen = order[start : start + decoding.batch_size]
            batch = pad_left([prompts[i] for i in chosen], tokenizer.pad_token_id)
            with torch.inference_mode():
                written = _search(model, tokenizer, [part.to(device) for part in batch], decoding)
            for index, ids in zip(chosen, written.tolist(), strict=True):
                texts[index] = tokenizer.decode(ids, skip_special_tokens=True).strip()
            if progress is not None:
                progress(start + len(chosen))
    finally:
        model.train(training)
    return texts


def pad_left(prompts: Sequence[Sequence[int]], pad: int) -> tuple[Tensor, Tensor]:
    """Token ids and attention mask, both (B, T) of int64; row ``i`` ends with its last token."""
    import torch

    width = max(len(prompt) for prompt in prompts)
    ids = [[pad] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    mask = [[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts]
    return torch.tensor(ids), torch.tensor(mask)


def check_room(model: nn.Module, prompts: Sequence[Sequence[int]], new_tokens: int) -> None:
    """An error where the longest prompt and ``new_tokens`` need more positions than there are."""
    longest = max((len(prompt) for prompt in prompts), default=0)
    room = positions(model)
    if room is not None and longest + new_tokens > room:
        raise ArgumentError(
            f"The longest prompt has {longest} tokens; with max_new_tokens={new_tokens} they are "
            f"more than the {room} positions of {type(model).__name__}. Lower max_new_tokens, or "
            "leave out the longest sources."
        )


def positions(model: nn.Module) -> int | None:
    """Most tokens that the model can read at once; None where its configuration does not say."""
    return getattr(model.config, "max_position_embeddings", None)


def _search(
    model: nn.Module, tokenizer: Any, batch: Sequence[Tensor], decoding: Decoding
) -> Tensor:
    """The new tokens (B, T'), padded behind the end token. ``batch``: ids and mask, (B, T)."""
    from transformers import GenerationConfig, LogitsProcessorList

    ids, mask = batch
    # Whatever is left out here the model's own generation_config.json would fill in.
    search = GenerationConfig(
        do_sample=False,
        num_beams=decoding.num_beams,
        max_new_tokens=decoding.max_new_tokens,
        length_penalty=decoding.length_penalty,
        # Each prompt's search ends by itself, however long the others of the batch go on.
        early_stopping=decoding.num_beams > 1,
        repetition_penalty=1.0,
        no_repeat_ngram_size=0,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    rules = LogitsProcessorList()
    if decoding.no_repeat_ngram_size:
        rules.append(_no_repeats(decoding.no_repeat_ngram_size, ids.shape[1]))
    output = model.generate(
        input_ids=ids, attention_mask=mask, generation_config=search, logits_processor=rules
    )
    return output[:, ids.shape[1] :]


def _no_repeats(size: int, prompt: int) -> Callable[[torch.LongTensor, Tensor], Tensor]:
    """The rule of transformers, for the text alone.

    For a decoder it would count the prompt, too, and so forbid to copy a name of four tokens from
    it, and the padding, which differs with what else is in the batch.
    """
    from transformers import LogitsProcessor, NoRepeatNGramLogitsProcessor

    whole = NoRepeatNGramLogitsProcessor(size)

    class OfTheText(LogitsProcessor):
        def __call__(self, input_ids: torch.LongTensor, scores: Tensor) -> Tensor:
            return whole(input_ids[:, prompt:], scores)

    return OfTheText()
