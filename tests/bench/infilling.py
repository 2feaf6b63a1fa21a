"""Infilling beside a classification head: a private LoRA step on the same reviews, per token.

Infilling's rows hold the template's tokens too, and its head a layer more, at one position.
"""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoModelForMaskedLM

import dppeft
from dppeft.clipping.engine import make_engine
from dppeft.infilling import Infilling
from dppeft.loss import default_loss
from dppeft.text import TokenDataset, collator_for, tokenize_rows
from tasks import movie_reviews
from tasks.common import demo_encoder
from tests.bench.measuring import Work, compared, interleaved, speed_ratio
from tests.bench.rows import load_encoder, load_tokenizer

ROWS, PHYSICAL_ROWS, MAX_LENGTH = 64, 16, 64
COST = 1.05  # the most that infilling may take of a head's time, per token


def measure(repeats: int) -> dict[str, Any]:
    """Medians of interleaved passes over the same texts."""
    chosen = movie_reviews.load().train.select(range(ROWS))
    tokenizer = load_tokenizer()
    infilling = Infilling(tokenizer, movie_reviews.TEMPLATE, movie_reviews.LABEL_WORDS)
    head_rows = tokenize_rows(tokenizer, chosen.texts, max_length=MAX_LENGTH).rows
    infilled = infilling.encode(chosen.texts, max_length=MAX_LENGTH).rows
    head = dppeft.wrap(load_encoder(), "lora").train()
    masked = dppeft.wrap(_masked_lm(), "lora").train()
    rows = {"head": head_rows, "infilling": infilled}
    contestants = {
        "head": _step(head, _batches(head_rows, chosen.labels, tokenizer), default_loss(head)),
        "infilling": _step(masked, _batches(infilled, chosen.labels, tokenizer), infilling.loss()),
    }
    times = interleaved(contestants, repeats)
    tokens = {name: sum(len(row["input_ids"]) for row in rows[name]) for name in rows}
    slower = speed_ratio(times["head"], times["infilling"])  # of the same texts
    return {
        "about": f"LoRA on {ROWS} movie reviews, MiniLM-L6",
        "threads": torch.get_num_threads(),
        "measured": {
            name: {
                "ms a row": 1000 * statistics.median(times[name]) / ROWS,
                "tokens a row": tokens[name] / ROWS,
            }
            for name in contestants
        },
        "ratios": {
            "infilling / head, time of a token": compared(
                slower * tokens["head"] / tokens["infilling"], COST, at_most=True
            )
        },
    }


def _masked_lm() -> nn.Module:
    torch.manual_seed(0)
    return AutoModelForMaskedLM.from_pretrained(
        demo_encoder(), hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0
    )


def _batches(rows: list[dict[str, Any]], labels: Any, tokenizer: Any) -> list[dict[str, Tensor]]:
    dataset, collate = TokenDataset(rows, list(labels)), collator_for(tokenizer)
    order = sorted(range(len(rows)), key=lambda i: -len(rows[i]["input_ids"]))
    return [
        collate([dataset[i] for i in order[start : start + PHYSICAL_ROWS]])
        for start in range(0, len(order), PHYSICAL_ROWS)
    ]


def _step(model: nn.Module, batches: list[dict[str, Tensor]], loss: Any) -> Work:
    engine = make_engine(model, loss=loss)
    totals = engine.zero_sum(max_grad_norm=1.0).grads

    def step() -> None:
        for batch in batches:
            engine.clipped_sum(batch, max_grad_norm=1.0, into=totals)

    return step
