"""Every kind of small tuner: clipped sums against forward and backward without privacy."""

from __future__ import annotations

import statistics
from typing import Any

import torch
from torch import Tensor, nn

import dppeft
from dppeft.clipping.engine import make_engine
from dppeft.loss import default_loss
from tests.bench.measuring import Work, compared, flops, interleaved, speed_ratio
from tests.bench.rows import load_encoder, load_rows, sorted_batches

TUNERS = (
    "lora",
    "dora",
    "ffa_lora",
    "adapter",
    "compacter",
    "bitfit",
    "head",
    "ia3",
    "vera",
    "loha",
    "lokr",
    "ln_tuning",
    "prompt_tuning",
)
TARGETS = {"lora": 0.93, "adapter": 0.92, "compacter": 0.92}  # the others: half the speed at least
OTHERS = 0.5
BATCHES = 4
ROWS = 512  # their lengths are those of the data set


def measure(repeats: int) -> dict[str, Any]:
    """Medians of interleaved passes over the same batches, for each tuner with its defaults."""
    name, dataset = load_rows(ROWS)
    batches = sorted_batches(dataset)
    batches = batches[:: max(1, len(batches) // BATCHES)][:BATCHES]  # long and short
    measured: dict[str, Any] = {}
    ratios: dict[str, Any] = {"bitfit, of LoRA without privacy": _bitfit(batches, repeats)}
    for tuner in TUNERS:
        times = interleaved(contestants := _contestants(tuner, batches), repeats)
        for key, values in times.items():
            measured[f"{tuner}, {key}"] = {"ms": 1000 * statistics.median(values)}
        ratios[tuner] = compared(
            speed_ratio(times["dppeft"], times["non-private"]), TARGETS.get(tuner, OTHERS)
        )
        if tuner == "lora":
            ours, plain = flops(contestants["dppeft"]), flops(contestants["non-private"])
            ratios["lora, operations"] = compared(ours / plain, at_most=True)
    rows = sum(len(batch["labels"]) for batch in batches)
    return {
        "about": f"dppeft / non-private, by tuner, on {rows} rows of {name}",
        "threads": torch.get_num_threads(),
        "measured": measured,
        "ratios": ratios,
    }


def _bitfit(batches: list[dict[str, Tensor]], repeats: int) -> dict[str, Any]:
    """Biases need no stored activations: a private step beside LoRA's plain one."""
    bitfit, lora = _contestants("bitfit", batches), _contestants("lora", batches)
    times = interleaved({"bitfit": bitfit["dppeft"], "lora": lora["non-private"]}, repeats)
    return compared(speed_ratio(times["bitfit"], times["lora"]), 1.0)


def _contestants(tuner: str, batches: list[dict[str, Tensor]]) -> dict[str, Work]:
    """Both on one model: the engine leaves ``.grad`` alone."""
    model: nn.Module = dppeft.wrap(load_encoder(attention="eager"), tuner).train()
    engine = make_engine(model, loss=default_loss(model))
    totals = engine.zero_sum(max_grad_norm=1.0).grads

    def ours() -> None:
        for batch in batches:
            engine.clipped_sum(batch, max_grad_norm=1.0, into=totals)

    def plain() -> None:
        for batch in batches:
            model(**batch).loss.backward()
        model.zero_grad()

    return {"dppeft": ours, "non-private": plain}
