"""Several methods, budgets and start values on one task, for the table of results.

python -m tasks.sweep movie_reviews --method lora --method rgp --epsilon 8 --seeds 3 \
    --no-privacy --result tasks/results/movie_reviews.json

What is measured is written after each run, and what the file holds is not run again: a sweep may be
interrupted. The frozen encoder's features are computed once for all runs.
"""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from transformers import logging

import dppeft
from tasks.classifying import Work
from tasks.common import Recipe
from tasks.results import Result, read_file, write_results
from tasks.settings import (
    Settings,
    check_names,
    inputs_of,
    model_name,
    one_line_errors,
    task_of,
    words_of,
)
from tasks.training import without_privacy

DELTA = 1e-5

app = typer.Typer(add_completion=False)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One run. ``epsilon`` is None without privacy."""

    method: str
    epsilon: float | None
    seed: int  # of the start values; draws and noise have none

    def is_in(self, results: Sequence[Result], command: str, model: str) -> bool:
        """Whether it was measured, with the same command on the same model."""
        mine = (self.method, self.epsilon, self.seed, command, model)
        return mine in [(r.method, r.epsilon, r.seed, r.command, r.model) for r in results]


def settings_of(
    methods: Sequence[str], epsilons: Sequence[float], seeds: int, *, no_privacy: bool
) -> Iterator[Setting]:
    """All runs: every seed at the first epsilon, the first seed at the others."""
    for method in methods:
        for number, epsilon in enumerate(epsilons):
            for seed in range(1 if number else seeds):
                yield Setting(method=method, epsilon=epsilon, seed=seed)
        if no_privacy:
            yield Setting(method=method, epsilon=None, seed=0)


def one(given: Settings, setting: Setting, console: Console, features: Any) -> tuple[Work, Any]:
    """Trains once; what was prepared, with the frozen encoder's features, and what came of it."""
    recipe = dict(given.recipe)
    if recipe["lr"] is not None:  # LoRA's: the other methods' follow from it, as by default
        recipe["lr"] = Recipe(lr=recipe["lr"]).for_method(setting.method).lr
    budget = float("inf") if setting.epsilon is None else setting.epsilon
    settings = replace(given, method=setting.method, epsilon=budget, recipe=recipe)
    work = Work.of(settings, console, dict(given.engine_options))
    work.features = features
    torch.manual_seed(setting.seed)  # of the start values, which are public
    plan = without_privacy(work.plan) if setting.epsilon is None else work.plan
    title = "no privacy" if setting.epsilon is None else f"{setting.epsilon:g}"
    return work, work.train(plan, f"{setting.method}, {title}")


def results_of(
    given: Settings, setting: Setting, work: Work, trained: Any, command: str
) -> Iterator[Result]:
    """One for each set of rows to report on."""
    model, done = trained
    with tempfile.TemporaryDirectory() as folder:
        dppeft.export(model, folder, spent=done.run.card())
        shared = sum(file.stat().st_size for file in Path(folder).rglob("*") if file.is_file())
    for rows in work.task.evaluation:
        several = len(work.task.evaluation) > 1
        yield Result(
            task=f"{work.task.name} ({rows.name})" if several else work.task.name,
            model=model_name(given),
            method=setting.method,
            epsilon=setting.epsilon,
            seed=setting.seed,
            metric="accuracy",
            value=work.accuracy(model, rows),
            trained_parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
            examples_per_second=done.examples_per_second,
            seconds=done.seconds,
            private_rows=len(work.task.train),
            bytes_shared=shared,
            delta=None if setting.epsilon is None else work.plan.delta,
            command=command,
        )


def command_of(given: Settings) -> str:
    """The command line of a sweep, without its methods and budgets: each result has its own."""
    said = inputs_of(given) | task_of(given) | {"rows": given.rows, **given.recipe}
    said["delta"] = given.delta if given.delta != DELTA else None
    return f"python -m tasks.sweep {given.task} {words_of(said)}".rstrip()


@app.command()
def main(
    task: Annotated[str, typer.Argument(help="As in tasks.run; a task of classification.")],
    method: Annotated[list[str], typer.Option(help="One or more.")],
    result: Annotated[Path, typer.Option(help="JSON file; what it holds is kept.")],
    epsilon: Annotated[
        list[float] | None, typer.Option(help="Budgets, the main one first.")
    ] = None,
    seeds: Annotated[int, typer.Option(help="Start values at the first epsilon.")] = 1,
    no_privacy: Annotated[bool, typer.Option(help="Each once without privacy, too.")] = False,
    delta: Annotated[float, typer.Option(help="Below 1 / number of rows.")] = DELTA,
    data: Annotated[Path | None, typer.Option(help="Folder of local files.")] = None,
    model: Annotated[str | None, typer.Option(help="Base model.")] = None,
    rows: Annotated[int | None, typer.Option(help="Use only so many private rows.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Expected visits per row.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Expected logical batch.")] = None,
    lr: Annotated[float | None, typer.Option(help="Rate of LoRA; the others' follow.")] = None,
    objective: Annotated[str, typer.Option(help="head or infilling.")] = "head",
    template: Annotated[str | None, typer.Option(help="'{text} It was {mask}.'")] = None,
    label_word: Annotated[list[str] | None, typer.Option(help="One per class, in order.")] = None,
) -> None:
    """Run them one after another."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    recipe = {"epochs": epochs, "batch_size": batch_size, "lr": lr}
    given = Settings(
        task=task,
        method="lora",
        epsilon=0.0,
        delta=delta,
        compare=False,
        data=data,
        model=model,
        output=Path(),
        sentences=(),
        rows=rows,
        objective=objective,
        template=template,
        label_words=label_word,
        recipe=recipe,
    )
    command = command_of(given)
    console = Console(soft_wrap=True, highlight=False)
    found = list(read_file(result)) if result.exists() else []
    with one_line_errors():
        check_names(task, method)
        features = None
        for setting in settings_of(method, epsilon or [8.0], seeds, no_privacy=no_privacy):
            if setting.is_in(found, command, model_name(given)):
                continue
            work, trained = one(given, setting, console, features)
            features = work.features
            found += results_of(given, setting, work, trained, command)
            write_results(result, found)
            console.print(f"{setting.method}, {setting.epsilon}: {found[-1].value:.3f}")


if __name__ == "__main__":
    app()
