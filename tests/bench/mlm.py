"""Masked-language training of a whole small BERT: a private update against one without privacy.

Both make a whole logical batch of real reviews, in the same physical batches: gradients, their sum,
the noise where there is any, one step of AdamW.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoTokenizer, BertConfig, BertForMaskedLM

import dppeft
from dppeft import MaskedTokenLoss, schedules
from dppeft._types import PerExampleLoss
from dppeft.clipping.engine import make_engine
from dppeft.loss import default_loss
from dppeft.privacy.noise import GaussianNoise, fresh_secret
from dppeft.text import MaskedRows, collator_for, rows_for_masking
from tasks.common import demo_encoder
from tasks.masked_lm import imdb_reviews
from tests.bench.measuring import Work, compared, flops, interleaved, speed_ratio

ROWS, LENGTH, PHYSICAL = 32, 128, 16
SIZES = ((2, 256), (4, 384))  # layers, width
PLAIN, OURS, TARGETS = "non-private update", "dppeft", "dppeft, head at the targets alone"
SPEED_OF_PLAIN, FLOPS_OF_PLAIN = 0.75, 1.12
ACCOUNTING_SECONDS = 5.0  # of processor time


def measure(repeats: int) -> dict[str, Any]:
    """Medians of interleaved updates, and operations."""
    measured: dict[str, Any] = {}
    ratios: dict[str, Any] = {}
    batches, vocabulary = make_batches()
    for layers, width in SIZES:
        name = f"{layers} layers of width {width}"
        contestants = {
            PLAIN: plain(make_model(layers, width, vocabulary), batches),
            OURS: private(make_model(layers, width, vocabulary), batches, default_loss),
            TARGETS: private(make_model(layers, width, vocabulary), batches, targets_alone),
        }
        times = interleaved(contestants, repeats)
        operations = {which: flops(work) for which, work in contestants.items()}
        for which in contestants:
            measured[f"{name}: {which}"] = {
                "ms": 1000 * statistics.median(times[which]),
                "GFLOP": operations[which] / 1e9,
            }
        ratios[f"{name}: dppeft / non-private, speed"] = compared(
            speed_ratio(times[OURS], times[PLAIN]), SPEED_OF_PLAIN
        )
        ratios[f"{name}: at the targets alone / non-private, speed"] = compared(
            speed_ratio(times[TARGETS], times[PLAIN]), 1.0
        )
        ratios[f"{name}: dppeft / non-private, operations"] = compared(
            operations[OURS] / operations[PLAIN], FLOPS_OF_PLAIN, at_most=True
        )
    ratios["epsilon of 20,000 different sizes, seconds"] = compared(
        account(), ACCOUNTING_SECONDS, at_most=True
    )
    return {
        "about": f"masked-language training, an update of {ROWS} reviews of up to {LENGTH} tokens",
        "threads": torch.get_num_threads(),
        "measured": measured,
        "ratios": ratios,
    }


def account() -> float:
    """Processor seconds for the epsilon of a schedule whose batches all differ."""
    sizes = schedules.linear(262_144, 1_048_576, every=1, steps=20_000)
    plan = dppeft.plan(
        num_examples=346_000_000,
        batch_size=max(sizes),
        batch_schedule=sizes,
        noise_multiplier=0.8,
        delta=1e-9,
    )
    start = time.process_time()
    plan.epsilon()
    return time.process_time() - start


def make_batches() -> tuple[list[dict[str, Tensor]], int]:
    """Physical batches of masked reviews, sorted by length; and the vocabulary's size."""
    tokenizer = AutoTokenizer.from_pretrained(demo_encoder())
    texts = [text[: 16 * LENGTH] for text in imdb_reviews()[:ROWS]]
    rows = rows_for_masking(tokenizer, texts, max_length=LENGTH)
    rows.sort(key=lambda row: -len(row["input_ids"]))
    masked = MaskedRows(rows, tokenizer, seed=0, fixed=True)
    collate = collator_for(tokenizer)
    starts = range(0, ROWS, PHYSICAL)
    return [collate([masked[i] for i in range(s, s + PHYSICAL)]) for s in starts], len(tokenizer)


def make_model(layers: int, width: int, vocabulary: int) -> nn.Module:
    """The same weights for both; embeddings tied to the head."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        num_hidden_layers=layers,
        num_attention_heads=width // 32,
        intermediate_size=4 * width,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
        attn_implementation="eager",
    )
    return BertForMaskedLM(config).train()


def plain(model: nn.Module, batches: Sequence[dict[str, Tensor]]) -> Work:
    """Gradients of the mean loss of each physical batch, added up; AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)

    def work() -> None:
        optimizer.zero_grad()
        for batch in batches:
            model(**batch).loss.backward()
        optimizer.step()

    return work


def targets_alone(model: nn.Module) -> MaskedTokenLoss:
    """The loss that `tasks.mlm` trains with."""
    loss = MaskedTokenLoss()
    loss.check(model)
    return loss


def private(
    model: nn.Module,
    batches: Sequence[dict[str, Tensor]],
    loss_of: Callable[[nn.Module], PerExampleLoss],
) -> Work:
    """Clipped gradients of each review, added up; noise; AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    engine = make_engine(model, loss=loss_of(model))
    noise = GaussianNoise(fresh_secret(0))
    named = dict(model.named_parameters())

    def work() -> None:
        optimizer.zero_grad()
        total = engine.zero_sum(max_grad_norm=1.0)
        for batch in batches:
            total = engine.clipped_sum(batch, max_grad_norm=1.0, into=total.grads)
        for name, grad in noise.add(total, noise_multiplier=1.0, step=0).items():
            named[name].grad = grad / ROWS
        optimizer.step()

    return work
