"""The table of results, from the files in ``tasks/results``: only what was measured is in it.

python -m tasks.table                 # prints it
python -m tasks.table --readme        # puts it into README.md, between its two marks
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer

from tasks.results import Result, read_results

README = Path(__file__).parents[1] / "README.md"
START = "<!-- results: made by python -m tasks.table --readme -->"
END = "<!-- end of results -->"
HEAD = (
    "| task | method | trained | epsilon | result | runs | from, to | examples/s | shared |",
    "|---|---|--:|--:|--:|--:|--:|--:|--:|",
)

app = typer.Typer(add_completion=False)


def table(results: Iterable[Result]) -> str:
    """One line for each task, model, method and epsilon: mean, number of runs and spread."""
    lines = list(HEAD)
    ordered = sorted(results, key=_order)
    for (task, model, method, epsilon), group in groupby(ordered, key=_setting):
        lines.append(_line(task, model, method, epsilon, list(group)))
    return "\n".join(lines)


def _setting(result: Result) -> tuple[str, str, str, float | None]:
    return result.task, result.model, result.method, result.epsilon


def _order(result: Result) -> tuple[str, str, float, str]:
    private = -1e9 if result.epsilon is None else -result.epsilon
    return result.task, result.model, private, result.method


def _line(task: str, model: str, method: str, epsilon: float | None, runs: Sequence[Result]) -> str:
    values = [run.value for run in runs]
    spread = f"{min(values):.3f} to {max(values):.3f}" if len(values) > 1 else ""
    shared = [run.bytes_shared for run in runs if run.bytes_shared is not None]
    cells = [
        f"{task}, {model}",
        method,
        f"{runs[0].trained_parameters:,}",
        "no privacy" if epsilon is None else f"{epsilon:g}",
        f"{statistics.mean(values):.3f}",
        str(len(values)),
        spread,
        f"{statistics.median(run.examples_per_second for run in runs):.0f}",
        f"{max(shared):,}" if shared else "",
    ]
    return f"| {' | '.join(cells)} |"


def into_readme(text: str, made: str) -> str:
    """The README with the table between its marks."""
    before, _, rest = text.partition(START)
    _, _, after = rest.partition(END)
    return f"{before}{START}\n\n{made}\n\n{END}{after}"


@app.command()
def main(
    readme: Annotated[bool, typer.Option(help="Write it into README.md.")] = False,
) -> None:
    """Print the table, or put it into the README."""
    made = table(read_results())
    if readme:
        README.write_text(into_readme(README.read_text(encoding="utf-8"), made), encoding="utf-8")
    else:
        typer.echo(made)


if __name__ == "__main__":
    app()
