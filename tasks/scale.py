"""Private pre-training at scale, on paper: what batch size and schedule do to noise and cost.

Anil et al. (2021): BERT-Large, 346 million examples of 128 tokens, 20,000 steps, epsilon 5.36. The
noise multiplier grows more slowly than the batch, so the noise on the mean gradient falls.

python -m tasks.scale
python -m tasks.scale --json > scale.json
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from dppeft.errors import ArgumentError
from tasks.settings import one_line_errors

# Powers of two: with 32,768 = 2**15 the noise multiplier is 0.466, with 32,000 it is 0.465.
BATCH_SIZES = tuple(2**power for power in range(15, 22))
GROWING_FROM, GROWING_TO, GROWING_EVERY = 2**18, 2**20, 7_500
FLOPS_PER_WEIGHT = 6  # of forward and backward pass, for each token (Kaplan et al., 2020)

app = typer.Typer(add_completion=False)


@dataclass(frozen=True, kw_only=True)
class Setting:
    """What all lines share.

    Attributes:
        num_examples: private rows.
        steps: noised updates.
        epsilon: budget.
        delta: None: 1 / num_examples, as in the paper.
        parameters: of the model (BERT-Large: 340 million).
        tokens: of one example.
        flops: peak of one accelerator, floating-point operations per second.
        utilisation: share of that peak that training reaches.
        accountant: of the plan.
    """

    num_examples: int = 346_000_000
    steps: int = 20_000
    epsilon: float = 5.36
    delta: float | None = None
    parameters: float = 340e6
    tokens: int = 128
    flops: float = 312e12
    utilisation: float = 0.4
    accountant: str = "pld"

    def __post_init__(self) -> None:
        """Refuses what the plan does not look at."""
        for name in ("num_examples", "parameters", "tokens", "flops", "utilisation"):
            if not 0 < getattr(self, name) < math.inf:
                raise ArgumentError(f"Expected {name} > 0, got {name}={getattr(self, name):g}.")
        if self.utilisation > 1:
            raise ArgumentError(
                f"Expected utilisation <= 1, got {self.utilisation:g}: it is a share of the peak."
            )

    def hours(self, examples: int) -> float:
        """Accelerator-hours of visiting so many examples, by count of operations."""
        operations = FLOPS_PER_WEIGHT * self.parameters * self.tokens * examples
        return operations / (self.flops * self.utilisation) / 3600


@dataclass(frozen=True, kw_only=True)
class Line:
    """One plan.

    Attributes:
        schedule: in words.
        batch_size: expected rows of the last step, the largest.
        noise_multiplier: over the L2 bound of the sum.
        noise_per_example: noise multiplier over the batch size: noise on the mean, in units of C.
        steps: noised updates.
        examples: visited, expected.
        epsilon: spent.
        delta: of the guarantee.
        accelerator_hours: see ``Setting.hours``.
    """

    schedule: str
    batch_size: int
    noise_multiplier: float
    noise_per_example: float
    steps: int
    examples: int
    epsilon: float
    delta: float
    accelerator_hours: float


def line(setting: Setting, schedule: Sequence[int], name: str) -> Line:
    """The plan of one schedule: the smallest noise that meets the budget, and what it costs."""
    import dppeft

    made = dppeft.plan(
        num_examples=setting.num_examples,
        batch_size=max(schedule),
        batch_schedule=schedule,
        epsilon=setting.epsilon,
        delta=1 / setting.num_examples if setting.delta is None else setting.delta,
        accountant=setting.accountant,
    )
    return Line(
        schedule=name,
        batch_size=made.expected_batch_size,
        noise_multiplier=made.noise_multiplier,
        noise_per_example=made.noise_multiplier / made.expected_batch_size,
        steps=made.steps,
        examples=sum(schedule),
        epsilon=made.epsilon(),
        delta=made.delta,
        accelerator_hours=setting.hours(sum(schedule)),
    )


def lines(setting: Setting, batch_sizes: Sequence[int]) -> list[Line]:
    """One for each fixed size, and the growing schedule last."""
    from dppeft import schedules

    made = [
        line(setting, schedules.constant(size, setting.steps), f"{size:,}") for size in batch_sizes
    ]
    growing = schedules.geometric(
        GROWING_FROM, GROWING_TO, every=GROWING_EVERY, steps=setting.steps
    )
    name = f"{growing[0]:,} to {growing[-1]:,}, every {GROWING_EVERY:,} steps"
    return [*made, line(setting, growing, name)]


@app.command()
def main(  # noqa: PLR0913 - one option of a command is one argument of its function
    num_examples: Annotated[int, typer.Option(help="Private rows.")] = Setting.num_examples,
    steps: Annotated[int, typer.Option(help="Noised updates.")] = Setting.steps,
    epsilon: Annotated[float, typer.Option(help="Budget.")] = Setting.epsilon,
    delta: Annotated[float | None, typer.Option(help="Default: 1 / rows, the paper's.")] = None,
    batch_size: Annotated[list[int] | None, typer.Option(help="May be repeated.")] = None,
    parameters: Annotated[float, typer.Option(help="Of the model.")] = Setting.parameters,
    tokens: Annotated[int, typer.Option(help="Of one example.")] = Setting.tokens,
    flops: Annotated[float, typer.Option(help="Accelerator's peak, 1/s.")] = Setting.flops,
    utilisation: Annotated[float, typer.Option(help="Share of it.")] = Setting.utilisation,
    accountant: Annotated[str, typer.Option(help="pld, rdp or prv.")] = Setting.accountant,
    as_json: Annotated[bool, typer.Option("--json", help="Print as JSON.")] = False,
) -> None:
    """Noise, examples and accelerator-hours by batch size, at one budget."""
    import warnings

    from dppeft.errors import PrivacyWarning

    if delta is None:  # the paper's choice, which dppeft would warn of; the table says it
        warnings.simplefilter("ignore", PrivacyWarning)
    with one_line_errors():
        setting = Setting(
            num_examples=num_examples,
            steps=steps,
            epsilon=epsilon,
            delta=delta,
            parameters=parameters,
            tokens=tokens,
            flops=flops,
            utilisation=utilisation,
            accountant=accountant,
        )
        made = lines(setting, batch_size or BATCH_SIZES)
    if as_json:
        typer.echo(json.dumps([dataclasses.asdict(one) for one in made], indent=1))
        return
    show(Console(), setting, made)


def show(console: Console, setting: Setting, made: Sequence[Line]) -> None:
    """The table, and what its columns mean."""
    table = Table("batch", "sigma", "sigma / B", "steps", "examples", "epsilon", "hours")
    for column in table.columns[1:]:
        column.justify = "right"
    for one in made:
        table.add_row(
            one.schedule,
            f"{one.noise_multiplier:.3f}",
            f"{one.noise_per_example:.3g}",
            f"{one.steps:,}",
            f"{one.examples / 1e9:.2f}e9",
            f"{one.epsilon:.3f}",
            f"{one.accelerator_hours:,.0f}",
        )
    console.print(table)
    console.print(
        f"{setting.num_examples:,} private rows, epsilon {setting.epsilon:g}, delta "
        f"{made[0].delta:.3g}{' = 1 / rows, as the paper has it' if setting.delta is None else ''}"
        ". sigma / B: noise on the mean gradient, in units of the clipping threshold. Hours of an "
        f"accelerator of {setting.flops:.3g} FLOP/s at {setting.utilisation:.0%}, for "
        f"{setting.parameters:.3g} parameters and {setting.tokens} tokens an example: "
        f"{FLOPS_PER_WEIGHT} FLOP per parameter and token, an estimate."
    )
    for one in made[:-1]:
        if one.batch_size == made[-1].batch_size:
            console.print(
                f"The growing schedule visits {1 - made[-1].examples / one.examples:.0%} fewer "
                f"examples than {one.schedule} throughout, in as many steps."
            )


if __name__ == "__main__":
    app()
