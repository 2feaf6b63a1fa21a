"""Private masked-language training of a whole small BERT (Anil et al., 2021).

One private row is one text, cut to ``--max-length`` tokens: what is past the cut is not used.

python -m tasks.run mlm --layers 4 --width 256 --batch-size 4096 --steps 500
python -m tasks.run mlm --body minilm --public --steps 300 --output runs/minilm-mlm
"""

from __future__ import annotations

import dataclasses
import math
import time
import warnings
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from dppeft.errors import ArgumentError
from tasks.settings import one_line_errors, words_of

if TYPE_CHECKING:
    from tasks.masked_lm import Texts
    from tasks.results import Result
    from tasks.training import Fit

EPSILON = 5.36  # the paper's
SCHEDULES = ("constant", "geometric", "linear")


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the command line said. ``epsilon`` None: the paper's, or no guarantee if ``public``."""

    texts: tuple[Path, ...] = ()
    column: str = "text"
    ratings: bool = False
    held_out: int = 500
    rows: int | None = None
    model: str | None = None
    body: str = "new"
    layers: int = 2
    width: int = 256
    epsilon: float | None = None
    delta: float = 1e-5
    public: bool = False
    compare: bool = False
    batch_size: int = 1024
    steps: int = 200
    schedule: str = "constant"
    first_batch_size: int | None = None
    every: int | None = None
    lr: float = 1e-3
    weight_decay: str = "auto"
    max_grad_norm: float = 1.0
    max_length: int = 128
    whole_words: bool = False
    seed: int | None = None
    output: Path
    result: Path | None = None
    command: str = ""
    recipe: str = ""  # name of the one that the settings are from
    batches: tuple[
        tuple[int, int], ...
    ] = ()  # (first step, expected batch size), in place of a schedule
    engine_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuses, before anything is read, what contradicts itself."""
        if self.public and (self.epsilon is not None or self.compare):
            given = "--compare" if self.compare else f"--epsilon {self.epsilon:g}"
            raise ArgumentError(
                f"--public declares the texts public and trains without privacy: leave {given} out."
            )
        if self.schedule not in SCHEDULES:
            raise ArgumentError(
                f"Unknown --schedule {self.schedule!r}. Choices: {', '.join(SCHEDULES)}."
            )
        growing = self.schedule != "constant"
        if not growing and (self.first_batch_size, self.every) != (None, None):
            raise ArgumentError(
                "--first-batch-size and --every are for a schedule that changes: add --schedule "
                "geometric or linear."
            )
        if self.ratings and self.texts:
            raise ArgumentError("--ratings is for the package's own reviews: leave --text out.")
        if self.model is not None and self.body != "new":
            raise ArgumentError(f"--model and --body {self.body} both name a model: give one.")
        for name in ("held_out", "rows", "layers", "width", "max_length", "steps"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ArgumentError(f"Expected --{name.replace('_', '-')} >= 1, got {value}.")
        if self.output.exists() and (not self.output.is_dir() or any(self.output.iterdir())):
            raise ArgumentError(f"--output {self.output} is not empty. Name a new folder.")
        _ = self.decay

    @property
    def decay(self) -> str | float:
        """The weight decay as ``decay_groups`` takes it."""
        if self.weight_decay == "auto":
            return "auto"
        try:
            return float(self.weight_decay)
        except ValueError:
            raise ArgumentError(
                f"Expected --weight-decay to be auto or a number, got {self.weight_decay!r}."
            ) from None

    def batch_schedule(self) -> tuple[int, ...]:
        """Expected batch of each step."""
        from dppeft import schedules

        if self.batches:
            return schedules.steps(self.batches, self.steps)
        if self.schedule == "constant":
            return schedules.constant(self.batch_size, self.steps)
        first = self.first_batch_size or max(1, self.batch_size // 4)
        every = self.every or math.ceil(self.steps / 4)
        grow = {"geometric": schedules.geometric, "linear": schedules.linear}[self.schedule]
        return grow(first, self.batch_size, every=every, steps=self.steps)


def mlm(  # noqa: PLR0913 - one option of a command is one argument of its function
    ctx: typer.Context,
    recipe: Annotated[str | None, typer.Option(help="See `python -m tasks.recipes`.")] = None,
    text: Annotated[list[Path] | None, typer.Option(help=".txt or a table; repeat.")] = None,
    column: Annotated[str, typer.Option(help="Of a table: the text.")] = Settings.column,
    ratings: Annotated[
        bool, typer.Option(help="Ends of reviews, each with 'It was great.'")
    ] = False,
    held_out: Annotated[int, typer.Option(help="Texts to report on.")] = Settings.held_out,
    rows: Annotated[int | None, typer.Option(help="Use only so many private texts.")] = None,
    model: Annotated[str | None, typer.Option(help="Folder or hub name.")] = None,
    body: Annotated[str, typer.Option(help="new, or minilm: the demo's encoder.")] = "new",
    layers: Annotated[int, typer.Option(help="Of a new model.")] = Settings.layers,
    width: Annotated[int, typer.Option(help="Of a new model.")] = Settings.width,
    epsilon: Annotated[float | None, typer.Option(help=f"Budget; default {EPSILON}.")] = None,
    delta: Annotated[float, typer.Option(help="Below 1 / number of texts.")] = Settings.delta,
    public: Annotated[bool, typer.Option(help="The texts are public: no privacy.")] = False,
    compare: Annotated[bool, typer.Option(help="Train once more without privacy.")] = False,
    batch_size: Annotated[int, typer.Option(help="Expected, the last.")] = Settings.batch_size,
    steps: Annotated[int, typer.Option(help="Updates.")] = Settings.steps,
    schedule: Annotated[str, typer.Option(help=", ".join(SCHEDULES))] = Settings.schedule,
    first_batch_size: Annotated[int | None, typer.Option(help="Default: a quarter.")] = None,
    every: Annotated[int | None, typer.Option(help="Steps of a stage.")] = None,
    lr: Annotated[float, typer.Option(help="Peak of Adam's rate.")] = Settings.lr,
    weight_decay: Annotated[str, typer.Option(help="auto or a number.")] = "auto",
    max_grad_norm: Annotated[float, typer.Option(help="Clipping.")] = Settings.max_grad_norm,
    max_length: Annotated[int, typer.Option(help="Tokens kept.")] = Settings.max_length,
    whole_words: Annotated[bool, typer.Option(help="Mask whole words.")] = False,
    engine: Annotated[str, typer.Option(help="auto or opacus.")] = "auto",
    precision: Annotated[str, typer.Option(help="auto, float32 or bf16.")] = "auto",
    seed: Annotated[int | None, typer.Option(help="Reproducible, and marked so.")] = None,
    output: Annotated[Path | None, typer.Option(help="New folder for the model.")] = None,
    result: Annotated[Path | None, typer.Option(help="JSON file for the figures.")] = None,
) -> None:
    """Train a whole masked language model on texts, privately."""
    given = {name: value for name, value in locals().items() if name in _FIELDS}
    given["texts"] = tuple(text or ())
    given["output"] = output or Path("runs") / f"mlm-{time.strftime('%Y%m%d-%H%M%S')}"
    given["engine_options"] = {"engine": engine, "precision": precision}
    with one_line_errors():
        given["recipe"] = recipe or ""
        if recipe is not None:  # it fills in what the command line does not say
            defaults = {one.name: one.default for one in ctx.command.params}
            stated = from_recipe(recipe)
            if public:  # trains without a budget
                del stated["epsilon"]
            silent = {n: v for n, v in stated.items() if given.get(n) == defaults.get(n)}
            given |= silent | {"batches": stated["batches"] if "batch_size" in silent else ()}
        run_mlm(Settings(**given, command=command_of(ctx)))


_FIELDS = {one.name for one in dataclasses.fields(Settings)}


def from_recipe(name: str) -> dict[str, Any]:
    """The settings that a recipe states; a new model of BERT-large's sizes."""
    from tasks.recipes import recipe

    paper = recipe(name, task="mlm")
    layers, width = {"bert-large": (24, 1024), "bert-base": (12, 768)}[paper.model]
    return {
        "recipe": name,
        "layers": layers,
        "width": width,
        "epsilon": paper.epsilon,
        "delta": paper.delta,
        "batch_size": paper.batch_size,
        "batches": tuple((first, size) for first, size in paper.batches),
        "steps": paper.steps,
        "lr": paper.lr,
        "weight_decay": f"{paper.weight_decay:g}",
        "max_grad_norm": paper.max_grad_norm,
        "max_length": paper.max_length,
    }


