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
from typing import Annotated, Any

import typer

from tasks import recipes
from tasks.recipes import PaperRecipe, Reported
from tasks.results import NOT_TRAINED, Result, read_results

README = Path(__file__).parents[1] / "README.md"
START = "<!-- results: made by python -m tasks.table --readme -->"
END = "<!-- end of results -->"
HEAD = (
    "| task | rows | method | trained | epsilon, delta | result | runs | from, to | examples/s | "
    "seconds | shared | made by |",
    "|---|--:|---|--:|--:|--:|--:|--:|--:|--:|--:|--:|",
)
SHOWN = ("accuracy", "masked-token accuracy", "BLEU", "ROUGE-L")  # other metrics: in the files

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
    """One line for each setting: mean, runs and spread; below, the commands that made them."""
    lines, commands = list(HEAD), list[str]()
    ordered = sorted((r for r in results if r.metric in SHOWN), key=_order)
    for _, group in groupby(ordered, key=_setting):
        runs = list(group)
        made_by = sorted({_made_by(run) for run in runs})
        commands += [command for command in made_by if command not in commands]
        numbers = ", ".join(str(commands.index(command) + 1) for command in made_by)
        lines.append(_line(runs, numbers))
    return "\n".join([*lines, "", *(f"{n}. {line}" for n, line in enumerate(commands, start=1))])


def _setting(result: Result) -> tuple[Any, ...]:
    """What runs share whose results may be averaged."""
    return (
        *(_measured(result), result.model, result.private_rows, result.method),
        *(result.epsilon, result.delta),
    )


def _order(result: Result) -> tuple[Any, ...]:
    private = -1e9 if result.epsilon is None else -result.epsilon
    return (
        *(_measured(result), result.model, result.private_rows),
        *(private, result.delta or 0.0, result.method),
    )


def _measured(result: Result) -> str:
    """The task, and the metric where it is another than that of most tasks."""
    return result.task if result.metric == "accuracy" else f"{result.task} ({result.metric})"


def _made_by(result: Result) -> str:
    about = [f"`{result.command}`", result.note, result.hardware]
    return "; ".join(part for part in about if part)


def _line(runs: Sequence[Result], made_by: str) -> str:
    """Of runs of one setting."""
    first, values = runs[0], [run.value for run in runs]
    shared = [run.bytes_shared for run in runs if run.bytes_shared is not None]
    budget = [first.epsilon, first.delta]
    trains = first.method != NOT_TRAINED
    cells = [
        f"{_measured(first)}, {first.model}",
        f"{first.private_rows:,}" if trains else "",
        first.method,
        f"{first.trained_parameters:,}",
        ", ".join(f"{number:g}" for number in budget if number is not None) or "no privacy",
        f"{statistics.mean(values):.3f}",
        str(len(values)),
        f"{min(values):.3f} to {max(values):.3f}" if len(values) > 1 else "",
        f"{statistics.median(run.examples_per_second for run in runs):.0f}" if trains else "",
        f"{statistics.median(run.seconds for run in runs):.0f}" if trains else "",
        f"{max(shared):,}" if shared else "",
        made_by,
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
