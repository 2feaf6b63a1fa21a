"""The engine as plain functions, with the loss that the model's kind implies."""

from __future__ import annotations

from torch import Tensor, nn

from dppeft._types import Batch, ClippedSum, PerExampleLoss
from dppeft.clipping.engine import make_engine
from dppeft.clipping.preflight import PreflightReport, check
from dppeft.loss import default_loss


def clipped_sum(
    model: nn.Module,
    batch: Batch,
    *,
    max_grad_norm: float,
    clipping: str = "flat",
    engine: str = "auto",
    loss: PerExampleLoss | None = None,
) -> ClippedSum:
    """The sum over a batch of its clipped per-example gradients.

    Guarantee: adding or removing one example moves the sum by at most ``.l2_bound``.

    Args:
        model: any module; the parameters with ``requires_grad`` are looked at.
        batch: dict of tensors as a Hugging Face collator makes it, ``labels`` included.
        max_grad_norm: clipping threshold C > 0 (``inf``: no clipping, no bound).
        clipping: "flat", "per_layer" (each of k tensors to C / sqrt(k)) or "automatic".
        engine: "auto" (ours) or "opacus" (the reference on Opacus's hooks).
        loss: ``(model, batch) -> (B,)``; default: by the model's kind.

    Returns:
        ``ClippedSum`` with ``.grads`` (float32, by parameter name), ``.norms`` (B,), ``.l2_bound``.
        It is private: noise has not been added.

    Raises:
        UnsupportedModelError: the gradients of this model cannot be computed exactly.
        ArgumentError: a reduced loss, a threshold that is not positive, an unknown name.
    """
    made = make_engine(model, loss=loss or default_loss(model), engine=engine, clipping=clipping)
    return made.clipped_sum(batch, max_grad_norm=max_grad_norm)


def per_example_grads(
    model: nn.Module, batch: Batch, *, engine: str = "auto", loss: PerExampleLoss | None = None
) -> dict[str, Tensor]:
    """Each example's gradient of each trained parameter, (B, *shape) float32; for tests and study.

    Arguments and errors as in ``clipped_sum``.
    """
    made = make_engine(model, loss=loss or default_loss(model), engine=engine)
    return made.per_example_grads(batch)


def preflight(
    model: nn.Module, batch: Batch, *, loss: PerExampleLoss | None = None
) -> PreflightReport:
    """Proves on a few rows that clipping this model is exact, before any private row is used.

    Args:
        model: the model to be trained.
        batch: two to four rows, best made up ones.
        loss: as in ``clipped_sum``.

    Raises:
        UnsupportedModelError: naming the module or parameter and the remedy.
    """
    return check(model, batch, loss=loss or default_loss(model))
