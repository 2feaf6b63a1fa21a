"""Checkpoints of PrivateTrainer: resumed to the bit, never cheaper, and no code in them."""

from __future__ import annotations

import json
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import dppeft
from dppeft.errors import PrivacyWarning
from tests.tiny import build
from tests.training.runs import trained, values
from tests.training.trainers import HELD_OUT, StopAfter, Watch, make, saving


def test_E8_training_resumes_from_a_checkpoint(tmp_path: Path) -> None:
    """Six updates straight equal three, a restart, and three: seeded noise, AdamW, schedule."""
    args = {"learning_rate": 1e-2}
    straight = make(tmp_path / "a", privacy={"seed": 1}, args=args)
    straight.train()
    first = saving(tmp_path / "b", privacy={"seed": 1}, args=args, callbacks=[StopAfter(3)])
    first.train()
    second = saving(tmp_path / "b", privacy={"seed": 1}, args=args)
    second.train(resume_from_checkpoint=True)
    assert second.state.global_step == 6
    assert second.spent() == straight.spent()
    for name, value in values(straight.model).items():
        torch.testing.assert_close(trained(second.model)[name], value, rtol=0, atol=1e-7)


def test_updates_after_the_checkpoint_stay_spent(tmp_path: Path) -> None:
    privacy = {"epsilon": 8.0, "noise_multiplier": None}
    saving(tmp_path, privacy=privacy, callbacks=[StopAfter(5)]).train()
    watch = Watch()
    second = saving(tmp_path, privacy=privacy, callbacks=[watch])
    with pytest.warns(PrivacyWarning, match="2 updates were made after this state was saved"):
        second.train(resume_from_checkpoint=True)
    assert watch.events.count("end") == 1  # six planned, five spent
    assert second.spent().steps == second.state.global_step == 6
    assert second.spent().epsilon <= 8.0
    assert watch.rates == pytest.approx([5e-5 / 6])  # the schedule ends with the budget


def test_H1_checkpoints_of_ours_hold_no_pickled_weights_or_arguments(tmp_path: Path) -> None:
    trainer = saving(tmp_path)
    trainer.train()
    trainer.save_model(tmp_path / "final")
    names = {str(path.relative_to(tmp_path)) for path in (tmp_path / "final").iterdir()}
    assert {name.split("/")[1] for name in names} == {
        "adapter_model.safetensors", "adapter_config.json", "privacy.json", "README.md",
    }  # fmt: skip
    pickles = {p.name for p in tmp_path.rglob("*") if p.suffix in (".pt", ".pth", ".bin")}
    assert pickles == {"scheduler.pt", "rng_state.pth"}  # read with weights_only=True


class Exploit:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> Any:
        return Path.touch, (self.marker,)


@pytest.mark.parametrize("name", ["scheduler.pt", "rng_state.pth", "private_run/run.json"])
def test_H1_a_checkpoint_runs_no_code(tmp_path: Path, name: str) -> None:
    saving(tmp_path, callbacks=[StopAfter(3)]).train()
    (tmp_path / "checkpoint-3" / name).write_bytes(
        pickle.dumps(Exploit(tmp_path / "marker"), protocol=2)
    )
    with pytest.raises((dppeft.DppeftError, pickle.UnpicklingError)):
        saving(tmp_path).train(resume_from_checkpoint=True)
    assert not (tmp_path / "marker").exists()


def test_a_checkpoint_of_another_trainer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "checkpoint-3").mkdir()
    with pytest.raises(dppeft.DppeftError, match="expected a checkpoint that PrivateTrainer wrote"):
        make(tmp_path).train(resume_from_checkpoint=True)


def test_the_saved_model_loads_with_its_card(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    trainer.train()
    trainer.save_model(tmp_path / "final")
    card = json.loads((tmp_path / "final" / "privacy.json").read_text())
    assert card["epsilon"] == trainer.spent().epsilon
    assert card["steps"] == 6
    assert card["max_grad_norm"] == 0.5
    loaded = dppeft.load(build("bert"), tmp_path / "final")
    batch = {k: v for k, v in trainer.data_collator(HELD_OUT).items() if k != "labels"}
    model = trainer.model.eval()
    torch.testing.assert_close(loaded(**batch).logits, model(**batch).logits)


def test_a_model_saved_before_training_claims_nothing(tmp_path: Path) -> None:
    trainer = make(tmp_path)
    assert trainer.spent().epsilon == 0.0
    trainer.save_model(tmp_path / "untrained")
    assert json.loads((tmp_path / "untrained" / "privacy.json").read_text())["guarantee"] is False
    with pytest.raises(dppeft.DppeftError, match="call train\\(\\) first"):
        trainer.card()
