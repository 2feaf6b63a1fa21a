"""Generation: LoRA steps of a real decoder without and with privacy, texts in batches and singly.

Needs the decoder (``make generation``). Rows are E2E's where DPPEFT_DATA is a folder with
``e2e_valid.txt``, made up in its form elsewhere.
"""

from __future__ import annotations

import os
import statistics
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import dppeft
from dppeft.clipping.engine import make_engine
from dppeft.loss import default_loss
from dppeft.text import collator_for
from tasks import e2e
from tasks.decoders import load_decoder, lora_options
from tasks.generation import Decoding, generate_texts
from tasks.pairs import Pairs
from tasks.prompts import encode_pairs, encode_sources
from tests.bench.measuring import Work, compared, interleaved, speed_ratio
from tests.tiny import descriptions

ROWS, PHYSICAL_ROWS = 8, 4
TEXTS, TOKENS, BEAMS = 32, 8, 1
STEP = 0.9  # the least that a private step should reach of a plain one's speed
BATCHED = 4.0  # the least that batches should gain on one text at a time


def measure(repeats: int) -> dict[str, Any]:
    """Medians of interleaved passes over the same rows, in processor time for one row or text."""
    name, pairs = _pairs()
    base, tokenizer = load_decoder("smollm2")
    model = dppeft.wrap(base, "lora", **lora_options("lora")).train()
    batches = _batches(tokenizer, pairs)
    step_times = interleaved(_steps(model, batches), repeats)
    text_times = interleaved(_writing(model, tokenizer, pairs), max(1, repeats // 2))  # minutes
    measured: dict[str, Any] = {
        key: {"ms a row": 1000 * statistics.median(values) / ROWS}
        for key, values in step_times.items()
    }
    measured |= {
        key: {"ms a text": 1000 * statistics.median(values) / TEXTS}
        for key, values in text_times.items()
    }
    private, plain = step_times.values()
    together, alone = text_times.values()
    return {
        "about": f"SmolLM2-135M, LoRA r=4 on q and v, on {ROWS} rows of {name}; {TEXTS} texts of "
        f"{TOKENS} tokens, {BEAMS} beam",
        "threads": torch.get_num_threads(),
        "measured": measured,
        "ratios": {
            "private / without privacy, speed": compared(speed_ratio(private, plain), STEP),
            "batches of 32 / one by one, speed": compared(speed_ratio(together, alone), BATCHED),
        },
    }


def _pairs() -> tuple[str, Pairs]:
    folder = os.environ.get("DPPEFT_DATA")
    path = Path(folder) / e2e.VALID if folder else None
    if path is not None and path.is_file():
        return "E2E", e2e.read_lines(path).some(max(ROWS, TEXTS))
    sources, targets = zip(*descriptions(max(ROWS, TEXTS)), strict=True)
    return "made-up descriptions", Pairs(name="x", sources=sources, targets=targets)


def _batches(tokenizer: Any, pairs: Pairs) -> list[dict[str, Tensor]]:
    rows = encode_pairs(tokenizer, pairs, max_length=100).rows[:ROWS]
    rows.sort(key=lambda row: -len(row["input_ids"]))
    collate = collator_for(tokenizer)
    return [collate(rows[i : i + PHYSICAL_ROWS]) for i in range(0, len(rows), PHYSICAL_ROWS)]


def _steps(model: nn.Module, batches: list[dict[str, Tensor]]) -> dict[str, Work]:
    """Both on one model: the engine leaves ``.grad`` alone."""
    engine = make_engine(model, loss=default_loss(model))
    totals = engine.zero_sum(max_grad_norm=0.1).grads

    def private() -> None:
        for batch in batches:
            engine.clipped_sum(batch, max_grad_norm=0.1, into=totals)

    def plain() -> None:
        for batch in batches:
            model(**batch).loss.backward()
        model.zero_grad()

    return {"private step": private, "without privacy": plain}


def _writing(model: nn.Module, tokenizer: Any, pairs: Pairs) -> dict[str, Work]:
    prompts = encode_sources(tokenizer, pairs.sources)[:TEXTS]

    def write(batch_size: int) -> Work:
        decoding = Decoding(num_beams=BEAMS, max_new_tokens=TOKENS, batch_size=batch_size)
        return lambda: generate_texts(model, tokenizer, prompts, decoding)

    return {f"texts in batches of {TEXTS}": write(TEXTS), "texts one by one": write(1)}
