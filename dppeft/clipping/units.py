"""Which module accounts for which parameter: the smallest called module that sees whole examples.

Opacus hooks leaf modules, so parameters that a tuner reads directly get no gradient or a wrong one.
Here nothing is assumed about the model. Two probing forwards, with two and with three rows, show
which modules are called and on which axis the batch lies (an axis that merely *equals* the batch
size does not grow with it). A parameter starts at the module that owns it. While a unit runs, its
parameters are switched off for autograd; if a trial backward still reaches one of them, the
parameter was used outside its unit, and the unit is moved up to the next called module. What
arrives at the model itself is computed one row at a time, which is the definition.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dppeft._types import Batch, PerExampleLoss
from dppeft.clipping.layout import Calls, Layout, layout_of
from dppeft.clipping.probing import (
    by_row,
    check_losses,
    computes_exactly,
    disagreement,
    each_alone,
    gradient_of,
    length_of,
    plain_grads,
    rows_of,
    trainable,
    unchanged_buffers,
    untouched_random_state,
    without_dropout,
)
from dppeft.clipping.rules import Rule, biases_alone, find_rule
from dppeft.clipping.terms import Dense, Term, at_least_float32, weighted_sum
from dppeft.errors import DppeftError, UnsupportedModelError


@dataclass(frozen=True, eq=False)
class Unit:
    """A module that accounts for some parameters, each of its calls one use."""

    path: str
    module: nn.Module
    params: dict[str, str]  # name inside the module -> name in the model
    rule: Rule | None  # None: replayed
    layout: Layout

    @property
    def needs_input(self) -> bool:
        """Biases alone do not, so that their layers' inputs need not be kept."""
        return self.rule is not biases_alone

    @property
    def expands(self) -> bool:
        """Its input is shared by all rows and must be repeated for each of them."""
        return self.layout.inputs[0] is None if self.rule else False


@dataclass(frozen=True, eq=False)
class UnitPlan:
    """Units that together account for every trainable parameter, or the reason why none do."""

    units: list[Unit]
    by_row: str | None = None  # the parameter that makes one row at a time necessary
    unreached: frozenset[str] = frozenset()


Trial = Callable[[list[Unit], Batch, int], tuple[dict[str, Term], set[str]]]


