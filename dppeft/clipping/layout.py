"""Where the batch lies in the inputs and outputs of each module, read off two forwards.

An axis that merely equals the batch size (a sequence of as many tokens) does not grow when a row
is added; the batch axis does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten

MIXED = -1  # the shape depends on the batch, but not as one axis of one entry per row
_INERT = (type(None), bool, int, float, str, torch.dtype, torch.device, torch.Size, nn.Module)


@dataclass(frozen=True)
class Layout:
    """Where the batch lies in a module's inputs and outputs: an axis, None (constant) or MIXED."""

    inputs: tuple[int | None, ...]
    tensors: tuple[bool, ...]  # which inputs were tensors
    outputs: tuple[tuple[int, int | None], ...]  # (position among the outputs, axis)
    lookup_once: bool  # its one input is (1, T): the same positions for every row
    replayable: bool  # no arguments with a state of their own, such as a cache

    @property
    def sees_whole_examples(self) -> bool:
        """Each output has one entry per row, and no input depends on the batch in another way."""
        outputs = [axis for _, axis in self.outputs]
        return bool(outputs) and None not in outputs and MIXED not in (*self.inputs, *outputs)

    def axes_of(self, leaves: list[Any], batch_size: int) -> list[int | None] | None:
        """The batch axis of each input of one call, or None where the layout does not fit it."""
        if len(leaves) != len(self.inputs):
            return None
        axes: list[int | None] = []
        for leaf, axis, expected in zip(leaves, self.inputs, self.tensors, strict=True):
            if isinstance(leaf, Tensor) and (
                not expected or (axis is not None and leaf.shape[axis] != batch_size)
            ):
                return None
            axes.append(axis if isinstance(leaf, Tensor) else None)
        return axes


class Call(NamedTuple):
    """The shapes of one call; of the outputs only those that a gradient can come back to."""

    inputs: list[torch.Size | str]
    outputs: dict[int, torch.Size | str]
    with_grad: bool


@dataclass(eq=False)
class Calls:
    """Every call of every module in one forward, by path."""

    of: dict[str, list[Call]] = field(default_factory=dict)

    def hook(self, path: str) -> Callable[..., None]:
        def record(_m: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            with_grad = torch.is_grad_enabled()  # off in a reentrant checkpoint's first pass
            inputs = [_shape(leaf) for leaf in tree_flatten((args, kwargs))[0]]
            outputs = {
                position: leaf.shape
                for position, leaf in enumerate(tree_flatten(output)[0])
                if isinstance(leaf, Tensor)
                and (leaf.requires_grad or (not with_grad and leaf.is_floating_point()))
            }
            self.of.setdefault(path, []).append(Call(inputs, outputs, with_grad))

        return record


def _shape(leaf: object) -> torch.Size | str:
    if isinstance(leaf, Tensor):
        return leaf.shape
    return "inert" if isinstance(leaf, _INERT) else "opaque"


def _axis(two: torch.Size | str, three: torch.Size | str) -> int | None:
    if isinstance(two, str) or isinstance(three, str):
        return None if two == three else MIXED
    if len(two) != len(three):
        return MIXED
    differing = [axis for axis, (a, b) in enumerate(zip(two, three, strict=True)) if a != b]
    if not differing:
        return None
    axis = differing[0]
    return axis if len(differing) == 1 and (two[axis], three[axis]) == (2, 3) else MIXED


def layout_of(module: nn.Module, two: list[Call], three: list[Call]) -> Layout | None:
    """The layout that all calls of a module share, or None where they differ."""
    if len(two) != len(three):
        return None
    layouts = set()
    for a, b in zip(two, three, strict=True):
        if len(a.inputs) != len(b.inputs) or a.outputs.keys() != b.outputs.keys():
            return None
        shapes = [shape for shape in a.inputs if not isinstance(shape, str)]
        layouts.add(
            Layout(
                inputs=tuple(map(_axis, a.inputs, b.inputs)),
                tensors=tuple(not isinstance(shape, str) for shape in a.inputs),
                outputs=tuple((k, _axis(a.outputs[k], b.outputs[k])) for k in a.outputs),
                lookup_once=isinstance(module, nn.Embedding)
                and [len(shape) > 1 and shape[0] == 1 for shape in shapes] == [True],
                replayable="opaque" not in a.inputs,
            )
        )
    return layouts.pop() if len(layouts) == 1 else None
