"""E2E: a restaurant's properties -> a sentence about it (Novikova et al., 2017).

``--data`` is a folder with ``e2e_test.txt`` and ``e2e_train.txt`` (42,061 rows) or, for a run that
two processor cores finish, ``e2e_valid.txt`` alone (4,672 rows); lines are
``meaning representation||reference``. A representation has about eight references, each a row of
its own: the unit of privacy is one of them. Reported on the test file, all references of a
representation together.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from dppeft.errors import DataError
from tasks.common import Recipe, first_file
from tasks.generation import Decoding
from tasks.pairs import GenerationTask, Pairs, needed_folder, references_of

TRAIN, VALID, TEST = "e2e_train.txt", "e2e_valid.txt", "e2e_test.txt"

# Li et al. (2022, arXiv 2110.05679) for full fine-tuning of GPT-2. Their rate is constant; here it
# falls linearly to 0, as in every task.
RATED = ("full", "lora")  # LoRA has the same rate here
RECIPE = Recipe(epochs=10, batch_size=1024, max_length=100, lr=2e-3, max_grad_norm=0.1)
# The same threshold on the rows of VALID with SmolLM2, sized for two cores and 25 minutes. Of its
# layers the upper half is adapted: 1.4 rows a second on one core. The rate, for steps so few, was
# compared on 40 of the rows, with batches of 32 and the noise that the mean gradient has here:
# their loss was 2.41 at 2e-3, 2.00 at 6e-3, 1.81 at 1.5e-2 (3.09 untrained). That search is in no
# account: for rows that are really private, take the rate as it is.
SMALL = Recipe(
    epochs=0.2, batch_size=128, max_length=100, lr=1.5e-2, max_grad_norm=0.1, bare_layers=0.5
)
# Beams as in Li et al.; length penalty and n-gram rule as in Yu et al. (2022, arXiv 2110.06500).
DECODING = Decoding(num_beams=5, max_new_tokens=64, length_penalty=0.8, no_repeat_ngram_size=4)
SMALL_DECODING = replace(DECODING, num_beams=3, max_new_tokens=48)
SMALL_EVALUATION = 64  # sources


def load(data: Path | None = None) -> GenerationTask:
    """The task from the files in ``data``."""
    folder = needed_folder(data, f"{TEST} and {TRAIN} or {VALID}")
    path = first_file(folder, [TRAIN, VALID])
    whole = path.name == TRAIN
    return GenerationTask(
        name="e2e" if whole else "e2e, validation rows only",
        train=read_lines(path),
        evaluation=references_of(read_lines(first_file(folder, [TEST]))),
        recipe=RECIPE if whole else SMALL,
        rated=RATED if whole else ("lora",),
        decoding=DECODING if whole else SMALL_DECODING,
        eval_rows=None if whole else SMALL_EVALUATION,
    )


def read_lines(path: Path) -> Pairs:
    """The rows of one file. Empty lines are passed over.

    Raises:
        DataError: a line is not of the form ``source||target``, or there is none.
    """
    lines = path.read_text(encoding="utf-8").split("\n")
    sources, targets = [], []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        parts = [part.strip() for part in line.split("||")]
        if len(parts) != 2 or not all(parts):
            raise DataError(
                f"Line {number} of {path} is not of the form `meaning representation||reference`, "
                "with text on both sides of one `||`. Correct it, or take it out."
            )
        sources.append(parts[0])
        targets.append(parts[1])
    if not sources:
        raise DataError(f"{path} has no rows. Expected lines `meaning representation||reference`.")
    return Pairs(name=path.name, sources=sources, targets=targets)
