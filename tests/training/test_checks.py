"""The mistakes that are refused before any row is trained on, each with its remedy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

import dppeft
from tests.tiny import build
from tests.training.runs import adapted_bert, make_plan, sgd, token_rows, trained

ROWS = token_rows(8)


class Guarded(list):  # type: ignore[type-arg]
    """Rows that tell which of them were read."""

    def __init__(self, rows: Any) -> None:
        super().__init__(rows)
        self.read: set[int] = set()

    def __getitem__(self, index: Any) -> Any:
        self.read.add(index)
        return super().__getitem__(index)


def refused(match: str, *, model: Any = None, optimizer: Any = None, **options: Any) -> None:
    model = adapted_bert() if model is None else model
    dataset = options.pop("dataset", Guarded(ROWS))
    plan = options.pop("plan", make_plan(8))
    optimizer = sgd(model) if optimizer is None else optimizer
    with pytest.raises(dppeft.DppeftError, match=match) as caught:
        dppeft.make_private(model, optimizer, dataset, plan, **options)
    assert "\n" not in str(caught.value)
    if isinstance(dataset, Guarded):  # the form of row 0 is looked at, no more
        assert dataset.read <= {0}


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter(ROWS)


DATASETS = {
    "loader": (DataLoader(ROWS), r"dataset is a DataLoader.*Pass the data set itself"),
    "stream": (Stream(), r"Stream, which has no length or no access by index.*datasets.Dataset"),
    "generator": (iter(ROWS), r"has no length or no access by index"),
    "columns": ({"input_ids": [[1]], "labels": [0]}, r"dict of 'input_ids', 'labels'.*from_dict"),
    "empty": ([], "dataset has no rows"),
    "other N": (ROWS[:5], r"has 5 rows but the plan was made for num_examples=8"),
    "names": ([{**row, "label": "good"} for row in ROWS], r"Field 'label' of the rows is text"),
}


@pytest.mark.parametrize("kind", DATASETS)
def test_A8_C6_C7_data_that_cannot_be_drawn_from(kind: str) -> None:
    dataset, match = DATASETS[kind]
    refused(match, dataset=dataset)


def test_C7_rows_that_vanish_later_are_noticed() -> None:
    rows = list(ROWS)
    model = adapted_bert()
    run = dppeft.make_private(model, sgd(model), rows, make_plan(8))
    rows.pop()
    with pytest.raises(dppeft.DppeftError, match="has 7 rows but the plan was made for"):
        next(run.batches())


def test_E8_optimizer_made_before_wrap() -> None:
    base = build("bert")
    optimizer = torch.optim.AdamW(base.parameters())
    model = dppeft.wrap(base, "lora")
    refused(r"lacks \d+ of \d+ trained tensors, such as '.*lora.*after dppeft.wrap",
            model=model, optimizer=optimizer)  # fmt: skip


def test_B8_an_optimizer_of_some_parameters_is_refused_by_name() -> None:
    model = adapted_bert()
    some = [p for name, p in trained(model).items() if "classifier" in name]
    refused("lacks 8 of 10 trained tensors", model=model, optimizer=torch.optim.SGD(some, lr=1.0))


def test_an_optimizer_of_another_model_is_refused() -> None:
    model, other = adapted_bert(), build("bert")
    both = [*trained(model).values(), *other.parameters()]
    refused("tensors that are not the model's", model=model, optimizer=torch.optim.SGD(both, lr=1))


def test_frozen_tensors_in_the_optimizer_are_fine_and_stay() -> None:
    model = adapted_bert()
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    run = dppeft.make_private(model, optimizer, ROWS, make_plan(8, steps=1))
    run.step(next(run.batches()))
    for name, p in model.named_parameters():
        assert torch.equal(p, before[name]) is not p.requires_grad


def test_E7_nothing_to_train_is_refused() -> None:
    model = adapted_bert()
    optimizer = sgd(model)
    model.requires_grad_(False)
    refused("No parameter of the model requires a gradient.*is_trainable=True",
            model=model, optimizer=optimizer)  # fmt: skip


class Mixing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.layer = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(self.norm(x))


def test_G4_models_that_cannot_be_private() -> None:
    rows = [{"x": torch.randn(4), "labels": i % 2} for i in range(8)]
    refused("norm", model=Mixing(), dataset=rows)
    refused("wrapped in DataParallel.*Pass the plain model", model=nn.DataParallel(Mixing()))
    refused("model is a str; expected a torch.nn.Module", model="bert", optimizer=sgd(Mixing()))


def test_G4_models_that_opacus_holds() -> None:
    from opacus.grad_sample.grad_sample_module import GradSampleHooks

    model = adapted_bert()
    GradSampleHooks(model, strict=False)
    refused("Opacus's hooks are already on this model", model=model)


OPTIONS = {
    "clipping": ("flatt", "Unknown clipping='flatt'.*Did you mean 'flat'"),
    "engine": ("opakus", "Unknown engine='opakus'.*Did you mean 'opacus'"),
    "precision": ("fp16", "Unknown precision='fp16'.*Choices: auto, float32, bf16"),
    "physical_tokens": (0, "Expected physical_tokens >= 1"),
    "seed": ("lucky", "Expected seed='lucky' to be a whole number"),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_out_of_range(name: str) -> None:
    value, match = OPTIONS[name]
    refused(match, **{name: value})


def test_wrong_kinds_of_plan_and_optimizer() -> None:
    refused("plan is a float; expected the PrivacyPlan", plan=8.0)
    refused("optimizer is a str", optimizer="adam")
    refused("LBFGS evaluates the loss several times", optimizer=torch.optim.LBFGS(
        trained(model := adapted_bert()).values()), model=model)  # fmt: skip
    with pytest.raises(TypeError, match="poison"):
        dppeft.make_private(adapted_bert(), sgd(adapted_bert()), ROWS, make_plan(8), poison=False)


def test_a_reduced_loss_is_refused() -> None:
    refused("loss", loss=lambda model, batch: model(**batch).loss)


def test_A16_an_accelerator_that_scales_or_accumulates_is_refused() -> None:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    try:
        refused("gradient_accumulation_steps=4: expected 1", accelerator=accelerator)
    finally:
        AcceleratorState._reset_state(reset_partial_state=True)