def command_of(ctx: typer.Context) -> str:
    """The command line that makes such a run again: what differs from the defaults."""
    said = {
        one.name or "": value
        for one in ctx.command.params
        if (value := ctx.params.get(one.name or "")) != one.default
        and one.name not in {"output", "result", "seed"}
    }
    # Of a path only the name: where it lies on this machine helps nobody.
    said["text"] = [Path(one).name for one in said.get("text") or ()]
    said["model"] = Path(said["model"]).name if said.get("model") else None
    return f"python -m tasks.run mlm {words_of(said)}".rstrip()


def run_mlm(settings: Settings) -> list[Result]:
    """The whole way: texts, plan, training, accuracy on unseen texts, a folder to share."""
    import torch
    from transformers import AutoTokenizer, logging

    from dppeft.text import MaskedRows, rows_for_masking
    from tasks import masked_lm
    from tasks.common import demo_encoder
    from tasks.mlm_report import figures, report, share

    logging.disable_progress_bar()
    logging.set_verbosity_error()  # loading would report the head that is new
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    console = Console(soft_wrap=True, highlight=False)
    texts = masked_lm.load_texts(
        settings.texts,
        column=settings.column,
        held_out=settings.held_out,
        rows=settings.rows,
        ratings=settings.ratings,
    )
    plan = make_plan(settings, len(texts.train))
    print_plan(console, settings, texts, plan)
    tokenizer = AutoTokenizer.from_pretrained(settings.model or str(demo_encoder()))
    masking = {"whole_words": settings.whole_words}
    limits = {"max_length": settings.max_length, **masking}
    # Characters that cannot survive the cut need not be tokenised.
    start = slice(16 * settings.max_length)
    private, public = (
        rows_for_masking(tokenizer, [text[start] for text in some], **limits)
        for some in (texts.train, texts.held_out)
    )
    held_out = MaskedRows(public, tokenizer, seed=masked_lm.EVALUATION_SEED, fixed=True, **masking)
    runs = {"public" if settings.public else "private": plan}
    if settings.compare:
        runs["without privacy"] = without_noise(plan)
    trained: dict[str, tuple[Any, Fit, float]] = {}
    for name, of_run in runs.items():
        if settings.seed is not None:  # start values; the noise has the run's own
            torch.manual_seed(settings.seed)
        model = masked_lm.build_model(
            model=settings.model,
            body=settings.body,
            vocabulary=len(tokenizer),
            sizes={"layers": settings.layers, "width": settings.width},
            positions=max(512, settings.max_length),
        )
        rows = MaskedRows(private, tokenizer, seed=settings.seed, **masking)
        done = _trained(console, settings, model, rows, of_run, (name, tokenizer))
        trained[name] = model, done, masked_lm.accuracy(model, held_out, tokenizer)
    report(console, trained, masked_lm.commonest_accuracy(held_out), len(held_out))
    model, done, _ = next(iter(trained.values()))
    if settings.texts and not settings.public:
        done.run.note_look("accuracy on texts of the same files, held out")
    size = share(console, settings, model, done.run, tokenizer)
    results = figures(settings, texts, trained, size)
    if settings.result is not None:
        from tasks.results import write_results

        write_results(settings.result, results)
    return results


