"""MNLI: does the first sentence imply the second, contradict it, or neither? 392,702 private rows.

``--data`` is a folder with the official ``train.tsv``, ``dev_matched.tsv`` and
``dev_mismatched.tsv`` of GLUE, or with ``mnli_train.tsv``, ``mnli_dev_matched.tsv`` and
``mnli_dev_mismatched.tsv`` (columns sentence1, sentence2, label). Where there is no training file,
the matched rows are the private ones and the result is on the mismatched rows: a smaller task, and
called so. Without ``--data``: the hub's ``nyu-mll/glue``.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from dppeft.errors import DataError
from tasks.common import Recipe, Rows, Task, first_file, hub_rows, read_table, rows_from

CLASSES = ("entailment", "neutral", "contradiction")
LABEL_WORDS = ("yes", "maybe", "no")  # with the template: Li et al. (2022)
TEMPLATE = "{text:cut}? {mask}, {pair:lower}"

RECIPE = Recipe(epochs=18, batch_size=6000, max_length=128)
SMALL_RECIPE = Recipe(epochs=10, batch_size=1024, max_length=128)  # 9,815 rows


def load(data: Path | None = None) -> Task:
    """The task from local files, or from the hub when ``data`` is None."""
    if data is None:
        columns = ("premise", "hypothesis", "label")
        splits = ("train", "validation_matched", "validation_mismatched")
        train, *dev = (hub_rows("nyu-mll/glue", "mnli", one, columns=columns) for one in splits)
        return _task("mnli", train, dev, RECIPE)
    matched, mismatched = _local(data, "dev_matched"), _local(data, "dev_mismatched")
    try:
        train = _local(data, "train")
    except DataError:
        return _task("mnli, matched rows only", matched, [mismatched], SMALL_RECIPE)
    return _task("mnli", train, [matched, mismatched], RECIPE)


def _task(name: str, train: Rows, evaluation: Sequence[Rows], recipe: Recipe) -> Task:
    return Task(
        name=name,
        train=train,
        evaluation=evaluation,
        classes=CLASSES,
        recipe=recipe,
    )


def _local(folder: Path, split: str) -> Rows:
    """One file; the official files call the label of all annotators ``gold_label``."""
    table = read_table(first_file(folder, [f"mnli_{split}.tsv", f"{split}.tsv"]))
    label = "gold_label" if table and "gold_label" in table[0] else "label"
    return rows_from(
        f"MNLI {split}", table, text="sentence1", pair="sentence2", label=label, classes=CLASSES
    )
