"""How a run is shown while it goes on, and what is kept of it for the table."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from dppeft.errors import ArgumentError
from tasks.common import Task
from tasks.results import NOT_TRAINED, Result, write_results
from tasks.training import Fit


@contextlib.contextmanager
def progress_bar(console: Console, plan: Any, title: str) -> Iterator[Any]:
    """A bar of public facts only: steps, epsilon spent, expected examples per second."""
    columns = (
        TextColumn(title),
        BarColumn(),
        TextColumn("step {task.completed}/{task.total}"),
        TextColumn("epsilon {task.fields[epsilon]}"),
        TextColumn("{task.fields[speed]:.0f} examples/s"),
        TimeRemainingColumn(),
    )
    start = time.perf_counter()
    every = max(1, plan.steps // 10)  # composing the accountant takes longer than drawing a bar
    with Progress(*columns, console=console, transient=True) as bar:
        line = bar.add_task(title, total=plan.steps, epsilon="0.00", speed=0.0)

        def advance(step: int) -> None:
            speed = step * plan.expected_batch_size / (time.perf_counter() - start)
            bar.update(line, completed=step, speed=speed)
            if step % every == 0:
                epsilon = f"{plan.epsilon(steps=step):.2f}"
                bar.update(line, epsilon=epsilon)
                if not console.is_terminal:  # a log file shows no bar
                    console.print(
                        f"{title}: step {step}/{plan.steps}, epsilon {epsilon}, "
                        f"{speed:.0f} examples/s"
                    )

        yield advance


def in_a_new_process(module: str, *arguments: str) -> str:
    """What ``python -m module arguments`` prints, in a process that knows nothing of this run.

    Raises:
        ArgumentError: it failed.
    """
    # Names that a launcher set would make it wait for other ranks.
    launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {key: value for key, value in os.environ.items() if key not in launcher}
    command = [sys.executable, "-m", module, *arguments]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ArgumentError(f"The shared folder could not be read back: {done.stderr[-500:]}")
    return done.stdout


def write_figures(  # noqa: PLR0913 - all that a line of the table says
    path: Path,
    *,
    command: str,
    task: Task,
    method: str,
    epsilon: float,
    model_name: str,
    fits: Mapping[str, Fit],
    scores: Sequence[Mapping[str, float]],
    model: Any,
    size: int,
    delta: float,
    recipe: str = "",
) -> None:
    """The private run, the one without privacy and the untrained model, where there are such.

    Args:
        path: of the file.
        command: that makes the run again.
        task: what was trained on.
        method: what trained.
        epsilon: of the private run.
        model_name: of the base model.
        fits: the runs by name, the private one first.
        scores: for each evaluation set, accuracy by name; a name without a run was not trained.
        model: the private one.
        size: bytes shared of it.
        delta: of the private run.
        recipe: that the run was of, if any.
    """
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    private = next(iter(fits))
    results = []
    for rows, of_rows in zip(task.evaluation, scores, strict=True):
        for name, value in of_rows.items():
            done = fits.get(name)
            results.append(
                Result(
                    task=f"{task.name} ({rows.name})" if len(scores) > 1 else task.name,
                    model=model_name,
                    method=method if done else NOT_TRAINED,
                    epsilon=epsilon if name == private else None,
                    delta=delta if name == private else None,
                    metric="accuracy",
                    value=value,
                    trained_parameters=trained if done else 0,
                    examples_per_second=done.examples_per_second if done else 0.0,
                    seconds=done.seconds if done else 0.0,
                    private_rows=len(task.train),
                    bytes_shared=size if name == private else None,
                    command=command,
                    recipe=recipe,
                )
            )
    write_results(path, results)
