"""Write texts with a shared adapter: plain PEFT, which knows our own kinds from dppeft.

python -m tasks.write e2e runs/my-adapter "name : Alimentum | area : city centre"
"""

from __future__ import annotations

import dataclasses
import importlib
import warnings
from pathlib import Path
from typing import Annotated

import typer

from dppeft.errors import ArgumentError
from tasks.generating import SMOLLM2, TASKS
from tasks.generation import Decoding
from tasks.settings import one_line_errors

app = typer.Typer(add_completion=False)


@app.command()
def main(
    task: Annotated[str, typer.Argument(help=f"One of {', '.join(TASKS)}: how texts are sought.")],
    adapter: Annotated[Path, typer.Argument(help="Folder that the training run exported.")],
    sources: Annotated[list[str], typer.Argument(help="What to write about, one text for each.")],
    model: Annotated[str, typer.Option(help="Base model, as in training.")] = SMOLLM2,
    beams: Annotated[int | None, typer.Option(help="Beams of the search.")] = None,
    max_new_tokens: Annotated[int | None, typer.Option(help="Most tokens of a text.")] = None,
) -> None:
    """Print one text per source."""
    from transformers import logging

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    given = {"num_beams": beams, "max_new_tokens": max_new_tokens}
    with one_line_errors():
        decoding = _decoding(task, given)
        texts = _texts(adapter, sources, model, decoding)
    for text in texts:
        typer.echo(text)


def _decoding(task: str, given: dict[str, int | None]) -> Decoding:
    """The task's own, with what the command line changes."""
    if task not in TASKS:
        raise ArgumentError(f"Unknown task {task!r}. Tasks: {', '.join(TASKS)}.")
    changed = {name: value for name, value in given.items() if value is not None}
    return dataclasses.replace(importlib.import_module(f"tasks.{task}").DECODING, **changed)


def _texts(adapter: Path, sources: list[str], model: str, decoding: Decoding) -> list[str]:
    import dppeft
    from tasks.decoders import load_decoder
    from tasks.generation import generate_texts
    from tasks.prompts import encode_sources

    base, tokenizer = load_decoder(model)
    tuned = dppeft.load(base, adapter)
    return generate_texts(tuned, tokenizer, encode_sources(tokenizer, sources), decoding)


if __name__ == "__main__":
    app()
