"""Classify sentences with a shared adapter: plain PEFT, which knows our own kinds from dppeft.

python -m tasks.predict movie_reviews runs/my-adapter "a joy from start to finish"
python -m tasks.predict mnli runs/my-adapter "a man plays the guitar | a man makes music"
"""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(add_completion=False)


@app.command()
def main(
    task: Annotated[str, typer.Argument(help="Task whose classes are meant, e.g. movie_reviews.")],
    adapter: Annotated[Path, typer.Argument(help="Folder that the training run exported.")],
    texts: Annotated[list[str], typer.Argument(help="Sentences; pairs with | between.")],
    model: Annotated[str | None, typer.Option(help="Base model; default: the demo's.")] = None,
    objective: Annotated[str, typer.Option(help="head or infilling, as in training.")] = "head",
    template: Annotated[str | None, typer.Option(help="As in training.")] = None,
    label_word: Annotated[list[str] | None, typer.Option(help="As in training.")] = None,
) -> None:
    """Print one line per sentence: class, probability, sentence."""
    from peft import PeftModel
    from transformers import AutoTokenizer, logging

    from tasks.classifier import predict
    from tasks.common import Recipe, Rows, demo_encoder
    from tasks.objectives import make_objective

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    about = importlib.import_module(f"tasks.{task}")
    folder = model or str(demo_encoder())
    way = make_objective(
        objective,
        folder,
        AutoTokenizer.from_pretrained(folder),
        classes=about.CLASSES,
        template=template or about.TEMPLATE,
        label_words=label_word or about.LABEL_WORDS,
    )
    base = way.build()
    if (adapter / "adapter_config.json").is_file():
        tuned = PeftModel.from_pretrained(base, adapter)
    else:  # method `full` shares whole weights, which are not in PEFT's form
        import dppeft

        tuned = dppeft.load(base, adapter)
    halves = [text.partition("|") for text in texts]
    pairs = [pair.strip() for _, _, pair in halves] if "{pair" in about.TEMPLATE else None
    rows = Rows(
        name="given",
        texts=texts if pairs is None else [first.strip() for first, _, _ in halves],
        pairs=pairs,
        labels=[0] * len(texts),
    )
    encoded, _ = way.encode(rows, Recipe(max_length=512))
    probabilities = predict(tuned, encoded, way.tokenizer, logits_of=way.logits).softmax(dim=1)
    for text, row in zip(texts, probabilities, strict=True):
        best = int(row.argmax())
        print(f"{about.CLASSES[best]:>14}  {row[best]:.2f}  {text}")


if __name__ == "__main__":
    app()
