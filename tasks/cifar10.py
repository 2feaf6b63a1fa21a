"""CIFAR-10 with the settings of the RGP paper: WRN-28-4, rank 16, batches of 1,000, 400 passes.

python -m tasks.cifar10 --data FOLDER --epsilon 8
python -m tasks.cifar10                          # from the hub, with the extra "data"

FOLDER holds the *binary version* of the data set (``data_batch_1.bin`` ... ``test_batch.bin``); the
Python version is pickles, which can run code when they are read. On a GPU: 28 layers are nothing
for two CPU cores (``--depth 10 --width 1 --steps 5`` shows that it runs).
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.console import Console
from torch import Tensor

import dppeft
from dppeft.errors import DataError
from tasks.results import Result, write_results
from tasks.settings import one_line_errors
from tasks.vision import Images, VisionRecipe, WideResNet, accuracy, fit

RECORD = 1 + 3 * 32 * 32  # a label and the three colours of 32 x 32 pixels
TRAINING = tuple(f"data_batch_{number}.bin" for number in range(1, 6))
TEST = ("test_batch.bin",)
# Yu et al. (2021), Section 4 and their code: clipping at 1, momentum 0.9, weight decay 1e-4.
BATCH_SIZE, EPOCHS, RANK, WARM_UP_EPOCHS, DELTA = 1000, 400, 16, 10, 1e-5
RATES = {10: 0.5, 4: 1.0}  # by width

app = typer.Typer(add_completion=False)


def read_binary(folder: Path, names: tuple[str, ...]) -> tuple[Tensor, Tensor]:
    """Images (N, 3, 32, 32) between -1 and 1, and labels (N,).

    Raises:
        DataError: a file is missing or is no file of this kind.
    """
    images, labels = [], []
    for name in names:
        path = folder / name
        if not path.is_file():
            raise DataError(
                f"{folder} has no {name}. Pass --data with the binary version of CIFAR-10 "
                "(cifar-10-batches-bin); the Python version is pickles and is not read."
            )
        content = np.fromfile(path, dtype=np.uint8)
        if not len(content) or len(content) % RECORD:
            raise DataError(f"{path} has {len(content)} bytes; expected records of {RECORD}.")
        records = content.reshape(-1, RECORD)
        if records[:, 0].max() > 9:
            raise DataError(f"{path} has labels above 9; expected ten classes, 0 to 9.")
        labels.append(torch.from_numpy(records[:, 0].astype(np.int64)))
        images.append(torch.from_numpy(records[:, 1:].reshape(-1, 3, 32, 32)))
    return torch.cat(images).float() / 127.5 - 1, torch.cat(labels)


def from_hub(split: str) -> tuple[Tensor, Tensor]:
    """The same from the hub, through the extra ``data``."""
    try:
        from datasets import load_dataset
    except ImportError as error:
        raise DataError(
            "Hub data sets need the extra: pip install 'dppeft[data]'. Or pass --data with the "
            "binary version of CIFAR-10."
        ) from error
    table = load_dataset("uoft-cs/cifar10", split=split)
    images = torch.stack([torch.from_numpy(np.array(image)) for image in table["img"]])
    return images.permute(0, 3, 1, 2).float() / 127.5 - 1, torch.tensor(table["label"])


@app.command()
def main(  # noqa: PLR0913 - the command line
    data: Annotated[Path | None, typer.Option(help="Folder with data_batch_1.bin ...")] = None,
    epsilon: Annotated[float, typer.Option(help="Budget.")] = 8.0,
    method: Annotated[str, typer.Option(help="rgp or full.")] = "rgp",
    sides: Annotated[str, typer.Option(help="Carriers: both, left or right.")] = "both",
    depth: Annotated[int, typer.Option(help="6 n + 4.")] = 28,
    width: Annotated[int, typer.Option(help="Of the network.")] = 4,
    steps: Annotated[int | None, typer.Option(help="Updates; default: 400 passes.")] = None,
    lr: Annotated[float | None, typer.Option(help="Default: the paper's for the width.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    result: Annotated[Path | None, typer.Option(help="File for the figures.")] = None,
) -> None:
    """Train privately and report the accuracy on the test images."""
    console = Console(soft_wrap=True, highlight=False)
    with one_line_errors():
        train = read_binary(data, TRAINING) if data else from_hub("train")
        test = read_binary(data, TEST) if data else from_hub("test")
        plan = dppeft.plan(
            num_examples=len(train[1]),
            batch_size=min(BATCH_SIZE, len(train[1])),
            epochs=None if steps else EPOCHS,
            steps=steps,
            epsilon=epsilon,
            delta=DELTA,
        )
        console.print(plan.explain())
        warm_up = round(WARM_UP_EPOCHS * len(train[1]) / plan.expected_batch_size)
        options = {"r": RANK, "sides": sides, "warmup_steps": warm_up} if method == "rgp" else {}
        network = WideResNet(depth=depth, width=width, num_labels=10).to(device)
        model = dppeft.wrap(network, method, **options)
        with console.status("training") as status:
            done = fit(
                model,
                Images(*train),
                plan,
                VisionRecipe(lr=lr or RATES.get(width, 1.0)),
                progress=lambda step: status.update(f"training: step {step}/{plan.steps}"),
            )
        score = accuracy(model, test[0].to(device), test[1].to(device))
    console.print(f"accuracy: {score:.3f} on {len(test[1])} test images")
    if result is not None:
        found = Result(
            task="cifar10",
            model=f"WRN-{depth}-{width}",
            method=method,
            epsilon=epsilon,
            metric="accuracy",
            value=score,
            trained_parameters=sum(p.numel() for p in model.parameters() if p.requires_grad),
            examples_per_second=done.examples_per_second,
            seconds=done.seconds,
            delta=DELTA,
            private_rows=len(train[1]),
            command=f"python -m tasks.cifar10 --depth {depth} --width {width}",
        )
        write_results(result, [found])


if __name__ == "__main__":
    app()
