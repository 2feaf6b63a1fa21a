"""Examples per second: a private step against four ways of making the same passes."""

from __future__ import annotations

import statistics
import tempfile
from typing import Any

import torch
from opacus import PrivacyEngine
from opacus.utils.batch_memory_manager import BatchMemoryManager
from torch.utils.data import DataLoader
from transformers import Trainer, TrainingArguments

import dppeft
from dppeft.text import TokenDataset, collator_for
from tests.bench.measuring import Work, compared, interleaved, speed_ratio
from tests.bench.rows import (
    PHYSICAL_ROWS,
    load_model,
    load_rows,
    load_tokenizer,
    sorted_batches,
    trained,
)

# Contestant, and the least that a private step should reach against it.
TARGETS = {
    "transformers.Trainer, float32, batch 32": ("ours_float32", 2.2),
    "Opacus hooks + BatchMemoryManager, batch 32": ("ours_float32", 2.2),
    "non-private PEFT forward+backward, same sorted batches": ("ours_float32", 0.90),
    "transformers.Trainer, its defaults": ("ours_auto", 4.0),
}


def measure(rows: int, repeats: int) -> dict[str, Any]:
    """Medians of interleaved passes, in seconds of processor time, and their ratios."""
    name, dataset = load_rows(rows)
    contestants: dict[str, Work] = {
        "ours_float32": _ours(dataset, "float32"),
        "ours_auto": _ours(dataset, "auto"),
        "transformers.Trainer, float32, batch 32": _trainer(dataset, PHYSICAL_ROWS),
        "transformers.Trainer, its defaults": _trainer(dataset, None),
        "Opacus hooks + BatchMemoryManager, batch 32": _opacus(dataset),
        "non-private PEFT forward+backward, same sorted batches": _limit(dataset),
    }
    times = interleaved(contestants, repeats)
    return {
        "about": f"LoRA, on {len(dataset):,} rows of {name}",
        "threads": torch.get_num_threads(),
        "measured": {
            key: {"examples/s": len(dataset) / statistics.median(values)}
            for key, values in times.items()
        },
        "ratios": {
            key: {**compared(speed_ratio(times[ours], times[key]), target), "of": ours}
            for key, (ours, target) in TARGETS.items()
        },
    }


def _ours(dataset: TokenDataset, precision: str) -> Work:
    """Every row drawn (rate 1), clipped, summed, noised, applied: one whole private update."""
    model = load_model()
    plan = dppeft.plan(
        num_examples=len(dataset),
        batch_size=len(dataset),
        steps=1000,
        delta=1e-6,
        noise_multiplier=1.0,
    )
    run = dppeft.make_private(
        model,
        torch.optim.SGD(trained(model), lr=1e-4),
        dataset,
        plan,
        collate_fn=collator_for(load_tokenizer()),
        precision=precision,
        ledger=f"{tempfile.mkdtemp()}/ledger.jsonl",
    )
    batches = run.batches()
    return lambda: run.step(next(batches))


def _trainer(dataset: TokenDataset, batch_size: int | None) -> Work:
    """One epoch of the ordinary, non-private trainer."""
    size = {} if batch_size is None else {"per_device_train_batch_size": batch_size}
    trainer = Trainer(
        model=load_model(),
        args=TrainingArguments(
            output_dir=tempfile.mkdtemp(),
            num_train_epochs=1,
            report_to=[],
            save_strategy="no",
            logging_strategy="no",
            disable_tqdm=True,
            use_cpu=True,
            **size,
        ),
        train_dataset=dataset,
        data_collator=collator_for(load_tokenizer()),
    )
    return lambda: trainer.train() and None


def _opacus(dataset: TokenDataset) -> Work:
    """Opacus as its documentation says: its hooks, physical batches of 32, one logical batch."""
    model = load_model()
    loader = DataLoader(
        dataset, batch_size=len(dataset), collate_fn=collator_for(load_tokenizer()), shuffle=True
    )
    model, optimizer, loader = PrivacyEngine().make_private(
        module=model,
        optimizer=torch.optim.SGD(trained(model), lr=1e-4),
        data_loader=loader,
        noise_multiplier=1.0,
        max_grad_norm=1.0,
        poisson_sampling=False,
    )

    def work() -> None:
        with BatchMemoryManager(
            data_loader=loader, max_physical_batch_size=PHYSICAL_ROWS, optimizer=optimizer
        ) as physical:
            for batch in physical:
                optimizer.zero_grad()
                model(**batch).loss.backward()
                optimizer.step()

    return work


def _limit(dataset: TokenDataset) -> Work:
    """Forward and backward alone, on the batches and with the attention that a private step has."""
    model = load_model(attention="eager")
    batches = sorted_batches(dataset)

    def work() -> None:
        for batch in batches:
            model(**batch).loss.backward()
        model.zero_grad()

    return work
