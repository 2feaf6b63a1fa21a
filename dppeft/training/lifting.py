"""From what is released to what is moved: RGP's small carriers stand for a full matrix.

A layer may train tensors that the optimizer does not move: it says which ones (``carries``), turns
their released gradients into that of the tensor that moves (``lift``), and prepares them before
each update (``before_step``). Everything else moves by its own released gradient.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from dppeft.errors import ArgumentError


@runtime_checkable
class LiftingLayer(Protocol):
    """What a layer must offer. Names are relative to it."""

    def carries(self) -> dict[str, list[str]]:
        """Name of a tensor that moves -> names of the trained tensors in its place."""
        ...

    def lift(self, moved: str, released: dict[str, Tensor]) -> Tensor:
        """The gradient of the tensor that moves, from the released ones of its carriers."""
        ...

    def before_step(self, step: int, key: str) -> None:
        """Prepares update number ``step`` from released weights alone; ``key`` is its path."""
        ...


@dataclass(frozen=True, eq=False)
class _Carried:
    layer: LiftingLayer
    path: str
    moved: str  # relative to the layer
    carriers: dict[str, str]  # name in the model -> relative to the layer

    @property
    def name(self) -> str:
        return f"{self.path}.{self.moved}".lstrip(".")


class Lift:
    """Which tensors the optimizer of a run moves, and by what.

    Attributes:
        moved: name -> tensor that an optimizer moves.
        kept: name -> tensor that a saved run holds: those, and the state of lifting layers.
    """

    def __init__(self, model: nn.Module, trained: Mapping[str, nn.Parameter]) -> None:
        self._layers = [
            (path, layer)
            for path, layer in model.named_modules()
            if isinstance(layer, LiftingLayer) and layer.carries()
        ]
        self._carried = [
            _Carried(layer, path, moved, {f"{path}.{c}".lstrip("."): c for c in carriers})
            for path, layer in self._layers
            for moved, carriers in layer.carries().items()
        ]
        self._stands_for: dict[int, nn.Parameter] = {}
        self.moved = dict(trained)
        for one in self._carried:
            tensor = _parameter(one)
            if one.name in trained:
                raise ArgumentError(
                    f"{one.name} requires a gradient and is trained through its carriers, too: one "
                    "of the two would be thrown away. Set its requires_grad to False."
                )
            for name in one.carriers:
                if name not in trained:
                    raise ArgumentError(
                        f"{name} was frozen, but {one.name} is trained through it. Freeze all "
                        "carriers of a matrix or none; sides= says which ones there are."
                    )
                self._stands_for[id(self.moved.pop(name))] = tensor
            self.moved[one.name] = tensor
        self.kept: dict[str, Tensor] = dict(self.moved)
        for path, layer in self._layers:
            assert isinstance(layer, nn.Module)
            own = layer.named_buffers()
            self.kept |= {f"{path}.{n}": b for n, b in own if not n.startswith("base_layer.")}

    def groups(self, optimizer: torch.optim.Optimizer) -> list[list[Tensor]]:
        """Its parameter groups, with the tensors that move in the place of their carriers."""
        seen: dict[int, int] = {}
        found = []
        for number, group in enumerate(optimizer.param_groups):
            tensors = [self._stands_for.get(id(tensor), tensor) for tensor in group["params"]]
            found.append(list({id(tensor): tensor for tensor in tensors}.values()))
            for tensor in found[-1]:
                if seen.setdefault(id(tensor), number) != number:
                    raise ArgumentError(
                        "Both carriers of a matrix must be in one parameter group of the "
                        "optimizer: the matrix itself is what it moves."
                    )
        return found

    def exchange(self, optimizer: torch.optim.Optimizer) -> None:
        """Makes those the optimizer's own. What it remembers of the carriers is forgotten."""
        groups = self.groups(optimizer)
        for group, tensors in zip(optimizer.param_groups, groups, strict=True):
            for tensor in group["params"]:
                if id(tensor) in self._stands_for:
                    optimizer.state.pop(tensor, None)
            group["params"] = tensors

    def before_step(self, step: int) -> None:
        """Prepares the layers. Nothing private is looked at."""
        for path, layer in self._layers:
            layer.before_step(step, path)

    def __call__(self, released: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Released gradients by trained tensor -> by tensor that moves."""
        lifted = dict(released)
        for one in self._carried:
            parts = {local: lifted.pop(name) for name, local in one.carriers.items()}
            lifted[one.name] = one.layer.lift(one.moved, parts)
        return lifted


def _parameter(one: _Carried) -> nn.Parameter:
    assert isinstance(one.layer, nn.Module)
    return one.layer.get_parameter(one.moved)
