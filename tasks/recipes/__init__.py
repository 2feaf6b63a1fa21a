"""Settings of the papers and our own, as data: one file for each paper, read and checked here.

A file names its axes, such as method, model and task. Each combination of their entries is one
recipe; its settings are the file's own, then those of its entries in the order of the axes.

python -m tasks.run mnli --recipe yu2022-lora-roberta-large-mnli
"""

from __future__ import annotations

import difflib
import itertools
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import cache
from pathlib import Path
from typing import Any

from dppeft.errors import ArgumentError, DataError

FOLDER = Path(__file__).parent
VERIFIED = ("S", "C")  # read in a primary source; computed. Anything else is shown as unverified.


@dataclass(frozen=True, kw_only=True)
class Check:
    """A number that the plan of a recipe must give, within 2 %.

    Attributes:
        epsilon: under ``accountant`` at ``delta``; or
        noise_multiplier: that calibration must find.
        accountant: "pld" or "rdp"; empty: the recipe's.
        delta: 0: the recipe's.
        tag: where the number is from.
    """

    epsilon: float | None = None
    noise_multiplier: float | None = None
    accountant: str = ""
    delta: float = 0.0
    tag: str = "C"


@dataclass(frozen=True, kw_only=True)
class Reported:
    """A figure of the paper."""

    metric: str
    value: float
    epsilon: float | None = None  # the paper's own; None: without privacy
    tag: str = "R"

    @property
    def verified(self) -> bool:
        """Whether it was read in a primary source, or computed."""
        return self.tag in VERIFIED


@dataclass(frozen=True, kw_only=True)
class PaperRecipe:
    """Everything that a run needs, and what came of it in the paper.

    Privacy: ``noise_multiplier`` or ``epsilon`` with ``accountant``; ``schedule_of_batches`` gives
    (first step, expected batch size) where the batch grows. ``options`` go to ``dppeft.wrap``.
    """

    name: str
    source: str
    task: str
    model: str
    method: str
    num_examples: int
    batch_size: int
    delta: float
    max_grad_norm: float
    lr: float
    epochs: float | None = None
    steps: int | None = None
    epsilon: float | None = None
    noise_multiplier: float | None = None
    accountant: str = "pld"
    clipping: str = "flat"
    objective: str = "head"
    head_steps: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)
    head_lr: float | None = None
    optimizer: str = "adam"
    betas: Sequence[float] = (0.9, 0.999)
    weight_decay: float = 0.0
    schedule: str = "linear"
    warmup: float = 0.0
    momentum: float = 0.0
    label_smoothing: float = 0.0
    max_length: int = 128
    bare_layers: float = 0.0
    decoding: Mapping[str, Any] = field(default_factory=dict)
    batches: Sequence[Sequence[int]] = ()
    note: str = ""
    checks: Sequence[Check] = ()
    reported: Sequence[Reported] = ()

    def budget(self, *, epsilon: float | None, delta: float | None) -> dict[str, Any]:
        """What is spent: as on the command line where it says something, else as here."""
        return {
            "epsilon": self.epsilon if epsilon is None else epsilon,
            "noise_multiplier": self.noise_multiplier if epsilon is None else None,
            "delta": self.delta if delta is None else delta,
            "accountant": self.accountant,
        }

    def training(self) -> dict[str, Any]:
        """What ``tasks.common.Recipe`` calls its settings of training, of those given here."""
        if self.optimizer not in ("adam", "adamw") or self.batches or self.epochs is None:
            raise ArgumentError(f"{self.name} is no recipe of a classifier or of texts.")
        return {
            "epochs": self.epochs,
            "batch_size": self.batch_size,
            "max_length": self.max_length,
            "lr": self.lr,
            "head_lr": self.head_lr or self.lr,
            "head_steps": self.head_steps,
            "bare_layers": self.bare_layers,
            "max_grad_norm": self.max_grad_norm,
            "clipping": self.clipping,
            "label_smoothing": self.label_smoothing,
            "schedule": self.schedule,
            "warmup": self.warmup,
            "weight_decay": self.weight_decay,
            "betas": tuple(self.betas),
        }

    def plan(self, num_examples: int | None = None) -> Any:
        """Its plan on the paper's number of rows, or on another."""
        import dppeft

        rows = num_examples or self.num_examples
        schedule = None
        if self.batches:
            assert self.steps is not None
            pairs = [(first, size) for first, size in self.batches]
            schedule = dppeft.schedules.steps(pairs, self.steps)
        return dppeft.plan(
            num_examples=rows,
            batch_size=self.batch_size,
            epochs=None if schedule else self.epochs,
            steps=None if schedule or self.epochs else self.steps,
            epsilon=self.epsilon,
            noise_multiplier=self.noise_multiplier,
            delta=self.delta,
            max_grad_norm=self.max_grad_norm,
            accountant=self.accountant,
            batch_schedule=schedule,
        )


