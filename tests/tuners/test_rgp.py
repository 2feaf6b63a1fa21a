"""RGP as a tuner: the base model's forward, a full matrix's update, and what carriers depend on."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor, nn

import dppeft
from dppeft.tuners.rgp import RgpLayer
from tests import architectures, oracle, tiny


def layers_of(model: nn.Module) -> dict[str, RgpLayer]:
    return {n: m for n, m in model.named_modules() if isinstance(m, RgpLayer)}


def rows_of(batch: dict[str, Tensor]) -> list[dict[str, Tensor]]:
    return [{k: v[i] for k, v in batch.items()} for i in range(len(batch["labels"]))]


def run_of(
    model: nn.Module, rows: list[Any], tmp_path: Path, *, lr: float = 0.1, **options: Any
) -> dppeft.training.run.PrivateRun:  # type: ignore[name-defined]
    settings = {"noise_multiplier": 0.0, "steps": 3, "max_grad_norm": 1e9} | {
        key: options.pop(key) for key in ("noise_multiplier", "steps") if key in options
    }
    plan = dppeft.plan(num_examples=len(rows), batch_size=len(rows), delta=1e-3, **settings)
    trained = [p for p in model.parameters() if p.requires_grad]
    make = options.pop("optimizer", torch.optim.SGD)
    number = len(list(tmp_path.iterdir()))
    return dppeft.make_private(
        model,
        make(trained, lr=lr),
        rows,
        plan,
        precision="float32",
        ledger=tmp_path / f"ledger{number}.jsonl",
        collate_fn=lambda some: {k: torch.stack([r[k] for r in some]) for k in some[0]},
        **options,
    )


def go(run: Any, steps: int | None = None) -> None:
    for batch in run.batches(steps=steps):
        run.step(batch)


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "resnet", "vit"])
def test_starts_as_the_model_it_was_to_the_bit(name: str) -> None:
    batch = architectures.batch_and_rows(name)[0]
    before = architectures.build(name)(**batch).logits
    model = dppeft.wrap(architectures.build(name), "rgp")
    assert layers_of(model)
    assert torch.equal(before, model(**batch).logits)
    with torch.no_grad():
        assert torch.equal(before, model(**batch).logits)


def test_number_of_trained_parameters_and_where() -> None:
    d, f, r = tiny.WIDTH, tiny.INNER, 4
    model = dppeft.wrap(tiny.build("bert"), "rgp", r=r)
    own = sum(p.numel() for n, p in model.named_parameters() if p.requires_grad and ".rgp_" in n)
    per_block = 4 * r * (d + d) + 2 * r * (d + f)
    assert own == tiny.LAYERS * per_block
    assert len(layers_of(model)) == tiny.LAYERS * 6
    left = dppeft.wrap(tiny.build("bert"), "rgp", r=r, sides="left")
    own = sum(p.numel() for n, p in left.named_parameters() if p.requires_grad and ".rgp_" in n)
    assert own == tiny.LAYERS * (4 * r * d + r * d + r * f)


@pytest.mark.parametrize("sides", ["both", "left", "right"])
@pytest.mark.parametrize("clip", ["tangent", "joint"])
@pytest.mark.parametrize("name", ["bert", "gpt2", "resnet"])
def test_a_step_moves_the_full_matrix_by_the_rebuilt_gradient(
    name: str, sides: str, clip: str, tmp_path: Path
) -> None:
    """W_1 = W_0 - lr G~ with G~ from the true gradient G by the paper's formula."""
    model = dppeft.wrap(architectures.build(name), "rgp", r=3, sides=sides, clip=clip).train()
    batch = architectures.batch_and_rows(name)[0]
    truth = _mean_gradients(model, batch)
    run = run_of(model, rows_of(batch), tmp_path)
    go(run, 1)
    for path, layer in layers_of(model).items():
        carriers, gradient = layer.rgp_carriers["default"], truth[path]
        left, right = carriers.basis_left, carriers.basis_right
        expected = {
            "both": gradient
            - (gradient - left @ left.T @ gradient)
            + (gradient - left @ left.T @ gradient) @ right.T @ right,
            "left": gradient @ right.T @ right,
            "right": left @ left.T @ gradient,
        }[sides]
        torch.testing.assert_close(layer.change("default"), -0.1 * expected, rtol=2e-3, atol=2e-6)


