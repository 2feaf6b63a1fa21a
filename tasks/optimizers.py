"""Adam beside what may be done with released gradients beyond it, on the demo's sentences.

python -m tasks.optimizers --epsilon 8 --seeds 5 --result tasks/results/optimizers.json

What trains is a network with one hidden layer on the frozen encoder's features, so that a run takes
seconds: its matrices are what shrinkage is for. Each contestant's rate (and floor) is the best of a
grid on 1,000 of the training rows, held apart; the accuracy shown is on rows that no choice saw.
"""

from __future__ import annotations

import itertools
import statistics
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn
from transformers import AutoTokenizer, logging

import dppeft
from dppeft.optimizers import PrivateAdam
from tasks import movie_reviews
from tasks.classifier import build_classifier
from tasks.common import demo_encoder
from tasks.results import Result, write_results
from tasks.settings import one_line_errors
from tasks.training import Fit, accuracy, all_updates, encode
from tasks.warm_start import Features, frozen_features

HIDDEN, BATCH_SIZE, STEPS, DELTA, HELD_APART = 128, 1024, 60, 1e-5, 1000
RATES = (3e-3, 1e-2, 3e-2)


@dataclass(frozen=True, kw_only=True)
class Contestant:
    """A name and the options of ``PrivateAdam``, each with the values to choose from."""

    name: str
    options: dict[str, tuple[Any, ...]] = field(default_factory=dict)

    def grid(self) -> Iterator[dict[str, Any]]:
        """Every choice."""
        names = ["lr", *self.options]
        for values in itertools.product(RATES, *self.options.values()):
            yield dict(zip(names, values, strict=True))


CONTESTANTS = (
    Contestant(name="Adam", options={"second_moment": ("plain",)}),
    # The square of the noise is about 1e-6 here; a floor below it is where the correction works.
    Contestant(
        name="Adam, noise taken off (DP-AdamBC)",
        options={"second_moment": ("corrected",), "floor": (1e-7, 1e-6)},
    ),
    Contestant(name="Adam, prescaled", options={"second_moment": ("prescaled",)}),
    Contestant(
        name="Adam, shrunk matrices",
        options={"second_moment": ("plain",), "shrinkage": (True,)},
    ),
)

app = typer.Typer(add_completion=False)


class Network(nn.Module):
    """(B, d) features -> (B, 2) logits."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.inner = nn.Linear(width, HIDDEN)
        self.classifier = nn.Linear(HIDDEN, 2)

    def forward(self, features: Tensor) -> Tensor:
        """Logits."""
        return self.classifier(torch.tanh(self.inner(features)))


@dataclass(frozen=True, kw_only=True)
class Data:
    """Features and labels of the rows to train on, and of those to look at."""

    train: Features
    features: Tensor
    labels: list[int]


def load() -> tuple[Data, Data]:
    """For the choice of rates, and for the report."""
    task = movie_reviews.load()
    folder = str(demo_encoder())
    tokenizer, base = AutoTokenizer.from_pretrained(folder), build_classifier(folder, num_labels=2)
    found = []
    for rows in (task.train, task.evaluation[0]):
        tokens, _ = encode(rows, tokenizer, task.recipe)
        features = frozen_features(base, tokens, tokenizer)
        # One length for all rows, a function of each row alone: the scale of the encoder's choice.
        found.append((nn.functional.normalize(features, dim=1) * 8, list(rows.labels)))
    (private, labels), (held_out, true) = found
    apart = slice(-HELD_APART, None), slice(-HELD_APART)
    choosing = Data(
        train=Features(private[apart[1]], labels[apart[1]]),
        features=private[apart[0]],
        labels=labels[apart[0]],
    )
    return choosing, Data(train=Features(private, labels), features=held_out, labels=true)


def one(data: Data, options: dict[str, Any], epsilon: float, seed: int) -> tuple[float, Fit]:
    """Accuracy of one run, and the run."""
    torch.manual_seed(seed)  # of the start values, which are public
    model = dppeft.wrap(Network(data.features.shape[1]), "full")
    plan = dppeft.plan(
        num_examples=len(data.train),
        batch_size=BATCH_SIZE,
        steps=STEPS,
        epsilon=epsilon,
        delta=DELTA,
        max_grad_norm=1.0,
    )
    optimizer = PrivateAdam(model.parameters(), **options)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / STEPS)
    with tempfile.TemporaryDirectory() as folder:
        run = dppeft.make_private(
            model,
            optimizer,
            data.train,
            plan,
            physical_batch_size=2048,
            ledger=Path(folder) / "ledger.jsonl",
        )
        done = all_updates(run, schedule)
    with torch.inference_mode():
        return accuracy(model(data.features), data.labels), done


@app.command()
def main(
    epsilon: Annotated[float, typer.Option(help="Budget of each run.")] = 8.0,
    seeds: Annotated[int, typer.Option(help="Start values tried for each.")] = 5,
    result: Annotated[Path | None, typer.Option(help="File for the figures.")] = None,
) -> None:
    """Choose each contestant's rate, train it with several start values, print a table."""
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    console, results = Console(soft_wrap=True, highlight=False), []
    table = Table("optimizer", "chosen", "accuracy", "lowest to highest")
    with one_line_errors():
        choosing, reporting = load()
        for contestant in CONTESTANTS:
            with console.status(contestant.name):
                tried = [
                    (statistics.mean(one(choosing, options, epsilon, s)[0] for s in (90, 91)), n)
                    for n, options in enumerate(contestant.grid())
                ]
                options = list(contestant.grid())[max(tried)[1]]
                runs = [one(reporting, options, epsilon, seed) for seed in range(seeds)]
            values = [value for value, _ in runs]
            shown = {k: v for k, v in options.items() if k in ("lr", "floor")}
            chosen = ", ".join(f"{name} {value:g}" for name, value in shown.items())
            spread = f"{min(values):.3f} to {max(values):.3f}"
            table.add_row(contestant.name, chosen, f"{statistics.mean(values):.3f}", spread)
            for seed, (value, done) in enumerate(runs):
                results.append(
                    Result(
                        task="movie_reviews, frozen features",
                        model="MiniLM-L6 and a hidden layer",
                        method=contestant.name,
                        epsilon=epsilon,
                        seed=seed,
                        metric="accuracy",
                        value=value,
                        trained_parameters=sum(p.numel() for p in done.run.model.parameters()),
                        examples_per_second=done.examples_per_second,
                        seconds=done.seconds,
                        delta=DELTA,
                        private_rows=len(reporting.train),
                        command="python -m tasks.optimizers",
                        note=chosen,
                    )
                )
    console.print(table)
    if result is not None:
        write_results(result, results)


if __name__ == "__main__":
    app()
