"""Saving and restoring: the same training, and never less spent than was spent."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import dppeft
from dppeft.errors import PrivacyWarning
from dppeft.training.state import MANIFEST, OPTIMIZER, WEIGHTS
from tests.training.runs import adapted_bert, dot_run, make_plan, sgd, token_rows, trained, values

ROWS = token_rows(12)
EYE = torch.eye(8)


def noisy(**changes: Any) -> Any:
    return make_plan(
        8, **{"batch_size": 4, "steps": 6, "noise_multiplier": 1.0, "max_grad_norm": 1.0, **changes}
    )


class Session:
    """A model with AdamW and a linear schedule, as a user's script has them."""

    def __init__(self, plan: Any, *, seed: int | None = None) -> None:
        self.model = adapted_bert()
        optimizer = torch.optim.AdamW(trained(self.model).values(), lr=1e-2, weight_decay=0.01)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / 10)
        self.run = dppeft.make_private(
            self.model, optimizer, ROWS, plan, seed=seed, precision="float32"
        )

    def train(self, steps: int) -> None:
        for batch in self.run.batches(steps=steps):
            self.run.step(batch)
            self.schedule.step()


@pytest.mark.parametrize("noise", [0.0, 1.0])
def test_E8_ten_steps_equal_five_and_five_after_a_restore(tmp_path: Path, noise: float) -> None:
    """Noise 0 with everything drawn, and seeded noise with seeded draws."""
    plan = make_plan(12, steps=10)
    if noise:
        plan = make_plan(12, steps=10, batch_size=6, noise_multiplier=noise, max_grad_norm=0.5)
    straight = Session(plan, seed=7)
    straight.train(10)
    first = Session(plan, seed=7)
    first.train(5)
    first.run.save(tmp_path / "saved")
    schedule = first.schedule.state_dict()
    second = Session(plan, seed=7)
    second.run.restore(tmp_path / "saved")
    second.schedule.load_state_dict(schedule)
    second.train(5)
    for name, value in values(straight.model).items():
        torch.testing.assert_close(trained(second.model)[name], value, rtol=0, atol=1e-7)
    assert second.run.spent() == straight.run.spent()
    assert second.run.ledger.path == first.run.ledger.path  # one account, not two


def test_a_restored_run_makes_the_remaining_steps_only(tmp_path: Path) -> None:
    plan = noisy(noise_multiplier=None, epsilon=3.0)
    _, first = dot_run(EYE, plan)
    for batch in first.batches(steps=2):
        first.step(batch)
    first.save(tmp_path)
    _, second = dot_run(EYE, plan)
    second.restore(tmp_path)
    assert sum(1 for batch in second.batches() if second.step(batch) is None) == 4
    assert second.spent().epsilon == pytest.approx(plan.epsilon())
    with pytest.raises(dppeft.DppeftError, match="6 of 6 planned steps"):
        second.batches()


def test_a_crash_loses_work_but_never_spent_budget(tmp_path: Path) -> None:
    plan = noisy(noise_multiplier=None, epsilon=3.0)
    _, first = dot_run(EYE, plan)
    for number, batch in enumerate(first.batches(steps=5)):
        first.step(batch)
        if number == 1:
            first.save(tmp_path)
    _, second = dot_run(EYE, plan)
    with pytest.warns(PrivacyWarning, match="3 updates were made after this state was saved"):
        second.restore(tmp_path)
    assert second.spent().steps == second.steps_made == 5
    assert [batch.step for batch in second.batches() if second.step(batch) is None] == [5]


def test_a_ledger_that_is_gone_is_replaced_by_its_copy(tmp_path: Path) -> None:
    _, first = dot_run(EYE, noisy())
    for batch in first.batches(steps=3):
        first.step(batch)
    first.save(tmp_path / "saved")
    first.ledger.path.unlink()
    _, second = dot_run(EYE, noisy(), ledger=tmp_path / "new.jsonl")
    second.restore(tmp_path / "saved")
    assert second.spent().steps == 3
    second.step(next(second.batches()))
    assert len((tmp_path / "new.jsonl").read_text().splitlines()) == 5


def test_an_unseeded_run_draws_afresh_after_a_restore(tmp_path: Path) -> None:
    _, first = dot_run(torch.ones(200, 1), make_plan(200, batch_size=100, steps=4))
    first.save(tmp_path)
    draw = next(first.batches()).indices.tolist()
    _, second = dot_run(torch.ones(200, 1), make_plan(200, batch_size=100, steps=4))
    second.restore(tmp_path)
    assert next(second.batches()).indices.tolist() != draw


