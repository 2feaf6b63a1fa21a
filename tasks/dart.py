"""DART: a set of triples -> a sentence that says them (Nan et al., 2021; version 1.1.1).

``--data`` is a folder with ``dart-v1.1.1-full-train.json`` and ``dart-v1.1.1-full-test.json`` or,
for a run that two processor cores finish, ``dart_dev.json`` alone: its triple sets are then split
by their hash, four fifths private and the rest to report on, so that no set is on both sides. Each
text of a set is a row of its own: the unit of privacy is one of them.
"""

from __future__ import annotations

import json
from hashlib import sha256
from pathlib import Path
from typing import Any

from dppeft.errors import DataError
from tasks import e2e
from tasks.common import Recipe, first_file
from tasks.pairs import GenerationTask, Pairs, needed_folder, references_of

TRAIN, TEST = "dart-v1.1.1-full-train.json", "dart-v1.1.1-full-test.json"
DEV = "dart_dev.json"
HELD_OUT = 5  # one in so many triple sets

# Li et al. (2022, arXiv 2110.05679) for full fine-tuning of GPT-2, with a rate that falls.
RECIPE = Recipe(epochs=15, batch_size=1024, max_length=120, lr=5e-4, max_grad_norm=0.1)
# For DEV with SmolLM2 on two cores, with the rate of tasks/e2e.py; rows are a fifth longer.
SMALL = Recipe(
    epochs=0.16, batch_size=128, max_length=120, lr=1.5e-2, max_grad_norm=0.1, bare_layers=0.5
)
DECODING = e2e.DECODING


def load(data: Path | None = None) -> GenerationTask:
    """The task from the files in ``data``."""
    folder = needed_folder(data, f"{TRAIN} and {TEST}, or {DEV}")
    path = first_file(folder, [TRAIN, DEV])
    whole = path.name == TRAIN
    rows = read_file(path)
    if whole:
        train, held_out = rows, read_file(first_file(folder, [TEST]))
    else:
        train, held_out = split(rows)
    return GenerationTask(
        name="dart" if whole else "dart, development rows only",
        train=train,
        evaluation=references_of(held_out),
        recipe=RECIPE if whole else SMALL,
        rated=e2e.RATED if whole else ("lora",),
        decoding=DECODING if whole else e2e.SMALL_DECODING,
        eval_rows=None if whole else e2e.SMALL_EVALUATION,
    )


def read_file(path: Path) -> Pairs:
    """One row for each text of each triple set.

    Raises:
        DataError: the file is no JSON list of such entries, or holds no text.
    """
    form = "a list of {tripleset: [[subject, relation, object], ...], annotations: [{text}, ...]}"
    try:
        entries = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise DataError(f"{path} is no JSON. Expected {form}.") from error
    sources, targets = [], []
    for number, entry in enumerate(entries if isinstance(entries, list) else []):
        try:
            source = as_text(entry["tripleset"])
            texts = [annotation["text"].strip() for annotation in entry["annotations"]]
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise DataError(f"Entry {number} (from 0) of {path} is not as in {form}.") from error
        kept = [text for text in texts if text]
        sources += [source] * len(kept)
        targets += kept
    if not sources:
        raise DataError(f"{path} has no rows. Expected {form}.")
    return Pairs(name=path.name, sources=sources, targets=targets)


def as_text(triples: Any) -> str:
    """``subject : relation : object | ...``, relations in lower case, in the order of the file."""
    if not triples:
        raise ValueError("a set without triples")
    return " | ".join(
        f"{subject} : {relation.lower()} : {value}" for subject, relation, value in triples
    )


def split(rows: Pairs) -> tuple[Pairs, Pairs]:
    """Private rows and held-out ones, by the hash of the triple set, whatever its order."""
    sets = ["\n".join(sorted(source.split(" | "))) for source in rows.sources]
    held_out = [int(sha256(one.encode()).hexdigest(), 16) % HELD_OUT == 0 for one in sets]
    parts = []
    for name, wanted in (("private part", False), ("held-out part", True)):
        kept = [i for i, out in enumerate(held_out) if out is wanted]
        parts.append(
            Pairs(
                name=f"{rows.name}, {name}",
                sources=[rows.sources[i] for i in kept],
                targets=[rows.targets[i] for i in kept],
            )
        )
    return parts[0], parts[1]
