"""Who draws, who sums, who writes, when several processes train one model.

Every process knows the same secret and so the same Poisson draw; the rows are dealt
out; one all-reduce adds the clipped sums; the main process alone draws the noise and broadcasts the
noisy sum, so that the noise enters once and every process applies the same bits. Adapters need no
DistributedDataParallel wrapper: nothing is synchronised during a backward pass.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from dppeft._types import ClippedSum
from dppeft.errors import ArgumentError

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(frozen=True)
class Processes:
    """The processes that train together. Collectives do nothing when there is only one.

    Attributes:
        rank: this process.
        count: how many there are.
        device: where collectives take their tensors: the model's device.
    """

    rank: int
    count: int
    device: torch.device

    @property
    def is_main(self) -> bool:
        """Whether this process draws the noise and writes the ledger."""
        return self.rank == 0

    def add_up(self, part: ClippedSum) -> ClippedSum:
        """The sum over all processes of their parts, by one all-reduce of one flat tensor.

        A process without rows takes part with zeros. ``norms`` and ``count`` stay local: nothing
        after this needs them.
        """
        if self.count == 1:
            return part
        flat = _flatten(part.grads.values())
        dist.all_reduce(flat)
        return replace(part, grads=_unflatten(flat, part.grads))

    def from_main(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The main process's values of these tensors, bit for bit, by one broadcast."""
        if self.count == 1:
            return dict(tensors)
        flat = _flatten(tensors.values())
        dist.broadcast(flat, src=0)
        return _unflatten(flat, tensors)

    def object_from_main(self, value: Any) -> Any:
        """The main process's value of a small Python object."""
        if self.count == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=self.device)
        return box[0]

    def same_weights(self, trained: Mapping[str, Tensor]) -> None:
        """Give every process the main one's trained weights; updates then keep them equal."""
        if self.count == 1:
            return
        with torch.no_grad():
            for name, value in self.from_main(trained).items():
                trained[name].copy_(value)


def find_processes(accelerator: Accelerator | None, device: torch.device) -> Processes:
    """The processes of ``accelerator``, of torch.distributed, or this one alone.

    Under a launcher (``accelerate launch``, ``torchrun``) the process group is set up here if
    nobody did: without it every process would train, add noise and spend by itself.
    """
    if accelerator is None and not _initialised() and int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from accelerate import Accelerator

        accelerator = Accelerator(cpu=device.type == "cpu")
    if accelerator is not None:
        _check_accelerator(accelerator)
    if not _initialised():
        return Processes(rank=0, count=1, device=device)
    return Processes(rank=dist.get_rank(), count=dist.get_world_size(), device=device)


def refuse_wrapped(model: nn.Module) -> None:
    """An error for models whose gradients are synchronised or sharded behind our back."""
    name = type(model).__name__
    if isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
        raise ArgumentError(
            f"The model is wrapped in {name}, which averages gradients before they are clipped. "
            "Pass the plain model (model.module, or leave it out of accelerator.prepare): dppeft "
            "adds up the clipped sums of the processes itself."
        )
    if "FullyShardedDataParallel" in name or "DeepSpeedEngine" in name or "FSDPModule" in name:
        raise ArgumentError(
            f"The model is wrapped in {name}: sharded models are not supported. Pass the plain "
            "model; an adapter's gradients are small enough to be kept on every process."
        )


def _check_accelerator(accelerator: Accelerator) -> None:
    kind = str(getattr(accelerator.distributed_type, "value", accelerator.distributed_type))
    if any(word in kind.upper() for word in ("FSDP", "DEEPSPEED", "MEGATRON", "XLA")):
        raise ArgumentError(
            f"accelerator.distributed_type={kind!r} shards the model. Expected one process, "
            "MULTI_CPU or MULTI_GPU: start with `accelerate launch --multi_gpu`."
        )
    if accelerator.mixed_precision == "fp16":
        raise ArgumentError(
            "accelerator.mixed_precision='fp16' scales the loss and skips updates that overflow, "
            "after the rows were used. Make the Accelerator with mixed_precision='no' and pass "
            "precision='bf16' or 'auto' instead."
        )
    if accelerator.gradient_accumulation_steps != 1:
        raise ArgumentError(
            f"accelerator.gradient_accumulation_steps={accelerator.gradient_accumulation_steps}: "
            "expected 1. The logical batch is the plan's batch_size; physical batches are cut "
            "from it automatically."
        )


def _initialised() -> bool:
    return dist.is_available() and dist.is_initialized()


def _flatten(tensors: Sequence[Tensor] | Any) -> Tensor:
    return torch.cat([tensor.detach().reshape(-1) for tensor in tensors])


def _unflatten(flat: Tensor, like: Mapping[str, Tensor]) -> dict[str, Tensor]:
    pieces = torch.split(flat, [tensor.numel() for tensor in like.values()])
    return {name: piece.view_as(like[name]) for name, piece in zip(like, pieces, strict=True)}
