"""``make_private``: a custom training loop in three lines, and the run behind it.

private = dppeft.make_private(model, optimizer, dataset, plan)
for batch in private.batches():      # Poisson draws, the planned number of steps
    private.step(batch)              # one noised update
print(private.spent())
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from dppeft import _validate
from dppeft._types import PerExampleLoss, Spent
from dppeft.clipping.engine import Engine, make_engine
from dppeft.clipping.preflight import PreflightReport
from dppeft.clipping.probing import trainable
from dppeft.errors import ArgumentTypeError, BudgetError, CheckpointError, PrivacyWarning
from dppeft.loss import default_loss
from dppeft.privacy.card import PrivacyCard
from dppeft.privacy.ledger import Ledger
from dppeft.privacy.noise import GaussianNoise, Secret, fresh_secret
from dppeft.privacy.plan import PrivacyPlan
from dppeft.privacy.sampling import PoissonSampler
from dppeft.training import checks, state
from dppeft.training.distributed import Processes, find_processes
from dppeft.training.packing import LogicalBatch, MapDataset
from dppeft.training.precision import Computation, check_trained_dtypes, choose_precision
from dppeft.training.record import Rates, Record
from dppeft.training.settings import RunSettings, make_packer
from dppeft.training.step import Update
from dppeft.training.thresholds import Thresholds

if TYPE_CHECKING:
    from accelerate import Accelerator


LEDGER = "ledger.jsonl"  # the copy beside saved weights

# The record of the last run on each model, to notice a second one that accounts for itself alone.
_RECORDS: WeakKeyDictionary[nn.Module, tuple[int, Record]] = WeakKeyDictionary()


def make_private(  # noqa: PLR0913 - the public contract
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    dataset: MapDataset,
    plan: PrivacyPlan,
    *,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    loss: PerExampleLoss | None = None,
    accelerator: Accelerator | None = None,
    clipping: str = "flat",
    engine: str = "auto",
    precision: str = "auto",
    physical_tokens: int | None = None,
    physical_batch_size: int | None = None,
    seed: int | None = None,
    ledger: str | Path | None = None,
) -> PrivateRun:
    """Bind a model, its optimizer and private rows to a plan, or say what stands against it.

    Args:
        model: wrapped or plain, in any mode, not in DistributedDataParallel.
        optimizer: any torch optimizer of the trained parameters; a learning-rate scheduler on it
            is stepped by you, once per update.
        dataset: rows by index, with a length. One row is the unit of privacy.
        plan: from ``dppeft.plan``, for ``num_examples=len(dataset)``.
        collate_fn: list of rows -> dict of tensors. Default: pads token ids, stacks numbers.
        loss: ``(model, batch) -> (B,)``. Default: by the model's kind.
        accelerator: for several processes; found by itself under ``accelerate launch``.
        clipping: "flat", "per_layer" or "automatic".
        engine: "auto" or "opacus".
        precision: "auto", "float32" or "bf16".
        physical_tokens: most padded tokens computed at once; changes speed and memory only.
        physical_batch_size: most rows computed at once; changes speed and memory only.
        seed: reproducible sampling and noise, marked in the card: who knows it can undo the noise.
        ledger: file where each release is recorded before it is used. An existing one of the same
            data is continued and ``spent()`` covers both runs. Default: a new file in
            ``$XDG_STATE_HOME/dppeft/ledgers`` (``~/.local/state``), to outlive the run.

    Raises:
        DppeftError: before any row is trained on; a subclass that fits, with the remedy.
    """
    settings = RunSettings(
        collate_fn=collate_fn,
        loss=loss,
        accelerator=accelerator,
        clipping=clipping,
        engine=engine,
        precision=precision,
        physical_tokens=physical_tokens,
        physical_batch_size=physical_batch_size,
        seed=seed,
        ledger=ledger,
    )
    return PrivateRun(model, optimizer, dataset, plan, settings)


class PrivateRun:
    """A private training run: draws, steps, and the account of what was spent.

    Made by ``make_private``. Public: ``plan``, ``engine``, ``optimizer``, ``model``, ``ledger``,
    ``preflight`` (what was proven about the model).
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        dataset: MapDataset,
        plan: PrivacyPlan,
        settings: RunSettings,
    ) -> None:
        optimizer = checks.unwrap_optimizer(optimizer)
        if not isinstance(plan, PrivacyPlan):
            raise ArgumentTypeError(
                f"plan is a {type(plan).__name__}; expected the PrivacyPlan that dppeft.plan makes."
            )
        checks.check_model(model)
        lift = checks.check_optimizer(model, optimizer)
        trained = trainable(model)
        check_trained_dtypes(trained | lift.moved)
        checks.check_rows_counted(checks.check_dataset(dataset), plan.num_examples)
        checks.check_first_row(dataset[0])
        device = next(iter(trained.values())).device
        precision = choose_precision(settings.asked_precision, device)
        self.model, self.optimizer, self.plan, self.settings = model, optimizer, plan, settings
        self._dataset = dataset
        self._kept_in_eval = checks.kept_in_eval(model)
        self._processes = find_processes(settings.accelerator, device)
        self._packer = make_packer(model, dataset, settings, self._processes)
        thresholds = Thresholds(plan, settings.clipping, list(trained))
        self.engine: Engine = make_engine(
            model,
            loss=settings.loss or default_loss(model),
            engine=settings.engine,
            clipping=settings.clipping,
        )
        proof = checks.prove(model, self._packer, self.engine, engine_name=settings.engine)
        self.preflight: PreflightReport = proof
        self._processes.same_weights(lift.kept)
        self._secret = _shared_secret(self._processes, settings.seed)
        self._record = Record(
            plan,
            self._processes,
            path=None if settings.ledger is None else Path(settings.ledger),
            seeded=self._secret.seeded,
        )
        self._sampler = PoissonSampler(plan, self._own_secret())
        self._update = Update(
            engine=self.engine,
            noise=GaussianNoise(self._own_secret()),
            record=self._record,
            optimizer=optimizer,
            trained=trained,
            lift=lift,
            processes=self._processes,
            thresholds=thresholds,
            computation=Computation(model, precision=precision, device=device),
            redrawn=[m for m in model.modules() if isinstance(getattr(m, "update", None), int)],
        )
        lift.exchange(optimizer)  # after all that can be refused
        self._pending: LogicalBatch | None = None
        self._looked_at: list[str] = []
        _warn_of_earlier_run(model, dataset, self._record)

    @property
    def ledger(self) -> Ledger | None:
        """The account of all releases; None on processes that are not the main one."""
        return self._record.ledger

    @property
    def steps_made(self) -> int:
        """Updates released by this run so far."""
        return self._record.steps

    def batches(self, *, steps: int | None = None) -> Iterator[LogicalBatch]:
        """Poisson draws, one for each update, empty ones included.

        Each must be stepped before the next is drawn: leaving out a draw after seeing its size
        would make what is released depend on private data. Breaking off the loop is fine: the draw
        left over is the first of the next call.

        Args:
            steps: how many. Default: those of the plan not made yet; once a plan without a target
                epsilon is done, as many again.

        Raises:
            BudgetError: the plan has a target epsilon and this would go past it. Nothing is drawn.
        """
        left = self.plan.steps - self.steps_made
        has_target = self.plan.target_epsilon is not None
        if steps is None:
            steps = left if left > 0 or has_target else self.plan.steps
            steps = max(steps, 1)  # nothing left: refused below
        steps = _validate.positive_integer(steps=steps)
        if has_target and steps > left:
            raise self._over_budget(steps)
        return self._draws(steps)

    def step(self, batch: LogicalBatch) -> None:
        """One noised update on a draw of :meth:`batches`; recorded before it is applied.

        Leaves every ``.grad`` of the optimizer's tensors empty; gradients of your own backward
        passes never enter. On an error before the noise is drawn nothing is spent, and the draw
        can be stepped again.

        Raises:
            ArgumentTypeError: not a draw of this run.
            BudgetError: stepped before, or past the plan.
        """
        if not isinstance(batch, LogicalBatch) or batch.packer is not self._packer:
            kind = type(batch).__name__
            raise ArgumentTypeError(
                f"step() got a {kind} that private.batches() of this run did not yield. A batch "
                "put together in another way is not the Poisson draw that the guarantee counts on: "
                "write `for batch in private.batches(): private.step(batch)`."
            )
        if batch is not self._pending:
            raise BudgetError(
                f"The draw for step {batch.step} was used before: a draw is released once. "
                "Take the next one from private.batches()."
            )
        if self.plan.target_epsilon is not None and self.steps_made >= self.plan.steps:
            raise self._over_budget(1)
        what, device = self._update, self._packer.device
        checks.check_unchanged(
            self.model, self.optimizer, what.trained, moved=what.lift.moved, device=device
        )
        made = self.steps_made
        try:
            with checks.in_training_mode(self.model, kept=self._kept_in_eval):
                self._update.apply(batch, self._rates(batch.step))
        finally:
            if self.steps_made > made:
                self._pending = None

    def spent(self) -> Spent:
        """The guarantee of what was released so far, computed from the ledger."""
        return self._record.spent()

    def card(self) -> PrivacyCard:
        """The privacy card of what was released so far, for sharing."""
        return PrivacyCard.from_spent(
            self.spent(),
            plan=self.plan,
            clipping=self.settings.clipping,
            seeded=self._record.seeded,
            looked_at_without_noise=self._looked_at,
            notes=[
                *self._record.notes(),
                *self._update.thresholds.notes(),
                self.preflight.note(),
            ],
        )

    def note_look(self, what: str) -> None:
        """Put into the privacy card something that was looked at without noise."""
        if what not in self._looked_at:
            self._looked_at.append(what)

    def save(self, directory: str | Path) -> Path:
        """Write trained weights, optimizer state, step count and a copy of the ledger.

        Neither rows nor the randomness to come are saved. In JSON and safetensors.
        """
        directory = Path(directory)
        if self._processes.is_main:
            directory.mkdir(parents=True, exist_ok=True)
            manifest = {
                "ledger": self._record.save_copy(directory / LEDGER),
                "steps": self.steps_made,
                "plan": self.plan.summary(),
                "thresholds": self._update.thresholds.values,
                "looked_at_without_noise": self._looked_at,
            }
            state.save_state(
                directory,
                trained=self._update.lift.kept,
                optimizer=self.optimizer,
                manifest=manifest,
            )
        self._processes.object_from_main(None)  # the files are there when this returns
        return directory

    def restore(self, directory: str | Path) -> None:
        """Go on from a saved run: a new run for the same plan, before its first step.

        The account goes on from the saved ledger or from its original, whichever is longer: steps
        made after the save are lost as work but stay spent. An unseeded run draws on with fresh
        randomness; a seeded one continues the stream of its seed. The state of torch's global
        generator (dropout) and of learning-rate schedulers is yours to save.

        Raises:
            CheckpointError: no such save, another plan, other tensors, or this run has made steps.
            LedgerError: a ledger was changed by hand.
        """
        directory = Path(directory)
        manifest = state.read_manifest(directory)
        planned, here = manifest["plan"], self.plan.summary()
        for name in planned.keys() | here.keys():
            if planned.get(name) != here.get(name):
                raise CheckpointError(
                    f"{directory} was saved under a plan with {name}={planned.get(name)!r}, this "
                    f"run's has {here.get(name)!r}. Make the run with the saved plan."
                )
        self._record.adopt(directory / LEDGER, manifest["ledger"])
        self._sampler = PoissonSampler(self.plan, self._own_secret())
        self._update = replace(self._update, noise=GaussianNoise(self._own_secret()))
        kept = self._update.lift.kept
        state.load_state(directory, manifest, trained=kept, optimizer=self.optimizer)
        self._update.thresholds.restore(manifest.get("thresholds", {}))
        self._processes.same_weights(kept)
        for what in manifest["looked_at_without_noise"]:
            self.note_look(what)
        self._pending = None
        lost = self.steps_made - manifest["steps"]
        if lost > 0:
            warnings.warn(
                f"{lost} updates were made after this state was saved. Their effect is lost, but "
                f"they are spent: {self.steps_made} of {self.plan.steps} steps are used.",
                PrivacyWarning,
                stacklevel=2,
            )

    def _own_secret(self) -> Secret:
        """This run's randomness: another one for each run that a ledger holds.

        Two runs with one seed would otherwise share draws and noise step by step, and the
        difference of their releases would have no noise at all.
        """
        return self._secret.spawn(f"after {self._record.earlier} releases")

    def _draws(self, count: int) -> Iterator[LogicalBatch]:
        for number in range(count):
            if self._pending is not None and number > 0:
                raise BudgetError(
                    f"The draw for step {self._pending.step} was not stepped. Leaving out a draw "
                    "would make the release depend on private data: call private.step(batch) for "
                    "each, empty ones too."
                )
            yield self._draw()

    def _draw(self) -> LogicalBatch:
        checks.check_rows_counted(len(self._dataset), self.plan.num_examples)
        if self._pending is None:
            step = self.steps_made
            if self.plan.target_epsilon is not None and step >= self.plan.steps:
                raise self._over_budget(1)
            indices = self._sampler.indices(step)
            self._pending = LogicalBatch(step=step, indices=indices, packer=self._packer)
        return self._pending

    def _rates(self, step: int) -> Rates:
        """The plan's numbers for one step; past the plan, those of its last step."""
        return Rates(
            sample_rate=self.plan.sample_rate_at(step),
            expected_batch_size=self.plan.expected_batch_size_at(step),
            noise_multiplier=self.plan.noise_multiplier,
        )

    def _over_budget(self, steps: int) -> BudgetError:
        return BudgetError(
            f"{self.steps_made} of {self.plan.steps} planned steps are made, and {steps} more "
            f"would exceed the target epsilon={self.plan.target_epsilon:g}. Make a plan with more "
            "steps before training, or one with noise_multiplier= instead of epsilon=."
        )


def _shared_secret(processes: Processes, seed: int | None) -> Secret:
    """The main process's: every process draws the same rows. As bytes: it is never pickled."""
    return Secret.from_bytes(processes.object_from_main(fresh_secret(seed).to_bytes()))


def _warn_of_earlier_run(model: nn.Module, dataset: MapDataset, record: Record) -> None:
    """Two runs of one model on the same rows spend together, which two ledgers do not show."""
    data, earlier = _RECORDS.get(model, (0, record))
    _RECORDS[model] = (id(dataset), record)
    if earlier.ledger is None or record.ledger is None:
        return  # the main process tells
    path, own = earlier.ledger.path, record.ledger.path
    if data == id(dataset) and earlier.steps and path.resolve() != own.resolve():
        warnings.warn(
            f"This model was trained on this data set before, {earlier.steps} updates recorded in "
            f"{path}: this run's epsilon leaves them out. Pass ledger= with that "
            "path to account for both together.",
            PrivacyWarning,
            stacklevel=4,
        )
