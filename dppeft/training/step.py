"""One private update, in the order of the paper.

Abadi et al. (2016), Algorithm 1, with Poisson sampling: every row enters the draw independently
with probability q; the sum of clipped gradients gets Gaussian noise once; the divisor is the
expected batch size q * N, which is public, never the drawn one, which is not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from dppeft._types import Batch, ClippedSum, KnowsNoise, added
from dppeft.clipping.engine import Engine
from dppeft.clipping.probing import through_hooks
from dppeft.privacy.noise import GaussianNoise
from dppeft.training.distributed import Processes
from dppeft.training.lifting import Lift
from dppeft.training.packing import LogicalBatch
from dppeft.training.precision import Computation
from dppeft.training.record import Rates, Record
from dppeft.training.thresholds import Thresholds


@dataclass(frozen=True, kw_only=True)
class Update:
    """What an update needs, fixed for a run.

    Attributes:
        engine: exact clipped sums.
        noise: the only thing that turns private into released.
        record: where releases are written down.
        optimizer: any torch optimizer; it only ever sees released gradients. See ``KnowsNoise``
            for one that makes use of the noise's size.
        trained: name as in ``model.named_parameters()`` -> tensor whose gradient is released.
        lift: from released gradients to those of the tensors that move.
        processes: who sums and who draws the noise.
        thresholds: what each example is clipped to.
        computation: precision and attention of the forward and backward pass.
        redrawn: layers that draw noise of their own once for each update (PVeRA).
    """

    engine: Engine
    noise: GaussianNoise
    record: Record
    optimizer: torch.optim.Optimizer
    trained: dict[str, nn.Parameter]
    lift: Lift
    processes: Processes
    thresholds: Thresholds
    computation: Computation
    redrawn: Sequence[Any] = ()

    def apply(self, draw: LogicalBatch, rates: Rates) -> None:
        """Release one noised gradient and move the trained weights by it.

        Guarantee: the released gradient is the Gaussian mechanism, noise multiplier
        ``rates.noise_multiplier``, on a Poisson sample at ``rates.sample_rate``; one row moves the
        sum before noise by at most ``l2_bound``.
        Edges: an empty draw is noised, recorded and applied like any other.
        """
        self.lift.before_step(draw.step)  # from released weights alone
        scales = self._scales()  # released
        total = self._clipped_sum(draw, scales)  # private
        total = self.thresholds.join(
            total,
            noise_multiplier=rates.noise_multiplier,
            expected_batch_size=rates.expected_batch_size,
        )
        total = self.processes.add_up(total)  # private: one all-reduce
        noisy = total.grads
        if self.processes.is_main:
            noisy = self.noise.add(  # released from here on: std = noise_multiplier * l2_bound
                total, noise_multiplier=rates.noise_multiplier, step=draw.step
            )
        if isinstance(self.optimizer, KnowsNoise):  # public
            sum_std = rates.noise_multiplier * total.l2_bound
            self.optimizer.noise_std = sum_std / rates.expected_batch_size
        self.record.release(draw.step, rates, total.l2_bound)  # on disk before anyone can use it
        noisy = self.processes.from_main(noisy)  # released
        self._move(noisy, rates.expected_batch_size, scales)  # released
        self.thresholds.move(noisy, rates.expected_batch_size)  # released

    def _scales(self) -> dict[str, torch.Tensor]:
        """What the optimizer wants gradients multiplied by before they are clipped, by name."""
        if not isinstance(self.optimizer, KnowsNoise):
            return {}
        wanted = self.optimizer.scales()
        return {name: wanted[p] for name, p in self.trained.items() if p in wanted}

    def _clipped_sum(self, draw: LogicalBatch, scales: Mapping[str, torch.Tensor]) -> ClippedSum:
        """The sum over this process's physical batches; memory of one of them. Private."""
        max_grad_norm = self.thresholds.for_engine
        total = self.engine.zero_sum(max_grad_norm=max_grad_norm)
        with self.computation.active():
            for rows in draw.physical_batches():
                with self.computation.attention_for(_length(rows)):
                    part = self.engine.clipped_sum(
                        rows, max_grad_norm=max_grad_norm, into=total.grads, scales=scales
                    )
                # Without the norms, which grow with the draw.
                total = replace(
                    part,
                    norms=total.norms,
                    count=total.count + part.count,
                    within=added(total.within, part.within),
                )
        return total

    def _move(
        self,
        noisy: dict[str, torch.Tensor],
        expected_batch_size: float,
        scales: Mapping[str, torch.Tensor],
    ) -> None:
        """One optimizer step on the released gradient and on nothing else."""
        # Gradients of the user's own backward passes, on trained or frozen tensors, are dropped:
        # they were neither clipped nor noised.
        self.optimizer.zero_grad(set_to_none=True)
        lifted = self.lift({n: g / scales[n] if n in scales else g for n, g in noisy.items()})
        for name, parameter in self.lift.moved.items():
            released = (lifted.pop(name) / expected_batch_size).to(parameter.dtype)
            parameter.grad = through_hooks(parameter, released)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        for layer in self.redrawn:
            layer.update += 1


def _length(rows: Batch) -> int:
    """Tokens of the longest row of a physical batch, encoder or decoder; 1 where rows have none."""
    return max(
        (rows[name].shape[1] for name in ("input_ids", "labels") if _is_matrix(rows, name)),
        default=1,
    )


def _is_matrix(rows: Batch, name: str) -> bool:
    return name in rows and rows[name].dim() == 2