class Planner:
    """Finds the units of a model once, on a few rows of a batch. Releases nothing."""

    def __init__(self, model: nn.Module, loss: PerExampleLoss) -> None:
        self.model = model
        self.loss = loss
        self.params = trainable(model)
        self.modules = dict(model.named_modules(remove_duplicate=False))
        self.layouts: dict[str, Layout | None] = {}

    def plan(self, batch: Batch, batch_size: int, trial: Trial) -> UnitPlan | None:
        """Units for every trainable parameter; None where no row has a finite gradient.

        Args:
            batch: at least one row.
            batch_size: its number of rows.
            trial: ``(units, batch, size) -> (terms, leftover)``: a forward and backward with units.
        """
        self._refuse_steps_in_backward()
        with untouched_random_state(self.model), unchanged_buffers(self.model):
            rows = self._usable_rows(batch, batch_size)
            if rows is None:
                return None
            two, three = (rows_of(batch, batch_size, rows[:k]) for k in (2, 3))
            calls_two, _ = self._probe(two, 2)
            calls_three, sums = self._probe(three, 3)
            self._read_layouts(calls_two, calls_three)
            self._refuse_lost_gradients(calls_three, set(sums))
            plan = self._settle(three, sums, trial)
            self._refuse_mixed_rows(plan, three, trial)
            return plan

    def _usable_rows(self, batch: Batch, batch_size: int) -> list[int] | None:
        """Three rows (repeated if there are fewer) whose gradients are finite.

        The shortest comes first: without any padding a model may pass no mask, and show less.
        """
        order = _shortest_first(batch, batch_size)
        three = [order[r % batch_size] for r in range(3)]
        for rows in (three, *([r] * 3 for r in range(batch_size))):
            sums = self._probe(rows_of(batch, batch_size, rows), 3)[1]
            if all(bool(grad.isfinite().all()) for grad in sums.values()):
                return rows
        return None

    def _probe(self, batch: Batch, size: int) -> tuple[Calls, dict[str, Tensor]]:
        """One forward with every call recorded, and autograd's own gradient of the summed loss."""
        calls = Calls()
        torch.manual_seed(0)  # the trial draws the same dropout; the caller restores the state
        handles = [
            module.register_forward_hook(calls.hook(path), with_kwargs=True)
            for path, module in self.model.named_modules()
        ]
        try:
            with torch.enable_grad():
                losses = check_losses(self.loss(self.model, batch), size)
        except DppeftError:
            raise
        except Exception as error:
            raise UnsupportedModelError(
                f"The model's own forward fails on {size} rows: {type(error).__name__}: {error}"
            ) from error
        finally:
            for handle in handles:
                handle.remove()
        return calls, self._summed_gradients(losses)

    def _summed_gradients(self, losses: Tensor) -> dict[str, Tensor]:
        if not losses.requires_grad:
            raise UnsupportedModelError(
                "The loss depends on no trained parameter: it was detached on its way, or nothing "
                "that trains is used. Return the losses as the model computed them."
            )
        with plain_grads(self.params.values()), torch.enable_grad():
            try:
                losses.sum().backward()
            except Exception as error:
                raise UnsupportedModelError(
                    f"The model's own backward fails: {type(error).__name__}: {error} With "
                    "gradient checkpointing, try "
                    "gradient_checkpointing_kwargs={'use_reentrant': False}."
                ) from error
            grads = {name: p.grad for name, p in self.params.items()}
        return {name: grad.to_dense() for name, grad in grads.items() if grad is not None}

    def _read_layouts(self, two: Calls, three: Calls) -> None:
        for path, module in self.model.named_modules():
            if path in two.of and path in three.of:
                self.layouts[path] = layout_of(module, two.of[path], three.of[path])

    def _refuse_mixed_rows(self, plan: UnitPlan, batch: Batch, trial: Trial) -> None:
        """Each row's gradient among its neighbours, in two orders, must be its gradient alone."""
        mixed = self._mixed_in_training(plan, batch, trial)
        with without_dropout(self.model):
            if plan.by_row is not None:
                alone = by_row(self.model, self.loss, batch, 3)
                mixed |= _differing(alone, self._probe(batch, 3)[1], computes_exactly(self.model))
            else:
                mixed |= self._mixed_in_order(plan, batch, trial)
        if mixed:
            raise UnsupportedModelError(
                f"{min(mixed)}: an example's gradient changes with the other examples of its "
                "batch. Some layer mixes them (statistics, attention or routing across rows), "
                "keeps something from call to call, or the loss is averaged over the batch. "
                "Replace that layer, choose another method, or return each example's own loss."
            )

    def _mixed_in_order(self, plan: UnitPlan, batch: Batch, trial: Trial) -> set[str]:
        """Names whose gradients of a row, without dropout, are not those of the row alone.

        Only one row's gradients exist at a time: they are as large as the trained parameters.
        """
        orders = ([0, 1, 2], [2, 0, 1])
        found = [trial(plan.units, rows_of(batch, 3, order), 3)[0] for order in orders]
        exact, mixed = computes_exactly(self.model), set()
        for row, alone in enumerate(each_alone(self.model, self.loss, batch, 3)):
            whole = length_of(alone)
            for order, terms in zip(orders, found, strict=True):
                for name, truth in alone.items():
                    here = gradient_of(terms[name], order.index(row)) if name in terms else None
                    if disagreement(here, truth, whole, exact=exact):
                        mixed.add(name)
        return mixed

    def _mixed_in_training(self, plan: UnitPlan, batch: Batch, trial: Trial) -> set[str]:
        """What the first row's gradient in the model's own mode owes to its neighbours.

        With one seed the first row gets the same dropout whatever the other rows are.
        """
        firsts: list[dict[str, Term]] = []
        for order in ([0, 1, 2], [0, 2, 1], [0, 0, 0]):
            rows = rows_of(batch, 3, order)
            torch.manual_seed(0)
            if plan.by_row is not None:
                firsts.append(self._first_row_by_autograd(rows))
            else:
                firsts.append(trial(plan.units, rows, 3)[0])
        exact = computes_exactly(self.model)
        whole = length_of({name: gradient_of(term, 0) for name, term in firsts[0].items()})
        return {
            name
            for other in firsts[1:]
            for name, term in firsts[0].items()
            if name not in other
            or disagreement(gradient_of(other[name], 0), gradient_of(term, 0), whole, exact=exact)
        }

    def _first_row_by_autograd(self, batch: Batch) -> dict[str, Term]:
        with plain_grads(self.params.values()), torch.enable_grad():
            losses = check_losses(self.loss(self.model, batch), 3)
            losses[0].backward()
            grads = {name: p.grad for name, p in self.params.items()}
        return {
            name: Dense(at_least_float32(grad.to_dense()[None]))
            for name, grad in grads.items()
            if grad is not None
        }

    def _refuse_steps_in_backward(self) -> None:
        for name, param in self.params.items():
            if getattr(param, "_post_accumulate_grad_hooks", None):
                raise UnsupportedModelError(
                    f"{name} has a hook that runs once its gradient is accumulated (an optimizer "
                    "step inside the backward, a sharding library). It would see private "
                    "gradients. Remove the hook."
                )

    def _refuse_lost_gradients(self, calls: Calls, reached: set[str]) -> None:
        """A reentrant checkpoint whose inputs need no gradient drops its parameters' gradients."""
        for name in self.params.keys() - reached:
            path = name.rpartition(".")[0]
            of_owner = [call for p, cs in calls.of.items() if p == path for call in cs]
            if of_owner and not any(call.with_grad for call in of_owner):
                raise UnsupportedModelError(
                    f"{path} runs without gradients, so {name} would never be trained. With "
                    "reentrant gradient checkpointing, call model.enable_input_require_grads() "
                    "or use gradient_checkpointing_kwargs={'use_reentrant': False}."
                )

    def _settle(self, batch: Batch, sums: dict[str, Tensor], trial: Trial) -> UnitPlan:
        """Moves parameters up until the units give autograd's gradient and autograd no other."""
        unreached = frozenset(self.params.keys() - sums.keys())
        homes = {name: self._owners(name) for name in sums}
        while True:
            lost = [name for name, paths in homes.items() if paths == {""}]
            if lost:
                return UnitPlan([], by_row=lost[0], unreached=unreached)
            units = self._units(homes)
            try:
                torch.manual_seed(0)
                terms, leftover = trial(units, batch, 3)
                outside = (leftover & sums.keys()) | _differing(
                    terms, sums, computes_exactly(self.model)
                )
            except Exception:
                # A model may repeat what is looked up once by itself (prompt tuning).
                outside = {name for unit in units if unit.expands for name in unit.params.values()}
                if not outside:  # checkpoints inside a replayed module, say: each row alone
                    return UnitPlan([], by_row=min(sums), unreached=unreached)
            if not outside:
                return UnitPlan(units, unreached=unreached)
            for name in outside:
                homes[name] = self._raised(name, homes[name])

    def _owners(self, name: str) -> set[str]:
        """Where a parameter starts: every owner that is called, else the closest called parents."""
        param = self.params[name]
        owners = {
            path
            for path, module in self.modules.items()
            if any(own is param for own in module._parameters.values())
        }
        # The same module may be reachable by several paths; calls are recorded under the first.
        first = {id(module): path for path, module in self.model.named_modules()}
        owners = {first[id(self.modules[path])] for path in owners}
        called = _innermost(path for path in owners if self._fits(path, name))
        return called or self._raised(name, owners)

    def _raised(self, name: str, paths: set[str]) -> set[str]:
        return _outermost({self._climb(path, name) for path in paths})

    def _climb(self, path: str, name: str) -> str:
        """The closest module above that is called and sees whole examples; "" is the model."""
        while path:
            path = path.rpartition(".")[0]
            if not path or self._fits(path, name):
                return path
        return path

    def _fits(self, path: str, name: str) -> bool:
        layout = self.layouts.get(path)
        if layout is None or not path:
            return False
        if find_rule(self.modules[path], self._local(path, name)):
            return layout.lookup_once or (
                layout.sees_whole_examples and layout.inputs[0] is not None
            )
        return layout.sees_whole_examples and layout.replayable

    def _local(self, path: str, name: str) -> list[str]:
        """The names by which a module knows a parameter of the model (several if it is tied)."""
        param = self.params[name]
        named = self.modules[path].named_parameters(remove_duplicate=False)
        return [local for local, own in named if own is param]

    def _units(self, homes: dict[str, set[str]]) -> list[Unit]:
        self._join_nested_replays(homes)
        units = []
        for path, params in self._grouped(homes).items():
            module, layout = self.modules[path], self.layouts[path]
            assert layout is not None
            units.append(Unit(path, module, params, find_rule(module, params), layout))
        return units

    def _grouped(self, homes: dict[str, set[str]]) -> dict[str, dict[str, str]]:
        grouped: dict[str, dict[str, str]] = {}
        for name, paths in homes.items():
            for path in paths:
                grouped.setdefault(path, {})[self._local(path, name)[0]] = name
        return grouped

    def _join_nested_replays(self, homes: dict[str, set[str]]) -> None:
        """A replay inside a larger replay joins it: one replay for a tuner layer, not several."""
        grouped = self._grouped(homes)
        replayed = [p for p, params in grouped.items() if not find_rule(self.modules[p], params)]
        top = {
            path: min((o for o in replayed if path == o or path.startswith(o + ".")), key=len)
            for path in replayed
        }
        for name, paths in homes.items():
            homes[name] = _outermost({top.get(path, path) for path in paths})


