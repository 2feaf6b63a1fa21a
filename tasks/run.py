"""Train a task privately, report it, share the result, and read it back in a new process.

python -m tasks.run movie_reviews --method lora --epsilon 8
python -m tasks.run sst2 --data FOLDER --method lora --epsilon 8
python -m tasks.run sst2 --data FOLDER --model ROBERTA --objective infilling
python -m tasks.run e2e --data FOLDER --model smollm2 --method lora --epsilon 8
python -m tasks.run mlm --schedule geometric --epsilon 5.36
accelerate launch --cpu --num_processes 2 -m tasks.run movie_reviews
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from tasks import generating, mlm
from tasks.classifying import run_task
from tasks.settings import TASKS, Settings, new_folder, one_line_errors, with_paper

app = typer.Typer(add_completion=False, no_args_is_help=True, help=(__doc__ or "").split("\n")[0])


def classification(
    ctx: typer.Context,
    method: Annotated[str | None, typer.Option(help="`dppeft methods`; default: lora.")] = None,
    epsilon: Annotated[float | None, typer.Option(help="Budget of the run; default: 8.")] = None,
    recipe: Annotated[str | None, typer.Option(help="See `python -m tasks.recipes`.")] = None,
    delta: Annotated[float | None, typer.Option(help="Default: 1e-5, or the recipe's.")] = None,
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
    objective: Annotated[str | None, typer.Option(help="head (default) or infilling.")] = None,
    template: Annotated[str | None, typer.Option(help="'{text} It was {mask}.'")] = None,
    label_word: Annotated[list[str] | None, typer.Option(help="One per class, in order.")] = None,
    engine: Annotated[str, typer.Option(help="auto or opacus.")] = "auto",
    precision: Annotated[str, typer.Option(help="auto, float32 or bf16.")] = "auto",
    seed: Annotated[int | None, typer.Option(help="Reproducible, and marked so.")] = None,
    result: Annotated[Path | None, typer.Option(help="JSON file for the figures.")] = None,
) -> None:
    """Train a classifier privately and report it beside what is simpler."""
    settings = Settings(
        task=str(ctx.info_name),
        method=method or "lora",
        epsilon=8.0 if epsilon is None else epsilon,
        delta=1e-5 if delta is None else delta,
        compare=compare,
        data=data,
        model=model,
        output=output or new_folder(str(ctx.info_name), recipe or method or "lora"),
        sentences=predict or (),
        objective=objective or "head",
        template=template,
        label_words=label_word,
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
    with one_line_errors():
        if recipe is not None:
            said = {"method": method, "epsilon": epsilon, "delta": delta, "objective": objective}
            settings = with_paper(settings, recipe, **said)
        run_task(settings)


for name in TASKS:
    app.command(name)(classification)
for name in generating.TASKS:
    app.command(name)(generating.generation)
app.command("mlm")(mlm.mlm)

if __name__ == "__main__":
    app()
