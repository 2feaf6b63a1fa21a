"""Train a language model privately to write texts, score what it writes, share the adapter.

A command for each generation task: ``generation`` takes the task's name from the command's own.

python -m tasks.run e2e --data FOLDER --epsilon 8 --zero-shot
"""

from __future__ import annotations

import dataclasses
import importlib
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from dppeft.errors import ArgumentError
from tasks.settings import new_folder, one_line_errors, words_of

if TYPE_CHECKING:
    from tasks.pairs import GenerationTask

TASKS = ("e2e", "dart")
NO_PRIVACY = "the same recipe without privacy"
SMOLLM2 = "smollm2"  # tasks.smollm2.NAME, which is loaded when it is asked for


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the command line said. An infinite ``epsilon`` trains without privacy."""

    task: str
    method: str
    epsilon: float | None
    delta: float
    data: Path | None
    model: str
    output: Path
    compare: bool = False
    zero_shot: bool = False
    rows: int | None = None
    eval_rows: int | None = None
    scorer: Path | None = None
    result: Path | None = None
    paper: str = ""  # name of the recipe that the settings are from
    noise_multiplier: float | None = None  # instead of epsilon
    accountant: str = "pld"
    options: Mapping[str, Any] = field(default_factory=dict)  # of dppeft.wrap
    engine_options: dict[str, Any] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)
    decoding: dict[str, Any] = field(default_factory=dict)

    @property
    def private(self) -> bool:
        """Whether the run has a budget. What is no number has one, and the plan refuses it."""
        return self.epsilon != math.inf

    @property
    def command(self) -> str:
        """The command line that makes such a run again."""
        names = {"num_beams": "beams"}
        said = {"data": "FOLDER", "model": Path(self.model).name, "method": self.method}
        said |= {"epsilon": self.epsilon, **self.recipe, **self.decoding}
        said |= {"rows": self.rows, "eval_rows": self.eval_rows}
        renamed = {names.get(name, name): value for name, value in said.items()}
        return f"python -m tasks.run {self.task} {words_of(renamed)}"


def generation(
    ctx: typer.Context,
    method: Annotated[str | None, typer.Option(help="`dppeft methods`; default: lora.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="Default: 8; inf: no privacy.")] = None,
    recipe: Annotated[str | None, typer.Option(help="See `python -m tasks.recipes`.")] = None,
    delta: Annotated[float | None, typer.Option(help="Default: 1e-5, or the recipe's.")] = None,
    compare: Annotated[bool, typer.Option(help="Train once more without privacy.")] = False,
    zero_shot: Annotated[bool, typer.Option(help="Score the untrained model, too.")] = False,
    data: Annotated[Path | None, typer.Option(help="Folder of local files.")] = None,
    model: Annotated[str | None, typer.Option(help="Folder or hub name; default: smollm2.")] = None,
    output: Annotated[Path | None, typer.Option(help="New folder for what is shared.")] = None,
    rows: Annotated[int | None, typer.Option(help="Use only so many private rows.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Expected visits per row.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Expected logical batch.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Tokens kept of a row.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    max_grad_norm: Annotated[float | None, typer.Option(help="Clipping threshold.")] = None,
    beams: Annotated[int | None, typer.Option(help="Beams of the search.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Most tokens of a text.")] = None,
    eval_rows: Annotated[int | None, typer.Option(help="Distinct sources to write for.")] = None,
    scorer: Annotated[Path | None, typer.Option(help="The challenge's measure_scores.py.")] = None,
    seed: Annotated[int | None, typer.Option(help="Reproducible, and marked so.")] = None,
    engine: Annotated[str, typer.Option(help="auto or opacus.")] = "auto",
    precision: Annotated[str, typer.Option(help="auto, float32 or bf16.")] = "auto",
    result: Annotated[Path | None, typer.Option(help="JSON file for the figures.")] = None,
) -> None:
    """Train a language model privately to write texts, and score them."""
    settings = Settings(
        task=str(ctx.info_name),
        method=method or "lora",
        epsilon=8.0 if epsilon is None else epsilon,
        delta=1e-5 if delta is None else delta,
        data=data,
        model=model or SMOLLM2,
        output=output or new_folder(str(ctx.info_name), recipe or method or "lora"),
        compare=compare,
        zero_shot=zero_shot,
        rows=rows,
        eval_rows=eval_rows,
        scorer=scorer,
        result=result,
        engine_options={"engine": engine, "precision": precision, "seed": seed},
        recipe={
            "epochs": epochs,
            "batch_size": batch_size,
            "max_length": max_length,
            "lr": lr,
            "max_grad_norm": max_grad_norm,
        },
        decoding={"num_beams": beams, "max_new_tokens": max_new_tokens},
    )
    with one_line_errors():
        if recipe is not None:
            said = {"method": method, "epsilon": epsilon, "model": model, "delta": delta}
            settings = with_paper(settings, recipe, said)
        run_generation(settings)


def with_paper(settings: Settings, name: str, said: Mapping[str, Any]) -> Settings:
    """The settings of a recipe wherever the command line, in ``said``, is silent."""
    from tasks.recipes import recipe

    paper = recipe(name, task=settings.task)
    given = {key: value for key, value in settings.recipe.items() if value is not None}
    decoding = {key: value for key, value in settings.decoding.items() if value is not None}
    return dataclasses.replace(
        settings,
        paper=name,
        method=said["method"] or paper.method,
        model=said["model"] or paper.model,
        **paper.budget(epsilon=said["epsilon"], delta=said.get("delta")),
        options=paper.options if said["method"] in (None, paper.method) else {},
        recipe={**paper.training(), **given},
        decoding={**paper.decoding, **decoding},
    )


def run_generation(settings: Settings) -> None:
    """The whole way: rows, plan, training, texts, scores, export, a process that reads it back."""
    check_before_loading(settings)
    from accelerate import Accelerator
    from transformers import logging

    from tasks.decoders import load_decoder
    from tasks.scoring import check_scoring
    from tasks.training import without_privacy
    from tasks.writing import Work, read_back, report, share, write_figures

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    accelerator = Accelerator()
    console = Console(quiet=not accelerator.is_main_process, soft_wrap=True, highlight=False)
    task = load_task(settings)
    check_scoring(task.evaluation.texts, settings.scorer)
    plan = make_plan(settings, task)
    print_plan(console, settings, task, plan)
    model, tokenizer = load_decoder(settings.model)
    work = Work.prepare(
        console=console,
        settings=settings,
        task=task,
        model=model,
        tokenizer=tokenizer,
        accelerator=accelerator,
    )
    main, runs = accelerator.is_main_process, []
    if settings.zero_shot and main:
        untrained = model.to(accelerator.device)
        runs.append(work.write(untrained, "zero-shot", None, private=False))
    title = f"private {settings.method}" if settings.private else NO_PRIVACY
    trained, done = work.train(model, plan, title)
    if main:
        runs.insert(0, work.write(trained, title, done, private=settings.private))
    if settings.compare and settings.private:
        other, unnoised = work.train(
            load_decoder(settings.model)[0], without_privacy(plan), NO_PRIVACY
        )
        if main:
            runs.append(work.write(other, NO_PRIVACY, unnoised, private=False))
    if main:
        report(console, task, runs)
        size = share(console, settings, trained, done.run)
        if settings.result is not None:
            write_figures(settings, task, runs, trained, size)
        read_back(console, settings, task)
    accelerator.wait_for_everyone()


def check_before_loading(settings: Settings) -> None:
    """What can be refused before anything is read."""
    from dppeft.tuners import registry

    if settings.task not in TASKS:
        raise ArgumentError(f"Unknown task {settings.task!r}. Tasks: {', '.join(TASKS)}.")
    registry.info(settings.method)  # an unknown name is an error, with the nearest one
    if settings.output.exists() and (settings.output.is_file() or any(settings.output.iterdir())):
        raise ArgumentError(f"--output {settings.output} is not empty. Name a new folder.")
    for name in ("rows", "eval_rows"):
        value = getattr(settings, name)
        if value is not None and value < 1:
            raise ArgumentError(f"Expected --{name.replace('_', '-')} >= 1, got {value}.")


def load_task(settings: Settings) -> GenerationTask:
    """The task, with what the command line changes."""
    from tasks.training import with_settings

    task = importlib.import_module(f"tasks.{settings.task}").load(settings.data)
    recipe = task.recipe
    if settings.method not in task.rated:
        recipe = recipe.for_method(settings.method)
    given = {name: value for name, value in settings.decoding.items() if value is not None}
    return dataclasses.replace(
        task,
        train=task.train.some(settings.rows),
        evaluation=task.evaluation.some(settings.eval_rows or task.eval_rows),
        recipe=with_settings(recipe, **settings.recipe),
        decoding=dataclasses.replace(task.decoding, **given),
    )


def make_plan(settings: Settings, task: GenerationTask) -> Any:
    """Rate, steps and noise of the run; no noise and no clipping where epsilon is infinite."""
    import dppeft

    recipe = task.recipe
    noise = (
        {
            "epsilon": settings.epsilon,
            "noise_multiplier": settings.noise_multiplier,
            "accountant": settings.accountant,
            "max_grad_norm": recipe.max_grad_norm,
        }
        if settings.private
        else {"noise_multiplier": 0.0, "max_grad_norm": 1e9}
    )
    return dppeft.plan(
        num_examples=len(task.train),
        batch_size=recipe.batch_size,
        steps=recipe.steps(len(task.train)),
        delta=settings.delta,
        **noise,
    )


def print_plan(console: Console, settings: Settings, task: GenerationTask, plan: Any) -> None:
    """All that will be spent, and on what, before it is."""
    recipe, decoding = task.recipe, task.decoding
    console.print(f"[bold]{task.name}[/bold]: {len(task.train)} private rows ({task.train.name})")
    console.print(
        f"model {settings.model}, method {settings.method}, clipping {recipe.clipping}, "
        f"{recipe.max_length} tokens a row, learning rate {recipe.lr:g}"
    )
    console.print(
        f"to report on: {len(task.evaluation)} sources of {task.evaluation.name}, "
        f"{decoding.num_beams} beams, at most {decoding.max_new_tokens} tokens a text"
    )
    console.print(plan.explain())