def names() -> list[str]:
    """All recipes."""
    return sorted(_all())


def recipe(name: str, *, task: str | None = None) -> PaperRecipe:
    """The recipe of that name.

    Raises:
        ArgumentError: there is none (the nearest is named), or it is not of ``task``.
    """
    if name not in _all():
        near = difflib.get_close_matches(name, _all(), n=1, cutoff=0.4)
        hint = f" Did you mean {near[0]!r}?" if near else ""
        raise ArgumentError(f"Unknown recipe {name!r}.{hint} `python -m tasks.recipes` lists them.")
    found = _all()[name]
    if task is not None and found.task != task:
        raise ArgumentError(
            f"Recipe {name} is for {found.task}, not for {task}. Start it with "
            f"`python -m tasks.run {found.task} --recipe {name}`."
        )
    return found


@cache
def _all() -> dict[str, PaperRecipe]:
    found: dict[str, PaperRecipe] = {}
    for path in sorted(FOLDER.glob("*.toml")):
        for one in read(path):
            if one.name in found:
                raise DataError(f"{path.name}: recipe {one.name!r} is there twice.")
            found[one.name] = one
    return found


def read(path: Path) -> Iterator[PaperRecipe]:
    """All recipes of a file.

    Raises:
        DataError: no TOML, an unknown or missing setting.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
        axes = table["axes"]
        chosen = [
            dict(zip(axes, keys, strict=True))
            for keys in itertools.product(*(table[axis] for axis in axes))
        ]
        for entry in [*table.get("check", []), *table.get("reported", [])]:
            if not any(_fits(entry, keys) for keys in chosen):
                raise KeyError(f"{entry} is of no recipe")
        for keys in chosen:
            yield _one(table, keys)
    except (tomllib.TOMLDecodeError, KeyError, TypeError) as error:
        raise DataError(f"{path.name} holds no recipes: {type(error).__name__}: {error}") from error


def _fits(entry: Mapping[str, Any], chosen: Mapping[str, str]) -> bool:
    return all(entry.get(axis, key) == key for axis, key in chosen.items())


def _one(table: Mapping[str, Any], chosen: Mapping[str, str]) -> PaperRecipe:
    """The recipe at one entry of each axis."""
    settings = dict(table.get("settings", {}))
    for axis, key in chosen.items():
        named = {axis: key} if axis in _SETTINGS else {}  # [model.gpt2] alone names the model
        settings |= {**named, **table[axis][key]}
    if unknown := settings.keys() - _SETTINGS:
        raise KeyError(f"unknown settings {sorted(unknown)}")
    checks, reported = (
        [
            kind(**{name: value for name, value in entry.items() if name not in chosen})
            for entry in table.get(of, [])
            if _fits(entry, chosen)
        ]
        for of, kind in (("check", Check), ("reported", Reported))
    )
    return PaperRecipe(
        name="-".join([table["prefix"], *chosen.values()]),
        source=table["source"],
        checks=checks,
        reported=reported,
        **settings,
    )


_SETTINGS = {one.name for one in fields(PaperRecipe)}
