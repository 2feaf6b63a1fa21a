"""A run: what is refused before rows are used, what may be drawn and stepped, what was spent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import dppeft
from dppeft.errors import PrivacyWarning
from tests.tiny import build
from tests.training.runs import (
    adapted_bert,
    dot_run,
    make_plan,
    sgd,
    token_rows,
    trained,
    values,
)

EYE = torch.eye(8)


def noisy(**changes: Any) -> Any:
    """A plan with noise and without a target."""
    return make_plan(
        8, **{"batch_size": 4, "noise_multiplier": 1.0, "max_grad_norm": 1.0, **changes}
    )


# How many steps there are


def test_A1_a_run_makes_the_planned_steps_and_a_target_refuses_more() -> None:
    plan = make_plan(8, batch_size=2, steps=None, epochs=3, epsilon=3.0, max_grad_norm=1.0)
    model, run = dot_run(EYE, plan)
    for batch in run.batches():
        run.step(batch)
    assert run.spent().steps == plan.steps == 12
    assert run.spent().epsilon == pytest.approx(plan.epsilon())
    assert run.spent().epsilon <= 3.0
    before = model.layer.weight.detach().clone()
    with pytest.raises(dppeft.DppeftError, match="12 of 12 planned steps are made, and 1 more"):
        next(iter(run.batches()))
    with pytest.raises(dppeft.DppeftError, match="would exceed the target epsilon=3"):
        run.batches(steps=1)
    assert torch.equal(before, model.layer.weight)
    assert run.spent().steps == 12


def test_A1_more_steps_than_a_target_allows_are_refused_at_once() -> None:
    _, run = dot_run(EYE, make_plan(8, batch_size=2, steps=4, epsilon=3.0, max_grad_norm=1.0))
    with pytest.raises(dppeft.DppeftError, match="0 of 4 planned steps are made, and 5 more"):
        run.batches(steps=5)


def test_A1_without_a_target_epsilon_keeps_growing() -> None:
    _, run = dot_run(EYE, noisy(steps=3))
    spent = [run.spent().epsilon]
    for _ in range(2):
        for batch in run.batches():
            run.step(batch)
        spent.append(run.spent().epsilon)
    for batch in run.batches(steps=1):
        run.step(batch)
    assert run.spent().steps == 7
    assert spent[0] == 0.0 < spent[1] < spent[2] < run.spent().epsilon


@pytest.mark.parametrize("physical", [1, 5, 12, 60])
def test_A5_nothing_is_left_over_between_steps_or_epochs(physical: int) -> None:
    """Every draw is one release, whatever the physical batches: also one larger than all rows."""
    x = torch.eye(24)
    plan = make_plan(24, batch_size=9, steps=6, max_grad_norm=1.0)
    model, run = dot_run(x, plan, physical_batch_size=physical)
    for batch in run.batches():
        before = model.layer.weight.detach()[0].clone()
        run.step(batch)
        moved = (before - model.layer.weight.detach()[0]) * 9
        expected = torch.zeros(24)
        expected[batch.indices] = 1.0
        torch.testing.assert_close(moved, expected)
    assert len(run.ledger.entries) == 6


def test_A7_epoch_lengths_are_exact() -> None:
    plan = make_plan(93, batch_size=1, steps=None, epochs=10, noise_multiplier=1.0, max_grad_norm=1)
    _, run = dot_run(torch.ones(93, 2), plan)
    for batch in run.batches():
        run.step(batch)
    assert run.spent().steps == plan.steps == 930
    assert run.spent().epsilon == pytest.approx(plan.epsilon())


def test_draws_follow_the_sample_rate_and_never_hold_a_row_twice() -> None:
    _, run = dot_run(torch.ones(200, 1), make_plan(200, batch_size=50, steps=100), seed=0)
    drawn = torch.zeros(200)
    for batch in run.batches():
        assert len(set(batch.indices.tolist())) == len(batch)
        drawn[batch.indices] += 1
        run.step(batch)
    assert abs(float(drawn.mean()) - 25.0) < 4 * (100 * 0.25 * 0.75 / 200) ** 0.5
    assert drawn.min() < 25 < drawn.max()  # not each row equally often


# What may be stepped


def test_a_draw_cannot_be_left_out_but_the_loop_can_be_broken_off() -> None:
    _, run = dot_run(EYE, noisy(steps=4))
    draws = run.batches()
    first = next(draws)
    with pytest.raises(dppeft.DppeftError, match="draw for step 0 was not stepped"):
        next(draws)
    again = next(run.batches())
    assert again is first
    run.step(again)
    assert next(run.batches()).step == 1


def test_a_draw_is_released_once() -> None:
    _, run = dot_run(EYE, noisy())
    batch = next(run.batches())
    run.step(batch)
    with pytest.raises(dppeft.DppeftError, match="step 0 was used before"):
        run.step(batch)
    assert run.spent().steps == 1


def test_A8_batches_from_elsewhere_are_refused() -> None:
    _, run = dot_run(EYE, noisy())
    _, other = dot_run(EYE, noisy())
    for batch in ({"x": EYE[:4]}, next(other.batches()), [0, 1]):
        with pytest.raises(dppeft.DppeftError, match="not the Poisson draw"):
            run.step(batch)
    assert run.spent().steps == 0


def test_an_error_before_the_release_spends_nothing_and_the_draw_stays() -> None:
    rows = token_rows(8)
    model = adapted_bert()
    run = dppeft.make_private(model, sgd(model), rows, make_plan(8))
    batch, kept = next(run.batches()), rows[0]
    rows[0] = {**kept, "labels": 99}
    with pytest.raises(dppeft.DppeftError, match="A label lies outside 0 to 2"):
        run.step(batch)
    assert run.spent().steps == 0
    rows[0] = kept
    assert next(run.batches()) is batch
    run.step(batch)
    assert run.spent().steps == 1


def test_D5_a_schedule_counts_updates() -> None:
    """The rate that moved the weights, read off the weights: constant gradient, no noise."""
    model, run = dot_run(torch.ones(8, 1), make_plan(8, steps=10), physical_batch_size=2)
    schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda step: min(1, step / 5))
    moved = []
    for batch in run.batches():
        before = float(model.layer.weight.detach())
        run.step(batch)
        schedule.step()
        moved.append(before - float(model.layer.weight.detach()))
    assert moved == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1, 1, 1, 1, 1], abs=1e-6)


# What is claimed


@pytest.mark.parametrize("changes", [{"epsilon": float("inf")}, {"noise_multiplier": 0.0}])
def test_G6_no_noise_runs_and_claims_nothing(changes: dict[str, Any]) -> None:
    _, run = dot_run(EYE, noisy(**changes))
    for batch in run.batches():
        run.step(batch)
    assert run.spent().epsilon == float("inf")
    assert not run.card().guarantee


def test_G6_a_huge_epsilon_runs() -> None:
    _, run = dot_run(EYE, noisy(epsilon=1000.0))
    for batch in run.batches():
        run.step(batch)
    assert 0 < run.spent().epsilon <= 1000


def test_the_card_tells_what_the_ledger_tells() -> None:
    _, run = dot_run(EYE, noisy(), clipping="per_layer")
    run.step(next(run.batches()))
    run.note_look("the weather")
    card = run.card()
    assert card.epsilon == run.spent().epsilon
    assert (card.steps, card.num_examples, card.clipping) == (1, 8, "per_layer")
    assert card.looked_at_without_noise == ("the weather",)
    assert card.seeded is False


def test_A19_a_second_run_on_the_same_rows_warns_or_shares_the_ledger() -> None:
    rows = token_rows(8)
    model = adapted_bert()
    first = dppeft.make_private(model, sgd(model), rows, noisy(steps=3))
    for batch in first.batches():
        first.step(batch)
    with pytest.warns(PrivacyWarning, match="trained on this data set before, 3 updates"):
        dppeft.make_private(model, sgd(model), rows, noisy())
    second = dppeft.make_private(model, sgd(model), rows, noisy(steps=3), ledger=first.ledger.path)
    assert second.steps_made == 0
    for batch in second.batches():
        second.step(batch)
    assert second.spent().steps == 6
    assert second.spent().epsilon == pytest.approx(noisy(steps=6).epsilon())
    assert "3 releases recorded before this run" in second.card().notes[0]


def test_a_ledger_of_other_data_is_not_continued() -> None:
    _, first = dot_run(EYE, noisy())
    with pytest.raises(dppeft.DppeftError, match="is of a run with num_examples=8, this one has 4"):
        dot_run(torch.eye(4), make_plan(4), ledger=first.ledger.path)


def test_a_ledger_that_cannot_be_written_is_an_error_at_the_start(tmp_path: Any) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    with pytest.raises(dppeft.DppeftError, match="pass ledger=, a path that will outlive the run"):
        dot_run(EYE, noisy(), ledger=blocked / "ledger.jsonl")


def test_C5_draws_differ_between_epochs_and_runs() -> None:
    draws = []
    for _ in range(2):
        _, run = dot_run(torch.ones(100, 1), make_plan(100, batch_size=50, steps=4))
        for batch in run.batches():
            draws.append(tuple(batch.indices.tolist()))
            run.step(batch)
    assert len(set(draws)) == 8


def test_preflight_leaves_the_random_state_and_the_model_alone() -> None:
    model = adapted_bert(hidden_dropout_prob=0.3).eval()
    before, state = values(model), torch.get_rng_state()
    run = dppeft.make_private(model, sgd(model), token_rows(8), make_plan(8))
    assert torch.equal(state, torch.get_rng_state())
    assert not model.training
    assert all(torch.equal(value, before[key]) for key, value in values(model).items())
    assert all(p.grad is None for p in model.parameters())
    assert run.preflight.trained_parameters == sum(p.numel() for p in trained(model).values())


def test_G5_tensors_that_no_row_can_move_are_named() -> None:
    model = dppeft.wrap(build("bert"), "lora", r=2)
    layer = model.base_model.model.bert.encoder.layer[1].attention.self.query
    layer.register_forward_hook(lambda module, inputs, output: output.detach())
    with pytest.warns(UserWarning, match=r"2 trained tensors get no gradient .*layer.1.*query"):
        dppeft.make_private(model, sgd(model), token_rows(8), make_plan(8))


def test_F4_secure_noise_needs_no_further_package() -> None:
    import sys

    _, run = dot_run(EYE, noisy())
    run.step(next(run.batches()))
    assert not any("csprng" in name for name in sys.modules)


def test_H2_runs_of_one_seed_in_one_ledger_share_neither_draws_nor_noise(tmp_path: Path) -> None:
    """The difference of two releases with one noise would be free of it."""
    plan = make_plan(200, batch_size=50, steps=1, noise_multiplier=1.0, max_grad_norm=1.0)
    moved, drawn = [], []
    for _ in range(2):
        model, run = dot_run(torch.zeros(200, 50), plan, seed=3, ledger=tmp_path / "ledger.jsonl")
        before = torch.cat([p.detach().flatten() for p in model.parameters()])
        for batch in run.batches():
            drawn.append(batch.indices.tolist())
            run.step(batch)
        moved.append(torch.cat([p.detach().flatten() for p in model.parameters()]) - before)
    assert drawn[0] != drawn[1]
    assert float(moved[0].abs().min()) > 0  # all of it is noise: the rows have no gradient
    correlation = torch.corrcoef(torch.stack(moved))[0, 1]
    assert abs(float(correlation)) < 0.5
    assert run.spent().steps == 2


@pytest.mark.parametrize("how", ["frozen", "unfrozen", "out of the optimizer", "replaced"])
def test_what_trains_may_not_change_after_make_private(how: str, tmp_path: Path) -> None:
    """Noticed before the draw is used: nothing is spent, no traceback after the ledger."""
    model = adapted_bert()
    optimizer = sgd(model)
    run = dppeft.make_private(
        model, optimizer, token_rows(8), make_plan(8), ledger=tmp_path / "ledger.jsonl"
    )
    name, parameter = next(iter(trained(model).items()))
    if how == "frozen":
        parameter.requires_grad_(False)
    elif how == "unfrozen":
        next(p for p in model.parameters() if not p.requires_grad).requires_grad_(True)
    elif how == "replaced":
        owner = model.get_submodule(name.rpartition(".")[0])
        setattr(owner, name.rpartition(".")[2], torch.nn.Parameter(parameter.detach().clone()))
    else:
        optimizer.param_groups.clear()
    batch = next(iter(run.batches()))
    with pytest.raises(dppeft.DppeftError, match="no longer what the run was made to train"):
        run.step(batch)
    assert len(run.ledger) == 0


def test_a_part_kept_in_eval_stays_there_through_an_evaluation(tmp_path: Path) -> None:
    model = adapted_bert(hidden_dropout_prob=0.5)
    model.train()
    kept = model.base_model.model.bert.encoder.layer[0]
    kept.eval()
    run = dppeft.make_private(
        model, sgd(model), token_rows(8), make_plan(8), ledger=tmp_path / "ledger.jsonl"
    )
    seen: list[tuple[bool, bool]] = []
    kept.register_forward_pre_hook(lambda module, _: seen.append((model.training, module.training)))
    for mode in (True, False, True):
        model.train(mode)  # as an evaluation leaves it
        seen.clear()
        run.step(next(iter(run.batches(steps=1))))
        assert set(seen) == {(True, False)}
        assert kept.training is mode