def _mean_gradients(model: nn.Module, batch: dict[str, Tensor]) -> dict[str, Tensor]:
    """(p, d) gradients of the mean loss with respect to the full matrices, by autograd."""
    twin = copy.deepcopy(model)
    layers = layers_of(twin)
    for layer in layers.values():
        layer.rgp_weight["default"].requires_grad_()
    total = sum(
        twin(**{k: v[i : i + 1] for k, v in batch.items()}).loss
        for i in range(len(batch["labels"]))
    )
    (total / len(batch["labels"])).backward()
    return {n: layer._matrix(layer.rgp_weight["default"].grad) for n, layer in layers.items()}


def test_full_rank_is_full_fine_tuning(tmp_path: Path) -> None:
    batch = tiny.make_batch("bert", lengths=[5, 5, 5, 5])
    model = dppeft.wrap(tiny.build("bert"), "rgp", r=32).train()
    truth = _mean_gradients(model, batch)
    go(run_of(model, rows_of(batch), tmp_path), 1)
    for path, layer in layers_of(model).items():
        torch.testing.assert_close(
            layer.change("default"), -0.1 * truth[path], rtol=2e-3, atol=2e-6
        )


def test_the_forward_stays_the_plain_one_of_the_moved_weight(tmp_path: Path) -> None:
    batch = tiny.make_batch("bert", lengths=[5, 5, 5, 5])
    model = dppeft.wrap(tiny.build("bert"), "rgp").train()
    go(run_of(model, rows_of(batch), tmp_path))
    wrapped = model(**batch).logits
    merged = dppeft.merge(copy.deepcopy(model))(**batch).logits
    torch.testing.assert_close(wrapped, merged, atol=1e-6, rtol=1e-6)
    with model.disable_adapter():
        off = model.base_model.model.bert(**{k: v for k, v in batch.items() if k != "labels"})
    base = tiny.build("bert").bert(**{k: v for k, v in batch.items() if k != "labels"})
    assert torch.equal(off.last_hidden_state, base.last_hidden_state)


def test_carriers_come_from_the_weight_in_the_warm_up_and_from_the_update_later() -> None:
    model = dppeft.wrap(tiny.build("bert"), "rgp", r=2, warmup_steps=3, power_iters=8)
    layer = next(iter(layers_of(model).values()))
    moved = torch.randn(32, 2) @ torch.randn(2, 32)
    with torch.no_grad():
        layer.rgp_weight["default"].add_(moved)
    weight = layer.rgp_weight["default"].detach()

    def span(step: int) -> Tensor:
        layer.before_step(step, "here")
        return layer.rgp_carriers["default"].basis_left.clone()

    of_weight = torch.linalg.svd(weight)[0][:, :2]
    of_update = torch.linalg.svd(moved)[0][:, :2]
    assert float(torch.linalg.svdvals(span(2).T @ of_weight).min()) > 0.95
    assert float(torch.linalg.svdvals(span(3).T @ of_update).min()) > 0.999


@pytest.mark.parametrize("history", ["update", "normalised_update", "weight", "random"])
def test_carriers_do_not_depend_on_the_rows_of_their_own_step(history: str, tmp_path: Path) -> None:
    batch = tiny.make_batch("bert", lengths=[5, 5, 5, 5])
    start = dppeft.wrap(tiny.build("bert"), "rgp", history=history, warmup_steps=0).train()
    go(run_of(start, rows_of(batch), tmp_path), 2)
    seen = []
    for replaced in (False, True):
        model = copy.deepcopy(start)
        rows = rows_of(batch)
        if replaced:
            rows[1] = {
                **rows[1],
                "input_ids": rows[1]["input_ids"].flip(0),
                "labels": rows[0]["labels"],
            }
        run = run_of(model, rows, tmp_path, seed=1, noise_multiplier=1.0)
        go(run, 1)
        seen.append([
            (layer.rgp_carriers["default"].basis_left, layer.rgp_carriers["default"].basis_right)
            for layer in layers_of(model).values()
        ])
    for one, other in zip(*seen, strict=True):
        assert torch.equal(one[0], other[0])
        assert torch.equal(one[1], other[1])


