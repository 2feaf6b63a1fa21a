"""A sweep measures what it is asked for once, keeps it, and can be interrupted."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from tasks.results import read_file
from tasks.sweep import Setting, app, settings_of
from tests.tiny import opinions, save_folder


def test_every_seed_at_the_first_budget_and_the_first_seed_at_the_others() -> None:
    found = list(settings_of(["lora", "head"], [8.0, 3.0], 2, no_privacy=True))
    of_lora = [(s.epsilon, s.seed) for s in found if s.method == "lora"]
    assert of_lora == [(8.0, 0), (8.0, 1), (3.0, 0), (None, 0)]
    assert [s.method for s in found] == ["lora"] * 4 + ["head"] * 4
    assert Setting(method="lora", epsilon=8.0, seed=0).is_in([], "", "") is False


def test_what_is_measured_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    base = save_folder(tmp_path / "base")
    (base / "1_Pooling").mkdir()
    (base / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    for split, count, seed in (("train", 200, 0), ("dev", 50, 1)):
        rows = zip(*opinions(count, seed=seed), strict=True)
        lines = ["sentence\tlabel", *(f"{text}\t{label}" for text, label in rows)]
        (tmp_path / f"sst2_{split}.tsv").write_text("\n".join(lines) + "\n")
    file = tmp_path / "found.json"

    def sweep(*more: str) -> str:
        given = ["sst2", "--data", tmp_path, "--model", base, "--result", file]
        given += ["--epochs", "2", "--batch-size", "50", "--lr", "0.02", "--epsilon", "50"]
        done = CliRunner().invoke(app, [str(word) for word in given] + list(more))
        assert done.exit_code == 0, done.output
        return done.output

    sweep("--method", "bitfit")
    (first,) = read_file(file)
    assert (first.method, first.epsilon, first.seed) == ("bitfit", 50.0, 0)
    assert first.bytes_shared > 1000
    options = f"--data FOLDER --model {base.name} --epochs 2 --batch-size 50 --lr 0.02"
    assert first.command == f"python -m tasks.sweep sst2 {options}"
    output = sweep("--method", "bitfit", "--method", "head", "--no-privacy")
    assert "bitfit, 50" not in output
    found = read_file(file)
    assert found[0] == first
    assert [(one.method, one.epsilon) for one in found] == [
        ("bitfit", 50.0),
        ("bitfit", None),
        ("head", 50.0),
        ("head", None),
    ]
    wrong = CliRunner().invoke(
        app, ["sst3", "--method", "lora", "--result", str(file), "--data", str(tmp_path)]
    )
    assert wrong.exit_code == 2
    assert "Unknown task 'sst3'" in wrong.output
