"""What privacy costs in memory and in operations. Time is measured in tests/bench, never here.

Memory is the peak of a new process (Linux). Operations are counted, not timed: the same on every
machine, and what remains when a machine is busy.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import BertConfig, BertForSequenceClassification, GPT2Config, GPT2LMHeadModel

import dppeft
from dppeft.clipping.engine import make_engine
from dppeft.loss import default_loss

ROOT = Path(__file__).parents[1]
STATUS = Path("/proc/self/status")


# G2: memory, each run in its own process

VOCAB, LENGTH, PHYSICAL = 2048, 128, 16


def gpt2() -> nn.Module:
    torch.manual_seed(0)
    model = GPT2LMHeadModel(
        GPT2Config(
            vocab_size=VOCAB,
            n_embd=256,
            n_layer=2,
            n_head=4,
            n_positions=LENGTH,
            bos_token_id=0,
            eos_token_id=0,
        )
    )
    return dppeft.wrap(model.train(), "lora", r=8)


def token_rows(count: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(VOCAB, (count, LENGTH), generator=generator)
    return [
        {"input_ids": row, "labels": row, "attention_mask": torch.ones_like(row)} for row in ids
    ]


def run_plainly(rows: list[dict[str, Tensor]]) -> None:
    model = gpt2()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    for start in range(0, len(rows), PHYSICAL):
        batch = rows[start : start + PHYSICAL]
        model(**{
            name: torch.stack([row[name] for row in batch]) for name in rows[0]
        }).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def run_privately(rows: list[dict[str, Tensor]], ledger: str) -> None:
    """One update on all rows, in physical batches."""
    model = gpt2()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1)
    plan = dppeft.plan(
        num_examples=len(rows), batch_size=len(rows), steps=1, delta=1e-4, noise_multiplier=1.0
    )
    run = dppeft.make_private(
        model,
        optimizer,
        rows,
        plan,
        physical_batch_size=PHYSICAL,
        precision="float32",
        ledger=ledger,
    )
    for batch in run.batches():
        assert len(batch) == len(rows)
        run.step(batch)


def peak_mib() -> float:
    """The most memory this process ever held."""
    (line,) = (line for line in STATUS.read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def main(kind: str, folder: str) -> None:
    torch.set_num_threads(1)
    rows = token_rows(8 * PHYSICAL)
    gpt2()  # what the libraries need for themselves
    found = {"before": peak_mib()}
    if kind == "plain":
        run_plainly(rows[:PHYSICAL])
        found["one"] = peak_mib()
    else:  # a peak never falls, so one process can tell both
        run_privately(rows[:PHYSICAL], f"{folder}/one.jsonl")
        found["one"] = peak_mib()
        run_privately(rows, f"{folder}/eight.jsonl")
        found["eight"] = peak_mib()
    print(json.dumps(found))


@pytest.fixture(scope="module")
def used(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, float]]:
    """MiB that training added to a process, by kind and by physical batches in an update."""
    if not STATUS.exists() or "VmHWM" not in STATUS.read_text():
        pytest.skip("peak memory is read from /proc/self/status, which this system lacks")
    folder = tmp_path_factory.mktemp("ledgers")
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        # What is freed goes back to the system at once: else glibc keeps a third of it, or none.
        "MALLOC_MMAP_THRESHOLD_": "1048576",
    }
    running = {
        kind: subprocess.Popen(
            [sys.executable, "-m", "tests.test_costs", kind, str(folder)],
            cwd=ROOT,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for kind in ("plain", "private")
    }
    found = {}
    for kind, process in running.items():
        output, errors = process.communicate(timeout=180)
        assert process.returncode == 0, errors[-3000:]
        peaks = json.loads(output.splitlines()[-1])
        before = peaks.pop("before")
        found[kind] = {batches: peak - before for batches, peak in peaks.items()}
    print(found)
    return found


@pytest.mark.thorough
def test_G2_a_private_update_fits_where_a_plain_one_does(used: Any) -> None:
    assert used["plain"]["one"] > 100  # the tensors, not the noise of allocation
    assert used["private"]["one"] <= 1.5 * used["plain"]["one"]


@pytest.mark.thorough
def test_G2_memory_is_that_of_a_physical_batch_not_of_a_logical_one(used: Any) -> None:
    assert used["private"]["eight"] <= 1.1 * used["private"]["one"]


# G3: operations


def bert() -> nn.Module:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=512,
        hidden_size=384,
        num_hidden_layers=2,
        num_attention_heads=6,
        intermediate_size=1536,
        max_position_embeddings=128,
        num_labels=2,
    )
    return BertForSequenceClassification(config).train()


def bert_batch(length: int, size: int = 16) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(512, (size, length), generator=generator)
    labels = torch.arange(size) % 2
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": labels}


def count(call: Any) -> int:
    with FlopCounterMode(display=False) as counter:
        call()
    return int(counter.get_total_flops())


@functools.cache
def plain_flops(method: str, length: int) -> int:
    model, batch = dppeft.wrap(bert(), method), bert_batch(length)
    return count(lambda: model(**batch).loss.backward())


def private_flops(model: nn.Module, length: int) -> int:
    engine, batch = make_engine(model, loss=default_loss(model)), bert_batch(length)
    engine.clipped_sum(batch, max_grad_norm=1.0)  # the first batch is examined as well
    return count(lambda: engine.clipped_sum(batch, max_grad_norm=1.0))


@pytest.mark.parametrize(
    ("method", "length", "most"), [("lora", 64, 1.03), ("full", 64, 1.12), ("full", 128, 1.12)]
)
def test_G3_operations_beside_those_of_plain_training(
    method: str, length: int, most: float
) -> None:
    ratio = private_flops(dppeft.wrap(bert(), method), length) / plain_flops(method, length)
    assert 0.9 < ratio <= most


def test_G3_nothing_is_propagated_below_the_lowest_trained_layer() -> None:
    # In units of a d x d product per token, a layer costs 12 forward and 12 backward, but 9 where
    # its input's gradient is not asked for below query, key and value. Frozen weights cost nothing
    # more. LoRA everywhere: 24 forward, 12 + 9 backward; in the upper layer alone: 24 + 9, and
    # 33 / 45 = 0.73. Attention (half a unit in all) and LoRA itself change the third digit.
    model = dppeft.wrap(bert(), "lora")
    everywhere = private_flops(model, 64)
    model.get_submodule("base_model.model.bert.encoder.layer.0").requires_grad_(False)
    assert private_flops(model, 64) / everywhere == pytest.approx(33 / 45, abs=0.01)


if __name__ == "__main__":
    main(*sys.argv[1:])
