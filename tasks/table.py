"""The tables of results, from the files in ``tasks/results``: only what was measured is in them.

python -m tasks.table                 # prints both
python -m tasks.table --readme        # puts them into README.md and tasks/reproduction.md

The second table sets the papers' figures beside ours, or says what a run of them needs.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from itertools import groupby
from pathlib import Path
from typing import Annotated

import typer

from tasks import recipes
from tasks.recipes import PaperRecipe, Reported
from tasks.results import Result, read_results

README = Path(__file__).parents[1] / "README.md"
START = "<!-- results: made by python -m tasks.table --readme -->"
END = "<!-- end of results -->"
HEAD = (
    "| task | method | trained | epsilon | result | runs | from, to | examples/s | shared |",
    "|---|---|--:|--:|--:|--:|--:|--:|--:|",
)

REPRODUCTION = Path(__file__).parent / "reproduction.md"
ABOVE = """# What the papers report, and what was reproduced here

Made by `python -m tasks.table --readme` from `tasks/recipes` and `tasks/results`. A figure marked
*unverified* was read in a secondary source.
"""
REPRODUCTION_HEAD = (
    "| recipe | metric | epsilon | the paper | ours |",
    "|---|---|--:|--:|---|",
)

app = typer.Typer(add_completion=False)


def table(results: Iterable[Result]) -> str:
    """One line for each task, metric, model, method and epsilon: mean, runs and spread."""
    lines = list(HEAD)
    ordered = sorted(results, key=_order)
    for (task, model, method, epsilon), group in groupby(ordered, key=_setting):
        lines.append(_line(task, model, method, epsilon, list(group)))
    return "\n".join(lines)


def _setting(result: Result) -> tuple[str, str, str, float | None]:
    return _measured(result), result.model, result.method, result.epsilon


def _order(result: Result) -> tuple[str, str, float, str]:
    private = -1e9 if result.epsilon is None else -result.epsilon
    return _measured(result), result.model, private, result.method


def _measured(result: Result) -> str:
    """The task, and the metric where it is another than that of most tasks."""
    return result.task if result.metric == "accuracy" else f"{result.task} ({result.metric})"


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


def reproduction(results: Iterable[Result]) -> str:
    """One line for each figure of a paper: theirs, and ours or what it would take."""
    measured = [result for result in results if result.recipe]
    lines = list(REPRODUCTION_HEAD)
    for name in recipes.names():
        one = recipes.recipe(name)
        for said in one.reported:
            own = [r for r in measured if (r.recipe, r.metric) == (name, said.metric)]
            lines.append(_against(one, said, [r for r in own if _same_budget(r, said)]))
    return "\n".join(lines)


def _same_budget(result: Result, said: Reported) -> bool:
    """Within 5 %: the paper's epsilon is often another accountant's."""
    if said.epsilon is None or result.epsilon is None:
        return said.epsilon is result.epsilon
    return abs(result.epsilon - said.epsilon) <= 0.05 * said.epsilon


def _against(one: PaperRecipe, said: Reported, own: Sequence[Result]) -> str:
    figure = f"{said.value:g}" + ("" if said.verified else " (unverified)")
    start = f"python -m tasks.run {one.task} --recipe {one.name}"
    needs = f"the weights of {one.model}"
    if one.task == "cifar10":
        needs, start = "the images of CIFAR-10", "python -m tasks.cifar10"
    elif one.task == "mlm":
        needs = f"the paper's {one.num_examples:,} texts"
    ours = f"not run here: needs {needs}; `{start}`"
    if own:
        values = [result.value for result in own]
        spread = f", {min(values):.3g} to {max(values):.3g}" if len(values) > 1 else ""
        few = f"; on {own[0].private_rows:,} rows" * (own[0].private_rows != one.num_examples)
        about = f"{len(values)} runs{spread}{few}; {own[0].hardware}"
        ours = f"{statistics.mean(values):.3g} ({about})"
    epsilon = "no privacy" if said.epsilon is None else f"{said.epsilon:g}"
    return f"| {one.name} | {said.metric} | {epsilon} | {figure} | {ours} |"


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
    made, against = table(read_results()), reproduction(read_results())
    if readme:
        REPRODUCTION.write_text(f"{ABOVE}\n{against}\n", encoding="utf-8")
        README.write_text(into_readme(README.read_text(encoding="utf-8"), made), encoding="utf-8")
    else:
        typer.echo(f"{made}\n\n{against}")


if __name__ == "__main__":
    app()
