"""Physical batches: a partition of the draw, within the budget, fetched when needed."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import dppeft
from dppeft.training.packing import (
    Packer,
    PhysicalLimits,
    RowSource,
    as_mapping,
    choose_limits,
)
from tests.training.runs import token_rows

CPU = torch.device("cpu")


def identity(rows: list[Any]) -> dict[str, torch.Tensor]:
    return {"labels": torch.tensor([row["labels"] for row in rows])}


def packer(dataset: Any, collate: Callable[[list[Any]], Any] = identity, **options: Any) -> Packer:
    limits = PhysicalLimits(tokens=options.pop("tokens", None), rows=options.pop("rows", None))
    return Packer(source=RowSource(dataset), collate=collate, limits=limits, device=CPU, **options)


@pytest.mark.parametrize("seed", range(5))
def test_a_cut_is_a_partition_within_the_budget(seed: int) -> None:
    lengths = np.random.default_rng(seed).integers(1, 60, 300)
    cuts = PhysicalLimits(tokens=128, rows=20).cut(lengths)
    assert sorted(np.concatenate(cuts).tolist()) == list(range(300))
    for cut in cuts:
        assert len(cut) <= 20
        assert lengths[cut].max() * len(cut) <= 128 or len(cut) == 1
    # Sorting pays: hardly any padding, where batches in given order have much.
    padded = sum(lengths[cut].max() * len(cut) for cut in cuts)
    assert padded < 1.15 * lengths.sum()


def test_a_row_above_the_budget_stands_alone() -> None:
    cuts = PhysicalLimits(tokens=10, rows=None).cut(np.array([3, 50, 4, 70]))
    assert [cut.tolist() for cut in cuts] == [[3], [1], [2, 0]]


def test_an_empty_draw_has_no_physical_batches() -> None:
    assert list(packer(token_rows(5)).physical_batches(torch.tensor([], dtype=torch.long))) == []


def firsts(rows: list[Any]) -> dict[str, torch.Tensor]:
    return {"first": torch.tensor([row["input_ids"][0] for row in rows])}


@pytest.mark.parametrize("world_size", [2, 3, 7])
def test_D3_ranks_share_a_draw_without_overlap(world_size: int) -> None:
    """Whatever lengths each of them reads: a data set may augment its rows."""
    drawn = torch.arange(0, 100, 2)
    counts = []
    seen: list[int] = []
    for rank in range(world_size):
        generator = np.random.default_rng(rank)
        rows = [
            {"input_ids": [row] * int(generator.integers(1, 60)), "labels": 0} for row in range(100)
        ]
        one = packer(rows, firsts, tokens=64, rank=rank, world_size=world_size)
        mine = [int(row) for batch in one.physical_batches(drawn) for row in batch["first"]]
        assert sorted(mine) == one.shares(drawn)[rank].tolist()
        seen += mine
        counts.append(len(mine))
    assert sorted(seen) == drawn.tolist()
    assert max(counts) - min(counts) <= 1


class Counting:
    """Counts fetches, and how many rows are alive at once."""

    def __init__(self, rows: list[dict[str, Any]], batched: bool = False) -> None:
        self.rows, self.fetched, self.calls = rows, [], 0
        if batched:
            self.__getitems__ = self._many

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> dict[str, Any]:
        self.fetched.append(index)
        return self.rows[index]

    def _many(self, indices: list[int]) -> list[dict[str, Any]]:
        self.calls += 1
        return [self[i] for i in indices]


def test_rows_are_fetched_for_one_physical_batch_at_a_time() -> None:
    dataset = Counting(token_rows(40))
    source = packer(dataset, rows=5)
    draw = torch.arange(40)
    list(source.physical_batches(draw))  # lengths are known from here on
    dataset.fetched.clear()
    batches = source.physical_batches(draw)
    for number in range(1, 9):
        next(batches)
        assert len(dataset.fetched) == 5 * number
    assert sorted(dataset.fetched) == list(range(40))  # and each row once


def test_batched_access_of_the_data_set_is_used() -> None:
    dataset = Counting(token_rows(40), batched=True)
    batch = packer(dataset).batch([3, 5])
    assert dataset.calls == 1
    assert batch["labels"].tolist() == [0, 2]


def test_a_datasets_dataset_works_and_reads_lengths_from_its_columns() -> None:
    datasets = pytest.importorskip("datasets")
    rows = token_rows(20)
    source = RowSource(datasets.Dataset.from_list(rows))
    expected = [len(row["input_ids"]) for row in rows]
    assert source.lengths(np.arange(20)).tolist() == expected
    assert [row["labels"] for row in source.fetch([1, 2])] == [1, 2]


def test_rows_without_lengths_count_alike_and_are_cut_by_rows() -> None:
    rows = [{"x": torch.zeros(3), "labels": 0} for _ in range(100)]
    source = RowSource(rows)
    assert set(source.lengths(np.arange(100)).tolist()) == {1}
    limits = choose_limits(
        torch.nn.Linear(1, 1),
        device=CPU,
        physical_tokens=None,
        physical_batch_size=None,
        has_lengths=source.has_lengths,
    )
    assert limits == PhysicalLimits(tokens=None, rows=32)


@pytest.mark.parametrize("name", ["physical_tokens", "physical_batch_size"])
def test_limits_must_be_positive(name: str) -> None:
    given = {"physical_tokens": None, "physical_batch_size": None, name: 0}
    with pytest.raises(dppeft.DppeftError, match=f"Expected {name} >= 1, got {name}=0"):
        choose_limits(torch.nn.Linear(1, 1), device=CPU, has_lengths=True, **given)


LABELS = {
    "int": (lambda i: i % 3, torch.int64),
    "numpy": (lambda i: np.int64(i % 3), torch.int64),
    "tensor": (lambda i: torch.tensor(i % 3), torch.int64),
    "float": (lambda i: i / 3, torch.float32),
    "multi-label": (lambda i: [float(i % 2), 1.0, 0.0], torch.float32),
}


@pytest.mark.parametrize("kind", LABELS)
def test_C2_labels_of_any_type_are_collated_by_default(kind: str) -> None:
    from dppeft.training.collation import choose_collate
    from tests.tiny import build

    label, dtype = LABELS[kind]
    rows = [{**row, "labels": label(i)} for i, row in enumerate(token_rows(4))]
    collate = choose_collate(None, build("bert"), rows[0])
    batch = packer(rows, collate).batch([0, 1, 2, 3])
    assert batch["labels"].dtype == dtype
    assert len(batch["labels"]) == len(batch["input_ids"]) == 4


def test_C2_named_tuples_and_encodings_are_batches_and_plain_tuples_are_not() -> None:
    from transformers import BatchEncoding

    pair = namedtuple("pair", ["x", "labels"])
    named = as_mapping(pair(x=torch.zeros(2, 3), labels=[0, 1]))
    assert named["labels"].tolist() == [0, 1]
    assert as_mapping(BatchEncoding({"input_ids": np.ones((2, 3))}))["input_ids"].shape == (2, 3)
    with pytest.raises(dppeft.DppeftError, match="returned a tuple; expected a mapping of tensors"):
        as_mapping((torch.zeros(2, 3), torch.zeros(2)))
    with pytest.raises(dppeft.DppeftError, match="'text' of the collated batch is not a tensor"):
        as_mapping({"text": ["a secret", "another"], "labels": torch.zeros(2)})
    with pytest.raises(dppeft.DppeftError, match="'labels' .* no dimension of examples"):
        as_mapping({"labels": torch.tensor(1.0)})


def test_H3_the_error_does_not_show_the_row() -> None:
    with pytest.raises(dppeft.DppeftError) as caught:
        as_mapping({"text": ["a secret"]})
    assert "secret" not in str(caught.value)
    assert caught.value.__suppress_context__


def test_C7_a_collator_that_packs_or_drops_rows_is_refused() -> None:
    def pack(rows: list[dict[str, Any]]) -> dict[str, torch.Tensor]:
        return {"labels": torch.zeros(1)}

    with pytest.raises(dppeft.DppeftError, match="made 1 examples of 3 rows"):
        packer(token_rows(5), pack).batch([0, 1, 2])
