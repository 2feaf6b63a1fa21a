"""Trainers of a tiny BERT on a few rows, and callbacks that watch or stop them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import TrainerCallback, TrainingArguments

import dppeft
from tests.training.runs import adapted_bert, token_rows, trained

ROWS, HELD_OUT = token_rows(24), token_rows(10, seed=1)
PRIVACY: dict[str, Any] = {"delta": 1e-3, "batch_size": 8, "max_grad_norm": 0.5}


def accuracy(prediction: Any) -> dict[str, float]:
    right = prediction.predictions.argmax(-1) == prediction.label_ids
    return {"accuracy": float(right.mean())}


def arguments(folder: Path, **changes: Any) -> TrainingArguments:
    fixed = {"use_cpu": True, "report_to": [], "disable_tqdm": True, "save_strategy": "no"}
    return TrainingArguments(output_dir=str(folder), **{**fixed, **changes})


def make(folder: Path, *, privacy: dict[str, Any] | None = None, **options: Any) -> Any:
    """A trainer of a tiny BERT: 2 epochs, noise 1 unless ``privacy`` says otherwise."""
    changes = options.pop("args", {})
    settings = {**PRIVACY, **(privacy or {})}
    if "epsilon" not in settings:
        settings.setdefault("noise_multiplier", 1.0)
    model = options.pop("model", None) or adapted_bert()
    options = {"train_dataset": ROWS, "eval_dataset": HELD_OUT, "data_collator": None, **options}
    return dppeft.PrivateTrainer(
        model,
        arguments(folder, **{"num_train_epochs": 2, **changes}),
        compute_metrics=accuracy,
        privacy=dppeft.Privacy(**settings),
        **options,
    )


def saving(folder: Path, **options: Any) -> Any:
    args = {"save_strategy": "steps", "save_steps": 3, **options.pop("args", {})}
    return make(folder, args=args, **options)


class StopAfter(TrainerCallback):
    """A crash, as far as the trainer can tell: no further step is made."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.step:
            control.should_training_stop = True


class Watch(TrainerCallback):
    """What callbacks are told, in order."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.rates: list[float] = []
        self.logs: list[dict[str, float]] = []
        self.saw_gradients = True

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.events.append("begin")

    def on_pre_optimizer_step(self, *_: Any, **kwargs: Any) -> None:
        self.events.append("pre")
        model = kwargs["model"]
        self.saw_gradients &= all(p.grad is not None for p in trained(model).values())
        self.rates.append(kwargs["optimizer"].param_groups[0]["lr"])

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        self.events.append("optimizer")

    def on_step_end(self, *_: Any, **__: Any) -> None:
        self.events.append("end")

    def on_epoch_end(self, *_: Any, **__: Any) -> None:
        self.events.append("epoch")

    def on_log(self, *_: Any, **kwargs: Any) -> None:
        self.logs.append(dict(kwargs["logs"]))
