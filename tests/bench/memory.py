"""Peak memory of one private step, by logical batch size; each measured in its own process.

python -m tests.bench.memory private 4096
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

import dppeft
from dppeft.text import collator_for
from tests.bench.rows import load_model, load_rows, load_tokenizer, sorted_batches, trained

ROWS = 4096  # in the data set, whatever the logical batch
SMALL, LARGE = 256, 4096


def measure() -> dict[str, Any]:
    """Peaks in MiB, of the whole process and of the step alone, and their ratios."""
    peaks = {
        name: _in_a_new_process(kind, logical)
        for name, kind, logical in (
            ("private, logical batch 256", "private", SMALL),
            ("private, logical batch 4,096", "private", LARGE),
            ("non-private, same physical batches", "plain", LARGE),
        )
    }
    small, large, plain = peaks.values()
    return {
        "mib": peaks,
        "ratios": {
            "logical batch 4,096 / 256": {"ratio": large["peak"] / small["peak"], "target": 1.05},
            "private / non-private": {"ratio": large["peak"] / plain["peak"], "target": 1.15},
        },
    }


def _in_a_new_process(kind: str, logical: int) -> dict[str, float]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench.memory", kind, str(logical)],
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[2],
    )
    return json.loads(done.stdout.splitlines()[-1])


def _peak_mib() -> float:
    """The most memory this process ever held (Linux)."""
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def _private(logical: int) -> dict[str, float]:
    _, dataset = load_rows(ROWS)
    model = load_model()
    plan = dppeft.plan(
        num_examples=len(dataset), batch_size=logical, steps=2, delta=1e-6, noise_multiplier=1.0
    )
    run = dppeft.make_private(
        model,
        torch.optim.SGD(trained(model), lr=1e-4),
        dataset,
        plan,
        collate_fn=collator_for(load_tokenizer()),
        precision="float32",
        ledger=f"{tempfile.mkdtemp()}/ledger.jsonl",
    )
    before = _peak_mib()
    for batch in run.batches():
        run.step(batch)
    return {"before": before, "peak": _peak_mib()}


def _plain() -> dict[str, float]:
    _, dataset = load_rows(ROWS)
    model, batches = load_model(attention="eager"), sorted_batches(dataset)
    before = _peak_mib()
    for batch in batches:
        model(**batch).loss.backward()
    return {"before": before, "peak": _peak_mib()}


if __name__ == "__main__":
    kind, logical = sys.argv[1:]
    print(json.dumps(_plain() if kind == "plain" else _private(int(logical))))