def test_noise_reaches_the_tangent_space_of_each_matrix_and_nothing_else(tmp_path: Path) -> None:
    batch = tiny.make_batch("bert", lengths=[5, 5, 5, 5])
    model = dppeft.wrap(tiny.build("bert"), "rgp", r=2).train()
    run = run_of(model, rows_of(batch), tmp_path, noise_multiplier=1.0, lr=1e-12)
    go(run, 1)
    for layer in layers_of(model).values():
        carriers, moved = layer.rgp_carriers["default"], layer.change("default")
        left, right = carriers.basis_left, carriers.basis_right
        outside = moved - left @ left.T @ moved
        outside = outside - outside @ right.T @ right
        assert float(outside.norm()) < 0.01 * float(moved.norm())


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD])
def test_the_optimizer_moves_full_matrices(make: type, tmp_path: Path) -> None:
    batch = tiny.make_batch("bert", lengths=[5, 5, 5, 5])
    model = dppeft.wrap(tiny.build("bert"), "rgp", r=2).train()
    run = run_of(model, rows_of(batch), tmp_path, optimizer=make, lr=0.01)
    held = {id(p) for group in run.optimizer.param_groups for p in group["params"]}
    for layer in layers_of(model).values():
        assert id(layer.rgp_weight["default"]) in held
        assert id(layer.rgp_carriers["default"].left) not in held
    go(run, 2)
    for layer in layers_of(model).values():
        assert float(layer.change("default").abs().max()) > 0
        assert not layer.rgp_carriers["default"].left.any()
        assert layer.rgp_weight["default"].grad is None


def test_carriers_of_one_matrix_in_two_groups_are_refused(tmp_path: Path) -> None:
    model = dppeft.wrap(tiny.build("bert"), "rgp").train()
    named = [(n, p) for n, p in model.named_parameters() if p.requires_grad]
    groups = [
        {"params": [p for n, p in named if n.endswith(".left")], "lr": 0.1},
        {"params": [p for n, p in named if not n.endswith(".left")]},
    ]
    rows = rows_of(tiny.make_batch("bert", lengths=[5, 5, 5, 5]))
    with pytest.raises(dppeft.DppeftError, match="one parameter group"):
        run_of(model, rows, tmp_path, optimizer=lambda _, lr: torch.optim.SGD(groups, lr=lr))


def test_a_frozen_half_is_refused(tmp_path: Path) -> None:
    model = dppeft.wrap(tiny.build("bert"), "rgp").train()
    layer = next(iter(layers_of(model).values()))
    layer.rgp_carriers["default"].right.requires_grad_(False)
    rows = rows_of(tiny.make_batch("bert", lengths=[5, 5, 5, 5]))
    with pytest.raises(dppeft.DppeftError, match="frozen"):
        run_of(model, rows, tmp_path)


def test_a_saved_run_goes_on_where_it_was(tmp_path: Path) -> None:
    batch = tiny.make_batch("bert", lengths=[5, 5, 5, 5])
    options = {"r": 2, "warmup_steps": 1, "warm_start": True, "decompose_every": 2}
    straight = dppeft.wrap(tiny.build("bert"), "rgp", **options).train()
    settings = {"seed": 3, "noise_multiplier": 0.5, "steps": 4, "optimizer": torch.optim.AdamW}
    go(run_of(straight, rows_of(batch), tmp_path, **settings))
    halves = dppeft.wrap(tiny.build("bert"), "rgp", **options).train()
    first = run_of(halves, rows_of(batch), tmp_path, **settings)
    go(first, 3)
    first.save(tmp_path / "saved")
    again = dppeft.wrap(tiny.build("bert"), "rgp", **options).train()
    second = run_of(again, rows_of(batch), tmp_path, **settings)
    second.restore(tmp_path / "saved")
    go(second, 1)
    for a, b in zip(layers_of(straight).values(), layers_of(again).values(), strict=True):
        torch.testing.assert_close(a.rgp_weight["default"], b.rgp_weight["default"])


def test_displaced_coordinates_are_taken_into_the_weight_before_carriers_change() -> None:
    model = tiny.wake(dppeft.wrap(tiny.build("bert"), "rgp")).eval()
    batch = tiny.make_batch("bert")
    before = model(**batch).logits
    for path, layer in layers_of(model).items():
        layer.before_step(20, path)
        assert not layer.rgp_carriers["default"].left.any()
    torch.testing.assert_close(model(**batch).logits, before)


def test_the_head_and_carriers_are_trained_together_and_clipped_together() -> None:
    model = tiny.wake(dppeft.wrap(tiny.build("bert"), "rgp")).train()
    batch = tiny.make_batch("bert")
    rows = [tiny.row(batch, i) for i in range(4)]
    truth = oracle.per_example(model, rows)
    assert any("classifier" in name for name in truth)
    bound = float(oracle.norms(truth).median())
    found = dppeft.clipped_sum(model, batch, max_grad_norm=bound)
    assert oracle.worst_error(found.grads, oracle.clipped_sum(truth, bound)) < 1e-3


