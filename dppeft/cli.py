"""The command line: ``dppeft plan | train | evaluate | predict | methods``.

Wrong use ends with one line on standard error and exit code 2, never with a traceback. Results go
to standard output (as JSON with ``--json``), all else to standard error. Nothing heavy is imported
before a command runs, so that ``--help`` answers at once.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from dppeft.errors import ArgumentError, DppeftError

app = typer.Typer(
    name="dppeft",
    add_completion=False,
    no_args_is_help=False,
    rich_markup_mode=None,
    help="Fine-tune pretrained transformers on private data and share the small result.",
)

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]
Data = Annotated[Path, typer.Option(help="A .csv, .tsv, .jsonl or .parquet file.")]
Text = Annotated[str, typer.Option(help="Column of the text.")]
TextPair = Annotated[str | None, typer.Option(help="Column of a second text.")]
Label = Annotated[str, typer.Option(help="Column of the label.")]
DropEmpty = Annotated[bool, typer.Option("--drop-empty", help="Leave rows without text out.")]
Adapter = Annotated[Path, typer.Option(help="A folder that `dppeft train` wrote.")]
Base = Annotated[str | None, typer.Option("--model", help="Base model, if it has moved.")]


def _print_version(asked: bool) -> None:
    if asked:
        import dppeft

        typer.echo(dppeft.__version__)
        raise typer.Exit


@app.callback()
def about(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print it.")
    ] = False,
) -> None:
    """Fine-tune pretrained transformers on private data and share the small result."""


@app.command()
def plan(
    num_examples: Annotated[int, typer.Option(help="Rows in the private data set.")],
    batch_size: Annotated[int, typer.Option(help="Expected logical batch.")],
    delta: Annotated[float, typer.Option(help="Below 1 / number of rows.")],
    epochs: Annotated[float | None, typer.Option(help="Expected visits per row.")] = None,
    steps: Annotated[int | None, typer.Option(help="Updates, instead of --epochs.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="Budget: the noise follows.")] = None,
    noise_multiplier: Annotated[float | None, typer.Option(help="Instead of --epsilon.")] = None,
    max_grad_norm: Annotated[float, typer.Option(help="Clipping threshold.")] = 1.0,
    accountant: Annotated[str, typer.Option(help="pld, rdp or prv.")] = "pld",
    as_json: Json = False,
) -> None:
    """What a run would spend, before spending anything."""
    import dppeft

    made = dppeft.plan(
        num_examples=num_examples,
        batch_size=batch_size,
        delta=delta,
        epochs=epochs,
        steps=steps,
        epsilon=epsilon,
        noise_multiplier=noise_multiplier,
        max_grad_norm=max_grad_norm,
        accountant=accountant,
    )
    _result({**made.summary(), "epsilon": made.epsilon()}, made.explain(), as_json=as_json)


@app.command()
def methods(as_json: Json = False) -> None:
    """What can train: every method with its options and their defaults."""
    import dppeft

    table = dppeft.methods()
    lines = [f"{name:24} {info.description}" for name, info in table.items()]
    fields = {
        name: {"description": info.description, "paper": info.paper, "options": dict(info.options)}
        for name, info in table.items()
    }
    _result(fields, "\n".join(lines), as_json=as_json)


@app.command()
def train(
    data: Data,
    text: Text,
    label: Label,
    model: Annotated[str, typer.Option(help="Name or folder of the base model.")],
    output: Annotated[Path, typer.Option(help="New folder for what is shared.")],
    epsilon: Annotated[float, typer.Option(help="Budget of the run.")],
    text_pair: TextPair = None,
    method: Annotated[str, typer.Option(help="See `dppeft methods`.")] = "lora",
    option: Annotated[list[str] | None, typer.Option(help="Of the method: r=16")] = None,
    target_modules: Annotated[str | None, typer.Option(help="Names, by comma.")] = None,
    delta: Annotated[float | None, typer.Option(help="Default: min(1e-5, 1/(2N)).")] = None,
    batch_size: Annotated[int | None, typer.Option(help="Expected logical batch.")] = None,
    epochs: Annotated[float | None, typer.Option(help="Expected visits per row.")] = None,
    lr: Annotated[float, typer.Option(help="Learning rate of the adapter.")] = 5e-4,
    head_lr: Annotated[float, typer.Option(help="Learning rate of the head.")] = 5e-3,
    max_length: Annotated[int, typer.Option(help="Tokens kept of a row.")] = 128,
    max_grad_norm: Annotated[float | None, typer.Option(help="Clipping threshold.")] = None,
    clipping: Annotated[str | None, typer.Option(help="flat, per_layer or automatic.")] = None,
    engine: Annotated[str, typer.Option(help="auto or opacus.")] = "auto",
    precision: Annotated[str, typer.Option(help="auto, float32 or bf16.")] = "auto",
    pad_token: Annotated[str | None, typer.Option(help="Where the tokenizer has none.")] = None,
    eval_data: Annotated[Path | None, typer.Option(help="Labelled rows to report on.")] = None,
    drop_empty: DropEmpty = False,
    seed: Annotated[int | None, typer.Option(help="Reproducible, and marked so.")] = None,
    as_json: Json = False,
) -> None:
    """Train a text classifier privately and write what may be shared."""
    from dppeft import classify

    if max_length < 3:
        raise ArgumentError(f"Expected --max-length >= 3, got {max_length}.")
    settings = classify.TrainSettings(
        data=data,
        columns=classify.Columns(
            text=text, label=label, text_pair=text_pair, drop_empty=drop_empty
        ),
        model=model,
        output=output,
        epsilon=epsilon,
        method=method,
        delta=delta,
        epochs=epochs,
        batch_size=batch_size,
        lr=lr,
        head_lr=head_lr,
        max_length=max_length,
        max_grad_norm=max_grad_norm,
        clipping=clipping,
        pad_token=pad_token,
        eval_data=eval_data,
        method_options=_method_options(option or [], target_modules),
        engine_options={"engine": engine, "precision": precision, "seed": seed},
    )
    with _Bar() as bar:
        result = classify.train(settings, say=_note, progress=bar.advance)
    _result(result, _train_summary(result), as_json=as_json)


@app.command()
def evaluate(
    data: Data,
    adapter: Adapter,
    text: Annotated[str | None, typer.Option(help="Default: as in training.")] = None,
    label: Annotated[str | None, typer.Option(help="Default: as in training.")] = None,
    text_pair: TextPair = None,
    model: Base = None,
    drop_empty: DropEmpty = False,
    as_json: Json = False,
) -> None:
    """Accuracy of a shared adapter on labelled rows."""
    from dppeft import classify

    trained = classify.read_note(adapter)["columns"]
    columns = classify.Columns(
        text=text or trained["text"],
        label=label or trained["label"],
        text_pair=text_pair or trained["text_pair"],
        drop_empty=drop_empty,
    )
    result = classify.evaluate(adapter, data, columns, model=model)
    line = "accuracy: {accuracy:.3f} on {rows} rows (commonest class: {majority:.3f})"
    _result(result, line.format(**result), as_json=as_json)


@app.command()
def predict(
    adapter: Adapter,
    texts: Annotated[list[str] | None, typer.Argument(help="Texts to classify.")] = None,
    data: Annotated[Path | None, typer.Option(help="A file of rows instead.")] = None,
    text: Annotated[str | None, typer.Option(help="Default: as in training.")] = None,
    text_pair: TextPair = None,
    model: Base = None,
    as_json: Json = False,
) -> None:
    """Class and probability of texts, with a shared adapter."""
    from dppeft import classify
    from dppeft.tables import TextTable

    if (data is None) == (not texts):
        raise ArgumentError("Expected texts or --data FILE, and not both.")
    trained = classify.read_note(adapter)["columns"]
    if data is not None:
        pair = text_pair or trained["text_pair"]
        table = classify.Columns(text=text or trained["text"], text_pair=pair).read(data)
    elif trained["text_pair"]:
        raise ArgumentError("This adapter reads two texts per row. Pass them with --data FILE.")
    else:
        table = TextTable(texts=list(texts or ()), pairs=None, labels=None)
    rows = classify.predict(adapter, table, model=model)
    lines = [f"{row['label']}\t{row['probability']:.2f}\t{row['text']}" for row in rows]
    _result(rows, "\n".join(lines), as_json=as_json)


def main(arguments: Sequence[str] | None = None) -> None:
    """Entry point: runs the command and ends the process with its exit code."""
    warnings.showwarning = _one_line_warning
    try:
        code = app(args=None if arguments is None else list(arguments), standalone_mode=False)
    except DppeftError as error:
        code = _wrong_use(str(error))
    except KeyboardInterrupt:
        code = 130
    except Exception as error:
        # typer's own errors (unknown option, missing option, not a number) know their one line.
        if not hasattr(error, "format_message"):
            raise
        code = _wrong_use(f"{error.format_message()} See `dppeft --help`.")
    sys.exit(code if isinstance(code, int) else 0)


def _one_line_warning(
    message: Warning | str,
    category: type[Warning],
    *_where: object,
    **_more: object,
) -> None:
    """A warning of ours in one line; those of libraries are for their developers."""
    if category.__module__.startswith("dppeft"):
        typer.echo("Warning: " + " ".join(str(message).split()), err=True)


def _wrong_use(message: str) -> int:
    typer.echo("Error: " + " ".join(message.split()), err=True)
    return 2


def _note(line: str) -> None:
    typer.echo(line, err=True)


def _result(fields: Any, text: str, *, as_json: bool) -> None:
    typer.echo(json.dumps(fields, indent=2, default=str) if as_json else text)


def _train_summary(result: dict[str, Any]) -> str:
    line = (
        f"{result['output']}: {result['bytes']:,} bytes to share, under ({result['epsilon']:.3g}, "
        f"{result['delta']:.3g})-DP for {result['unit']}"
    )
    if "accuracy" in result:
        line += (
            "\naccuracy: {accuracy:.3f} on {rows} rows (commonest class: {majority:.3f})".format(
                **result
            )
        )
    return line


def _method_options(given: Sequence[str], target_modules: str | None) -> dict[str, Any]:
    """``["r=16", "bias=none"]`` -> ``{"r": 16, "bias": "none"}``."""
    options: dict[str, Any] = {}
    for item in given:
        name, equals, value = item.partition("=")
        if not equals or not name:
            raise ArgumentError(f"--option {item!r} is not of the form name=value, such as r=16.")
        try:
            options[name] = json.loads(value)
        except json.JSONDecodeError:
            options[name] = value
    if target_modules is not None:
        names = [name for name in target_modules.split(",") if name]
        options["target_modules"] = names[0] if names == ["all-linear"] else names
    return options


class _Bar:
    """A progress bar on standard error: steps and epsilon spent, which are public."""

    def __init__(self) -> None:
        self._bar: Any = None
        self._line: Any = None

    def __enter__(self) -> _Bar:
        return self

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def advance(self, step: int, plan: Any) -> None:
        if self._bar is None:
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._bar.start()
            self._line = self._bar.add_task("training", total=plan.steps)
        if step % max(1, plan.steps // 10) == 0:  # composing takes longer than drawing
            self._bar.update(self._line, description=f"epsilon {plan.epsilon(steps=step):.2f}")
        self._bar.update(self._line, completed=step)
