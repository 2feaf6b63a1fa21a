"""Exact per-example gradients of any module: run that one module again, for each example.

The module's inputs and output gradients were recorded in the one forward and backward of the whole
model, so only the module itself is repeated: under ``vmap(vjp)``, one row at a time where vmap
cannot (custom autograd functions, sparse tensors), and on the whole batch with the forward's own
random state where the module draws random numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vjp, vmap
from torch.utils._pytree import tree_flatten, tree_unflatten

from dppeft.clipping.terms import Dense, Term, at_least_float32
from dppeft.clipping.units import Unit


@dataclass(frozen=True, eq=False)
class Call:
    """One recorded call of a unit: its inputs (detached), and what its surroundings were."""

    leaves: list[Any]  # the flattened (args, kwargs)
    axes: list[int | None]  # of each leaf, the axis of the batch
    structure: Any
    random_state: RandomState | None  # as it was before the call, if the call drew numbers
    autocast: tuple[str, bool, torch.dtype]


@dataclass(frozen=True, eq=False)
class RandomState:
    """The state of the global generator of one device."""

    state: Tensor
    device: torch.device

    @classmethod
    def of(cls, device: torch.device) -> RandomState:
        cuda = device.type == "cuda"
        return cls(torch.cuda.get_rng_state(device) if cuda else torch.get_rng_state(), device)

    def has_moved(self) -> bool:
        return not torch.equal(self.state, RandomState.of(self.device).state)

    def restore(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.set_rng_state(self.state, self.device)
        else:
            torch.set_rng_state(self.state)


class Replayer:
    """Replays the calls of one unit; remembers whether vmap can."""

    def __init__(self, unit: Unit) -> None:
        self.unit = unit
        self.vmap_works = True
        self._sites = {local: _sites_of(unit.module, local) for local in unit.params}

    def terms(self, call: Call, grads: dict[int, Tensor]) -> dict[str, Term]:
        """Per-example gradients of the unit's parameters.

        Args:
            call: the recorded call.
            grads: position among the outputs -> gradient of the summed loss (batch on the axis
                that the unit's layout names).
        """
        device, enabled, dtype = call.autocast
        with torch.enable_grad(), torch.autocast(device, enabled=enabled, dtype=dtype):
            if call.random_state is not None:
                rows = self._whole_batch_at_a_time(call, grads)
            else:
                rows = self._vmapped(call, grads) if self.vmap_works else None
                rows = rows if rows is not None else self._row_at_a_time(call, grads)
        return {name: Dense(at_least_float32(grad.detach())) for name, grad in rows.items()}

    def _params(self) -> dict[str, Tensor]:
        return {name: self.unit.module.get_parameter(name).detach() for name in self.unit.params}

    def _forward(self, params: dict[str, Tensor], leaves: Sequence[Any], call: Call, of: Any):  # type: ignore[no-untyped-def]
        args, kwargs = tree_unflatten(list(leaves), call.structure)
        with self._in_place_of_parameters(params):
            outputs = tree_flatten(self.unit.module(*args, **kwargs))[0]
        return [outputs[position] for position in of]

    @contextmanager
    def _in_place_of_parameters(self, params: dict[str, Tensor]) -> Iterator[None]:
        # torch.func.functional_call leaves its tensors behind in a module that hangs in two places
        # of the tree (VB-LoRA's bank), so each place is exchanged here exactly once.
        saved = []
        try:
            for local, tensor in params.items():
                for module, key in self._sites[local]:
                    saved.append((module, key, module._parameters[key]))
                    module._parameters[key] = tensor  # type: ignore[assignment]
            yield
        finally:
            for module, key, param in reversed(saved):
                module._parameters[key] = param

    def _vmapped(self, call: Call, grads: dict[int, Tensor]) -> dict[str, Tensor] | None:
        in_axes = call.axes
        mapped = [k for k, axis in enumerate(in_axes) if axis is not None]
        out_axes = dict(self.unit.layout.outputs)
        params = self._params()

        def one(tensors: list[Tensor], cotangents: dict[int, Tensor]) -> dict[str, Tensor]:
            leaves = list(call.leaves)
            for k, tensor in zip(mapped, tensors, strict=True):
                leaves[k] = tensor.unsqueeze(in_axes[k])
            _, pull = vjp(lambda p: self._forward(p, leaves, call, grads), params)
            return pull([cotangents[k].unsqueeze(out_axes[k]) for k in grads])[0]

        axes = ([in_axes[k] for k in mapped], {k: out_axes[k] for k in grads})
        try:
            return vmap(one, in_dims=axes)([call.leaves[k] for k in mapped], grads)
        except Exception:  # whatever vmap cannot trace; the rows below show a real error again
            self.vmap_works = False
            return None

    def _row_at_a_time(self, call: Call, grads: dict[int, Tensor]) -> dict[str, Tensor]:
        out_axes = dict(self.unit.layout.outputs)
        position = next(iter(grads))
        rows: list[dict[str, Tensor]] = []
        for row in range(grads[position].shape[out_axes[position]]):
            leaves = [
                leaf if axis is None else leaf.narrow(axis, row, 1)
                for leaf, axis in zip(call.leaves, call.axes, strict=True)
            ]
            params = {name: p.requires_grad_() for name, p in self._params().items()}
            outputs = self._forward(params, leaves, call, grads)
            cotangents = [grads[k].narrow(out_axes[k], row, 1) for k in grads]
            rows.append(_gradients(outputs, params, cotangents))
        return {name: torch.stack([r[name] for r in rows]) for name in rows[0]}

    def _whole_batch_at_a_time(self, call: Call, grads: dict[int, Tensor]) -> dict[str, Tensor]:
        """The forward's own draw for all rows; a backward for each, with the others set to 0."""
        assert call.random_state is not None
        after = RandomState.of(call.random_state.device)
        params = {name: p.requires_grad_() for name, p in self._params().items()}
        call.random_state.restore()
        outputs = self._forward(params, call.leaves, call, grads)
        after.restore()
        out_axes = dict(self.unit.layout.outputs)
        position = next(iter(grads))
        rows = []
        for row in range(grads[position].shape[out_axes[position]]):
            cotangents = [_only(grads[k], out_axes[k], row) for k in grads]
            rows.append(_gradients(outputs, params, cotangents, retain=True))
        return {name: torch.stack([r[name] for r in rows]) for name in rows[0]}


def _sites_of(module: nn.Module, local: str) -> list[tuple[nn.Module, str]]:
    """Every place inside a module that holds this parameter."""
    param = module.get_parameter(local)
    return [
        (owner, key)
        for owner in module.modules()
        for key, own in owner._parameters.items()
        if own is param
    ]


def _only(grad: Tensor, axis: int, row: int) -> Tensor:
    alone = torch.zeros_like(grad)
    alone.narrow(axis, row, 1).copy_(grad.narrow(axis, row, 1))
    return alone


def _gradients(
    outputs: list[Tensor], params: dict[str, Tensor], cotangents: list[Tensor], retain: bool = False
) -> dict[str, Tensor]:
    pairs = [(o, c) for o, c in zip(outputs, cotangents, strict=True) if o.requires_grad]
    if not pairs:
        return {name: torch.zeros_like(p) for name, p in params.items()}
    found = torch.autograd.grad(
        [o for o, _ in pairs],
        list(params.values()),
        [c for _, c in pairs],
        retain_graph=retain,
        allow_unused=True,
    )
    return {
        name: (torch.zeros_like(p) if grad is None else grad).to_dense().detach()
        for (name, p), grad in zip(params.items(), found, strict=True)
    }
