"""The reference engine: Opacus's own GradSampleHooks, refused where they are not exact.

Opacus hooks leaf modules. For a parameter that is read in any other way it misses gradients, or
gets them wrong without a word, so its result is compared with one-example-at-a-time gradients on
two and on three rows before it is trusted, and no attribute of Opacus's stays on the model.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch
from opacus.grad_sample.grad_sample_module import GradSampleHooks
from torch import Tensor, nn

from dppeft._types import Batch, PerExampleLoss
from dppeft.clipping.engine import Engine, by_row
from dppeft.clipping.terms import Dense, Term, at_least_float32
from dppeft.clipping.units import (
    check_losses,
    plain_grads,
    refuse_mixing,
    rows_of,
    trainable,
    untouched_random_state,
)
from dppeft.errors import UnsupportedModelError

_LEFT_ON_MODULES = ("activations", "max_batch_len", "ft_compute_sample_grad")


class OpacusEngine(Engine):
    """Per-example gradients as Opacus's hooks compute them."""

    def __init__(self, model: nn.Module, *, loss: PerExampleLoss, clipping: str = "flat") -> None:
        super().__init__(model, loss=loss, clipping=clipping)
        self._trusted_for: tuple[str, ...] = ()

    def terms(self, batch: Batch, batch_size: int) -> dict[str, Term]:
        names = tuple(self._trainable())
        if names != self._trusted_for:
            refuse_mixing(self.model)
            with untouched_random_state(self.model), without_dropout(self.model):
                for size in (2, 3):
                    rows = [row % batch_size for row in range(size)]
                    self._compare(rows_of(batch, batch_size, rows), size)
            self._trusted_for = names
        samples = _hooked(self.model, self.loss, batch, batch_size)
        for name, sample in samples.items():
            if len(sample) != batch_size:
                raise self._refusal(name, f"{len(sample)} gradients for {batch_size} examples")
        return {name: Dense(at_least_float32(sample)) for name, sample in samples.items()}

    def _compare(self, batch: Batch, size: int) -> None:
        try:
            found = _hooked(self.model, self.loss, batch, size)
        except Exception as error:
            why = f"its hooks fail ({type(error).__name__}: {str(error).splitlines()[0][:120]})"
            raise self._refusal("this model", why) from error
        truth = by_row(self.model, self.loss, batch, size)
        for name, term in truth.items():
            wrong = disagreement(found.get(name), term.instantiate(), truth)
            if wrong:
                raise self._refusal(name, wrong)

    def _refusal(self, what: str, why: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"engine='opacus' cannot be used for {what}: {why}. Use engine='auto', which is exact "
            "here or says why not."
        )


def disagreement(found: Tensor | None, truth: Tensor, whole: dict[str, Term]) -> str | None:
    """How per-example gradients of one parameter differ from the definition, or None.

    A difference counts relative to the parameter's own gradient, with a floor of 1e-4 of the
    example's whole gradient (BERT's key biases have a gradient that is zero but for rounding).
    """
    if found is None:
        return "it gives no gradient" if bool(truth.abs().max() > 0) else None
    if found.shape != truth.shape:
        return f"it gives gradients of shape {tuple(found.shape)} instead of {tuple(truth.shape)}"
    tolerance = 1e-3 if truth.dtype in (torch.float32, torch.float64) else 5e-2
    total = torch.stack([term.norms_sq() for term in whole.values()]).sum(0).sqrt()
    error = (found.to(truth.dtype) - truth).flatten(1).norm(dim=1)
    allowed = tolerance * (truth.flatten(1).norm(dim=1) + 0.1 * total) + 1e-7
    if bool((error <= allowed).all()):
        return None
    return f"its gradient is off by {float((error / allowed).max()) * tolerance:.1e} of its norm"


@contextmanager
def without_dropout(model: nn.Module) -> Iterator[None]:
    """Eval mode inside, each module's own mode afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    for module, _ in modes:
        module.training = False
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def _hooked(
    model: nn.Module, loss: PerExampleLoss, batch: Batch, batch_size: int
) -> dict[str, Tensor]:
    """Opacus's grad samples by parameter name; missing where Opacus made none."""
    # Opacus records only in training mode; hooked modules alone are switched, not their dropout.
    modes = [
        (m, m.training) for m in model.modules() if any(True for _ in m.parameters(recurse=False))
    ]
    hooks = None
    try:
        with plain_grads(trainable(model).values()), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's remark on full backward hooks
            hooks = GradSampleHooks(model, strict=False, loss_reduction="sum")
            for module, _ in modes:
                module.training = True
            losses = check_losses(loss(model, batch), batch_size)
            if losses.requires_grad:
                losses.backward(torch.ones_like(losses))
            found = {name: p.grad_sample for name, p in trainable(model).items()}
    finally:
        for module, mode in modes:
            module.training = mode
        if hooks is not None:
            hooks.cleanup()
        _sweep(model)
    return {
        name: (sum(sample) if isinstance(sample, list) else sample).detach()
        for name, sample in found.items()
        if sample is not None
    }


def _sweep(model: nn.Module) -> None:
    for module in model.modules():
        for attribute in _LEFT_ON_MODULES:
            vars(module).pop(attribute, None)
    for param in model.parameters():
        for attribute in [a for a in vars(param) if a in ("grad_sample", "_forward_counter")]:
            delattr(param, attribute)
