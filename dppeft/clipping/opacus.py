"""The reference engine: Opacus's own GradSampleHooks, refused where they are not exact.

Opacus hooks leaf modules. For a parameter that is read in any other way it misses gradients, or
gets them wrong without a word, so its result is compared with one-example-at-a-time gradients on
two and on three rows before it is trusted, and no attribute of Opacus's stays on the model.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from opacus.grad_sample.grad_sample_module import GradSampleHooks
from opacus.grad_sample.utils import register_grad_sampler
from torch import Tensor, nn

from dppeft._types import Batch, PerExampleLoss
from dppeft.clipping.engine import Engine
from dppeft.clipping.probing import (
    check_losses,
    computes_exactly,
    disagreement,
    each_alone,
    length_of,
    plain_grads,
    refuse_mixing,
    rows_of,
    trainable,
    untouched_random_state,
    without_dropout,
)
from dppeft.clipping.terms import Dense, Term, at_least_float32
from dppeft.errors import UnsupportedModelError

_LEFT_ON_MODULES = ("activations", "max_batch_len", "ft_compute_sample_grad")


class OpacusEngine(Engine):
    """Per-example gradients as Opacus's hooks compute them."""

    def __init__(self, model: nn.Module, *, loss: PerExampleLoss, clipping: str = "flat") -> None:
        super().__init__(model, loss=loss, clipping=clipping)
        self._trusted_for: tuple[object, ...] = ()

    def terms(self, batch: Batch, batch_size: int) -> dict[str, Term]:
        self._refuse_recomputation()
        signature = self._signature()
        if signature != self._trusted_for:
            refuse_mixing(self.model)
            with untouched_random_state(self.model), without_dropout(self.model):
                for size in (2, 3):
                    rows = [row % batch_size for row in range(size)]
                    self._compare(rows_of(batch, batch_size, rows), size)
            self._trusted_for = signature
        samples, summed = _hooked(self.model, self.loss, batch, batch_size)
        for name, sample in samples.items():
            if len(sample) != batch_size:
                raise self._refusal(name, f"{len(sample)} gradients for {batch_size} examples")
        self._check_sums(samples, summed)
        return {name: Dense(at_least_float32(sample)) for name, sample in samples.items()}

    def _compare(self, batch: Batch, size: int) -> None:
        try:
            found, _ = _hooked(self.model, self.loss, batch, size)
        except Exception as error:
            why = f"its hooks fail ({type(error).__name__}: {str(error).splitlines()[0][:120]})"
            raise self._refusal("this model", why) from error
        exact = computes_exactly(self.model)
        for row, alone in enumerate(each_alone(self.model, self.loss, batch, size)):
            whole = length_of(alone)
            for name, truth in alone.items():
                sample = found.get(name)
                if sample is not None:
                    if sample.shape != (size, *truth.shape):
                        shape = tuple(sample.shape)
                        raise self._refusal(name, f"it gives gradients of shape {shape}")
                    sample = sample[row]
                wrong = disagreement(sample, truth, whole, exact=exact)
                if wrong:
                    raise self._refusal(name, wrong)

    def _refuse_recomputation(self) -> None:
        """The trust is earned in evaluation mode, in which nothing is recomputed."""
        for name, module in self.model.named_modules():
            how = getattr(module, "_gradient_checkpointing_func", None)
            if not getattr(module, "gradient_checkpointing", False) or how is None:
                continue
            if getattr(how, "keywords", {}).get("use_reentrant") is not True:
                why = "its hooks miss gradients of layers that are computed again without reentry"
                raise self._refusal(f"{name or 'this model'} with gradient checkpointing", why)

    def _check_sums(self, samples: dict[str, Tensor], summed: dict[str, Tensor]) -> None:
        """Autograd has added up the same gradients: what the hooks missed is missing here."""
        exact = computes_exactly(self.model)
        lengths = {n: at_least_float32(s).flatten(1).norm(dim=1).sum() for n, s in samples.items()}
        whole = length_of({**summed, **lengths})
        for name, total in summed.items():
            sample = samples.get(name)
            if not bool(total.isfinite().all()) or not bool(whole.isfinite()):
                continue  # a row that is not finite counts as zero, but not for autograd
            found = 0 if sample is None else at_least_float32(sample).sum(0)
            off = length_of({name: at_least_float32(total) - found})
            if bool(off > (1e-2 if exact else 0.1) * whole):
                raise self._refusal(name, "its hooks miss a part of the gradient")

    def _refusal(self, what: str, why: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"engine='opacus' cannot be used for {what}: {why}. Use engine='auto', which is exact "
            "here or says why not."
        )


def _hooked(
    model: nn.Module, loss: PerExampleLoss, batch: Batch, batch_size: int
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Opacus's grad samples by parameter name, missing where it made none; and autograd's sums."""
    # Opacus records only in training mode; hooked modules alone are switched, not their dropout.
    modes = [
        (m, m.training) for m in model.modules() if any(True for _ in m.parameters(recurse=False))
    ]
    hooks = None
    try:
        with plain_grads(trainable(model).values()), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's remark on full backward hooks
            _register_own(model)
            hooks = _HooksOnce(model, strict=False, loss_reduction="sum")
            for module, _ in modes:
                module.training = True
            losses = check_losses(loss(model, batch), batch_size)
            if losses.requires_grad:
                losses.backward(torch.ones_like(losses))
            found = {name: p.grad_sample for name, p in trainable(model).items()}
            grads = {n: p.grad for n, p in trainable(model).items()}
    finally:
        for module, mode in modes:
            module.training = mode
        if hooks is not None:
            hooks.cleanup()
        _sweep(model)
    samples = {
        name: (sum(sample) if isinstance(sample, list) else sample).detach()
        for name, sample in found.items()
        if sample is not None
    }
    return samples, {n: grad.detach().to_dense() for n, grad in grads.items() if grad is not None}


class _HooksOnce(GradSampleHooks):
    """Opacus walks down to a module by every path, and would count a shared one once for each."""

    def iterate_submodules(self, module: nn.Module) -> Iterable[nn.Module]:
        yield from dict.fromkeys(super().iterate_submodules(module))


def _register_own(model: nn.Module) -> None:
    """Layers that bring their own closed form, in Opacus's table of samplers."""
    for module in model.modules():
        kind = type(module)
        if hasattr(kind, "example_gradients") and kind not in GradSampleHooks.GRAD_SAMPLERS:
            register_grad_sampler(kind)(_sample)


def _sample(layer: Any, activations: list[Tensor], backprops: Tensor) -> dict[nn.Parameter, Tensor]:
    found = layer.example_gradients(activations[0], backprops)
    return {getattr(layer, name): grads for name, grads in found.items()}


def _sweep(model: nn.Module) -> None:
    for module in model.modules():
        for attribute in _LEFT_ON_MODULES:
            vars(module).pop(attribute, None)
    for param in model.parameters():
        for attribute in [a for a in vars(param) if a in ("grad_sample", "_forward_counter")]:
            delattr(param, attribute)
