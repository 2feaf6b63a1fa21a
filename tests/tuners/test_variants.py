"""Variants of LoRA, and BitFit without stored activations."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from peft.optimizers import create_loraplus_optimizer

import dppeft
from dppeft.clipping.engine import ExactEngine
from dppeft.clipping.rules import biases_alone
from dppeft.loss import default_loss
from tests import oracle, tiny


def test_loraplus_moves_b_by_its_own_rate(tmp_path: Path) -> None:
    """Hayou et al. (2024), by PEFT's own optimizer: B at 16 times the rate of A."""
    model = tiny.wake(dppeft.wrap(tiny.build("bert"), "lora"))
    before = {n: p.detach().clone() for n, p in model.named_parameters() if p.requires_grad}
    optimizer = create_loraplus_optimizer(
        model,
        optimizer_cls=torch.optim.SGD,
        lr=1e-3,
        loraplus_lr_ratio=16,
        loraplus_lr_embedding=1e-3,
    )
    batch = tiny.make_batch("bert", lengths=[4, 4, 4, 4])
    truth = oracle.per_example(model, [tiny.row(batch, i) for i in range(4)])
    run = dppeft.make_private(
        model,
        optimizer,
        [{k: v[i] for k, v in batch.items()} for i in range(4)],
        dppeft.plan(
            num_examples=4,
            batch_size=4,
            steps=1,
            delta=1e-3,
            noise_multiplier=0.0,
            max_grad_norm=1e9,
        ),
        precision="float32",
        ledger=tmp_path / "ledger.jsonl",
    )
    for drawn in run.batches():
        run.step(drawn)
    after = dict(model.named_parameters())
    for part, rate in (("lora_A", 1e-3), ("lora_B", 16e-3)):
        for name in [n for n in before if part in n]:
            moved = (after[name].detach() - before[name]).double()
            torch.testing.assert_close(moved, -rate * truth[name].mean(0), rtol=1e-2, atol=1e-6)


def test_rank_stabilised_lora_scales_by_the_root_of_the_rank() -> None:
    model = dppeft.wrap(tiny.build("bert"), "lora", r=16, lora_alpha=16, use_rslora=True)
    scales = {m.scaling["default"] for m in model.modules() if hasattr(m, "lora_A")}
    assert scales == {4.0}


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_bitfit_keeps_no_input(name: str) -> None:
    model = tiny.wake(dppeft.wrap(tiny.build(name), "bitfit")).train()
    batch = tiny.make_batch(name)
    engine = ExactEngine(model, loss=default_loss(model))
    plan = engine.plan_for(batch, 4)
    alone = [unit for unit in plan.units if set(unit.params) == {"bias"}]
    assert len(alone) >= tiny.LAYERS * 6
    assert all(unit.rule is biases_alone and not unit.needs_input for unit in alone)
    truth = oracle.per_example(model, [tiny.row(batch, i) for i in range(4)])
    assert oracle.worst_error(engine.per_example_grads(batch), truth) < 1e-3
