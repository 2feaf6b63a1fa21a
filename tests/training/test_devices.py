"""Where the weights are and what they are made of: trained as they should be, or refused.

The ``meta`` device stands for a second one, so that no accelerator is needed.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import cpu_offload, dispatch_model
from accelerate.hooks import (
    AlignDevicesHook,
    CpuOffload,
    ModelHook,
    SequentialHook,
    add_hook_to_module,
)
from torch import nn
from transformers import AutoModelForSequenceClassification

import dppeft
from dppeft.training.checks import check_unchanged
from dppeft.training.packing import PhysicalLimits, RowSource
from dppeft.training.settings import Packer
from tests.oracle import worst_error
from tests.tiny import build, make_batch
from tests.training.placed import ROWS, computed, first_layer, make_run, refused
from tests.training.runs import adapted_bert, make_plan, sgd, trained, values

# D6: one device, and the one that the run was made for


def test_D6_a_base_placed_on_one_device_trains_and_reads_back(tmp_path: Path) -> None:
    build("bert").save_pretrained(tmp_path / "base")

    def load() -> nn.Module:
        auto = AutoModelForSequenceClassification
        base = auto.from_pretrained(tmp_path / "base", device_map="cpu")
        return dispatch_model(base, {"": "cpu"})

    assert load().hf_device_map == {"": "cpu"}
    model = dppeft.wrap(load(), "lora", r=4)
    before = values(model)
    run = make_run(model)
    for batch in run.batches():
        run.step(batch)
    assert run.steps_made == 5
    moved = [name for name, value in values(model).items() if not torch.equal(value, before[name])]
    assert [name for name in before if "lora_B" in name] == [n for n in moved if "lora_B" in n]
    dppeft.export(model, tmp_path / "adapter", spent=run.card())
    assert not torch.allclose(computed(model), computed(load()))
    assert torch.equal(computed(dppeft.load(load(), tmp_path / "adapter")), computed(model))


@pytest.mark.parametrize("places", [{"": 0, "head": "cuda:0"}, {"": "cpu"}, {}])
def test_D6_one_device_under_two_names_is_one(places: dict[str, Any]) -> None:
    model = adapted_bert()
    model.base_model.model.hf_device_map = places
    make_run(model)


@pytest.mark.parametrize(
    ("places", "named"),
    [
        ({"a": 0, "b": 1}, "cuda:0, cuda:1"),
        ({"a": 0, "b": "cpu", "c": "disk"}, "cpu, cuda:0, disk"),
    ],
)
def test_D6_a_base_spread_by_device_map_is_refused(places: dict[str, Any], named: str) -> None:
    model = adapted_bert()
    model.base_model.model.hf_device_map = places  # on the base, under PEFT
    remedy = r"Load it on one device \(device_map=\{'': 0\}\).*accelerate launch"
    refused(f"spread over {named} .*{remedy}", model)


def test_D6_parameters_on_two_devices_are_refused() -> None:
    model = adapted_bert()
    model.base_model.model.bert.embeddings.to("meta")
    refused(r"more than one device: meta \(.*embeddings.*\), cpu \(.*model\.to\(device\)", model)


def test_D6_adapters_left_behind_are_refused() -> None:
    model = adapted_bert()
    first_layer(model).attention.self.query.lora_B.to("meta")
    refused(r"more than one device: cpu \(.*\), meta \(.*lora_B.*after dppeft.wrap", model)


@pytest.mark.parametrize("part", ["all", "buffers"])
def test_D6_a_model_without_values_is_refused(part: str) -> None:
    model = adapted_bert()
    if part == "all":
        model.to("meta")
    else:
        for module in model.modules():
            for name, buffer in module._buffers.items():
                module._buffers[name] = buffer.to("meta")
    refused("on the meta device, which holds no values.*from_pretrained", model)


def test_D6_weights_that_accelerate_offloads_are_refused() -> None:
    model = adapted_bert()
    cpu_offload(model.base_model.model, execution_device=torch.device("cpu"))
    refused("accelerate's AlignDevicesHook offloads this module.*Load it on one device", model)


@pytest.mark.parametrize(
    "hook",
    [CpuOffload(torch.device("cpu")), SequentialHook(ModelHook(), AlignDevicesHook(offload=True))],
    ids=lambda hook: type(hook).__name__,
)
def test_D6_every_kind_of_offloading_hook_is_refused(hook: ModelHook) -> None:
    model = adapted_bert()
    first_layer(model).output._hf_hook = hook
    refused(r"layer.0.output: accelerate's (CpuOffload|AlignDevicesHook) offloads", model)


def test_D6_hooks_that_only_place_the_inputs_change_no_gradient() -> None:
    model, plain = adapted_bert(), adapted_bert()
    for module in (first_layer(model).attention.self.query, first_layer(model).output):
        add_hook_to_module(module, AlignDevicesHook(torch.device("cpu"), io_same_device=True))
    make_run(model)
    batch = make_batch("bert")
    found, expected = (dppeft.per_example_grads(m, batch) for m in (model, plain))
    assert worst_error(found, {n: g.double() for n, g in expected.items()}) < 1e-6


def test_D6_replaced_parameters_are_not_the_optimizers() -> None:
    model = adapted_bert()
    optimizer = sgd(model)
    head = model.base_model.model.classifier.modules_to_save["default"]
    head.weight = nn.Parameter(head.weight.detach().clone())
    refused("lacks 1 of 10 trained tensors.*Make it after dppeft.wrap", model, optimizer)


def test_D6_converted_after_the_optimizer_was_made_trains_all_the_same() -> None:
    model = adapted_bert()
    optimizer = sgd(model)
    model.to(torch.float64)
    before = values(model)
    run = dppeft.make_private(model, optimizer, ROWS, make_plan(8, noise_multiplier=0.1))
    run.step(next(run.batches()))
    for name, value in values(model).items():
        assert value.dtype == torch.float64
        assert not torch.equal(value, before[name])


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda model: model.half(), "dtype float16.*Expected float32"),
        (lambda model: model.to("meta"), "no longer what the run was made to train"),
        (lambda model: model.base_model.model.bert.pooler.to("meta"), "more than one device"),
    ],
    ids=["half", "moved", "a part moved"],
)
def test_D6_changes_after_the_run_was_made_spend_nothing(change: Any, match: str) -> None:
    model = adapted_bert()
    run = make_run(model)
    batch = next(run.batches())
    change(model)
    with pytest.raises(dppeft.DppeftError, match=match):
        run.step(batch)
    assert run.spent().steps == 0


def test_D6_a_model_that_left_the_device_of_its_batches_is_refused() -> None:
    model = adapted_bert()
    optimizer = sgd(model)
    check_unchanged(model, optimizer, trained(model), device=torch.device("cpu"))
    with pytest.raises(dppeft.DppeftError, match="moved to cpu after the run was made on meta.*"):
        check_unchanged(model, optimizer, trained(model), device=torch.device("meta"))


def test_D6_batches_go_where_the_model_is() -> None:
    packer = Packer(
        source=RowSource(ROWS),
        collate=lambda rows: {"labels": [one["labels"] for one in rows]},
        limits=PhysicalLimits(tokens=None, rows=8),
        device=torch.device("meta"),
    )
    assert packer.batch([0, 1])["labels"].is_meta


# D7: sharded models


@pytest.fixture
def mesh(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A process group of this process alone."""
    from torch.distributed.device_mesh import init_device_mesh

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield init_device_mesh("cpu", (1,))
    finally:
        dist.destroy_process_group()


