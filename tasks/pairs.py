"""Rows of a generation task: a source and one target each, and all the references of a source."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path

from dppeft.errors import DataError
from tasks.common import Recipe
from tasks.generation import Decoding


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """Sources and targets, one of each per row. A source may have several rows."""

    name: str
    sources: Sequence[str]
    targets: Sequence[str]

    def __len__(self) -> int:
        """How many rows."""
        return len(self.sources)

    def some(self, count: int | None) -> Pairs:
        """So many rows, the same ones each time; all where ``count`` is None or larger."""
        kept = _chosen(
            [f"{s}\n{t}" for s, t in zip(self.sources, self.targets, strict=True)], count
        )
        return replace(
            self,
            sources=[self.sources[i] for i in kept],
            targets=[self.targets[i] for i in kept],
        )


@dataclass(frozen=True, kw_only=True)
class References:
    """Distinct sources and, for each, every text that was written for it."""

    name: str
    sources: Sequence[str]
    texts: Sequence[Sequence[str]]

    def __len__(self) -> int:
        """How many sources."""
        return len(self.sources)

    def some(self, count: int | None) -> References:
        """So many sources, the same ones each time; all where ``count`` is None or larger."""
        kept = _chosen(self.sources, count)
        return replace(
            self, sources=[self.sources[i] for i in kept], texts=[self.texts[i] for i in kept]
        )


@dataclass(frozen=True, kw_only=True)
class GenerationTask:
    """A data set ready to train on: private rows, sources to write for, how to train and decode.

    ``eval_rows`` is how many of the sources are written for when the command line says nothing
    else; None: all. The recipe's rate is that of the methods in ``rated``; the others' follow from
    LoRA's.
    """

    name: str
    train: Pairs
    evaluation: References
    recipe: Recipe
    decoding: Decoding
    eval_rows: int | None = None
    rated: Sequence[str] = ("lora",)


def _chosen(texts: Sequence[str], count: int | None) -> list[int]:
    """Indices of ``count`` texts, picked by their hash and kept in order.

    Files are sorted by what they speak about: their first lines would be all of one kind.
    """
    order = sorted(range(len(texts)), key=lambda i: sha256(texts[i].encode()).digest())
    return sorted(order[:count])


def references_of(pairs: Pairs) -> References:
    """The rows grouped by source, in the order in which sources appear first."""
    groups: dict[str, list[str]] = {}
    for source, target in zip(pairs.sources, pairs.targets, strict=True):
        groups.setdefault(source, []).append(target)
    return References(name=pairs.name, sources=list(groups), texts=list(groups.values()))


def needed_folder(data: Path | None, what: str) -> Path:
    """``--data``, which these tasks cannot do without.

    Raises:
        DataError: not given, or no folder.
    """
    if data is None:
        raise DataError(f"Pass --data with a folder that holds {what}.")
    if not data.is_dir():
        raise DataError(f"--data {data} is no folder. Pass one that holds {what}.")
    return data
