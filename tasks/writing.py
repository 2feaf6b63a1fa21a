"""What a generation run does with a model: train it, let it write, score, show and share."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

import dppeft
from dppeft.errors import ArgumentError
from dppeft.text import TokenDataset
from tasks.decoders import lora_options
from tasks.generation import check_room, generate_texts, positions
from tasks.pairs import GenerationTask
from tasks.prompts import PromptRows, encode_pairs, encode_sources
from tasks.reporting import in_a_new_process, progress_bar
from tasks.results import NOT_TRAINED, Result, write_results
from tasks.scoring import official_scores, score
from tasks.training import Fit, adapted_layers, fit

if TYPE_CHECKING:
    from tasks.generating import Settings
SAMPLES = 3  # texts shown of each run


@dataclass(frozen=True, kw_only=True)
class Written:
    """What one model wrote, one text for each source to report on, and how good it is.

    ``private`` says whether the guarantee of the run holds for it; ``fit`` is None where nothing
    was trained.
    """

    title: str
    texts: Sequence[str]
    scores: dict[str, float]
    fit: Fit | None
    private: bool


@dataclass(frozen=True, kw_only=True)
class Work:
    """What all models of one run share."""

    console: Console
    settings: Settings
    task: GenerationTask
    tokenizer: Any
    accelerator: Any
    encoded: PromptRows
    prompts: Sequence[Sequence[int]]

    @classmethod
    def prepare(
        cls,
        *,
        console: Console,
        settings: Settings,
        task: GenerationTask,
        model: Any,
        tokenizer: Any,
        accelerator: Any,
    ) -> Work:
        """Tokens of all rows and sources; says how many rows were cut.

        Raises:
            ArgumentError: a prompt and its text, or a row, need more positions than ``model`` has.
        """
        prompts = encode_sources(tokenizer, task.evaluation.sources)
        check_room(model, prompts, task.decoding.max_new_tokens)
        room, needed = positions(model), task.recipe.max_length
        if room is not None and needed > room:
            raise ArgumentError(
                f"Expected --max-length of at most {room}, the positions of "
                f"{type(model).__name__}, got {needed}."
            )
        encoded = encode_pairs(tokenizer, task.train, max_length=task.recipe.max_length)
        console.print(
            f"rows cut to {task.recipe.max_length} tokens: {encoded.cut}, {encoded.without_target} "
            "of them without any target left, which add nothing (not private, for you only)"
        )
        return cls(
            console=console,
            settings=settings,
            task=task,
            tokenizer=tokenizer,
            accelerator=accelerator,
            encoded=encoded,
            prompts=prompts,
        )

    def train(self, model: Any, plan: Any, title: str) -> tuple[Any, Fit]:
        """The model, adapted and trained by the plan."""
        method, recipe = self.settings.method, self.task.recipe
        seed = self.settings.engine_options.get("seed")
        if seed is not None:
            torch.manual_seed(seed)  # of the adapter's start; draws and noise have the run's own
        options = {
            **adapted_layers(model, method, recipe),
            **lora_options(method),
            **self.settings.options,
        }
        wrapped = dppeft.wrap(model, method, **options).to(self.accelerator.device)
        with progress_bar(self.console, plan, title) as progress:
            done = fit(
                wrapped,
                TokenDataset(self.encoded.rows),
                plan,
                recipe,
                tokenizer=self.tokenizer,
                progress=progress,
                options={**self.settings.engine_options, "accelerator": self.accelerator},
            )
        self.console.print(
            f"{title}: {plan.steps} steps in {done.seconds:.0f} s, "
            f"{done.examples_per_second:.1f} examples/s"
        )
        return wrapped, done

    def write(self, model: Any, title: str, done: Fit | None, *, private: bool) -> Written:
        """A text for each source to report on, and its scores."""
        columns = (TextColumn(title), BarColumn(), TextColumn("text {task.completed}/{task.total}"))
        start = time.perf_counter()
        with Progress(*columns, TimeRemainingColumn(), console=self.console, transient=True) as bar:
            line = bar.add_task(title, total=len(self.prompts))
            texts = generate_texts(
                model,
                self.tokenizer,
                self.prompts,
                self.task.decoding,
                progress=lambda count: bar.update(line, completed=count),
            )
        seconds = time.perf_counter() - start
        self.console.print(f"{title}: {len(texts)} texts written in {seconds:.0f} s")
        scores = score(texts, self.task.evaluation.texts)
        if self.settings.scorer is not None:
            official, output = official_scores(
                self.settings.scorer, texts, self.task.evaluation.texts
            )
            self.console.print(output, markup=False)
            if not official:
                self.console.print(f"{self.settings.scorer} gave no scores: see above")
            scores |= {f"{name} (official)": value for name, value in official.items()}
        return Written(title=title, texts=texts, scores=scores, fit=done, private=private)


def report(console: Console, task: GenerationTask, runs: Sequence[Written]) -> None:
    """Scores of all runs side by side, samples, and the first run's BLEU on a line of its own."""
    evaluation = task.evaluation
    table = Table("on " + evaluation.name, *(run.title for run in runs))
    for metric in runs[0].scores:
        cells = (run.scores.get(metric) for run in runs)
        table.add_row(metric, *("" if value is None else f"{value:.3f}" for value in cells))
    console.print(table)
    if "METEOR" not in runs[0].scores:
        console.print("METEOR is left out: nltk finds no WordNet data here")
    for number, source in enumerate(evaluation.sources[:SAMPLES]):
        console.print(f"source: {source}", markup=False)
        console.print(f"  a reference: {evaluation.texts[number][0]}", markup=False)
        for run in runs:
            console.print(f"  {run.title}: {run.texts[number]}", markup=False)
    console.print(f"BLEU: {runs[0].scores['BLEU']:.2f} on {len(evaluation)} of {evaluation.name}")