def _trained(
    console: Console,
    settings: Settings,
    model: Any,
    rows: Any,
    plan: Any,
    about: tuple[str, Any],
) -> Fit:
    from tasks.masked_lm import train
    from tasks.reporting import progress_bar

    name, tokenizer = about
    with progress_bar(console, plan, name) as progress:
        return train(
            model,
            rows,
            plan,
            tokenizer=tokenizer,
            lr=settings.lr,
            weight_decay=settings.decay,
            progress=progress,
            options={**settings.engine_options, "seed": settings.seed},
        )


def make_plan(settings: Settings, rows: int) -> Any:
    """The plan of a private run; of a public one the same steps without noise."""
    import dppeft

    sizes = settings.batch_schedule()
    budget: dict[str, Any] = {"epsilon": EPSILON if settings.epsilon is None else settings.epsilon}
    if settings.public:
        budget = {"noise_multiplier": 0.0}
    return dppeft.plan(
        num_examples=rows,
        batch_size=max(sizes),
        batch_schedule=sizes if len(set(sizes)) > 1 else None,
        steps=None if len(set(sizes)) > 1 else len(sizes),
        delta=settings.delta,
        max_grad_norm=1e9 if settings.public else settings.max_grad_norm,
        **budget,
    )


def without_noise(plan: Any) -> Any:
    """The same draws and steps with no noise and nothing clipped."""
    return dataclasses.replace(plan, noise_multiplier=0.0, target_epsilon=None, max_grad_norm=1e9)


def print_plan(console: Console, settings: Settings, texts: Texts, plan: Any) -> None:
    """All that will be spent, and on what, before it is."""
    kind = "public" if settings.public else "private"
    console.print(
        f"[bold]masked language model[/bold]: {len(texts.train)} {kind} texts ({texts.name}), each "
        f"one row of at most {settings.max_length} tokens; {len(texts.held_out)} held out"
    )
    what = "whole words" if settings.whole_words else "tokens"
    console.print(
        f"15 % of the {what} masked; learning rate {settings.lr:g}, weight decay "
        f"{settings.weight_decay}"
    )
    console.print(plan.explain())
