"""``PrivateTrainer``: transformers' Trainer with a private update instead of its training step.

Callbacks, logging back ends, progress bar, checkpoints, evaluation and prediction are Trainer's
own. What differs: an update is ``PrivateRun.step``; the number of updates comes from the plan; what
is logged about private rows is public (step, epsilon spent, learning rate, speed); and an option
that cannot be honoured is refused by name.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import TrainerCallback, TrainingArguments
from transformers.trainer_utils import TrainOutput
from transformers.utils import is_datasets_available

from dppeft._types import Spent
from dppeft.errors import ArgumentError
from dppeft.privacy.card import PrivacyCard
from dppeft.privacy.plan import PrivacyPlan
from dppeft.training import checks
from dppeft.training.arguments import (
    check_arguments,
    mapped_physical_batch_size,
    mapped_precision,
)
from dppeft.training.collation import choose_collate
from dppeft.training.inputs import Privacy, TrainingRows, check_given, make_loss, make_plan
from dppeft.training.run import PrivateRun
from dppeft.training.saving import SavingTrainer
from dppeft.training.settings import RunSettings

__all__ = ["Privacy", "PrivateTrainer"]

PRIVATE_LOSS = "train_loss_not_private"  # the key says what the value is
# What Trainer computes from rows as they are; never logged for private ones.
_UNNOISED = ("loss", "train_loss", "grad_norm", "total_flos")


class PrivateTrainer(SavingTrainer):
    """``transformers.Trainer`` under differential privacy.

    ``trainer.plan`` is what training will spend, known before anything is spent; ``spent()`` and
    ``card()`` are what was. ``dataloader_num_workers`` and the like hold for evaluation.

    Args:
        model: wrapped (``dppeft.wrap``) or plain.
        args: fields that cannot be honoured are refused here, by name.
        privacy: required.
        data_collator, train_dataset, eval_dataset, processing_class, compute_metrics, callbacks,
            optimizers, optimizer_cls_and_kwargs, preprocess_logits_for_metrics: as in Trainer.
        model_init, compute_loss_func: refused, with what to do instead.
    """

    def __init__(  # noqa: PLR0913 - Trainer's own arguments
        self,
        model: nn.Module | None = None,
        args: TrainingArguments | None = None,
        *,
        privacy: Privacy | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        model_init: Callable[..., nn.Module] | None = None,
        compute_loss_func: Callable[..., Tensor] | None = None,
        compute_metrics: Callable[[Any], dict[str, float]] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[[Tensor, Tensor], Tensor] | None = None,
    ) -> None:
        args = TrainingArguments(output_dir="tmp_trainer") if args is None else args
        check_given(model, privacy, model_init, compute_loss_func)
        assert privacy is not None
        assert model is not None
        check_arguments(args)
        checks.check_model(model)
        self.privacy = privacy
        self.plan: PrivacyPlan | None = None
        if train_dataset is not None:
            self.plan = make_plan(privacy, args, train_dataset)
            checks.check_first_row(train_dataset[0])
        self._loss = make_loss(privacy, args, model)
        self._run: PrivateRun | None = None
        self._looks: list[str] = []
        if data_collator is None and processing_class is None:
            data_collator = _padding_for(model, train_dataset, eval_dataset)
        super().__init__(
            model,
            args,
            data_collator=data_collator,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            processing_class=processing_class,
            compute_metrics=compute_metrics,
            callbacks=callbacks,
            optimizers=optimizers,
            optimizer_cls_and_kwargs=optimizer_cls_and_kwargs,
            preprocess_logits_for_metrics=preprocess_logits_for_metrics,
        )
        self._refuse_training_rows(eval_dataset)

    # What was spent

    def spent(self) -> Spent:
        """The guarantee of the updates made so far; epsilon 0 before the first."""
        if self._run is not None:
            return self._run.spent()
        if self.plan is None:
            raise ArgumentError("There is no train_dataset, so there is no plan and nothing spent.")
        return Spent(
            epsilon=0.0,
            delta=self.plan.delta,
            steps=0,
            sample_rate=self.plan.sample_rate,
            noise_multiplier=self.plan.noise_multiplier,
            accountant=self.plan.accountant,
        )

    def card(self) -> PrivacyCard:
        """The privacy card of the model as it is now, with what was looked at without noise."""
        if self._run is None:
            raise ArgumentError("Nothing was trained yet, so there is no card: call train() first.")
        for what in self._looks:
            self._run.note_look(what)
        return self._run.card()

    # Where private training enters Trainer. A test names the version when this seam moves; an
    # unknown Trainer that trains by itself would call training_step, which refuses.

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """Refused: a training step of Trainer's own would use rows without privacy."""
        raise NotImplementedError(
            "PrivateTrainer makes no step of this kind: it would use private rows without noise. "
            "This version of transformers is not supported if train() brought you here."
        )

    def get_train_dataloader(self) -> Any:
        """The rows, how they are collated, and how many updates make an epoch; not batches."""
        if self.plan is None:
            raise ArgumentError("train() needs train_dataset=, given when the trainer is made.")
        dataset = self.train_dataset
        columns: list[str] | None = None
        if self.args.remove_unused_columns:
            self._set_signature_columns_if_needed()
            columns = self._signature_columns
        if is_datasets_available():
            import datasets

            if isinstance(dataset, datasets.Dataset):
                dataset, columns = self._remove_unused_columns(dataset, "training"), None
        return TrainingRows(dataset, self.data_collator, self.plan, columns=columns)

    def set_initial_training_values(
        self, args: TrainingArguments, dataloader: Any
    ) -> tuple[int, int, int, int, int, int | None, int]:
        """Epochs and updates of the plan, which alone decides how many there are."""
        planned = dataloader.planned
        per_epoch = len(dataloader)
        return (
            -(-planned.steps // per_epoch),
            per_epoch,
            planned.num_examples,
            round(planned.steps * planned.expected_batch_size),
            round(planned.expected_batch_size),
            per_epoch,
            planned.steps,
        )

    def _prepare_for_training(
        self, max_steps: int, train_dataloader: Any, resume_from_checkpoint: str | None
    ) -> tuple[nn.Module, Any]:
        """Optimizer, schedule, private run; no DistributedDataParallel: the run adds up."""
        if self._created_lr_scheduler:
            self.lr_scheduler, self._created_lr_scheduler = None, False
        self.create_optimizer()
        self.optimizer = checks.unwrap_optimizer(self.optimizer)
        self.create_scheduler(num_training_steps=max_steps)
        if self._run is None:
            self._run = PrivateRun(
                self.model,
                self.optimizer,
                train_dataloader.dataset,
                self.plan,
                self._settings(train_dataloader),
            )
        if resume_from_checkpoint is not None:
            self._resume(Path(resume_from_checkpoint))
        else:
            self._run.batches()  # refuses, by its own words, when the plan is used up
        for name in ("model", "optimizer", "lr_scheduler"):
            setattr(self.callback_handler, name, getattr(self, name))
        self.callback_handler.train_dataloader = train_dataloader
        return self.model, train_dataloader

    def _run_epoch(  # noqa: PLR0913 - Trainer's own signature
        self,
        model: nn.Module,
        epoch: int,
        train_dataloader: Any,
        steps_in_epoch: int,
        num_update_steps_per_epoch: int,
        trial: Any,
        ignore_keys_for_eval: list[str] | None,
        start_time: float,
        resume_from_checkpoint: str | None,
        epochs_trained: int,
        steps_trained_in_current_epoch: int,
    ) -> None:
        """The updates of one epoch, one private step each."""
        if epoch == epochs_trained and resume_from_checkpoint is not None:
            self._load_rng_state(resume_from_checkpoint)
        done = self.state.global_step - epoch * num_update_steps_per_epoch
        learning_rate = None
        for number in range(max(done, 0), num_update_steps_per_epoch):
            if self.control.should_training_stop or not self._steps_left():
                self.control.should_training_stop = True
                break
            self.control = self.callback_handler.on_step_begin(self.args, self.state, self.control)
            learning_rate = self._update()
            self.state.global_step += 1
            self.state.epoch = epoch + (number + 1) / num_update_steps_per_epoch
            self.control = self.callback_handler.on_step_end(self.args, self.state, self.control)
            self._after_update(epoch, trial, ignore_keys_for_eval, start_time, learning_rate)
            if self.control.should_epoch_stop or self.control.should_training_stop:
                break
        self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
        self._after_update(epoch, trial, ignore_keys_for_eval, start_time, learning_rate)

    def _update(self) -> float:
        """One private step; returns the learning rate that moved the weights."""
        assert self._run is not None

        def before(*_: Any) -> None:  # the gradients are released by now
            self.control = self.callback_handler.on_pre_optimizer_step(
                self.args, self.state, self.control
            )

        if callable(getattr(self.optimizer, "train", None)):
            self.optimizer.train()  # schedule-free optimizers
        self._loss.forget()
        hook = self.optimizer.register_step_pre_hook(before)
        try:
            self._run.step(next(self._run.batches(steps=1)))
        finally:
            hook.remove()
        self.control = self.callback_handler.on_optimizer_step(self.args, self.state, self.control)
        learning_rate = self._get_learning_rate()
        if self._schedule_steps_per_update():
            self.lr_scheduler.step()  # once per update, whatever the physical batches were
        if self.privacy.log_private_loss:
            self._tr_loss += self._loss.mean()
        return learning_rate

    def _steps_left(self) -> bool:
        """Whether the plan allows another update; a plan without a target always does."""
        assert self._run is not None
        assert self.plan is not None
        return self.plan.target_epsilon is None or self._run.steps_made < self.plan.steps

    def _after_update(
        self,
        epoch: int,
        trial: Any,
        ignore_keys_for_eval: list[str] | None,
        start_time: float,
        learning_rate: float | None,
    ) -> None:
        """Trainer's logging, evaluation and saving; no gradient norm."""
        self._maybe_log_save_evaluate(
            self._tr_loss,
            None,
            self.model,
            trial,
            epoch,
            ignore_keys_for_eval,
            start_time,
            learning_rate=learning_rate,
        )

    def _finalize_training(
        self, trial: Any, num_train_samples: int, start_time: float
    ) -> TrainOutput:
        """Trainer's end of training; the training loss is unknown, not 0."""
        output = super()._finalize_training(trial, num_train_samples, start_time)
        metrics = {name: v for name, v in output.metrics.items() if name not in _UNNOISED}
        return TrainOutput(output.global_step, math.nan, {**metrics, **self._public_metrics()})

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log public facts: what Trainer would say of private rows is replaced by epsilon spent."""
        training = "loss" in logs or "train_loss" in logs
        shown = {name: value for name, value in logs.items() if name not in _UNNOISED}
        if training and self._run is not None:
            if self.privacy.log_private_loss:
                shown[PRIVATE_LOSS] = logs.get("loss", logs.get("train_loss", math.nan))
                self._run.note_look("mean training loss of the drawn rows, logged")
            shown.update(self._public_metrics())
            if start_time is not None:
                steps = self.state.global_step - self._initial_global_step
                seconds = max(time.time() - start_time, 1e-9)
                rows = steps * self.plan.expected_batch_size
                shown["examples_per_second"] = round(rows / seconds, 1)
        super().log(shown, start_time)

    def _public_metrics(self) -> dict[str, float]:
        return {"epsilon_spent": self.spent().epsilon}

    # Evaluation: Trainer's own, of the user's rows

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> dict[str, float]:
        """Trainer's evaluation. Metrics carry no noise: of private rows they are for your eyes."""
        self._refuse_training_rows(eval_dataset)
        self._look("metrics of evaluate(), which cost privacy if the evaluation rows are private")
        return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)

    def predict(
        self,
        test_dataset: Any,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "test",
    ) -> Any:
        """Trainer's prediction."""
        self._refuse_training_rows(test_dataset)
        self._look(
            "predictions and metrics of predict(), which cost privacy if its rows are private"
        )
        return super().predict(test_dataset, ignore_keys, metric_key_prefix)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Refused: each trial is a release of its own."""
        raise ArgumentError(
            "hyperparameter_search would train on the private rows once per trial and report the "
            "epsilon of one. Make one PrivateTrainer per trial with the same Privacy.ledger, which "
            "then counts all of them, or search on public data."
        )

    def _refuse_training_rows(self, dataset: Any) -> None:
        """Metrics of the private rows leave without noise; only on request."""
        named = dataset.values() if isinstance(dataset, Mapping) else [dataset]
        if self.train_dataset is None or self.privacy.log_private_loss:
            return
        if any(rows is self.train_dataset for rows in named):
            raise ArgumentError(
                "The evaluation rows are the private train_dataset: its metrics would be logged "
                "and saved without noise. Pass held-out rows, or Privacy(log_private_loss=True) "
                "for debugging, which the privacy card lists."
            )

    def _look(self, what: str) -> None:
        if what not in self._looks:
            self._looks.append(what)

    def _settings(self, rows: TrainingRows) -> RunSettings:
        privacy = self.privacy
        return RunSettings(
            collate_fn=rows.collate,
            loss=self._loss,
            accelerator=self.accelerator,
            clipping=privacy.clipping,
            engine=privacy.engine,
            precision=mapped_precision(self.args, privacy.precision),
            physical_tokens=privacy.physical_tokens,
            physical_batch_size=mapped_physical_batch_size(self.args, privacy.physical_batch_size),
            seed=privacy.seed,
            ledger=privacy.ledger,
        )


def _padding_for(model: nn.Module, *datasets: Any) -> Any:
    """A padding collator where rows are token lists; None, Trainer's own default, elsewhere."""
    for dataset in datasets:
        named = isinstance(dataset, Mapping)  # several evaluation sets, by name
        rows = next(iter(dataset.values()), None) if named else dataset
        row = rows[0] if hasattr(rows, "__getitem__") and len(rows) else None
        if isinstance(row, Mapping) and "input_ids" in row:
            return choose_collate(None, model, row)
    return None
