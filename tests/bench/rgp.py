"""RGP against full fine-tuning: it forms no full weight gradient, so it should be the faster one.

python -m tests.bench.rgp private
"""

from __future__ import annotations

import json
import statistics
import sys
from typing import Any

import torch
from torch import Tensor, nn

import dppeft
from dppeft.clipping.engine import make_engine
from dppeft.loss import default_loss
from dppeft.tuners.rgp import RgpLayer
from tests.bench import full
from tests.bench.measuring import (
    Work,
    compared,
    flops,
    in_a_new_process,
    interleaved,
    peak_mib,
    speed_ratio,
)

WIDTHS, LENGTH, RANK = (384, 768), 64, 8
OF_FULL, OF_GHOST, OF_A_STEP = 1.1, 2.2, 0.05
LOGICAL_BATCH = 512


def measure(repeats: int) -> dict[str, Any]:
    """Medians of interleaved steps on a BERT of 4 layers; peaks of whole processes."""
    measured: dict[str, Any] = {}
    ratios: dict[str, Any] = {}
    for width in WIDTHS:
        for total, part in zip((measured, ratios), _compare(width, repeats), strict=True):
            total.update({f"width {width}: {key}": value for key, value in part.items()})
    peaks = {which: in_a_new_process("tests.bench.rgp", which) for which in ("plain", "private")}
    for which, values in peaks.items():
        measured[f"width 384: peak of the process, {which}"] = values
    allowed = peaks["plain"]["MiB"] + peaks["private"]["MiB of W_0"]
    ratios["width 384: peak memory, of plain full fine-tuning and W_0"] = compared(
        peaks["private"]["MiB"] / allowed, 1.0, at_most=True
    )
    return {
        "about": f"RGP of rank {RANK} on a BERT of 4 layers, 16 rows of {LENGTH} tokens",
        "threads": torch.get_num_threads(),
        "measured": measured,
        "ratios": ratios,
    }


def _compare(width: int, repeats: int) -> tuple[dict[str, Any], dict[str, Any]]:
    batch = full.make_batch("BERT", LENGTH)
    model = _model(width)
    contestants: dict[str, Work] = {
        "full fine-tuning without privacy": full.plain("BERT", batch, width=width),
        "RGP": _ours(model, batch),
        "Opacus ghost clipping of everything": full.ghost_clipping("BERT", batch, width=width),
    }
    times = interleaved(contestants, repeats)
    measured = {
        name: {"ms": 1000 * statistics.median(times[name]), "GFLOP": flops(work) / 1e9}
        for name, work in contestants.items()
    }
    plain, ours, ghost = times.values()
    rebuilt = interleaved({"decomposition": lambda: _rebuild(model)}, repeats)["decomposition"]
    physical_batches = LOGICAL_BATCH / full.BATCH
    step = statistics.median(ours) * physical_batches
    measured["decomposition of every matrix"] = {"ms": 1000 * statistics.median(rebuilt)}
    return measured, {
        "RGP / full fine-tuning without privacy, speed": compared(
            speed_ratio(ours, plain), OF_FULL
        ),
        "RGP / Opacus ghost clipping, speed": compared(speed_ratio(ours, ghost), OF_GHOST),
        f"decomposition / step of {LOGICAL_BATCH} rows, time": compared(
            statistics.median(rebuilt) / step, OF_A_STEP, at_most=True
        ),
    }


def _model(width: int = 384) -> nn.Module:
    return dppeft.wrap(full.make_model("BERT", width=width), "rgp", r=RANK).train()


def _ours(model: nn.Module, batch: dict[str, Tensor]) -> Work:
    """Clipped gradients of carriers, added to the sum of a logical batch."""
    engine = make_engine(model, loss=default_loss(model))
    totals = engine.zero_sum(max_grad_norm=full.NORM).grads
    return lambda: engine.clipped_sum(batch, max_grad_norm=full.NORM, into=totals)


def _rebuild(model: nn.Module) -> None:
    for path, module in model.named_modules():
        if isinstance(module, RgpLayer):
            module.before_step(1, path)


def _peak(which: str) -> dict[str, float]:
    batch = full.make_batch("BERT", LENGTH)
    if which == "plain":
        work, held = full.plain("BERT", batch, accumulated=False), 0.0
    else:
        model = _model()
        work = _ours(model, batch)
        layers = [m for m in model.modules() if isinstance(m, RgpLayer)]
        held = sum(m.get_base_layer().weight.numel() for m in layers) * 4 / 2**20
    for _ in range(2):
        work()
    return {"MiB": peak_mib(), "MiB of W_0": held}


if __name__ == "__main__":
    print(json.dumps(_peak(sys.argv[1])))