def share(console: Console, settings: Settings, model: Any, run: Any) -> int:
    """Export, and say what is shared under which guarantee.

    Returns:
        The bytes shared.
    """
    spent = run.spent()
    dppeft.export(model, settings.output, spent=run.card() if settings.private else None)
    size = sum(path.stat().st_size for path in settings.output.rglob("*") if path.is_file())
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    guarantee = (
        f"under ({spent.epsilon:.2f}, {spent.delta:g})-DP for {spent.unit} ({spent.accountant}, "
        f"{spent.steps} steps)"
        if settings.private
        else "with no guarantee"
    )
    console.print(
        f"shared: {size:,} bytes in {settings.output} (the model: {whole:,}), {guarantee}"
    )
    return size


def read_back(console: Console, settings: Settings, task: GenerationTask) -> None:
    """What the shared folder writes about the first source, in a process that knows nothing else.

    Raises:
        ArgumentError: the folder could not be read back.
    """
    decoding = task.decoding
    printed = in_a_new_process(
        "tasks.write",
        *(settings.task, str(settings.output), "--model", settings.model),
        *("--beams", str(decoding.num_beams), "--max-new-tokens", str(decoding.max_new_tokens)),
        *("--", task.evaluation.sources[0]),
    )
    console.print("read back in a new process, the first source again:")
    console.print(printed, end="", markup=False)


def write_figures(
    settings: Settings, task: GenerationTask, runs: Sequence[Written], model: Any, size: int
) -> None:
    """One result for each run and metric. What was not trained has the method ``NOT_TRAINED``."""
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    epsilon = settings.epsilon
    if epsilon is None:  # the noise was given
        epsilon = next(run.fit.run.spent().epsilon for run in runs if run.private and run.fit)
    results = [
        Result(
            task=task.name,
            model=Path(settings.model).name,
            method=NOT_TRAINED if run.fit is None else settings.method,
            epsilon=epsilon if run.private else None,
            delta=settings.delta if run.private else None,
            metric=metric,
            value=value,
            trained_parameters=0 if run.fit is None else trained,
            examples_per_second=0.0 if run.fit is None else run.fit.examples_per_second,
            seconds=0.0 if run.fit is None else run.fit.seconds,
            private_rows=len(task.train),
            bytes_shared=size if run.private else None,
            seed=settings.engine_options.get("seed"),
            note=f"{len(task.evaluation)} sources, {task.decoding.num_beams} beams",
            command=settings.command,
            recipe=settings.paper,
        )
        for run in runs
        for metric, value in run.scores.items()
    ]
    write_results(settings.result, results)