def test_memory_one_full_size_buffer_for_each_matrix() -> None:
    model = dppeft.wrap(tiny.build("bert"), "rgp", r=1)
    for layer in layers_of(model).values():
        size = layer.get_base_layer().weight.numel()
        held = sum(t.numel() for t in (*layer.parameters(), *layer.buffers()))
        bias = layer.get_base_layer().bias.numel()
        assert held - bias <= 2 * size + 4 * sum(layer.get_base_layer().weight.shape)


class Regression(nn.Module):
    """y = W x, with a head that does nothing, so that W is not taken for it."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(24, 24, bias=False)
        self.classifier = nn.Linear(24, 24, bias=False)
        nn.init.zeros_(self.body.weight)

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x)


def test_historical_carriers_recover_a_low_rank_optimum_that_random_ones_do_not(
    tmp_path: Path,
) -> None:
    """Linear regression, W* of rank 2 in 24 x 24, the same rank and noise for both."""
    torch.manual_seed(0)
    target = torch.randn(24, 2) @ torch.randn(2, 24) / 5
    x = torch.randn(256, 24)
    rows = [{"x": a, "labels": b} for a, b in zip(x, x @ target.T, strict=True)]
    errors = {}
    for history in ("update", "random"):
        model = dppeft.wrap(
            Regression(),
            "rgp",
            target_modules=["body"],
            r=2,
            history=history,
            warmup_steps=0,
        )
        model.base_model.model.classifier.requires_grad_(False)
        plan = dppeft.plan(
            num_examples=256, batch_size=256, steps=60, delta=1e-3, noise_multiplier=4.0
        )
        run = dppeft.make_private(
            model,
            torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=2.0),
            rows,
            plan,
            loss=lambda m, b: (m(b["x"]) - b["labels"]).square().mean(1),
            seed=0,
            precision="float32",
            ledger=tmp_path / f"{history}.jsonl",
        )
        go(run)
        (layer,) = layers_of(model).values()
        errors[history] = float((layer.matrix("default") - target).norm() / target.norm())
    assert errors["update"] < 0.7 * errors["random"], errors


@pytest.mark.parametrize("low_cpu_mem_usage", [False, True])
@pytest.mark.filterwarnings("ignore")
def test_plain_peft_loads_it_also_by_way_of_empty_tensors(
    low_cpu_mem_usage: bool, tmp_path: Path
) -> None:
    model = dppeft.wrap(tiny.build("bert"), "rgp")
    with torch.no_grad():
        for layer in layers_of(model).values():
            layer.rgp_weight["default"].add_(0.01)
    folder = dppeft.export(model, tmp_path / "out")
    again = PeftModel.from_pretrained(
        tiny.build("bert"), folder, low_cpu_mem_usage=low_cpu_mem_usage
    )
    batch = tiny.make_batch("bert")
    with torch.no_grad():
        assert torch.equal(again.eval()(**batch).logits, model.eval()(**batch).logits)


def test_two_adapters_in_different_places_are_written_as_lora_one_by_one(tmp_path: Path) -> None:
    model = dppeft.wrap(tiny.build("bert"), "rgp", target_modules=["query"])
    model.add_adapter("second", copy.copy(model.peft_config["default"]))
    own = [layer for layer in layers_of(model).values() if "default" in layer.rgp_weight]
    del own[0].rgp_weight["second"]  # as if it had other targets
    model.set_adapter("second")
    dppeft.export(model, tmp_path / "lora", as_lora_rank=2)
    written = load_file(tmp_path / "lora" / "adapter_model.safetensors")
    assert sum("lora_A" in name for name in written) == len(own) - 1


def test_a_16_bit_base_gets_float32_matrices_that_do_not_require_a_gradient() -> None:
    model = dppeft.wrap(tiny.build("llama").bfloat16(), "rgp")
    assert model(**tiny.make_batch("llama")).logits.dtype == torch.bfloat16
    for layer in layers_of(model).values():
        weight = layer.rgp_weight["default"]
        assert (weight.dtype, weight.requires_grad) == (torch.float32, False)
        assert layer.rgp_carriers["default"].left.dtype == torch.float32