def test_nothing_secret_and_no_row_is_saved(tmp_path: Path) -> None:
    model = adapted_bert()
    plan = make_plan(12, batch_size=6, noise_multiplier=1.0, max_grad_norm=0.5)
    run = dppeft.make_private(model, sgd(model), ROWS, plan, seed=987654321)
    run.step(next(run.batches()))
    folder = run.save(tmp_path / "saved")
    assert {path.name for path in folder.iterdir()} == {
        MANIFEST, WEIGHTS, OPTIMIZER, "ledger.jsonl",
    }  # fmt: skip
    assert load_file(folder / WEIGHTS).keys() == trained(model).keys()
    text = (folder / MANIFEST).read_text() + (folder / "ledger.jsonl").read_text()
    assert "987654321" not in text


class Exploit:
    """Touches a file when unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("name", [MANIFEST, WEIGHTS, OPTIMIZER, "ledger.jsonl"])
def test_H1_nothing_is_unpickled(tmp_path: Path, name: str) -> None:
    _, run = dot_run(EYE, noisy())
    run.save(tmp_path / "saved")
    (tmp_path / "saved" / name).write_bytes(pickle.dumps(Exploit(tmp_path / "marker")))
    _, other = dot_run(EYE, noisy())
    with pytest.raises(dppeft.DppeftError, match=name.split(".")[0]):
        other.restore(tmp_path / "saved")
    assert not (tmp_path / "marker").exists()


def saved(folder: Path, steps: int = 3) -> Any:
    _, run = dot_run(EYE, noisy())
    for batch in run.batches(steps=steps):
        run.step(batch)
    run.save(folder)
    return run


def test_H1_a_ledger_changed_by_hand_is_not_trusted(tmp_path: Path) -> None:
    saved(tmp_path)
    ledger = tmp_path / "ledger.jsonl"
    lines = ledger.read_text().splitlines(keepends=True)
    _, run = dot_run(EYE, noisy())
    for changed in (
        "".join(lines).replace('"noise_multiplier":1.0', '"noise_multiplier":9.0'),
        "".join(lines[:-1]),  # cut off at the end: a valid file, but not the one saved
        "".join(lines[:1] + lines[2:]),
    ):
        ledger.write_text(changed)
        with pytest.raises(dppeft.DppeftError, match="ledger"):
            run.restore(tmp_path)
    assert run.spent().steps == 0


def test_two_histories_of_one_run_are_refused(tmp_path: Path) -> None:
    first = saved(tmp_path / "a")
    _, other = dot_run(EYE, noisy(noise_multiplier=2.0))
    other.step(next(other.batches()))
    shutil.copyfile(other.ledger.path, first.ledger.path)
    _, run = dot_run(EYE, noisy())
    with pytest.raises(dppeft.DppeftError, match="tell different histories"):
        run.restore(tmp_path / "a")


def test_a_restore_must_fit_the_run(tmp_path: Path) -> None:
    saved(tmp_path / "a")
    _, other = dot_run(EYE, noisy(noise_multiplier=2.0))
    with pytest.raises(dppeft.DppeftError, match="plan with noise_multiplier=1.0, this run's has"):
        other.restore(tmp_path / "a")
    _, wide = dot_run(torch.ones(8, 3), noisy())
    with pytest.raises(dppeft.DppeftError, match=r"has shape \(1, 8\), this run's has \(1, 3\)"):
        wide.restore(tmp_path / "a")
    with pytest.raises(dppeft.DppeftError, match="expected a directory written by"):
        wide.restore(tmp_path / "nowhere")
    _, begun = dot_run(EYE, noisy())
    begun.step(next(begun.batches()))
    with pytest.raises(dppeft.DppeftError, match="already made 1 updates.*before its first step"):
        begun.restore(tmp_path / "a")


def test_a_state_for_another_optimizer_is_refused(tmp_path: Path) -> None:
    saved(tmp_path)
    manifest = json.loads((tmp_path / MANIFEST).read_text())
    manifest["optimizer"] = {"dict": [["state", {"dict": []}], ["param_groups", {"list": []}]]}
    (tmp_path / MANIFEST).write_text(json.dumps(manifest))
    _, run = dot_run(EYE, noisy())
    with pytest.raises(dppeft.DppeftError, match="does not fit this SGD"):
        run.restore(tmp_path)


def test_a_run_can_go_back_to_its_own_save(tmp_path: Path) -> None:
    model, run = dot_run(EYE, noisy())
    run.step(next(run.batches()))
    run.save(tmp_path)
    kept = model.layer.weight.detach().clone()
    run.step(next(run.batches()))
    with pytest.warns(PrivacyWarning, match="1 updates were made after"):
        run.restore(tmp_path)
    assert torch.equal(model.layer.weight, kept)
    assert run.spent().steps == 2
