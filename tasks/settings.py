"""What the command line says of a run, and what a recipe says where the command line is silent."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import shlex
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer

from dppeft.errors import ArgumentError, DppeftError

# Tasks of classification, each a module of this package.
TASKS = ("movie_reviews", "sst2", "mnli", "qnli", "qqp")


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """A user's mistake ends the command with one line on standard error and exit code 2."""
    try:
        yield
    except DppeftError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from error


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the command line said."""

    task: str
    method: str
    epsilon: float | None
    delta: float
    compare: bool
    data: Path | None
    model: str | None
    output: Path
    sentences: Sequence[str]
    rows: int | None
    result: Path | None = None
    paper: str = ""  # name of the recipe that the settings are from
    objective: str = "head"
    template: str | None = None
    label_words: list[str] | None = None
    noise_multiplier: float | None = None  # instead of epsilon
    accountant: str = "pld"
    options: Mapping[str, Any] = field(default_factory=dict)  # of dppeft.wrap
    engine_options: dict[str, Any] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)


_OPTIONS = ("epochs", "batch_size", "max_length", "lr", "head_lr", "max_grad_norm", "clipping")


def command_of(settings: Settings) -> str:
    """The command line that makes such a run again."""
    said: dict[str, Any] = {"recipe": settings.paper} if settings.paper else {}
    said |= inputs_of(settings) | {"method": settings.method, "epsilon": settings.epsilon}
    said |= task_of(settings)
    said |= {name: settings.recipe.get(name) for name in _OPTIONS} | {"rows": settings.rows}
    return f"python -m tasks.run {settings.task} {words_of(said)}"


def inputs_of(settings: Settings) -> dict[str, Any]:
    """Data and model. Where they lie on this machine helps nobody: names only."""
    named = Path(settings.model).name if settings.model else None
    return {"data": "FOLDER" if settings.data else None, "model": named}


def task_of(settings: Settings) -> dict[str, Any]:
    """Head or infilling; with the template and the label words where they are one's own."""
    if settings.objective == "head":
        return {}
    said = {"objective": settings.objective, "template": settings.template}
    return said | {"label_word": settings.label_words}


def words_of(said: Mapping[str, Any]) -> str:
    """Options as they are typed; what is None or False is left out, a list repeats its option."""
    words = []
    for name, value in said.items():
        for one in value if isinstance(value, list | tuple) else [value]:
            if one is None or one is False:
                continue
            flag = f"--{name.replace('_', '-')}"
            typed = f"{one:.15g}" if isinstance(one, float) else shlex.quote(str(one))
            words.append(flag if one is True else f"{flag} {typed}")
    return " ".join(words)


def with_paper(
    settings: Settings,
    name: str,
    *,
    method: str | None,
    epsilon: float | None,
    delta: float | None = None,
    objective: str | None = None,
) -> Settings:
    """The settings of a recipe, wherever the command line says nothing else.

    Args:
        settings: as the command line said; ``recipe`` holds None for what it did not say.
        name: of the recipe.
        method: on the command line, or None.
        epsilon: on the command line, or None.
        delta: on the command line, or None.
        objective: on the command line, or None.

    Raises:
        ArgumentError: no such recipe, or one of another task.
    """
    from tasks.recipes import recipe

    paper = recipe(name, task=settings.task)
    given = {key: value for key, value in settings.recipe.items() if value is not None}
    return dataclasses.replace(
        settings,
        paper=name,
        method=method or paper.method,
        model=settings.model or (None if paper.model == "minilm" else paper.model),
        **paper.budget(epsilon=epsilon, delta=delta),
        objective=objective or paper.objective,
        options=paper.options if method in (None, paper.method) else {},
        recipe={**paper.training(), **given},
    )


def stated_epsilon(plan: Any) -> float:
    """The budget, or what the noise comes to where none was set."""
    return plan.epsilon() if plan.target_epsilon is None else plan.target_epsilon


def new_folder(task: str, of: str) -> Path:
    """Where a run's result goes when nothing is said."""
    return Path("runs") / f"{task}-{of}-{time.strftime('%Y%m%d-%H%M%S')}"


def model_name(settings: Settings) -> str:
    """Of the base model, for the table."""
    return Path(settings.model).name if settings.model else "MiniLM-L6"


def check_names(task: str, methods: Sequence[str]) -> None:
    """An unknown name is an error, with the names there are or the nearest one."""
    from dppeft.tuners import registry

    if task not in TASKS:
        raise ArgumentError(f"Unknown task {task!r}. Tasks: {', '.join(TASKS)}.")
    for method in methods:
        registry.info(method)


def check_before_loading(settings: Settings) -> None:
    """What can be refused before anything is read."""
    if settings.epsilon is not None and math.isinf(settings.epsilon):
        raise ArgumentError(
            "--epsilon inf would train without privacy under a private run's name. Give a budget; "
            "--compare adds the same run without privacy."
        )
    check_names(settings.task, [settings.method])
    if settings.objective == "head" and (settings.template or settings.label_words):
        raise ArgumentError("A head takes no template or label words: add --objective infilling.")
    if settings.output.exists() and any(settings.output.iterdir()):
        raise ArgumentError(f"--output {settings.output} is not empty. Name a new folder.")
    if settings.rows is not None and settings.rows < 1:
        raise ArgumentError(f"Expected --rows >= 1, got {settings.rows}.")
