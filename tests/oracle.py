"""DP-SGD by its definition, one example at a time, in float64. Imports torch and nothing of dppeft.

The gradients come from the model's own ``.loss`` on each example alone, its padding stripped, so
neither our losses nor our engine nor our padding can agree with this by sharing a mistake.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

Row = dict[str, Tensor]
Grads = dict[str, Tensor]  # name -> (B, *shape), float64


def own_loss(model: nn.Module, row: Row) -> Tensor:
    """The loss that a transformers model computes by itself."""
    return model(**row).loss


def per_example(
    model: nn.Module, rows: Sequence[Row], loss: Callable[[Any, Row], Tensor] = own_loss
) -> Grads:
    """Each row's gradient of each parameter that trains; zeros where the row does not reach it."""
    model = copy.deepcopy(model).double()
    params = {name: p for name, p in model.named_parameters() if p.requires_grad}
    found = []
    for row in rows:
        model.zero_grad()
        doubled = {k: v.double() if v.is_floating_point() else v for k, v in row.items()}
        loss(model, doubled).sum().backward()
        found.append({
            n: torch.zeros_like(p) if p.grad is None else p.grad.clone() for n, p in params.items()
        })
    return {name: torch.stack([grads[name] for grads in found]) for name in params}


def norms(grads: Grads) -> Tensor:
    """(B,) norm of each example's gradient over all parameters together."""
    return torch.stack([g.flatten(1).norm(dim=1) for g in grads.values()]).norm(dim=0)


def clipped_sum(grads: Grads, max_grad_norm: float) -> Grads:
    """``sum_i g_i min(1, C / ||g_i||)``, Algorithm 1 of Abadi et al. (2016)."""
    factors = (max_grad_norm / norms(grads).clamp_min(1e-300)).clamp(max=1)
    return {n: torch.einsum("b,b...->...", factors, g) for n, g in grads.items()}


def clipped_sum_per_tensor(grads: Grads, max_grad_norm: float) -> Grads:
    """Each of k tensors clipped to C / sqrt(k) (Yu et al. 2022)."""
    threshold = max_grad_norm / len(grads) ** 0.5
    return {n: clipped_sum({n: g}, threshold)[n] for n, g in grads.items()}


def normalised_sum(grads: Grads, max_grad_norm: float, gamma: float = 0.01) -> Grads:
    """``sum_i g_i C / (||g_i|| + gamma)``, Eq. 4 of Bu et al. (2022), arXiv 2206.07136."""
    factors = max_grad_norm / (norms(grads) + gamma)
    return {n: torch.einsum("b,b...->...", factors, g) for n, g in grads.items()}


def distance(a: Grads, b: Grads) -> float:
    """L2 distance over all tensors together."""
    assert a.keys() == b.keys()
    return float(sum((a[n].double() - b[n].double()).square().sum() for n in a)) ** 0.5


def worst_error(found: Grads, truth: Grads) -> float:
    """Largest relative error of a tensor, with a floor of 1e-3 of the largest tensor.

    The floor is for gradients that are zero but for rounding, such as BERT's key biases, whose
    effect the softmax cancels.
    """
    assert found.keys() == truth.keys(), found.keys() ^ truth.keys()
    whole = max(float(t.norm()) for t in truth.values())
    errors = [0.0]
    for name, true in truth.items():
        assert found[name].shape == true.shape, name
        errors.append(float((found[name].double() - true).norm() / (true.norm() + 1e-3 * whole)))
    return max(errors)
