"""How a run computes, and the packer that follows from it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from dppeft._types import PerExampleLoss
from dppeft.training.collation import choose_collate
from dppeft.training.distributed import Processes
from dppeft.training.packing import MapDataset, Packer, RowSource, choose_limits

if TYPE_CHECKING:
    from accelerate import Accelerator


@dataclass(frozen=True, kw_only=True)
class RunSettings:
    """How a run computes. None of it changes the guarantee; ``seed`` weakens it and is marked.

    Attributes:
        collate_fn: list of rows -> dict of tensors. Default: pads rows of ``input_ids``, stacks
            rows of other numbers.
        loss: ``(model, batch) -> (B,)``. Default: by the model's kind.
        accelerator: for several processes; found by itself under ``accelerate launch``.
        clipping: "flat", "per_layer" or "automatic".
        engine: "auto" or "opacus".
        precision: "auto", "float32" or "bf16".
        physical_tokens: most padded tokens computed at once. Changes speed and memory only.
        physical_batch_size: most rows computed at once. Changes speed and memory only.
        seed: makes sampling and noise reproducible: whoever knows it can remove the noise.
        ledger: see ``make_private``.
    """

    collate_fn: Callable[[list[Any]], Any] | None = None
    loss: PerExampleLoss | None = None
    accelerator: Accelerator | None = None
    clipping: str = "flat"
    engine: str = "auto"
    precision: str = "auto"
    physical_tokens: int | None = None
    physical_batch_size: int | None = None
    seed: int | None = None
    ledger: str | Path | None = None

    @property
    def asked_precision(self) -> str:
        """``precision``; an Accelerator made for bf16 asks for it where it says "auto"."""
        mixed = getattr(self.accelerator, "mixed_precision", None)
        return "bf16" if self.precision == "auto" and mixed == "bf16" else self.precision


def make_packer(
    model: nn.Module, dataset: MapDataset, settings: RunSettings, processes: Processes
) -> Packer:
    """Rows of ``dataset`` collated, cut and dealt out as the settings and the device ask for."""
    source = RowSource(dataset)
    limits = choose_limits(
        model,
        device=processes.device,
        physical_tokens=settings.physical_tokens,
        physical_batch_size=settings.physical_batch_size,
        has_lengths=source.has_lengths,
    )
    return Packer(
        source=source,
        collate=choose_collate(settings.collate_fn, model, dataset[0]),
        limits=limits,
        device=processes.device,
        rank=processes.rank,
        world_size=processes.count,
    )
