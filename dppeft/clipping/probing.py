"""Looking at a model on a few rows without leaving a trace, and refusing what mixes examples."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dppeft._types import Batch, PerExampleLoss
from dppeft.clipping.terms import Dense, Term, at_least_float32
from dppeft.errors import ArgumentError, UnsupportedModelError


def rows_of(batch: Batch, batch_size: int, rows: list[int]) -> dict[str, Any]:
    """The given rows of a batch; entries without a row for each example stay as they are."""
    return {
        key: value[torch.tensor(rows, device=value.device)]
        if isinstance(value, Tensor) and value.dim() and value.shape[0] == batch_size
        else value
        for key, value in batch.items()
    }


def check_losses(losses: object, batch_size: int) -> Tensor:
    """The losses themselves; an error unless there is exactly one value for each example."""
    shape = tuple(losses.shape) if isinstance(losses, Tensor) else type(losses).__name__
    if shape != (batch_size,) or not isinstance(losses, Tensor):
        raise ArgumentError(
            f"The loss returned {shape}; expected one value per example, shape ({batch_size},). "
            "A reduced loss has no per-example gradients: use reduction='none' and average over "
            "each example's own targets."
        )
    return losses


@contextmanager
def without_autocast() -> Iterator[None]:
    """A backward, and what its hooks compute, follows the dtypes that the forward chose."""
    with torch.autocast("cpu", enabled=False), torch.autocast("cuda", enabled=False):
        yield


@contextmanager
def full_precision() -> Iterator[None]:
    """Whatever the caller's autocast or TF32: norms, factors and sums are float32.

    A sum in TF32 would exceed the bound that float32 norms promise by a thousandth.
    """
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        with without_autocast():
            yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def untouched_random_state(model: nn.Module) -> Iterator[None]:
    """Draws made inside leave torch's global generators as they were."""
    devices = sorted({p.device.index for p in model.parameters() if p.device.type == "cuda"})
    with torch.random.fork_rng(devices=devices):
        yield


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name -> parameter, each once, for what requires a gradient."""
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def refuse_mixing(model: nn.Module) -> None:
    """Raises for layers that mix the examples of a batch by construction."""
    batch_norms = nn.modules.batchnorm._BatchNorm
    for path, module in model.named_modules():
        if isinstance(module, batch_norms) and (module.training or module.running_mean is None):
            raise UnsupportedModelError(
                f"{path}: {type(module).__name__} normalises over the examples of a batch, so one "
                "example has no gradient of its own. Replace it by GroupNorm or LayerNorm, or put "
                "it in eval mode and keep it there."
            )
        if isinstance(module, nn.Embedding) and module.weight.requires_grad:
            for option in ("max_norm", "scale_grad_by_freq"):
                if getattr(module, option):
                    raise UnsupportedModelError(
                        f"{path}: Embedding with {option} depends on the whole batch. "
                        f"Build it without {option}."
                    )
        threshold = getattr(getattr(module, "state", None), "threshold", 0.0)
        if type(module).__name__ == "Linear8bitLt" and threshold > 0:
            # LLM.int8() computes a column in 16 bits if any row of the batch has an outlier in it;
            # the few rows of a proof may have none.
            raise UnsupportedModelError(
                f"{path}: Linear8bitLt with threshold={threshold:g} rounds an example by the "
                "outliers of its whole batch, so it has no gradient of its own. Load it with "
                "BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0), or in 4 bits."
            )


@contextmanager
def unchanged_buffers(model: nn.Module) -> Iterator[None]:
    """Puts back buffers that a forward inside has changed, and refuses the model for it.

    What a forward keeps of private rows (running statistics) would reach later examples and the
    exported model without noise.
    """
    before = {
        (module, key): (buffer, buffer.clone())
        for module in model.modules()
        for key, buffer in module._buffers.items()
        if buffer is not None
    }
    changed = []
    try:
        yield
    finally:
        for (module, key), (buffer, value) in before.items():
            if module._buffers.get(key) is not buffer or not _same(buffer, value):
                changed.append((type(module).__name__, key))
                module._buffers[key] = buffer
                buffer.copy_(value)
    if changed:
        kind, key = changed[0]
        raise UnsupportedModelError(
            f"A {kind} writes into its buffer {key!r} in the forward pass, so it would keep and "
            "share what it saw of private rows without noise. Turn running statistics off "
            "(track_running_stats=False), or put that module in eval mode and keep it there."
        )


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(((a == b) | (a != a) & (b != b)).all())


@contextmanager
def plain_grads(params: Iterable[nn.Parameter]) -> Iterator[None]:
    """``.grad`` is empty and the tensors' own hooks are silent inside; afterwards both are back.

    A gradient hook (OSF's projection, a mask) is post-processing: it belongs on the released
    gradient, where noise passes through it too, not on private ones.
    """
    params = list(params)
    saved = [p.grad for p in params]
    hooks = [(p._backward_hooks, dict(p._backward_hooks)) for p in params if p._backward_hooks]
    for p in params:
        p.grad = None
    for live, _ in hooks:
        live.clear()
    try:
        yield
    finally:
        for live, kept in hooks:
            live.update(kept)
        for p, grad in zip(params, saved, strict=True):
            p.grad = grad


def through_hooks(param: nn.Parameter, grad: Tensor) -> Tensor:
    """What the tensor's own gradient hooks make of a released gradient, in their order."""
    for hook in (param._backward_hooks or {}).values():
        changed = hook(grad)
        grad = grad if changed is None else changed
    return grad


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


def refuse_dependence(
    model: nn.Module, batch: Batch, batch_size: int, loss: PerExampleLoss
) -> None:
    """Raises where an example's loss changes with its neighbours: reversed, copied, or absent.

    Padding counts as a neighbour's doing: how much there is depends on the longest row.
    """
    order = list(range(batch_size))[::-1]
    with torch.enable_grad(), without_dropout(model):  # some layers take a shortcut without grad

        def losses(rows: list[int]) -> Tensor:
            found = loss(model, rows_of(batch, batch_size, rows))
            return check_losses(found, len(rows)).detach().float()

        together = losses(order[::-1])
        others = {
            "reversed": (losses(order).flip(0), together),
            "alone": (torch.cat([losses([row]) for row in order[::-1]]), together),
            "copies": (losses([0] * batch_size)[:1], together[:1]),
        }
        others |= {
            f"row {row} without padding": (
                check_losses(loss(model, shorter), 1).detach().float(),
                together[row : row + 1],
            )
            for row in range(batch_size)
            if (shorter := _without_padding(batch, batch_size, row)) is not None
        }
    tolerance = 1e-4 if computes_exactly(model) else 3e-2
    for how, (other, first) in others.items():
        if not torch.allclose(other, first, rtol=tolerance, atol=tolerance, equal_nan=True):
            raise UnsupportedModelError(
                f"An example's loss changes with the other examples of its batch ({how}: batch "
                "statistics, attention or routing across examples, or a loss averaged over the "
                "batch), so it has no gradient of its own. Find the layer that mixes rows and "
                "replace it, or return each example's own loss."
            )


def _without_padding(batch: Batch, batch_size: int, row: int) -> dict[str, Any] | None:
    """One row with the columns that its attention mask hides cut off; None where there are none."""
    alone = rows_of(batch, batch_size, [row])
    mask = alone.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2 or "decoder_input_ids" in alone:
        return None
    width, length = mask.shape[1], int(mask.sum())
    if length == width or not bool(mask[0, :length].all()):  # full, or padded on the left
        return None

    def is_padded(key: str, value: object) -> bool:
        fits = isinstance(value, Tensor) and value.dim() > 1 and value.shape[1] == width
        # A decoder's labels may happen to be as wide as the encoder's input.
        return fits and (key != "labels" or bool((value[:, length:] == -100).all()))

    return {k: v[:, :length] if is_padded(k, v) else v for k, v in alone.items()}


def computes_exactly(model: nn.Module) -> bool:
    """Whether gradients carry float32's precision: no weights or autocast below it."""
    full = all(p.dtype in (torch.float32, torch.float64) for p in model.parameters())
    return full and not any(torch.is_autocast_enabled(kind) for kind in ("cpu", "cuda"))


def each_alone(
    model: nn.Module, loss: PerExampleLoss, batch: Batch, batch_size: int
) -> Iterator[dict[str, Tensor]]:
    """The definition, one example after another: its gradients by name, zeros where it has none."""
    params = trainable(model)
    for row in range(batch_size):
        with plain_grads(params.values()), torch.enable_grad():
            losses = check_losses(loss(model, rows_of(batch, batch_size, [row])), 1)
            if losses.requires_grad:
                losses.sum().backward()
            grads = {
                name: torch.zeros_like(p) if p.grad is None else p.grad.to_dense().detach()
                for name, p in params.items()
            }
        yield {name: at_least_float32(grad) for name, grad in grads.items()}


def by_row(
    model: nn.Module, loss: PerExampleLoss, batch: Batch, batch_size: int
) -> dict[str, Term]:
    """Each example alone, one forward and one backward for each; all gradients together."""
    stacks: dict[str, Tensor] = {}
    for row, grads in enumerate(each_alone(model, loss, batch, batch_size)):
        for name, grad in grads.items():
            if name not in stacks:
                stacks[name] = grad.new_empty(batch_size, *grad.shape)
            stacks[name][row] = grad
    return {name: Dense(stack) for name, stack in stacks.items()}


def gradient_of(term: Term, row: int) -> Tensor:
    """One example's gradient of one parameter."""
    with full_precision():
        return term.instantiate(slice(row, row + 1))[0]


def length_of(grads: Mapping[str, Tensor]) -> Tensor:
    """The norm of a whole gradient, float64, shape (); 0 without tensors."""
    norms = [_norm(grad) for grad in grads.values()]
    return torch.stack(norms).norm() if norms else torch.zeros((), dtype=torch.float64)


def disagreement(
    found: Tensor | None, truth: Tensor, whole: Tensor, *, exact: bool = True
) -> str | None:
    """How one example's gradient of one parameter differs from the definition, or None.

    A difference counts relative to the parameter's own gradient, with a floor relative to the
    example's whole gradient (BERT's key biases have a gradient that is zero but for rounding).

    Args:
        found: what is checked, or None where there is nothing.
        truth: the definition.
        whole: ``length_of`` the example's gradients.
        exact: False where the model computes in less than float32.
    """
    if found is None:
        return "it gives no gradient" if bool((truth != 0).any()) else None
    if found.shape != truth.shape:
        return f"it gives gradients of shape {tuple(found.shape)} instead of {tuple(truth.shape)}"
    if not bool(truth.isfinite().all()):  # such a row must contribute nothing either way
        finite = bool(found.isfinite().all())
        return "its gradient is finite where the definition is not" if finite else None
    tolerance, floor = (1e-3, 1e-5) if exact else (5e-2, 5e-3)
    error = _norm(found.to(truth.dtype) - truth)
    allowed = tolerance * _norm(truth) + floor * whole.nan_to_num(0.0, 0.0, 0.0) + 1e-9
    if bool(error <= allowed):
        return None
    return f"its gradient is off by more than {tolerance:g} of its norm"  # rows may be private


def _norm(x: Tensor) -> Tensor:
    # Large values do not overflow in float64, which Apple's GPUs lack.
    return torch.linalg.vector_norm(x, dtype=torch.float32 if x.is_mps else torch.float64)
