"""SST-2: is a phrase of a film review positive? 67,349 private rows, 872 to report on.

``--data`` is a folder with the official ``train.tsv`` and ``dev.tsv`` of GLUE, or with
``sst2_train.tsv`` and ``sst2_dev.tsv``; without it, the hub's ``nyu-mll/glue``.
"""

from __future__ import annotations

from pathlib import Path

from tasks.common import Recipe, Task, first_file, hub_rows, read_table, rows_from

CLASSES = ("negative", "positive")
LABEL_WORDS = ("terrible", "great")  # with the template: Li et al. (2022)
TEMPLATE = "{text} It was {mask}."

# Batch and epochs as in Li et al. (2022); rates for an adapter; two of six layers left bare, since
# the demo's encoder is trained on processors too.
RECIPE = Recipe(
    epochs=3,
    batch_size=1000,
    max_length=128,
    lr=1e-3,
    head_steps=20,
    bare_layers=1 / 3,
    max_grad_norm=1.0,
)


def load(data: Path | None = None) -> Task:
    """The task from local files, or from the hub when ``data`` is None."""
    if data is None:
        columns = ("sentence", None, "label")
        train, dev = (
            hub_rows("nyu-mll/glue", "sst2", split, columns=columns)
            for split in ("train", "validation")
        )
    else:
        train, dev = (
            rows_from(
                f"SST-2 {split}",
                read_table(first_file(data, [f"sst2_{split}.tsv", f"{split}.tsv"])),
                text="sentence",
                label="label",
                classes=CLASSES,
            )
            for split in ("train", "dev")
        )
    return Task(name="sst2", train=train, evaluation=[dev], classes=CLASSES, recipe=RECIPE)
