"""The command line: the whole way on a tiny model, and one line for every wrong use (G4)."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import dppeft
from dppeft import classify, cli
from tests.tiny import opinions, save_folder

Cli = Callable[..., tuple[int, str, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Cli:
    """Runs a command in this process: exit code, standard output, standard error."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))

    def command(*arguments: object) -> tuple[int, str, str]:
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main([str(argument) for argument in arguments])
        output = capsys.readouterr()
        return int(ended.value.code or 0), output.out, output.err

    return command


def _rows(path: Path, count: int = 240, **columns: Any) -> Path:
    texts, labels = opinions(count)
    table = {"text": texts, "label": ["yes" if label else "no" for label in labels], **columns}
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(table)
        writer.writerows(zip(*table.values(), strict=True))
    return path


def _train(base: Path, data: Path, output: Path, *more: object) -> list[object]:
    arguments = ["train", "--data", data, "--text", "text", "--label", "label", "--model", base]
    return [*arguments, "--epsilon", 8, "--output", output, *more]


def test_the_version_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["--version"])
    assert not ended.value.code
    assert capsys.readouterr().out.strip() == dppeft.__version__


def test_plan_prints_and_gives_json(run: Cli) -> None:
    arguments = ("plan", "--num-examples", 67349, "--batch-size", 1000, "--epochs", 3)
    arguments = (*arguments, "--noise-multiplier", 0.7, "--delta", 1e-5)
    code, text, _ = run(*arguments)
    assert code == 0
    assert "epsilon (pld)" in text
    code, text, _ = run(*arguments, "--json")
    fields = json.loads(text)
    assert fields["steps"] == 203
    assert fields["epsilon"] == pytest.approx(3.730, abs=0.01)


def test_methods_lists_all(run: Cli) -> None:
    code, text, _ = run("methods")
    assert code == 0
    assert "lora " in text
    _, text, _ = run("methods", "--json")
    assert json.loads(text)["lora"]["options"]["r"] == 8


def test_C8_train_evaluate_predict(run: Cli, base_folder: Path, tmp_path: Path) -> None:
    data = _rows(tmp_path / "rows.csv", count=600)
    output = tmp_path / "shared"
    code, text, error = run(
        *_train(base_folder, data, output, "--epsilon", 1000, "--method", "lora", "--json"),
        *("--option", "r=4", "--lr", 0.02, "--head-lr", 0.05, "--eval-data", data, "--seed", 1),
        *("--batch-size", 200, "--epochs", 30, "--max-length", 6),
    )
    assert code == 0, error
    result = json.loads(text)
    assert 980 < result["epsilon"] <= 1000
    assert result["accuracy"] > result["majority"] + 0.2
    assert result["bytes"] == sum(f.stat().st_size for f in output.rglob("*") if f.is_file())
    assert "not private" in error  # rows longer than 6 tokens
    card = json.loads((output / "privacy.json").read_text())
    assert card["epsilon"] == pytest.approx(result["epsilon"])
    # C8: the names of the classes come from private rows, and are no result of the noise.
    assert "names of the classes" in " ".join(card["looked_at_without_noise"])

    code, text, error = run("evaluate", "--data", data, "--adapter", output, "--json")
    assert code == 0, error
    assert json.loads(text)["accuracy"] == pytest.approx(result["accuracy"])

    texts, labels = opinions(60)
    code, text, error = run("predict", "--adapter", output, *texts)
    assert code == 0, error
    said = [line.split("\t")[0] for line in text.splitlines()]
    right = [word == ("yes" if label else "no") for word, label in zip(said, labels, strict=True)]
    assert sum(right) / 60 > result["majority"] + 0.1

    code, _, error = run(*_train(base_folder, data, output))
    assert (code, error.count("\n")) == (2, 1)
    assert "is not empty. Name a new folder." in error


WRONG = [
    ((), {}, ["plan"], "Missing option '--num-examples'"),
    ((), {}, ["plan", "--num-examples", "10", "--batch-size", "5", "--epochs", "1"], "--delta"),
    ((), {}, ["nothing"], "No such command 'nothing'"),
    ((), {}, [], "Missing command"),
    ((), {}, ["plan", "--rows", "10"], "No such option"),
    ((), {}, ["plan", "--num-examples", "ten"], "--num-examples"),
    (("--epsilon", "0"), {}, None, "epsilon"),
    (("--epsilon", "-3"), {}, None, "epsilon"),
    (("--epsilon", "nan"), {}, None, "epsilon"),
    (("--delta", "0"), {}, None, "delta"),
    (("--delta", "1"), {}, None, "delta"),
    (("--delta", "nan"), {}, None, "delta"),
    (("--batch-size", "500"), {}, None, "batch_size=500"),
    (("--epochs", "0"), {}, None, "epochs"),
    (("--method", "lorra"), {}, None, "Did you mean 'lora'?"),
    (("--option", "rnak=4"), {}, None, "Unknown option 'rnak'"),
    (("--option", "r"), {}, None, "not of the form name=value"),
    (("--target-modules", "nowhere"), {}, None, "nowhere"),
    (("--clipping", "flatt"), {}, None, "Did you mean 'flat'?"),
    (("--engine", "ghost"), {}, None, "engine='ghost'"),
    (("--precision", "fp8"), {}, None, "precision='fp8'"),
    (("--max-length", "1"), {}, None, "--max-length >= 3"),
    (("--lr", "-1"), {}, None, "lr=-1"),
    (("--text", "txt"), {}, None, "no column 'txt'; it has 'text', 'label'. Did you mean 'text'?"),
    (("--label", "labels"), {}, None, "no column 'labels'"),
    (("--pad-token", "[NONE]"), {}, None, "not in the vocabulary"),
    (("--model", "no/such/folder"), {}, None, "No model 'no/such/folder' can be loaded"),
    ((), {"label": ["same"] * 240}, None, "constant"),
    ((), {"label": [f"{i}" for i in range(240)]}, None, "240 different values"),
    ((), {"text": ["good"] * 239 + [" "]}, None, "1 row(s) have an empty text or label"),
    (("--data", "nowhere.csv"), {}, None, "no such file"),
    (("--data", "rows.xml"), {}, None, "files of kind '.xml' are not read"),
]


