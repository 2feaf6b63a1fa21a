"""QNLI: does the sentence answer the question? 104,743 private rows, 5,463 to report on.

``--data`` is a folder with the official ``train.tsv`` and ``dev.tsv`` of GLUE, or with
``qnli_train.tsv`` and ``qnli_dev.tsv``; without it, the hub's ``nyu-mll/glue``.
"""

from __future__ import annotations

from pathlib import Path

from tasks.common import Recipe, Task, first_file, hub_rows, read_table, rows_from

CLASSES = ("entailment", "not_entailment")
LABEL_WORDS = ("yes", "no")  # with the template: Li et al. (2022)
TEMPLATE = "{text:cut}? {mask}, {pair:lower}"

RECIPE = Recipe(epochs=6, batch_size=2000, max_length=128)


def load(data: Path | None = None) -> Task:
    """The task from local files, or from the hub when ``data`` is None."""
    if data is None:
        columns = ("question", "sentence", "label")
        train, dev = (
            hub_rows("nyu-mll/glue", "qnli", split, columns=columns)
            for split in ("train", "validation")
        )
    else:
        train, dev = (
            rows_from(
                f"QNLI {split}",
                read_table(first_file(data, [f"qnli_{split}.tsv", f"{split}.tsv"])),
                text="question",
                pair="sentence",
                label="label",
                classes=CLASSES,
            )
            for split in ("train", "dev")
        )
    return Task(name="qnli", train=train, evaluation=[dev], classes=CLASSES, recipe=RECIPE)
