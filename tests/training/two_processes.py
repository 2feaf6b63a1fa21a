"""What each of several gloo processes does in test_distributed.py; writes what it saw to a file.

python -m torch.distributed.run --nproc-per-node 2 tests/training/two_processes.py FOLDER
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
torch.set_num_threads(1)

import dppeft  # noqa: E402
from tests.training import runs  # noqa: E402

RANK = int(os.environ["RANK"])


def clipped_sums() -> dict[str, Any]:
    """Five steps on ragged rows without noise; which rows each rank used."""
    rows = Watched(runs.token_rows(40))
    model = runs.adapted_bert()
    if RANK == 1:  # the start values of the main process count
        for p in runs.trained(model).values():
            p.data.add_(1.0)
    plan = runs.make_plan(40, batch_size=16, steps=5, max_grad_norm=0.5)
    run = dppeft.make_private(
        model, runs.sgd(model), rows, plan, physical_tokens=32, precision="float32", seed=3
    )
    used, draws, weights = [], [], [runs.values(model)]
    for batch in run.batches():
        run._packer.source.lengths(batch.indices.numpy())  # lengths are read by every rank
        rows.read.clear()
        draws.append(batch.indices.tolist())
        run.step(batch)
        used.append(sorted(rows.read))
        weights.append(runs.values(model))
    return {"used": used, "draws": draws, "weights": weights, "spent": run.spent().epsilon}


class Watched(list):  # type: ignore[type-arg]
    def __init__(self, rows: Any) -> None:
        super().__init__(rows)
        self.read: list[int] = []

    def __getitem__(self, index: Any) -> Any:
        self.read.append(index)
        return super().__getitem__(index)


def rgp() -> dict[str, Any]:
    """Three noised steps on full matrices: carriers are made on every rank for itself."""
    model = runs.carried_bert()
    plan = runs.make_plan(24, batch_size=12, steps=3, noise_multiplier=0.5, max_grad_norm=0.5)
    run = dppeft.make_private(
        model, runs.sgd(model), runs.token_rows(24), plan, precision="float32", seed=5
    )
    for batch in run.batches():
        run.step(batch)
    return {"weights": runs.full_matrices(model)}


def noise() -> dict[str, Any]:
    """Zero gradients, sigma 1, C 0.5: the weight is minus the noise over the batch size."""
    plan = runs.make_plan(64, batch_size=8, steps=1, noise_multiplier=1.0, max_grad_norm=0.5)
    model, run = runs.dot_run(torch.zeros(64, 20_000), plan, seed=0)
    run.step(next(run.batches()))
    return {"noise": model.layer.weight.detach() * 8, "spent": run.spent()}


def empty() -> dict[str, Any]:
    """One row expected for two ranks: one of them, or both, have none in most steps."""
    plan = runs.make_plan(20, batch_size=1, steps=40, noise_multiplier=1.0, max_grad_norm=1.0)
    model, run = runs.dot_run(torch.eye(20), plan)
    sizes = []
    for batch in run.batches():
        sizes.append(len(batch))
        run.step(batch)
    return {
        "sizes": sizes,
        "weight": model.layer.weight.detach(),
        "spent": run.spent(),
        "ledger": None if run.ledger is None else len(run.ledger.entries),
    }


def restored(folder: Path) -> dict[str, Any]:
    """Save after two steps, restore into new runs, and finish."""
    plan = runs.make_plan(8, batch_size=4, steps=4, epsilon=3.0, max_grad_norm=1.0)
    _, first = runs.dot_run(torch.eye(8), plan)
    for batch in first.batches(steps=2):
        first.step(batch)
    first.save(folder / "saved")
    model, second = runs.dot_run(torch.eye(8), plan)
    second.restore(folder / "saved")
    for batch in second.batches():
        second.step(batch)
    return {"weight": model.layer.weight.detach(), "spent": second.spent()}


def trainer(folder: Path) -> dict[str, Any]:
    """PrivateTrainer as it is launched: same weights everywhere, one learning rate per update."""
    from transformers import TrainerCallback, TrainingArguments

    rates = []

    class Watch(TrainerCallback):
        def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            rates.append(kwargs["lr_scheduler"].get_last_lr()[0])

    model = runs.adapted_bert()
    made = dppeft.PrivateTrainer(
        model,
        TrainingArguments(
            output_dir=str(folder / "out"), max_steps=4, learning_rate=1.0, use_cpu=True,
            report_to=[], disable_tqdm=True, save_steps=2, logging_steps=1,
        ),
        train_dataset=runs.token_rows(24),
        callbacks=[Watch],
        privacy=dppeft.Privacy(noise_multiplier=1.0, delta=1e-3, batch_size=8, max_grad_norm=0.1),
    )  # fmt: skip
    made.train()
    return {"weights": runs.values(model), "rates": rates, "spent": made.spent()}


def main(folder: Path) -> None:
    """All cases in one launch: starting Python and torch twice takes longer than all of them."""
    os.environ["XDG_STATE_HOME"] = str(folder / f"state-{RANK}")
    cases: dict[str, Callable[[], dict[str, Any]]] = {
        "clipped_sums": clipped_sums,
        "rgp": rgp,
        "noise": noise,
        "empty": empty,
        "restored": lambda: restored(folder),
        "trainer": lambda: trainer(folder),
    }
    torch.save({name: case() for name, case in cases.items()}, folder / f"{RANK}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
