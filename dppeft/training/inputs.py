"""What a ``PrivateTrainer`` is given: the privacy settings, the rows, the loss."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn
from transformers import TrainingArguments

from dppeft._types import Batch, PerExampleLoss
from dppeft.errors import ArgumentError, ArgumentTypeError
from dppeft.loss import default_loss
from dppeft.privacy.adaptive import AdaptiveClipping
from dppeft.privacy.plan import PrivacyPlan, plan
from dppeft.training import checks
from dppeft.training.collation import choose_collate


@dataclass(frozen=True, kw_only=True)
class Privacy:
    """What a training run may spend, and how it computes.

    Epochs or steps come from ``TrainingArguments.num_train_epochs`` or ``max_steps``.

    Attributes:
        epsilon: target; or give ``noise_multiplier``.
        delta: in (0, 1); below one over the number of rows.
        batch_size: expected logical batch.
        max_grad_norm: each example's gradient is clipped to this L2 norm.
        noise_multiplier: noise std over ``max_grad_norm``, instead of ``epsilon``.
        accountant: "pld", "rdp" or "prv".
        clipping: "flat", "per_layer" or "automatic".
        engine: "auto" or "opacus".
        precision: "auto", "float32" or "bf16".
        loss: ``(model, batch) -> (B,)``; default: by the model's kind.
        physical_tokens: most padded tokens computed at once; changes speed and memory only.
        physical_batch_size: most rows computed at once. ``per_device_train_batch_size`` other than
            its default of 8 means the same.
        seed: reproducible sampling and noise; marked in the card. ``TrainingArguments.seed`` is
            for everything else and does not touch the noise.
        ledger: file of the account; see ``make_private``.
        log_private_loss: log the mean loss of drawn rows, without noise, as
            ``train_loss_not_private``, and allow evaluation on the training rows. For debugging
            only; the card lists it.
        adaptive: let the threshold follow a quantile of the norms, from ``max_grad_norm`` on.
    """

    epsilon: float | None = None
    delta: float
    batch_size: int
    max_grad_norm: float = 1.0
    noise_multiplier: float | None = None
    accountant: str = "pld"
    clipping: str = "flat"
    engine: str = "auto"
    precision: str = "auto"
    loss: PerExampleLoss | None = None
    physical_tokens: int | None = None
    physical_batch_size: int | None = None
    seed: int | None = None
    ledger: str | Path | None = None
    log_private_loss: bool = False
    adaptive: AdaptiveClipping | None = None


def check_given(
    model: Any, privacy: Any, model_init: Callable[..., Any] | None, loss: Callable[..., Any] | None
) -> None:
    """Refuse, by name, arguments of Trainer that a private run cannot take."""
    if not isinstance(privacy, Privacy):
        raise ArgumentTypeError(
            f"privacy is a {type(privacy).__name__}; expected dppeft.Privacy(epsilon=..., "
            "delta=..., batch_size=..., max_grad_norm=...)."
        )
    if model_init is not None or model is None:
        raise ArgumentTypeError(
            "PrivateTrainer needs model=, the model itself: model_init= would train anew, and "
            "spend anew, at each train()."
        )
    if loss is not None:
        raise ArgumentTypeError(
            "compute_loss_func= returns one number for a batch, of which no per-example gradients "
            "can be made. Pass Privacy(loss=), a function (model, batch) -> tensor of shape (B,)."
        )


def make_plan(privacy: Privacy, args: TrainingArguments, dataset: Any) -> PrivacyPlan:
    """The plan of ``args.num_train_epochs`` or ``args.max_steps`` over the rows of ``dataset``."""
    by_steps = args.max_steps > 0
    return plan(
        num_examples=checks.check_dataset(dataset),
        batch_size=privacy.batch_size,
        delta=privacy.delta,
        epochs=None if by_steps else args.num_train_epochs,
        steps=args.max_steps if by_steps else None,
        epsilon=privacy.epsilon,
        noise_multiplier=privacy.noise_multiplier,
        max_grad_norm=privacy.max_grad_norm,
        adaptive=privacy.adaptive,
        accountant=privacy.accountant,
    )


class TrainingRows:
    """Stands where Trainer keeps a data loader: what is drawn from, not a sequence of batches.

    Args:
        dataset: private rows by index.
        collate: list of rows -> batch.
        planned: says how many updates there are.
        columns: names that rows are cut down to, or None for all.
    """

    def __init__(
        self,
        dataset: Any,
        collate: Callable[[list[Any]], Any],
        planned: PrivacyPlan,
        *,
        columns: list[str] | None,
    ) -> None:
        self.dataset = dataset
        self.planned = planned
        faster = choose_collate(collate, nn.Identity(), None)
        self.collate = faster if columns is None else KeptColumns(faster, frozenset(columns))

    def __len__(self) -> int:
        """Updates in one expected pass over the rows."""
        return -(-self.planned.num_examples // self.planned.expected_batch_size)

    def __iter__(self) -> Any:
        """Refused: a batch of private rows is drawn and used inside a private step only."""
        raise ArgumentError(
            "PrivateTrainer has no training batches to iterate over: rows are drawn by Poisson "
            "sampling inside train(). For a loop of your own use dppeft.make_private."
        )


@dataclass(frozen=True)
class KeptColumns:
    """A collator that sees the named columns of each row only."""

    collate: Callable[[list[Any]], Any]
    columns: frozenset[str]

    def __call__(self, rows: list[Any]) -> Any:
        """The batch of the rows, cut down."""
        if isinstance(rows[0], Mapping) and not rows[0].keys() <= self.columns:
            rows = [{k: v for k, v in row.items() if k in self.columns} for row in rows]
        return self.collate(rows)


class ObservedLoss:
    """A per-example loss that can tell the mean it had, if it is asked to keep it.

    Args:
        loss: ``(model, batch) -> (B,)``.
        observed: whether to keep sums. They are private.
    """

    def __init__(self, loss: PerExampleLoss, *, observed: bool) -> None:
        self._loss = loss
        self._observed = observed
        if hasattr(loss, "made_up_rows"):  # see checks.prove
            self.made_up_rows = loss.made_up_rows
        self.forget()

    def __call__(self, model: nn.Module, batch: Batch) -> Tensor:
        """The losses, (B,)."""
        losses = self._loss(model, batch)
        if self._observed:
            self._sum += float(losses.detach().sum())
            self._count += len(losses)
        return losses

    def forget(self) -> None:
        """Start a new mean."""
        self._sum, self._count = 0.0, 0

    def mean(self) -> float:
        """Mean loss of the rows seen since ``forget``; 0 without rows. Private."""
        return self._sum / max(self._count, 1)


def make_loss(privacy: Privacy, args: TrainingArguments, model: nn.Module) -> ObservedLoss:
    """``Privacy.loss``, or the default with ``label_smoothing_factor``."""
    smoothing = args.label_smoothing_factor
    if privacy.loss is not None and smoothing:
        raise ArgumentError(
            f"TrainingArguments.label_smoothing_factor={smoothing} cannot be put into "
            "Privacy.loss. Smooth the labels in that function and leave the factor out."
        )
    loss = privacy.loss or default_loss(model, label_smoothing=smoothing)
    return ObservedLoss(loss, observed=privacy.log_private_loss)
