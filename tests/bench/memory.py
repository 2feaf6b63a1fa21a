"""Peak memory of one private step, by logical batch size; each measured in its own process.

python -m tests.bench.memory private 4096
"""

from __future__ import annotations

import json
import sys
import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import dppeft
from dppeft.text import collator_for
from dppeft.training.run import PrivateRun
from tests.bench.measuring import compared, in_a_new_process, peak_mib
from tests.bench.rows import load_model, load_rows, load_tokenizer, sorted_batches, trained

ROWS = 4096  # in the data set, whatever the logical batch
SMALL, LARGE = 256, 4096
MANY_ROWS, HUGE = 4_194_304, 1_048_576  # simulated: a data set, the largest logical batch

# What is measured -> which process, its logical batch.
PROCESSES = {
    "private, logical batch 256": ("private", SMALL),
    "private, logical batch 4,096": ("private", LARGE),
    "non-private, same physical batches": ("plain", LARGE),
    "simulated rows, logical batch 256": ("simulated", SMALL),
    "simulated rows, logical batch 1,048,576": ("simulated", HUGE),
}


def measure() -> dict[str, Any]:
    """Peaks in MiB, of the whole process and before the step, and their ratios."""
    measured = {
        name: in_a_new_process("tests.bench.memory", kind, str(logical))
        for name, (kind, logical) in PROCESSES.items()
    }
    small, large, plain, few, huge = (peaks["MiB"] for peaks in measured.values())
    return {
        "about": "peak memory of a process that makes a step",
        "measured": measured,
        "ratios": {
            "logical batch 4,096 / 256": compared(large / small, 1.05, at_most=True),
            "private / non-private": compared(large / plain, 1.15, at_most=True),
            "memory flat in the logical batch: 1,048,576 / 256, simulated": compared(
                huge / few, 1.15, at_most=True
            ),
        },
    }


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
    return _stepped(run)


def _stepped(run: PrivateRun) -> dict[str, float]:
    before = peak_mib()
    for batch in run.batches():
        run.step(batch)
    return {"MiB": peak_mib(), "MiB before the step": before}


def _plain() -> dict[str, float]:
    _, dataset = load_rows(ROWS)
    model, batches = load_model(attention="eager"), sorted_batches(dataset)
    before = peak_mib()
    for batch in batches:
        model(**batch).loss.backward()
    return {"MiB": peak_mib(), "MiB before the step": before}


class _Simulated:
    """As many rows as asked for, none of them stored: a row is its index."""

    def __len__(self) -> int:
        return MANY_ROWS

    def __getitem__(self, index: int) -> int:
        return index

    @staticmethod
    def collate(rows: list[int]) -> dict[str, Tensor]:
        """Four features and a label, computed from the indices."""
        index = torch.tensor(rows)
        features = torch.sin(index[:, None] * torch.tensor([1.0, 0.7, 0.3, 0.1]))
        return {"x": features, "labels": index % 2}


def _simulated(logical: int) -> dict[str, float]:
    """One step of a tiny model: what grows here grows with the rows drawn, and with nothing else.

    A million rows take a few seconds.
    """
    model = nn.Sequential(nn.Linear(4, 2))  # a bare layer would be computed row by row
    plan = dppeft.plan(
        num_examples=MANY_ROWS, batch_size=logical, steps=1, delta=1e-8, noise_multiplier=1.0
    )
    run = dppeft.make_private(
        model,
        torch.optim.SGD(model.parameters(), lr=1e-4),
        _Simulated(),
        plan,
        collate_fn=_Simulated.collate,
        loss=_cross_entropy,
        physical_batch_size=4096,
        precision="float32",
        ledger=f"{tempfile.mkdtemp()}/ledger.jsonl",
    )
    return _stepped(run)


def _cross_entropy(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(model(batch["x"]), batch["labels"], reduction="none")


if __name__ == "__main__":
    kind, logical = sys.argv[1], int(sys.argv[2])
    made = {"private": _private, "simulated": _simulated}
    print(json.dumps(_plain() if kind == "plain" else made[kind](logical)))
