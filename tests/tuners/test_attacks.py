"""Ways in which these tuners were made to go wrong in silence, each closed."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch import Tensor, nn

import dppeft
from dppeft.tuners.bottleneck import BottleneckConfig
from dppeft.tuners.rgp import RgpLayer
from tests import architectures, tiny
from tests.training import runs

OURS = ("adapter", "compacter", "rgp")


def logits(model: nn.Module, name: str = "bert") -> Tensor:
    batch = {k: v for k, v in architectures.batch_and_rows(name)[0].items() if k != "labels"}
    with torch.no_grad():
        return model.eval()(**batch).logits


def tuned(method: str, seed: int) -> nn.Module:
    model = tiny.wake(dppeft.wrap(tiny.build("bert"), method), seed=seed)
    for layer in model.modules():
        if isinstance(layer, RgpLayer):
            layer._absorb("default")
    return model


@pytest.mark.parametrize("method", OURS)
@pytest.mark.filterwarnings("error:Found missing adapter keys")
def test_adapters_load_under_any_name_and_leave_each_other_alone(
    method: str, tmp_path: Path
) -> None:
    first, second = tuned(method, 1), tuned(method, 2)
    folders = [dppeft.export(m, tmp_path / str(i)) for i, m in enumerate((first, second))]
    mine = PeftModel.from_pretrained(tiny.build("bert"), folders[0], adapter_name="mine")
    torch.testing.assert_close(logits(mine), logits(first))
    both = dppeft.load(tiny.build("bert"), folders[0])
    both.load_adapter(folders[1], adapter_name="other")
    torch.testing.assert_close(logits(both), logits(first))
    both.set_adapter("other")
    torch.testing.assert_close(logits(both), logits(second))


def test_rgp_exports_the_same_lora_merged_or_not(tmp_path: Path) -> None:
    model = tuned("rgp", 1)
    plain = dppeft.export(model, tmp_path / "plain", as_lora_rank=32)
    model.merge_adapter()
    model.merge_adapter()  # twice is once
    merged = dppeft.export(model, tmp_path / "merged", as_lora_rank=32)
    a, b = (logits(dppeft.load(tiny.build("bert"), folder)) for folder in (plain, merged))
    torch.testing.assert_close(a, b)
    torch.testing.assert_close(a, logits(tuned("rgp", 1)), atol=1e-4, rtol=1e-3)


def test_a_dilated_convolution_is_not_written_as_lora(tmp_path: Path) -> None:
    net = nn.Sequential()
    net.add_module("body", nn.Conv2d(2, 5, 3, padding=2, dilation=2))
    net.add_module("classifier", nn.Linear(4, 2))
    model = dppeft.wrap(net, "rgp", target_modules=["body"])
    with pytest.raises(dppeft.DppeftError, match="body is a dilated convolution"):
        dppeft.export(model, tmp_path / "out", as_lora_rank=2)


@pytest.mark.parametrize("method", ["lora", "rgp"])
def test_nothing_is_spent_on_a_merged_adapter(method: str) -> None:
    model = dppeft.wrap(tiny.build("bert"), method)
    plan = runs.make_plan(8, steps=2, noise_multiplier=1.0, max_grad_norm=1.0)
    run = dppeft.make_private(model, runs.sgd(model), runs.token_rows(8), plan, precision="float32")
    model.merge_adapter()
    with pytest.raises(dppeft.DppeftError, match="is merged"):
        run.step(next(run.batches()))
    assert run.spent().steps == 0
    with pytest.raises(dppeft.DppeftError, match="is merged"):
        dppeft.make_private(model, runs.sgd(model), runs.token_rows(8), plan, precision="float32")


def test_a_matrix_trained_twice_is_refused() -> None:
    model = runs.carried_bert().requires_grad_(True)
    with pytest.raises(dppeft.DppeftError, match="trained through its carriers, too"):
        dppeft.make_private(
            model, runs.sgd(model), runs.token_rows(8), runs.make_plan(8), precision="float32"
        )


def test_an_optimizer_that_remembers_carriers_can_be_saved(tmp_path: Path) -> None:
    model = runs.carried_bert()
    optimizer = torch.optim.Adagrad(runs.trained(model).values(), lr=0.1)
    run = dppeft.make_private(
        model, optimizer, runs.token_rows(8), runs.make_plan(8, steps=2), precision="float32"
    )
    run.step(next(run.batches()))
    run.save(tmp_path / "saved")


def test_a_refused_run_leaves_the_optimizer_as_it_was() -> None:
    model = runs.carried_bert()
    optimizer = runs.sgd(model)
    before = [id(p) for p in optimizer.param_groups[0]["params"]]
    with pytest.raises(dppeft.DppeftError, match="8 rows"):
        dppeft.make_private(
            model, optimizer, runs.token_rows(8), runs.make_plan(9), precision="float32"
        )
    assert [id(p) for p in optimizer.param_groups[0]["params"]] == before


@pytest.mark.parametrize("layers", [0, [0], 1])
@pytest.mark.parametrize("method", OURS)
def test_layers_are_never_passed_over(method: str, layers: Any) -> None:
    with pytest.raises(dppeft.DppeftError, match="layers_to_transform has no effect"):
        dppeft.wrap(
            tiny.build("bert"),
            method,
            target_modules=r".*output\.dense",
            layers_to_transform=layers,
        )
    wanted = {layers} if isinstance(layers, int) else set(layers)
    model = dppeft.wrap(tiny.build("bert"), method, layers_to_transform=layers)
    trained = [n for n, p in model.named_parameters() if p.requires_grad and ".layer." in n]
    assert {int(name.split(".layer.")[1][0]) for name in trained} == wanted


@pytest.mark.parametrize("method", OURS)
def test_layers_of_one_list_only(method: str) -> None:
    model = dppeft.wrap(
        architectures.build("bart"),
        method,
        layers_to_transform=[0],
        layers_pattern="decoder.layers",
    )
    trained = [n for n, p in model.named_parameters() if p.requires_grad]
    assert trained
    assert all("decoder.layers.0." in name for name in trained)


def test_a_further_adapter_in_other_places_must_say_where() -> None:
    model = dppeft.wrap(tiny.build("bert"), "adapter")
    with pytest.raises(ValueError, match="placement of a further adapter"):
        model.add_adapter("second", BottleneckConfig(placement="pfeiffer"))


def test_an_operation_in_place_behind_a_target() -> None:
    net = nn.Sequential()
    net.add_module("body", nn.Conv2d(3, 4, 3))
    net.add_module("relu", nn.ReLU(inplace=True))
    net.add_module("flat", nn.Flatten())
    net.add_module("classifier", nn.Linear(4 * 36, 2))
    model = dppeft.wrap(net, "rgp", target_modules=["body"])
    batch = {"x": torch.randn(3, 3, 8, 8), "labels": torch.tensor([0, 1, 0])}

    def loss(m: Any, b: dict[str, Tensor]) -> Tensor:
        return nn.functional.cross_entropy(m(b["x"]), b["labels"], reduction="none")

    assert dppeft.preflight(model, batch, loss=loss).worst_error < 1e-5


def test_a_deleted_adapter_leaves_nothing_behind() -> None:
    model = tiny.wake(dppeft.wrap(tiny.build("bert"), "compacter", n=4))
    config = copy.copy(model.peft_config["default"])
    model.add_adapter("second", copy.copy(config))
    model.set_adapter("second")
    model.delete_adapter("default")
    config.n = 8
    model.add_adapter("default", config)
    model.set_adapter("default")
    shapes = {n: p.shape for n, p in model.named_parameters() if n.endswith("mix.weight")}
    assert {shape for n, shape in shapes.items() if ".default." in n} == {(8, 8, 8)}
    assert logits(model).isfinite().all()


def test_directions_are_orthonormal_on_a_16_bit_base() -> None:
    model = dppeft.wrap(tiny.build("llama").bfloat16(), "rgp")
    for layer in model.modules():
        if isinstance(layer, RgpLayer):
            basis = layer.rgp_carriers["default"].basis_left
            assert basis.dtype == torch.float32
            identity = torch.eye(basis.shape[1])
            torch.testing.assert_close(basis.T @ basis, identity, atol=1e-5, rtol=0)
