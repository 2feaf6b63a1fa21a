"""Classify sentences with a shared adapter: plain PEFT, which knows our own kinds from dppeft.

python -m tasks.predict movie_reviews runs/my-adapter "a joy from start to finish"
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
    texts: Annotated[list[str], typer.Argument(help="Sentences.")],
    model: Annotated[str | None, typer.Option(help="Base model; default: the demo's.")] = None,
) -> None:
    """Print one line per sentence: class, probability, sentence."""
    from peft import PeftModel
    from transformers import AutoTokenizer, logging

    from tasks.classifier import build_classifier, predict
    from tasks.common import demo_encoder

    logging.disable_progress_bar()
    logging.set_verbosity_error()
    classes = importlib.import_module(f"tasks.{task}").CLASSES
    base_folder = model or str(demo_encoder())
    tokenizer = AutoTokenizer.from_pretrained(base_folder)
    base = build_classifier(base_folder, num_labels=len(classes))
    if (adapter / "adapter_config.json").is_file():
        tuned = PeftModel.from_pretrained(base, adapter)
    else:  # method `full` shares whole weights, which are not in PEFT's form
        import dppeft

        tuned = dppeft.load(base, adapter)
    encoded = [dict(tokenizer(text, truncation=True, max_length=512)) for text in texts]
    probabilities = predict(tuned, encoded, tokenizer).softmax(dim=1)
    for text, row in zip(texts, probabilities, strict=True):
        best = int(row.argmax())
        print(f"{classes[best]:>14}  {row[best]:.2f}  {text}")


if __name__ == "__main__":
    app()
