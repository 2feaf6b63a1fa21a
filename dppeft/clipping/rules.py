"""Closed forms: from a layer's input and output gradient to per-example gradients.

A rule is ``(layer, x, grad) -> {parameter name: Term}`` with the batch on the first axis of both.
Weights that act as matrices have rules of their own, which keep the factors of the gradient
(Li et al. 2022, Sec. 4; Bu et al. 2023). Other normalisations and convolutions use Opacus's
registered grad samplers, wherever those are right. Whatever has no rule here is replayed
(``replay.py``).
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from typing import Protocol, runtime_checkable

import opacus.grad_sample  # noqa: F401  (fills the registry below)
import torch
from opacus.grad_sample.grad_sample_module import GradSampleHooks
from torch import Tensor, nn
from torch.nn import functional
from transformers.pytorch_utils import Conv1D

from dppeft.clipping.terms import Dense, Lookup, Outer, Term, at_least_float32

_CANNOT_OVERFLOW = 1e12  # summed squares of any number of such values are finite in float32

Rule = Callable[[nn.Module, Tensor, Tensor], dict[str, Term]]


@runtime_checkable
class _KnowsItsGradients(Protocol):
    """A layer that brings its own closed form; preflight proves it like any other."""

    def example_gradients(self, x: Tensor, grad: Tensor) -> dict[str, Tensor]:
        """Each example's gradient of each trained tensor."""
        ...


def _positions(x: Tensor) -> Tensor:
    """(B, *, d) -> (B, T, d)."""
    return at_least_float32(x.reshape(x.shape[0], -1, x.shape[-1]))