def _shortest_first(batch: Batch, batch_size: int) -> list[int]:
    """The rows in their order, but the one with most padding moved to the front."""
    mask = batch.get("attention_mask")
    if not isinstance(mask, Tensor) or mask.dim() != 2 or len(mask) != batch_size:
        return list(range(batch_size))
    first = int(mask.sum(1).argmin())
    return [first, *(row for row in range(batch_size) if row != first)]


def _differing(terms: dict[str, Term], sums: dict[str, Tensor], exact: bool) -> set[str]:
    """Names whose per-example gradients do not add up to autograd's gradient of the summed loss."""
    total = torch.stack([grad.float().square().sum() for grad in sums.values()]).sum().sqrt()
    found = set()
    tolerance, floor = (1e-3, 1e-5) if exact else (5e-2, 5e-3)
    for name, grad in sums.items():
        if name in terms:
            ones = torch.ones(terms[name].batch, device=grad.device)
            error = (weighted_sum(terms[name], ones, grad.shape).float() - grad.float()).norm()
        else:
            error = grad.float().norm()
        if not error <= tolerance * grad.float().norm() + floor * total:
            found.add(name)
    return found


def _innermost(paths: Iterable[str]) -> set[str]:
    """No path around another: the smallest modules."""
    paths = set(paths)
    return {path for path in paths if not any(o.startswith(path + ".") for o in paths)}


def _outermost(paths: Iterable[str]) -> set[str]:
    """No path inside another: a use inside both would be counted twice."""
    paths = set(paths)
    if "" in paths:
        return {""}
    return {path for path in paths if not any(path.startswith(other + ".") for other in paths)}
