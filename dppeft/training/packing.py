"""A logical batch -> physical batches: sorted by length, cut by a budget of padded tokens.

The clipped sum does not depend on the order of the rows, so inside one logical batch rows of like
length may stand together. Padding then costs about 5 % instead of doubling the work, and the
largest physical batch, not the logical one, decides the memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor, nn

from dppeft import _validate
from dppeft._types import Batch
from dppeft.errors import ArgumentTypeError, DataError

Collate = Callable[[list[Any]], Any]

_CHUNK = 1_000  # rows held at once while their lengths are read
_ROWS_WITHOUT_LENGTH = 32  # rows per physical batch where nothing says how large a row is
_FIRST = ("labels", "input_ids")  # entries whose first dimension is the number of rows


class MapDataset(Protocol):
    """Rows by index; the number of rows is known."""

    def __len__(self) -> int:
        """Number of rows."""

    def __getitem__(self, index: int) -> Any:
        """One row."""


class RowSource:
    """The rows of a data set by index, and how many tokens each has.

    A row's length is read when it is first drawn and kept, 4 bytes per row; the row itself is not.
    """

    def __init__(self, dataset: MapDataset) -> None:
        self._dataset = dataset
        self._lengths: np.ndarray = np.zeros(len(dataset), dtype=np.int32)  # 0: not read yet

    def __len__(self) -> int:
        """Number of rows."""
        return len(self._lengths)

    @property
    def has_lengths(self) -> bool:
        """Whether rows say how many tokens they have, read from the first one."""
        row = self._dataset[0]
        return isinstance(row, Mapping) and row.get("input_ids") is not None

    def fetch(self, indices: Sequence[int]) -> list[Any]:
        """The rows at ``indices``, through the data set's own batched access where it has one."""
        return _fetch(self._dataset, indices)

    def lengths(self, indices: np.ndarray) -> np.ndarray:
        """(n,) tokens of each row, 1 for rows without ``input_ids``."""
        missing = indices[self._lengths[indices] == 0]
        view: Any = self._dataset
        if len(missing) and "input_ids" in (getattr(view, "column_names", None) or ()):
            columns = [name for name in ("input_ids", "labels") if name in view.column_names]
            view = view.select_columns(columns)  # a datasets.Dataset decodes what is read only
        for start in range(0, len(missing), _CHUNK):
            chunk = missing[start : start + _CHUNK]
            rows = _fetch(view, chunk.tolist())
            self._lengths[chunk] = [_row_length(row) for row in rows]
        lengths: np.ndarray = self._lengths[indices]
        return lengths


def _fetch(dataset: MapDataset, indices: Sequence[int]) -> list[Any]:
    batched = getattr(dataset, "__getitems__", None)
    if batched is not None:
        return list(batched(indices))
    return [dataset[index] for index in indices]


def _row_length(row: Any) -> int:
    """Tokens of one row, encoder and decoder together; at least 1, so that an empty row counts."""
    tokens = row.get("input_ids") if isinstance(row, Mapping) else None
    if tokens is None:
        return 1
    labels = row.get("labels")
    decoder = len(labels) if hasattr(labels, "__len__") and np.ndim(labels) == 1 else 0
    return max(1, len(tokens) + (decoder if decoder != len(tokens) else 0))


