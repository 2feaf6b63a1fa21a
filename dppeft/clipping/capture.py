"""One forward and one backward with the units' calls recorded: the only hooks in the library.

While a unit runs, its own parameters do not require a gradient, so autograd never forms their
ordinary gradients; what it finds for a trainable parameter all the same is a use outside every
unit, and is reported as ``leftover``. All hooks are gone and all flags restored on exit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten

from dppeft._types import Batch, PerExampleLoss
from dppeft.clipping.probing import check_losses, full_precision, plain_grads, without_autocast
from dppeft.clipping.replay import Call, RandomState, Replayer
from dppeft.clipping.terms import Term, add
from dppeft.clipping.units import Unit
from dppeft.errors import ChangedCallError, UnsupportedModelError


class _StartOfGradient(torch.autograd.Function):
    """Makes an output require a gradient although nothing below it does (frozen embeddings)."""

    @staticmethod
    def forward(_ctx: Any, output: Tensor, _anchor: Tensor) -> Tensor:
        return output.clone()  # not a view: models may write into it in place

    @staticmethod
    def backward(_ctx: Any, *_grads: Tensor) -> tuple[None, None]:
        return None, None


class Capture:
    """Records the calls of the units during one forward and turns them into terms."""

    def __init__(self, model: nn.Module, units: Sequence[Unit], replayers: dict[str, Replayer]):
        self.model = model
        self.units = units
        self.replayers = replayers
        self.params = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.batch_size = 0
        self.recording = False
        self.uses: dict[str, list[Term]] = defaultdict(list)
        self.pending: list[tuple[Unit, Call, dict[int, Tensor]]] = []

    def run(
        self, loss: PerExampleLoss, batch: Batch, batch_size: int
    ) -> tuple[dict[str, Term], set[str]]:
        """Terms by parameter name, and the names that autograd reached outside their units."""
        self.batch_size = batch_size
        handles = [handle for unit in self.units for handle in self._hooks(unit)]
        try:
            with plain_grads(self.params.values()):
                self.recording = True
                with torch.enable_grad():
                    losses = check_losses(loss(self.model, batch), batch_size)
                if losses.requires_grad:
                    with without_autocast():
                        losses.backward(torch.ones_like(losses))
                self.recording = False
                leftover = {name for name, p in self.params.items() if p.grad is not None}
        finally:
            self.recording = False
            for handle in handles:
                handle.remove()
            for param in self.params.values():
                param.requires_grad_(True)
        with full_precision():
            for unit, call, grads in self.pending:
                if grads:
                    self._use(unit, self.replayers[unit.path].terms(call, grads))
            return {name: add(terms) for name, terms in self.uses.items()}, leftover

    def _hooks(self, unit: Unit) -> list[Any]:
        own = [self.params[name] for name in unit.params.values()]
        states: list[RandomState | None] = []

        def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
            if not (self.recording and torch.is_grad_enabled()):
                return None
            for param in own:
                param.requires_grad_(False)
            draws = unit.rule is None and module.training
            states.append(RandomState.of(own[0].device) if draws else None)
            return self._expanded(args, kwargs) if unit.expands else None

        def after(_module: nn.Module, args: Any, kwargs: Any, output: Any) -> Any:
            if not (self.recording and torch.is_grad_enabled()):
                return None
            for param in own:
                param.requires_grad_(True)
            state = states.pop()
            if output is None:  # the call raised
                return None
            moved = state if state is not None and state.has_moved() else None
            return self._tap(unit, args, kwargs, output, moved)

        return [
            unit.module.register_forward_pre_hook(before, with_kwargs=True),
            unit.module.register_forward_hook(after, with_kwargs=True, always_call=True),
        ]

    def _expanded(self, args: Any, kwargs: Any) -> Any:
        """Positions looked up once for all rows are looked up for each row instead."""
        leaves, structure = tree_flatten((args, kwargs))
        leaves[0] = leaves[0].expand(self.batch_size, *leaves[0].shape[1:])
        return tree_unflatten(leaves, structure)

    def _tap(
        self, unit: Unit, args: Any, kwargs: Any, output: Any, state: RandomState | None
    ) -> Any:
        """Asks for the gradient of each output; the recorded inputs meet it in the backward."""
        if unit.rule is not None and len(args) == 1 and not kwargs:
            leaves, structure = [args[0]], None  # most calls: nothing to flatten or to replay
        else:
            leaves, structure = tree_flatten((args, kwargs))
        axes = self._axes(unit, leaves)
        if unit.rule is not None:  # looks at the first input at most: no other need be kept
            leaves = leaves[: int(unit.needs_input)]
        leaves = [x.detach() if isinstance(x, Tensor) else x for x in leaves]
        versions = [x._version if isinstance(x, Tensor) else 0 for x in leaves]
        kind = self.params[next(iter(unit.params.values()))].device.type
        autocast = (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        call = Call(leaves, axes, structure, state, autocast)
        single = isinstance(output, Tensor)
        outputs, output_structure = ([output], None) if single else tree_flatten(output)
        grads: dict[int, Tensor] = {}
        several = len(unit.layout.outputs) > 1
        if several:
            self.pending.append((unit, call, grads))  # complete only when the backward is over
        for position, _ in unit.layout.outputs:
            tensor = outputs[position]
            if not tensor.requires_grad:
                anchor = torch.zeros((), device=tensor.device, requires_grad=True)
                tensor = outputs[position] = _StartOfGradient.apply(tensor, anchor)
            elif several:
                # One output may be an intermediate of another (a list of hidden states): only what
                # arrives from outside the unit is its output gradient.
                tensor = outputs[position] = tensor.clone()

            def receive(grad: Tensor, position: int = position) -> None:
                if versions != [x._version if isinstance(x, Tensor) else 0 for x in leaves]:
                    raise UnsupportedModelError(
                        f"{unit.path}: its input was changed in place after the call, so its "
                        "gradient is lost. Replace the in-place operation in the model."
                    )
                self._receive(unit, call, grads, position, grad.detach())

            tensor.register_hook(receive)
        return outputs[0] if single else tree_unflatten(outputs, output_structure)

    def _receive(
        self, unit: Unit, call: Call, grads: dict[int, Tensor], position: int, grad: Tensor
    ) -> None:
        recording, self.recording = self.recording, False  # a replay is not a use
        try:
            if unit.rule is not None:
                if not unit.expands:
                    grad = grad.movedim(unit.layout.outputs[0][1], 0)
                x = call.leaves[0] if unit.needs_input else grad
                if unit.needs_input and not unit.expands:
                    x = x.movedim(call.axes[0], 0)
                self._use(unit, unit.rule(unit.module, x, grad))
            else:
                grads[position] = grad
                if len(unit.layout.outputs) == 1:
                    self._use(unit, self.replayers[unit.path].terms(call, grads))
        finally:
            self.recording = recording

    def _use(self, unit: Unit, terms: dict[str, Term]) -> None:
        for local, name in unit.params.items():
            if local in terms:
                self.uses[name].append(terms[local])

    def _axes(self, unit: Unit, leaves: list[Any]) -> list[int | None]:
        axes = unit.layout.axes_of(leaves, self.batch_size)
        if axes is None:
            raise ChangedCallError(
                f"{unit.path} was called for {self.batch_size} examples with other inputs than on "
                "the rows that it was examined on. Each call must see every example once, in the "
                "same arguments; train other modules, or change the model."
            )
        return axes
