"""Made-up rows that fit a model, to try it before any private row is used."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from dppeft import _validate
from dppeft._kind import kind_of, unwrap
from dppeft._types import Batch
from dppeft.errors import ArgumentError

IGNORED = -100  # the label of a position without a target, as everywhere in transformers


def synthetic_rows(model: nn.Module, *, n_rows: int = 3, length: int = 7, seed: int = 0) -> Batch:
    """A ragged batch of made-up rows that fits the model, to try it before any private row is used.

    Args:
        model: a ``transformers`` model on token ids, bare or wrapped.
        n_rows: rows in the batch, B.
        length: tokens of the longest row, T.
        seed: of the draw; the global generator is left alone.

    Returns:
        ``input_ids``, ``attention_mask`` (B, T) and the labels that the kind of model asks for, on
        the CPU. Ids are drawn from the vocabulary, special ones left out.

    Raises:
        ArgumentError: the model's inputs cannot be guessed (a plain module; images, audio).
    """
    _validate.positive_integer(n_rows=n_rows)
    _validate.positive_integer(length=length)
    base = unwrap(model)
    config, text_config = _configs(base)
    generator = torch.Generator().manual_seed(seed)
    special = _special_ids(text_config)
    words = torch.tensor([i for i in range(text_config.vocab_size) if i not in special] or [0])

    def draw(shape: torch.Size | tuple[int, ...]) -> Tensor:
        return words[torch.randint(len(words), shape, generator=generator)]

    lengths = torch.tensor([max(2, length - 2 * (row % length)) for row in range(n_rows)])
    width = int(lengths.max())
    used = torch.arange(width) < lengths[:, None]
    ids = draw(used.shape)
    kind = kind_of(base)
    end = _first(getattr(text_config, "eos_token_id", None))
    reads_end = kind == "classification" and getattr(config, "is_encoder_decoder", False)
    if reads_end and end is not None:  # BART and T5 classify at the last end token
        ids[torch.arange(n_rows), lengths - 1] = end
    pad = getattr(text_config, "pad_token_id", None)
    batch = {
        "input_ids": torch.where(used, ids, 0 if pad is None else pad),
        "attention_mask": used.long(),
    }
    if kind == "question_answering":
        starts = torch.zeros(n_rows, dtype=torch.long)
        return batch | {"start_positions": starts, "end_positions": lengths - 1}
    if kind == "causal_lm":
        labels = ids.masked_fill(~used, IGNORED)
    elif kind == "masked_lm":
        chosen = used & (torch.arange(width) % 2 == 0)
        labels = draw(used.shape).masked_fill(~chosen, IGNORED)
    elif kind == "seq2seq_lm":  # targets ragged in the opposite order of the sources
        labels = draw(used.shape).masked_fill(~used.flip(0), IGNORED)
    elif kind == "token_classification":
        labels = torch.randint(config.num_labels, used.shape, generator=generator)
        labels = labels.masked_fill(~used, IGNORED)
    else:
        labels = _class_labels(config, n_rows, generator)
    return batch | {"labels": labels}


def _configs(base: nn.Module) -> tuple[Any, Any]:
    """The model's config and that of its text part; an error where it takes no token ids."""
    config = getattr(base, "config", None)
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else None
    takes_ids = "input_ids" in inspect.signature(base.forward).parameters
    if getattr(text_config, "vocab_size", None) is None or not takes_ids:
        raise ArgumentError(
            f"No rows can be made up for {type(base).__name__}: it is no transformers model on "
            "token ids. Pass a batch of your own that is not private."
        )
    return config, text_config


def _class_labels(config: Any, n_rows: int, generator: torch.Generator) -> Tensor:
    """(B,) or (B, num_labels): class numbers, numbers, or which of the labels hold."""
    columns, problem = config.num_labels, getattr(config, "problem_type", None)
    if problem == "multi_label_classification":
        return torch.randint(2, (n_rows, columns), generator=generator).float()
    if problem == "regression" or (problem is None and columns == 1):
        shape = (n_rows,) if columns == 1 else (n_rows, columns)
        return torch.randn(shape, generator=generator)
    return torch.randint(columns, (n_rows,), generator=generator)


def _special_ids(config: Any) -> set[int]:
    ids: set[int] = set()
    for name, value in config.to_dict().items():
        if name.endswith("_token_id"):
            ids.update(v for v in (value if isinstance(value, list) else [value]) if v is not None)
    return ids


def _first(value: Any) -> int | None:
    return value[0] if isinstance(value, list | tuple) and value else value