@dataclass(frozen=True, kw_only=True)
class PhysicalLimits:
    """How large a physical batch may be. Changes speed and memory, never the result.

    Attributes:
        tokens: most padded tokens in one physical batch, or None.
        rows: most rows in one physical batch, or None.
    """

    tokens: int | None
    rows: int | None

    def cut(self, lengths: np.ndarray) -> list[np.ndarray]:
        """Positions 0..n-1 cut into physical batches, longest rows first.

        Longest first: whoever runs out of memory does so in the first batch, and later batches
        fit into the memory that the first one freed. A single row above the budget stands alone.

        Args:
            lengths: (n,) tokens of each row.
        """
        order = np.argsort(-lengths, kind="stable")
        most = len(order) if self.rows is None else self.rows
        cuts, start = [], 0
        while start < len(order):
            size = most
            if self.tokens is not None:
                size = min(most, max(1, self.tokens // int(lengths[order[start]])))
            cuts.append(order[start : start + size])
            start += size
        return cuts


def choose_limits(
    model: nn.Module,
    *,
    device: torch.device,
    physical_tokens: int | None,
    physical_batch_size: int | None,
    has_lengths: bool,
) -> PhysicalLimits:
    """The limits asked for; where nothing was asked, what suits the device and the model's width.

    On a CPU a physical batch should fit the cache: 1,280 tokens were best at width 384, so the
    budget shrinks as the width grows. On a GPU it follows the free memory.
    """
    if physical_tokens is not None:
        physical_tokens = _validate.positive_integer(physical_tokens=physical_tokens)
    if physical_batch_size is not None:
        physical_batch_size = _validate.positive_integer(physical_batch_size=physical_batch_size)
    if physical_tokens is None and physical_batch_size is None:
        if not has_lengths:
            return PhysicalLimits(tokens=None, rows=_ROWS_WITHOUT_LENGTH)
        physical_tokens = _default_tokens(model, device)
    return PhysicalLimits(tokens=physical_tokens, rows=physical_batch_size)


def _default_tokens(model: nn.Module, device: torch.device) -> int:
    config = getattr(model, "config", None)
    width = getattr(config, "hidden_size", None) or 768
    if device.type != "cuda":
        return int(np.clip(1_280 * 384 // width, 512, 8_192))
    layers = getattr(config, "num_hidden_layers", None) or 12
    free, _ = torch.cuda.mem_get_info(device)
    # About 34 values of `width` per token and layer live until the backward pass (Korthikanti et
    # al. 2022, without the attention matrix), in float32; half of the free memory is left alone.
    per_token = 34 * width * layers * 4
    return int(np.clip(free // 2 // per_token, 1_024, 65_536))


@dataclass(frozen=True, eq=False)
class LogicalBatch:
    """One Poisson draw, not yet used. What was drawn, and how much, is private.

    Attributes:
        step: number of the update that this draw is for, counted from 0. Public.
        indices: (n,) int64, the drawn rows. Private, and so is their number.
    """

    step: int
    indices: Tensor
    packer: Packer = dataclasses.field(repr=False)

    def __len__(self) -> int:
        """Rows drawn. Private."""
        return len(self.indices)

    def physical_batches(self) -> Iterator[Batch]:
        """This process's share, collated and on the model's device, one at a time."""
        return self.packer.physical_batches(self.indices)


@dataclass(frozen=True, kw_only=True)
class Packer:
    """Turns drawn indices into collated batches.

    Attributes:
        source: where the rows come from.
        collate: list of rows -> mapping of tensors, first dimension = rows.
        limits: the size of a physical batch.
        device: where batches go.
        rank: this process, 0 <= rank < world_size.
        world_size: number of processes that share a logical batch.
    """

    source: RowSource
    collate: Collate
    limits: PhysicalLimits
    device: torch.device
    rank: int = 0
    world_size: int = 1

    def shares(self, indices: Tensor) -> list[np.ndarray]:
        """The drawn rows of each process: disjoint, and together the draw.

        Dealt by their place in the draw, which every process knows, and by nothing that is read
        from a row: a data set that augments its rows shows each process other lengths, and a cut
        by those would count some rows twice.
        """
        drawn = indices.cpu().numpy()
        return [drawn[rank :: self.world_size] for rank in range(self.world_size)]

    def physical_batches(self, indices: Tensor) -> Iterator[Batch]:
        """Collated batches of this process's share of ``indices``, fetched when asked for."""
        own = self.shares(indices)[self.rank]
        for cut in self.limits.cut(self.source.lengths(own)):
            yield self.batch(own[cut].tolist())

    def batch(self, indices: Sequence[int]) -> Batch:
        """The rows at ``indices`` as one collated batch on the device."""
        batch = as_mapping(self.collate(self.source.fetch(indices)))
        count = next((len(batch[name]) for name in _FIRST if name in batch), None)
        if count is None:
            count = len(next(iter(batch.values())))
        if count != len(indices):
            raise DataError(
                f"collate_fn made {count} examples of {len(indices)} rows. The unit of privacy is "
                "one row of the dataset: pack, filter or split rows before the plan is made, so "
                "that num_examples counts what is trained on."
            )
        return {name: value.to(self.device) for name, value in batch.items()}


def as_mapping(collated: Any) -> dict[str, Tensor]:
    """What a collator returned, as a dict of tensors; otherwise an error that names the field."""
    if hasattr(collated, "_asdict"):
        collated = collated._asdict()
    if not isinstance(collated, Mapping):
        raise ArgumentTypeError(
            f"collate_fn returned a {type(collated).__name__}; expected a mapping of tensors such "
            "as {'input_ids': ..., 'labels': ...}, or a named tuple of them."
        )
    batch = {}
    for name, value in collated.items():
        if value is None:
            continue
        if not isinstance(value, Tensor):
            value = _to_tensor(name, value)
        if value.dim() == 0:
            raise DataError(
                f"Entry {name!r} of the collated batch has no dimension of examples: "
                "expected one value per row."
            )
        batch[name] = value
    if not batch:
        raise DataError("collate_fn returned no tensors: expected one entry per model input.")
    return batch


def _to_tensor(name: str, value: Any) -> Tensor:
    # The message names the field and the type and never shows the value: rows are private.
    remedy = "expected a tensor or numbers; tokenise texts and map class names to numbers first."
    try:
        return torch.as_tensor(np.asarray(value))
    except (TypeError, ValueError):
        raise DataError(f"Entry {name!r} of the collated batch is not a tensor: {remedy}") from None
