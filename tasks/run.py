"""Train a task privately, report it, share the adapter, and read it back in a new process.

python -m tasks.run movie_reviews --method lora --epsilon 8
python -m tasks.run sst2 --data FOLDER --method lora --epsilon 8
accelerate launch --cpu --num_processes 2 -m tasks.run movie_reviews
"""

from __future__ import annotations

import dataclasses
import importlib
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from dppeft.errors import ArgumentError, DppeftError

if TYPE_CHECKING:
    from tasks.common import Rows, Task
    from tasks.training import Fit

TASKS = ("movie_reviews", "sst2", "mnli", "qnli", "qqp")
SENTENCES = (
    "a joy from start to finish , warm , funny and beautifully acted .",
    "two hours of my life that i will never get back .",
)

app = typer.Typer(add_completion=False)


@dataclass(frozen=True, kw_only=True)
class Settings:
    """What the command line said."""

    task: str
    method: str
    epsilon: float
    delta: float
    compare: bool
    data: Path | None
    model: str | None
    output: Path
    sentences: Sequence[str]
    rows: int | None
    result: Path | None = None
    engine_options: dict[str, Any] = field(default_factory=dict)
    recipe: dict[str, Any] = field(default_factory=dict)


@app.command()
def main(
    task: Annotated[str, typer.Argument(help=f"One of {', '.join(TASKS)}.")],
    method: Annotated[str, typer.Option(help="What trains; see `dppeft methods`.")] = "lora",
    epsilon: Annotated[float, typer.Option(help="Budget of the run.")] = 8.0,
    delta: Annotated[float, typer.Option(help="Below 1 / number of rows.")] = 1e-5,
    compare: Annotated[bool, typer.Option(help="Train once more without privacy.")] = False,
    data: Annotated[Path | None, typer.Option(help="Folder of local files.")] = None,
    model: Annotated[str | None, typer.Option(help="Base model; default: the demo's.")] = None,
    output: Annotated[Path | None, typer.Option(help="New folder for what is shared.")] = None,
    predict: Annotated[list[str] | None, typer.Option(help="A sentence to classify.")] = None,
    rows: Annotated[int | None, typer.Option(help="Use only so many private rows.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Expected visits per row.")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Expected logical batch.")] = None,
    max_length: Annotated[int | None, typer.Option(help="Tokens kept of a row.")] = None,
    lr: Annotated[float | None, typer.Option(help="Rate of the adapter.")] = None,
    head_lr: Annotated[float | None, typer.Option(help="Rate of the head.")] = None,
    max_grad_norm: Annotated[float | None, typer.Option(help="Clipping threshold.")] = None,
    clipping: Annotated[str | None, typer.Option(help="flat, per_layer or automatic.")] = None,
    engine: Annotated[str, typer.Option(help="auto or opacus.")] = "auto",
    precision: Annotated[str, typer.Option(help="auto, float32 or bf16.")] = "auto",
    seed: Annotated[int | None, typer.Option(help="Reproducible, and marked so.")] = None,
    result: Annotated[Path | None, typer.Option(help="JSON file for the figures.")] = None,
) -> None:
    """Train a task privately and report the result beside what is simpler."""
    started = time.strftime("%Y%m%d-%H%M%S")
    settings = Settings(
        task=task,
        method=method,
        epsilon=epsilon,
        delta=delta,
        compare=compare,
        data=data,
        model=model,
        output=output or Path("runs") / f"{task}-{method}-eps{epsilon:g}-{started}",
        sentences=predict or SENTENCES,
        rows=rows,
        result=result,
        engine_options={"engine": engine, "precision": precision, "seed": seed},
        recipe={
            "epochs": epochs,
            "batch_size": batch_size,
            "max_length": max_length,
            "lr": lr,
            "head_lr": head_lr,
            "max_grad_norm": max_grad_norm,
            "clipping": clipping,
        },
    )
    try:
        run_task(settings)
    except DppeftError as error:
        typer.echo(f"Error: {error}", err=True)
        raise typer.Exit(2) from error


def run_task(settings: Settings) -> None:
    """The whole way: rows, plan, training, report, export, a new process that reads it back."""
    check_before_loading(settings)
    from accelerate import Accelerator
    from transformers import AutoTokenizer, logging

    import dppeft
    from dppeft.text import TokenDataset
    from tasks.common import demo_encoder
    from tasks.reporting import write_figures
    from tasks.training import encode, without_privacy

    logging.disable_progress_bar()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    logging.set_verbosity_error()  # each loading would report the head that is new
    accelerator = Accelerator()
    console = Console(quiet=not accelerator.is_main_process, soft_wrap=True, highlight=False)
    folder = settings.model or str(demo_encoder())
    task = load_task(settings, folder)
    recipe = task.recipe
    plan = dppeft.plan(
        num_examples=len(task.train),
        batch_size=recipe.batch_size,
        steps=recipe.steps(len(task.train)),
        epsilon=settings.epsilon,
        delta=settings.delta,
        max_grad_norm=recipe.max_grad_norm,
    )
    print_plan(console, settings, task, plan)
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows, cut = encode(task.train, tokenizer, recipe)
    console.print(f"rows cut to {recipe.max_length} tokens: {cut} (not private, for you only)")
    work = Work(
        console=console,
        task=task,
        folder=folder,
        tokenizer=tokenizer,
        tokens=rows,
        dataset=TokenDataset(rows, task.train.labels),
        method=settings.method,
        engine_options={**settings.engine_options, "accelerator": accelerator},
    )
    model, done = work.train(plan, "private")
    console.print(
        f"trained {plan.steps} steps: {done.seconds:.0f} s with the adapter in place, "
        f"{done.examples_per_second:.0f} examples/s"
    )
    models, fits = {f"private {settings.method}": model}, [done]
    if settings.compare:
        other, done_without = work.train(without_privacy(plan), "without privacy")
        models["the same recipe without privacy"] = other
        fits.append(done_without)
    scores = [work.report(rows, models, plan) for rows in task.evaluation]
    if accelerator.is_main_process:
        size = share(console, settings, model, done.run)
        if settings.result is not None:
            about = {"task": task, "method": settings.method, "epsilon": settings.epsilon}
            about |= {"command": command_of(settings), "model": model, "size": size}
            about["model_name"] = Path(folder).name if settings.model else "MiniLM-L6"
            write_figures(settings.result, fits=fits, scores=scores, **about)
    accelerator.wait_for_everyone()


def command_of(settings: Settings) -> str:
    """The command line that makes such a run again."""
    changed = {name: value for name, value in settings.recipe.items() if value is not None}
    options = "".join(f" --{name.replace('_', '-')} {value}" for name, value in changed.items())
    return (
        f"python -m tasks.run {settings.task} --method {settings.method} "
        f"--epsilon {settings.epsilon:g}{options}"
    )


def load_task(settings: Settings, folder: str) -> Task:
    """The task, with what the command line changes and what the model in ``folder`` allows."""
    from tasks.classifier import stated_pooling
    from tasks.training import with_settings

    task = importlib.import_module(f"tasks.{settings.task}").load(settings.data)
    return dataclasses.replace(
        task,
        recipe=with_settings(
            task.recipe.for_method(settings.method),
            # A warm start needs a head that reads nothing but the encoder's features.
            head_steps=None if stated_pooling(Path(folder)) else 0,
            **settings.recipe,
        ),
        train=task.train.select(range(min(settings.rows or len(task.train), len(task.train)))),
    )


@dataclass(kw_only=True)
class Work:
    """What training and reporting share."""

    console: Console
    task: Task
    folder: str
    tokenizer: Any
    tokens: Any
    dataset: Any
    method: str
    engine_options: dict[str, Any]
    features: Any = None  # of the private rows under the frozen encoder, once they are needed

    def train(self, plan: Any, title: str) -> tuple[Any, Fit]:
        """A fresh model, trained by the plan."""
        import dppeft
        from tasks.classifier import build_classifier
        from tasks.reporting import progress_bar
        from tasks.training import adapted_layers, fit
        from tasks.warm_start import frozen_features, part_of, warm_start

        recipe = self.task.recipe
        classes = len(self.task.classes)
        base = build_classifier(self.folder, num_labels=classes)
        options = adapted_layers(base, self.method, recipe)
        # What cannot be wrapped is refused here, before the warm start has spent anything.
        dppeft.wrap(build_classifier(self.folder, num_labels=classes), self.method, **options)
        ledger = {}
        if recipe.head_steps:
            with self.console.status(f"{title}: warm start of the head on frozen features"):
                if self.features is None:  # once for all runs: the encoder is the same
                    self.features = frozen_features(base, self.tokens, self.tokenizer)
                labels = self.task.train.labels
                warm = warm_start(
                    base, self.features, labels, plan, recipe, options=self.engine_options
                )
            if warm.run.ledger is not None:  # the main process writes
                ledger = {"ledger": warm.run.ledger.path}
        model = dppeft.wrap(base, self.method, **options)
        with progress_bar(self.console, plan, title) as progress:
            done = fit(
                model,
                self.dataset,
                part_of(plan, plan.steps - recipe.head_steps),
                recipe,
                tokenizer=self.tokenizer,
                progress=lambda step: progress(recipe.head_steps + step),
                options={**self.engine_options, **ledger},
            )
        return model, done

    def report(self, rows: Rows, models: dict[str, Any], plan: Any) -> dict[str, float]:
        """The first model's accuracy on its own line, and a table beside what is simpler."""
        from tasks.classifier import predict
        from tasks.training import accuracy, encode, majority_accuracy, words_accuracy

        tokens, _ = encode(rows, self.tokenizer, self.task.recipe)
        scores = {
            name: accuracy(predict(model, tokens, self.tokenizer), rows.labels)
            for name, model in models.items()
        }
        words = words_accuracy(
            self.task.train,
            rows,
            classes=len(self.task.classes),
            plan=plan,
            options=self.engine_options,
        )
        table = Table("on " + rows.name, "accuracy")
        table.add_row("majority class", f"{majority_accuracy(rows.labels):.3f}")
        table.add_row("private bag of words, same epsilon", f"{words:.3f}")
        for name, score in scores.items():
            table.add_row(name, f"{score:.3f}")
        self.console.print(table)
        main_score = next(iter(scores.values()))
        self.console.print(f"accuracy: {main_score:.3f} on {len(rows)} {rows.name}")
        return scores


def check_before_loading(settings: Settings) -> None:
    """What can be refused before anything is read."""
    from dppeft.tuners import registry

    if settings.task not in TASKS:
        raise ArgumentError(f"Unknown task {settings.task!r}. Tasks: {', '.join(TASKS)}.")
    registry.info(settings.method)  # an unknown name is an error, with the nearest one
    if settings.output.exists() and any(settings.output.iterdir()):
        raise ArgumentError(f"--output {settings.output} is not empty. Name a new folder.")
    if settings.rows is not None and settings.rows < 1:
        raise ArgumentError(f"Expected --rows >= 1, got {settings.rows}.")


def print_plan(console: Console, settings: Settings, task: Task, plan: Any) -> None:
    """All that will be spent, and on what, before it is."""
    recipe = task.recipe
    console.print(f"[bold]{task.name}[/bold]: {len(task.train)} private rows ({task.train.name})")
    console.print(
        f"method {settings.method}, clipping {recipe.clipping}, {recipe.max_length} tokens a row, "
        f"learning rates {recipe.lr:g} (adapter) and {recipe.head_lr:g} (head)"
    )
    if recipe.head_steps:
        console.print(
            f"the first {recipe.head_steps} steps train the head alone, on features that the "
            "encoder computes once"
        )
    console.print(plan.explain())


def share(console: Console, settings: Settings, model: Any, run: Any) -> int:
    """Export, say what is shared under which guarantee, read it back in a new process.

    Returns:
        The bytes shared.
    """
    import dppeft

    spent = run.spent()
    dppeft.export(model, settings.output, spent=run.card())
    size = sum(path.stat().st_size for path in settings.output.rglob("*") if path.is_file())
    whole = sum(p.numel() * p.element_size() for p in model.parameters())
    console.print(
        f"shared: {size:,} bytes in {settings.output} (the model: {whole:,}), under "
        f"({spent.epsilon:.2f}, {spent.delta:g})-DP for {spent.unit} ({spent.accountant}, "
        f"{spent.steps} steps)"
    )
    command = [sys.executable, "-m", "tasks.predict", settings.task, str(settings.output)]
    command += ["--model", settings.model] if settings.model else []
    # A fresh process: nothing of this run but the folder. Names that a launcher set would make it
    # wait for other ranks.
    launcher = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    env = {key: value for key, value in os.environ.items() if key not in launcher}
    done = subprocess.run(
        [*command, "--", *settings.sentences], env=env, capture_output=True, text=True, check=False
    )
    if done.returncode:
        raise ArgumentError(f"The shared folder could not be read back: {done.stderr[-500:]}")
    console.print("read back in a new process with peft.PeftModel.from_pretrained:")
    console.print(done.stdout, end="", markup=False)
    return size


if __name__ == "__main__":
    app()
