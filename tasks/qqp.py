"""QQP: do two questions ask the same? 363,846 private rows, 40,430 to report on.

``--data`` is a folder with the official ``train.tsv`` and ``dev.tsv`` of GLUE, or with
``qqp_train.tsv`` and ``qqp_dev.tsv``; without it, the hub's ``nyu-mll/glue``.
"""

from __future__ import annotations

from pathlib import Path

from tasks.common import Recipe, Task, first_file, hub_rows, read_table, rows_from

CLASSES = ("not_duplicate", "duplicate")
LABEL_WORDS = ("no", "yes")  # with the template: Li et al. (2022)
TEMPLATE = "{text:cut} {mask}, {pair:lower}"

RECIPE = Recipe(epochs=18, batch_size=6000, max_length=128)


def load(data: Path | None = None) -> Task:
    """The task from local files, or from the hub when ``data`` is None."""
    if data is None:
        columns = ("question1", "question2", "label")
        train, dev = (
            hub_rows("nyu-mll/glue", "qqp", split, columns=columns)
            for split in ("train", "validation")
        )
    else:
        train, dev = (
            rows_from(
                f"QQP {split}",
                read_table(first_file(data, [f"qqp_{split}.tsv", f"{split}.tsv"])),
                text="question1",
                pair="question2",
                label="is_duplicate",
                classes=CLASSES,
            )
            for split in ("train", "dev")
        )
    return Task(name="qqp", train=train, evaluation=[dev], classes=CLASSES, recipe=RECIPE)
