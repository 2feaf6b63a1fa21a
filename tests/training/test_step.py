"""An update is Algorithm 1: clipped, summed, noised once, over the expected size, recorded."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

import dppeft
from dppeft.privacy.noise import GaussianNoise
from tests import oracle
from tests.tiny import build
from tests.training.runs import (
    Dot,
    adapted_bert,
    dot_loss,
    dot_rows,
    dot_run,
    make_plan,
    sgd,
    token_rows,
    trained,
    values,
)


def as_batch(rows: list[dict[str, Any]]) -> dict[str, Tensor]:
    """Padded with zeros, mask and all."""
    width = max(len(row["input_ids"]) for row in rows)

    def padded(name: str) -> Tensor:
        return torch.tensor([row[name] + [0] * (width - len(row[name])) for row in rows])

    return {
        "input_ids": padded("input_ids"),
        "attention_mask": padded("attention_mask"),
        "labels": torch.tensor([row["labels"] for row in rows]),
    }


def single(row: dict[str, Any]) -> dict[str, Tensor]:
    return as_batch([row])


OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.01),
    "adamw": lambda params: torch.optim.AdamW(params, lr=1e-3, weight_decay=0.01),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_B18_without_noise_and_clipping_it_is_plain_training(name: str) -> None:
    rows = token_rows(24)
    model = adapted_bert()
    plain = copy.deepcopy(model)
    optimizer = OPTIMIZERS[name](trained(model).values())
    run = dppeft.make_private(
        model, optimizer, rows, make_plan(24, steps=20), physical_tokens=48, precision="float32"
    )
    for batch in run.batches():
        run.step(batch)
    optimizer, batch = OPTIMIZERS[name](trained(plain).values()), as_batch(rows)
    for _ in range(20):
        optimizer.zero_grad()
        plain(**batch).loss.backward()
        optimizer.step()
    start = values(adapted_bert())
    for key, value in values(plain).items():
        torch.testing.assert_close(trained(model)[key].detach(), value, rtol=0, atol=1e-5)
        assert (value - start[key]).abs().max() > 1e-3  # it moved, so equality says something


def test_B17_update_is_the_clipped_sum_over_the_expected_batch_size() -> None:
    rows = token_rows(40)
    model = adapted_bert()
    plan = make_plan(40, batch_size=16, steps=6, max_grad_norm=0.5)
    run = dppeft.make_private(
        model, sgd(model), rows, plan, physical_batch_size=3, precision="float32", seed=3
    )
    sizes = []
    for batch in run.batches():
        sizes.append(len(batch))
        before = values(model)
        grads = oracle.per_example(model, [single(rows[i]) for i in batch.indices.tolist()])
        assert (oracle.norms(grads) > 0.5).any()  # something is clipped
        expected = oracle.clipped_sum(grads, 0.5)
        run.step(batch)
        for key, value in before.items():
            moved = (value - trained(model)[key].detach()).double()
            torch.testing.assert_close(moved, expected[key] / 16, rtol=1e-4, atol=1e-6)
    assert len(set(sizes)) > 2  # a drawn size as divisor would have been noticed
    assert set(sizes) - {16}


@pytest.mark.parametrize("max_grad_norm", [0.1, 1.0, 10.0])
@pytest.mark.parametrize("batch_size", [8, 64])
def test_B16_noise_on_the_mean_is_sigma_c_over_expected_batch(
    max_grad_norm: float, batch_size: int
) -> None:
    plan = make_plan(
        64, batch_size=batch_size, steps=1, noise_multiplier=1.5, max_grad_norm=max_grad_norm
    )
    model, run = dot_run(torch.zeros(64, 40_000), plan, seed=0)
    run.step(next(run.batches()))
    scaled = model.layer.weight.detach().flatten() * batch_size / max_grad_norm
    chi_square = float((scaled / 1.5).square().sum())
    # 40,000 degrees of freedom, standard deviation 283: 1.5 % off in the scale is 4 of them.
    assert abs(chi_square - 40_000) < 2.6 * 283
    assert abs(float(scaled.mean())) < 4 * 1.5 / 200


def test_A15_empty_draws_are_noised_counted_and_applied() -> None:
    x = torch.eye(50)
    plan = make_plan(50, batch_size=1, steps=100, noise_multiplier=1.0, max_grad_norm=1.0)
    model, run = dot_run(x, plan, seed=5)
    empty = 0
    for batch in run.batches():
        before = model.layer.weight.detach().clone()
        run.step(batch)
        assert not torch.equal(before, model.layer.weight)
        empty += len(batch) == 0
    assert 20 < empty < 55  # about 37 of 100
    assert len(run.ledger.entries) == 100
    assert run.spent().steps == 100


@pytest.mark.parametrize("where", ["never", "before", "after", "between"])
def test_A4_B20_gradients_of_the_user_never_enter(where: str) -> None:
    rows = token_rows(20)

    def train(interfere: bool) -> dict[str, Tensor]:
        model = adapted_bert()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)  # frozen ones in it, too
        plan = make_plan(20, batch_size=8, max_grad_norm=0.5, steps=3)
        run = dppeft.make_private(model, optimizer, rows, plan, seed=1, precision="float32")
        for batch in run.batches():
            if interfere and where == "before":
                optimizer.zero_grad()
            if interfere:
                for p in model.parameters():
                    p.grad = torch.full_like(p, 1e3)
                model(**as_batch(rows)).loss.backward() if where != "never" else None
            if interfere and where == "between":
                optimizer.zero_grad()
            run.step(batch)
            assert all(p.grad is None for p in model.parameters())
            if interfere and where == "after":
                model(**as_batch(rows)).loss.backward()
                optimizer.zero_grad()
        frozen = dict(build("bert").named_parameters())
        assert torch.equal(
            dict(model.named_parameters())[
                "base_model.model.bert.embeddings.word_embeddings.weight"
            ],
            frozen["bert.embeddings.word_embeddings.weight"],
        )
        return values(model)

    alone = train(False)
    for key, value in train(True).items():
        assert torch.equal(value, alone[key])


def test_B21_forwards_without_gradient_between_steps_change_nothing() -> None:
    rows = token_rows(12)

    def train(looks: int) -> dict[str, Tensor]:
        model = adapted_bert()
        run = dppeft.make_private(model, sgd(model), rows, make_plan(12), precision="float32")
        for batch in run.batches():
            for _ in range(looks):
                with torch.no_grad():
                    model(**as_batch(rows))
            run.step(batch)
        return values(model)

    never = train(0)
    assert all(torch.equal(value, never[key]) for key, value in train(20).items())


def test_B22_an_eval_model_is_trained_with_dropout_and_left_in_eval_mode() -> None:
    rows = token_rows(12)
    model = dppeft.wrap(build("bert", hidden_dropout_prob=0.5), "lora", r=4).eval()
    run = dppeft.make_private(model, sgd(model), rows, make_plan(12), precision="float32")
    seen = []
    hook = model.base_model.model.bert.encoder.layer[0].output.dropout.register_forward_hook(
        lambda module, *_: seen.append(module.training)
    )
    for batch in run.batches():
        run.step(batch)
    hook.remove()
    assert seen
    assert all(seen)
    assert not any(module.training for module in model.modules())


def test_a_part_kept_in_eval_mode_stays_so_in_a_training_model() -> None:
    model = dppeft.wrap(build("bert", hidden_dropout_prob=0.5), "lora", r=4).train()
    dropout = model.base_model.model.bert.embeddings.dropout.eval()
    run = dppeft.make_private(model, sgd(model), token_rows(12), make_plan(12))
    seen = []
    hook = dropout.register_forward_hook(lambda module, *_: seen.append(module.training))
    run.step(next(run.batches()))
    hook.remove()
    assert seen
    assert not any(seen)


class _Failing(torch.optim.SGD):
    def step(self, closure: Any = None) -> None:
        raise RuntimeError("power cut")


def test_the_ledger_has_the_step_before_the_update_is_applied() -> None:
    x = torch.eye(4)
    model = Dot(4)
    optimizer = _Failing(model.parameters(), lr=1.0)
    plan = make_plan(4, noise_multiplier=1.0, max_grad_norm=1.0)
    run = dppeft.make_private(model, optimizer, dot_rows(x), plan, loss=dot_loss)
    with pytest.raises(RuntimeError, match="power cut"):
        run.step(next(run.batches()))
    assert len(run.ledger.path.read_text().splitlines()) == 2  # header and the release
    assert run.spent().steps == 1
    assert next(run.batches()).step == 1  # and the noise of step 0 is not used again


def test_no_update_without_a_ledger_entry() -> None:
    plan = make_plan(4, noise_multiplier=1.0, max_grad_norm=1.0)
    model, run = dot_run(torch.eye(4), plan)
    draw = next(run.batches())
    run.ledger.path.unlink()
    with pytest.raises(dppeft.DppeftError, match="ledger"):
        run.step(draw)
    assert not model.layer.weight.any()
    assert run.steps_made == 0


def test_H2_noise_is_not_torchs_global_generator() -> None:
    """The global seed neither freezes the noise nor is advanced by it."""
    plan = make_plan(4, steps=5, noise_multiplier=1.0, max_grad_norm=1.0)
    model, run = dot_run(torch.eye(4), plan)
    moves = []
    for batch in run.batches():
        before = model.layer.weight.detach().clone()
        torch.manual_seed(0)
        state = torch.get_rng_state()
        run.step(batch)
        assert torch.equal(state, torch.get_rng_state())
        moves.append(model.layer.weight.detach() - before)
    for i, one in enumerate(moves):
        assert not any(torch.allclose(one, other, atol=1e-3) for other in moves[:i])


@pytest.mark.parametrize(("seed", "equal"), [(None, False), (42, True)])
def test_H2_runs_differ_unless_seeded(seed: int | None, equal: bool) -> None:
    weights = []
    for _ in range(2):
        torch.manual_seed(0)
        plan = make_plan(4, steps=1, noise_multiplier=1.0, max_grad_norm=1.0)
        model, run = dot_run(torch.eye(4), plan, seed=seed)
        run.step(next(run.batches()))
        weights.append(model.layer.weight.detach().clone())
        assert run.card().seeded is equal
        assert run.ledger.header["seeded"] is equal
    assert torch.equal(*weights) is equal


def test_H2_tensors_of_one_shape_get_independent_noise() -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a = torch.nn.Linear(5_000, 1, bias=False)
            self.b = torch.nn.Linear(5_000, 1, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return (self.a(x) + self.b(x))[:, 0]

    model = Two()
    torch.nn.init.zeros_(model.a.weight)
    torch.nn.init.zeros_(model.b.weight)
    plan = make_plan(4, steps=1, noise_multiplier=1e3, max_grad_norm=1.0)
    x = torch.ones(4, 5_000)
    run = dppeft.make_private(model, sgd(model), dot_rows(x), plan, loss=dot_loss, seed=0)
    run.step(next(run.batches()))
    pair = torch.stack([model.a.weight.detach()[0], model.b.weight.detach()[0]])
    assert abs(float(torch.corrcoef(pair)[0, 1])) < 0.05


def test_what_is_kept_of_a_draw_does_not_grow_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """One sum, whatever the number of physical batches; no norms are collected."""
    kept = []
    add = GaussianNoise.add

    def watched(self: GaussianNoise, clipped: Any, **options: Any) -> Any:
        kept.append((
            clipped.count,
            clipped.norms.numel(),
            float(clipped.grads["layer.weight"][0, 0]),
        ))
        return add(self, clipped, **options)

    monkeypatch.setattr(GaussianNoise, "add", watched)
    _, run = dot_run(torch.ones(64, 3), make_plan(64, steps=1), physical_batch_size=1)
    run.step(next(run.batches()))
    assert kept == [(64, 0, 64.0)]


def test_a_gradient_hook_acts_on_the_released_gradient() -> None:
    """A mask keeps a coordinate still, noise included; it runs once per update."""
    plan = make_plan(4, steps=1, noise_multiplier=1.0, max_grad_norm=1.0)
    model, run = dot_run(torch.eye(4), plan, physical_batch_size=1)
    mask, calls = torch.tensor([[1.0, 0.0, 1.0, 1.0]]), []
    before = model.layer.weight.detach().clone()
    model.layer.weight.register_hook(lambda grad: calls.append(1) or grad * mask)
    run.step(next(run.batches()))
    moved = model.layer.weight.detach() - before
    assert torch.equal(moved == 0, mask == 0)
    assert len(calls) == 1