def _reached(grad: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    """Both without the positions whose gradient is zero in every row, where those are many.

    A classifier that reads the first token alone leaves the rest of its last layer without
    gradients. On a GPU a look at the values would hold up the backward, so all positions stay.
    """
    positions = grad.shape[1]
    if grad.device.type != "cpu" or positions < 3:
        return grad, x
    # Cheaper than a look at all: where most are unreached, two inner ones likely are.
    if bool(grad[:, positions // 3].any()) or bool(grad[:, 2 * positions // 3].any()):
        return grad, x
    reached = (grad.amax((0, 2)) != 0) | (grad.amin((0, 2)) != 0)  # NaN is not 0
    if 2 * int(reached.sum()) > len(reached):
        return grad, x
    # Zero times NaN, or times what overflows in a norm, is NaN and takes its row out of the sum.
    # Whether a row counts must not depend on its neighbours' positions: then all of them stay.
    lowest, highest = torch.aminmax(x)
    if not bool(torch.maximum(highest, -lowest) < _CANNOT_OVERFLOW):
        return grad, x
    return grad[:, reached], x[:, reached]


def linear(layer: nn.Module, x: Tensor, grad: Tensor) -> dict[str, Term]:
    """``y = x W^T + b`` at T positions: ``dW_i = sum_t grad_it x_it^T``, ``db_i = sum_t grad_it``.

    x is (B, *, d_in) and grad (B, *, d_out), with any number of axes between.
    """
    grad, x = _reached(_positions(grad), _positions(x))
    return _matrix(layer, grad, x, bias=grad)


def conv1d_gpt2(layer: nn.Module, x: Tensor, grad: Tensor) -> dict[str, Term]:
    """GPT-2's Conv1D, ``y = x W + b``: a Linear layer whose weight is stored transposed."""
    grad, x = _reached(_positions(grad), _positions(x))
    return _matrix(layer, x, grad, bias=grad)


def _matrix(layer: nn.Module, left: Tensor, right: Tensor, *, bias: Tensor) -> dict[str, Term]:
    terms: dict[str, Term] = {}
    if layer.weight.requires_grad:
        terms["weight"] = Outer(left, right).compact()
    if layer.bias is not None and layer.bias.requires_grad:
        terms["bias"] = Dense(bias.sum(1))
    return terms


def embedding(layer: nn.Module, x: Tensor, grad: Tensor) -> dict[str, Term]:
    """Table lookup: the gradient of row v is the sum over positions that read it; none at padding.

    x is (B, *) and grad (B, *, d).
    """
    assert isinstance(layer, nn.Embedding)
    ids, grad = x.reshape(x.shape[0], -1), _positions(grad)
    if layer.padding_idx is not None:
        grad = grad.masked_fill((ids == layer.padding_idx)[..., None], 0)
    return {"weight": Lookup(ids, grad, layer.num_embeddings).compact()}


def layer_norm(layer: nn.Module, x: Tensor, grad: Tensor) -> dict[str, Term]:
    """``y = w * xhat + b``: ``dw_i = sum_t xhat_it * grad_it``, ``db_i = sum_t grad_it``.

    x and grad are (B, *, *normalized_shape).
    """
    assert isinstance(layer, nn.LayerNorm)
    shape = layer.normalized_shape
    x, grad = (at_least_float32(part.reshape(len(part), -1, *shape)) for part in (x, grad))
    if len(shape) == 1:
        grad, x = _reached(grad, x)
    terms: dict[str, Term] = {}
    if layer.weight.requires_grad:
        normal = functional.layer_norm(x, shape, eps=layer.eps)
        terms["weight"] = Dense(normal.mul_(grad).sum(1))
    if layer.bias is not None and layer.bias.requires_grad:
        terms["bias"] = Dense(grad.sum(1))
    return terms


def biases_alone(_layer: nn.Module, _x: Tensor, grad: Tensor) -> dict[str, Term]:
    """``y = f(x) + b`` with f frozen: ``db_i = sum_t grad_it``. The input is not looked at."""
    return {"bias": Dense(_positions(grad).sum(1))}


def from_layer(layer: nn.Module, x: Tensor, grad: Tensor) -> dict[str, Term]:
    """The layer's own closed form: its ``example_gradients(x, grad) -> {name: (B, *shape)}``."""
    assert isinstance(layer, _KnowsItsGradients)
    found = layer.example_gradients(at_least_float32(x), at_least_float32(grad))
    return {name: Dense(grads) for name, grads in found.items()}


def from_opacus(layer: nn.Module, x: Tensor, grad: Tensor) -> dict[str, Term]:
    """Opacus's own rule for this layer type, in float32."""
    sampler = GradSampleHooks.GRAD_SAMPLERS[type(layer)]
    samples = sampler(layer, [at_least_float32(x)], at_least_float32(grad))
    names = {param: name for name, param in layer.named_parameters(recurse=False)}
    return {names[param]: Dense(sample) for param, sample in samples.items()}


def _pads_with_zeros(layer: nn.Module) -> bool:
    # Opacus unfolds zero padding only, and reads named paddings in Conv1d alone.
    return layer.padding_mode == "zeros" and not isinstance(layer.padding, str)


def _looks_up_only(layer: nn.Module) -> bool:
    # max_norm rewrites the table in the forward; scale_grad_by_freq counts over the whole batch.
    return layer.max_norm is None and not layer.scale_grad_by_freq


def _always(_: nn.Module) -> bool:
    return True


# Layers whose output is something plus the bias, on the last axis.
_ADD_A_BIAS = (nn.Linear, Conv1D, nn.LayerNorm)

# Layer type -> its rule, and when the rule is right. One row per layer type.
RULES: dict[type[nn.Module], tuple[Rule, Callable[[nn.Module], bool]]] = {
    nn.Linear: (linear, _always),
    Conv1D: (conv1d_gpt2, _always),
    nn.Embedding: (embedding, _looks_up_only),
    nn.LayerNorm: (layer_norm, _always),
    nn.RMSNorm: (from_opacus, _always),
    nn.GroupNorm: (from_opacus, _always),
    nn.Conv1d: (from_opacus, _pads_with_zeros),
    nn.Conv2d: (from_opacus, _pads_with_zeros),
    nn.Conv3d: (from_opacus, _pads_with_zeros),
}


def find_rule(layer: nn.Module, names: Collection[str]) -> Rule | None:
    """The closed form for these parameters of this layer, or None where it must be replayed.

    A subclass may inherit its parent's rule only with its parent's forward, and the parameters
    must be the layer's own (not a parametrization's, not a child's).
    """
    if "forward" in vars(layer) or not set(names) <= set(layer._parameters):
        return None
    if isinstance(layer, _KnowsItsGradients):
        return from_layer
    if set(names) == {"bias"} and isinstance(layer, _ADD_A_BIAS):
        plain = any(type(layer).forward is kind.forward for kind in _ADD_A_BIAS)
        return biases_alone if plain else None
    for base, (rule, is_right) in RULES.items():
        if isinstance(layer, base) and type(layer).forward is base.forward:
            if rule is from_opacus and type(layer) not in GradSampleHooks.GRAD_SAMPLERS:
                return None
            return rule if set(names) <= {"weight", "bias"} and is_right(layer) else None
    return None
