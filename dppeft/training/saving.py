"""What a ``PrivateTrainer`` writes and reads back: checkpoints, and what may be shared."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import ReduceLROnPlateau
from transformers import Trainer
from transformers.optimization import GreedyLR
from transformers.trainer import SCHEDULER_NAME

from dppeft.errors import CheckpointError
from dppeft.privacy.card import PrivacyCard, library_versions
from dppeft.sharing import write_shared
from dppeft.training.run import PrivateRun

RUN_FOLDER = "private_run"  # inside a checkpoint: trained weights, optimizer, ledger


class SavingTrainer(Trainer):
    """Trainer whose checkpoints hold the account and no pickled optimizer."""

    _run: PrivateRun | None

    def card(self) -> PrivacyCard:
        """The privacy card of the model as it is now."""
        raise NotImplementedError

    def _save(
        self, output_dir: str | None = None, state_dict: dict[str, Tensor] | None = None
    ) -> None:
        """What is shared: adapter and head, privacy card, tokenizer. No pickle, no row."""
        if not self.args.should_save:
            return
        directory = self.args.output_dir if output_dir is None else output_dir
        card = PrivacyCard(versions=library_versions()) if self._run is None else self.card()
        write_shared(self.model, directory, card=card)
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(directory)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        super()._save_checkpoint(model, trial)
        assert self._run is not None
        self._run.save(self._checkpoint_folder(trial) / RUN_FOLDER)

    def _checkpoint_folder(self, trial: Any) -> Path:
        return Path(self._get_output_dir(trial)) / f"checkpoint-{self.state.global_step}"

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """The schedule only: the run's own folder has the optimizer, without pickles."""
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: nn.Module | None = None
    ) -> None:
        """Nothing yet: weights, optimizer and ledger come back together, in ``_resume``."""
        if not (Path(resume_from_checkpoint) / RUN_FOLDER).is_dir():
            raise CheckpointError(
                f"{resume_from_checkpoint} has no folder {RUN_FOLDER!r}: expected a checkpoint "
                "that PrivateTrainer wrote."
            )

    def _resume(self, checkpoint: Path) -> None:
        """Weights, optimizer, ledger and schedule; updates made after the save stay spent."""
        assert self._run is not None
        self._run.restore(checkpoint / RUN_FOLDER)
        if (checkpoint / SCHEDULER_NAME).is_file():
            self.lr_scheduler.load_state_dict(
                torch.load(checkpoint / SCHEDULER_NAME, weights_only=True)
            )
        for _ in range(self._run.steps_made - self.state.global_step):
            # Lost as work, but spent: the schedule ends where the budget does.
            self.state.global_step += 1
            if self._schedule_steps_per_update():
                self.lr_scheduler.step()

    def _schedule_steps_per_update(self) -> bool:
        """False for schedules that are stepped with a metric, on evaluation."""
        return not isinstance(self.lr_scheduler, ReduceLROnPlateau | GreedyLR)