def test_D7_modules_sharded_by_fsdp2_are_refused(mesh: Any) -> None:
    from torch.distributed.fsdp import fully_shard

    model = adapted_bert()
    fully_shard(first_layer(model), mesh=mesh)  # a part of it, as FSDP is used
    refused(r"encoder\.layer\.0 is sharded by fully_shard.*Leave it out of fully_shard", model)


@pytest.mark.parametrize("kind", ["DTensor", "ZeRO"])
def test_D7_tensors_sharded_by_others_are_refused(kind: str, mesh: Any) -> None:
    from torch.distributed.tensor import distribute_tensor

    model = adapted_bert()
    dense = first_layer(model).output.dense
    if kind == "DTensor":
        dense.weight = nn.Parameter(distribute_tensor(dense.weight.detach(), mesh), False)
    else:
        dense.weight.ds_id = 3  # what zero.Init writes on each parameter that it cuts up
    refused(r"output\.dense\.weight is sharded over processes.*tp_plan", model)


@pytest.mark.parametrize("name", ["FullyShardedDataParallel", "DeepSpeedEngine", "DataParallel"])
def test_D7_wrappers_inside_the_model_are_refused(name: str) -> None:
    model = adapted_bert()
    inner = first_layer(model).output
    if name == "DataParallel":
        first_layer(model).output = nn.DataParallel(inner)
    else:
        inner.__class__ = type(name, (type(inner),), {})
    refused(f"wrapped in {name}.*Pass the plain model", model)