@pytest.mark.parametrize(
    ("more", "columns", "command", "message"), WRONG, ids=[str(case[3])[:40] for case in WRONG]
)
def test_G4_wrong_use_gives_one_line_and_exit_code_2(
    run: Cli,
    base_folder: Path,
    tmp_path: Path,
    more: tuple[str, ...],
    columns: dict[str, Any],
    command: list[str] | None,
    message: str,
) -> None:
    output = tmp_path / "shared"
    if command is None:
        data = _rows(tmp_path / "rows.csv", **columns)
        command = [str(argument) for argument in _train(base_folder, data, output, *more)]
    code, text, error = run(*command)
    assert code == 2
    assert text == ""
    last = error.rstrip("\n").splitlines()[-1]
    assert last.startswith("Error: ")
    assert message in last
    assert error.count("Error: ") == 1
    assert "Traceback" not in error
    assert not output.exists()


def test_G4_unseen_label_in_evaluation(run: Cli, base_folder: Path, tmp_path: Path) -> None:
    data = _rows(tmp_path / "rows.csv")
    other = _rows(tmp_path / "other.csv", label=["maybe"] * 240)
    code, _, error = run(*_train(base_folder, data, tmp_path / "out", "--eval-data", other))
    assert (code, error.count("\n")) == (2, 1)
    assert "not among the 2 classes" in error
    assert "maybe" not in error  # a label is private


def test_G4_tokenizer_without_pad_token(run: Cli, tmp_path: Path) -> None:
    base = save_folder(tmp_path / "base", pad_token=False)
    data = _rows(tmp_path / "rows.csv")
    code, _, error = run(*_train(base, data, tmp_path / "out"))
    assert code == 2
    assert "has no pad token" in error.splitlines()[-1]
    assert "--pad-token" in error.splitlines()[-1]


def test_G4_a_folder_that_train_did_not_write(run: Cli, tmp_path: Path) -> None:
    code, _, error = run("predict", "--adapter", tmp_path, "good")
    assert (code, error.count("\n")) == (2, 1)
    assert "Expected a folder written by `dppeft train`" in error
    code, _, error = run("predict", "--adapter", tmp_path)
    assert "Expected texts or --data FILE" in error


@pytest.mark.parametrize("command", ["plan", "train", "evaluate", "predict", "methods"])
def test_every_command_has_help(run: Cli, command: str) -> None:
    code, text, _ = run(command, "--help")
    assert code == 0
    assert "--json" in text


def test_batch_and_passes_follow_the_number_of_rows() -> None:
    found = {rows: classify.by_size(rows) for rows in (4, 800, 20_000, 67_349, 134_698, 392_702)}
    assert found == {
        4: (1, 10.0),
        800: (100, 10.0),
        20_000: (1024, 10.0),
        67_349: (1024, 10.0),
        134_698: (2000, 10.0),
        392_702: (5831, pytest.approx(17.5, abs=0.05)),  # the paper's MNLI: 6,000 and 18
    }
    assert classify.by_size(10**7) == (6000, 18.0)
    sizes = [classify.by_size(rows) for rows in range(1, 500_000, 997)]
    assert sizes == sorted(sizes)


def test_without_a_threshold_clipping_is_automatic() -> None:
    fields: dict[str, Any] = {
        "data": Path("x"),
        "columns": classify.Columns(text="text"),
        "model": "x",
        "output": Path("y"),
        "epsilon": 8.0,
    }
    for given, clipping, bound in (
        ({}, "automatic", 0.1),
        ({"max_grad_norm": 2.0}, "flat", 2.0),
        ({"clipping": "per_layer"}, "per_layer", 0.1),
        ({"clipping": "automatic", "max_grad_norm": 1.0}, "automatic", 1.0),
    ):
        settings = classify.TrainSettings(**fields, **given)
        assert classify._clipping(settings) == clipping
        assert classify._plan(settings, 1000).max_grad_norm == bound
