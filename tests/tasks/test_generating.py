"""Generation tasks: their files, and the whole way on a tiny model and made-up rows."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner, Result

from dppeft.errors import ArgumentError, DataError
from tasks import dart, e2e, writing
from tasks.generating import Settings, generation, load_task, run_generation, with_paper
from tasks.pairs import Pairs, references_of
from tests.tiny import descriptions, save_decoder


def _write_e2e(folder: Path) -> Path:
    for name, count, seed in ((e2e.VALID, 300, 0), (e2e.TEST, 20, 1)):
        lines = [f"{source}||{target}" for source, target in descriptions(count, seed=seed)]
        (folder / name).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return folder


def _write_dart(folder: Path, name: str = dart.DEV, count: int = 40) -> Path:
    entries = [
        {
            "tripleset": [[f"Place {i}", "FOOD", "French"], [f"Place {i}", "AREA", "Centre"]],
            "annotations": [{"text": f"Text {i}."}, {"text": f"Other {i}."}, {"text": " "}],
        }
        for i in range(count)
    ]
    (folder / name).write_text(json.dumps(entries), encoding="utf-8")
    return folder


def test_rows_of_one_source_are_its_references() -> None:
    rows = Pairs(name="x", sources=["b", "a", "b"], targets=["1", "2", "3"])
    found = references_of(rows)
    assert (found.sources, found.texts) == (["b", "a"], [["1", "3"], ["2"]])
    assert len(rows.some(None)) == len(rows.some(99)) == 3
    assert rows.some(2) == rows.some(2)
    assert len(found.some(1)) == 1


def test_e2e_files(tmp_path: Path) -> None:
    small = e2e.load(_write_e2e(tmp_path))
    assert small.name == "e2e, validation rows only"
    assert len(small.train) == 300
    assert sum(map(len, small.evaluation.texts)) == 20
    assert len(small.evaluation) == len(set(small.evaluation.sources)) < 20
    (tmp_path / e2e.VALID).rename(tmp_path / e2e.TRAIN)
    whole = e2e.load(tmp_path)
    assert (whole.name, whole.recipe, whole.eval_rows) == ("e2e", e2e.RECIPE, None)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a||b\n\nno bars\n", r"Line 3 of .*e2e_valid.txt is not of the form"),
        ("a||\n", "Line 1 of"),
        ("||b\n", "Line 1 of"),
        ("a||b||c\n", "Line 1 of"),
        ("\n \n", "has no rows"),
    ],
)
def test_ill_formed_lines_are_counted_not_shown(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / e2e.VALID).write_text(text)
    with pytest.raises(DataError, match=message) as error:
        e2e.read_lines(tmp_path / e2e.VALID)
    assert "no bars" not in str(error.value)


def test_dart_is_split_by_triple_set(tmp_path: Path) -> None:
    task = dart.load(_write_dart(tmp_path, count=200))
    assert task.train.sources[0].startswith("Place ")
    assert " : food : French | Place " in task.train.sources[0]
    private, held_out = set(task.train.sources), set(task.evaluation.sources)
    assert not private & held_out
    assert len(private) + len(held_out) == 200
    assert 20 <= len(held_out) <= 60  # a fifth, of 200: 40, standard deviation 5.7
    assert len(task.train) + sum(map(len, task.evaluation.texts)) == 400  # empty texts are dropped
    assert dart.load(tmp_path) == task
    turned = Pairs(
        name="x",
        sources=[" | ".join(reversed(s.split(" | "))) for s in held_out],
        targets=["t"] * len(held_out),
    )
    assert len(dart.split(turned)[0]) == 0  # the order of triples makes no other set


def test_dart_files_of_both_kinds_and_none(tmp_path: Path) -> None:
    _write_dart(tmp_path, dart.TRAIN)
    _write_dart(tmp_path, dart.TEST, count=3)
    whole = dart.load(tmp_path)
    assert (whole.name, len(whole.train), len(whole.evaluation)) == ("dart", 80, 3)
    for content, message in (
        ("[1", "is no JSON"),
        ("{}", "has no rows"),
        ('[{"tripleset": [["a", "b"]], "annotations": []}]', r"Entry 0 \(from 0\)"),
        ('[{"tripleset": [], "annotations": []}]', r"Entry 0 \(from 0\)"),
        ('[{"annotations": [{"text": "t"}]}]', r"Entry 0 \(from 0\)"),
    ):
        (tmp_path / dart.DEV).write_text(content)
        with pytest.raises(DataError, match=message):
            dart.read_file(tmp_path / dart.DEV)


def test_real_files_have_their_known_sizes() -> None:
    folder = Path(os.environ.get("DPPEFT_DATA", "nowhere"))
    if not (folder / e2e.VALID).is_file() or not (folder / dart.DEV).is_file():
        pytest.skip("DPPEFT_DATA names no folder with E2E's and DART's files")
    task = e2e.load(folder)
    assert len(task.train) == 4672
    assert (len(task.evaluation), sum(map(len, task.evaluation.texts))) == (630, 4693)
    assert not set(task.train.sources) & set(task.evaluation.sources)
    rows = dart.load(folder)
    assert len(rows.train) + sum(map(len, rows.evaluation.texts)) == 6980


def _run(*arguments: object) -> Result:
    app = typer.Typer()
    for task in ("e2e", "dart"):
        app.command(task)(generation)
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    (tmp_path / "base").mkdir()
    save_decoder(tmp_path / "base")
    return _write_dart(_write_e2e(tmp_path))


TINY = ("--epochs", 1, "--batch-size", 60, "--max-length", 30, "--max-new-tokens", 12, "--beams", 2)


def test_the_whole_way_from_rows_to_a_new_process(folder: Path) -> None:
    (folder / e2e.VALID).rename(folder / e2e.TRAIN)  # whose recipe adapts both layers
    script = folder / "measure_scores.py"
    script.write_text("print('BLEU: 0.2500')")
    shared, figures = folder / "shared", folder / "figures.json"
    options = ("--model", folder / "base", "--data", folder, "--output", shared, *TINY)
    options += ("--epsilon", 1000, "--delta", 1e-4, "--lr", 0.02, "--seed", 0, "--eval-rows", 5)
    options += ("--epochs", 15, "--batch-size", 100)
    done = _run(
        "e2e", *options, "--zero-shot", "--compare", "--scorer", script, "--result", figures
    )
    assert done.exit_code == 0, done.output
    text = done.output
    assert text.index("epsilon (pld)") < text.index("rows cut to 30") < text.index("private lora:")
    assert "METEOR" in text
    rows = json.loads(figures.read_text())
    by_run = {(row["method"], row["epsilon"]) for row in rows}
    assert by_run == {("lora", 1000.0), ("none", None), ("lora", None)}
    values = {(row["method"], row["epsilon"], row["metric"]): row["value"] for row in rows}
    assert len(values) == len(rows)
    assert values["lora", 1000.0, "BLEU (official)"] == 0.25
    assert values["lora", 1000.0, "chrF"] > values["none", None, "chrF"] + 10
    assert f"BLEU: {values['lora', 1000.0, 'BLEU']:.2f} on 5 of e2e_test.txt" in text
    card = json.loads((shared / "privacy.json").read_text())
    assert f"({card['epsilon']:.2f}, 0.0001)-DP for one row" in text
    assert card["steps"] == 45
    # What was written here is what a new process writes from the shared folder alone.
    first = text.split("  a reference: ")[1].split("  private lora: ")[1].splitlines()[0].strip()
    assert text.split("the first source again:")[1].strip() == first


def test_without_a_budget_no_guarantee_is_claimed(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writing, "read_back", lambda *given: None)  # tried above; takes seconds
    options = ("--model", folder / "base", "--data", folder, *TINY, "--output", folder / "shared")
    done = _run("dart", *options, "--epsilon", "inf", "--rows", 61, "--eval-rows", 2)
    assert done.exit_code == 0, done.output
    assert "NO GUARANTEE" in done.output
    assert "61 private rows" in done.output
    assert "with no guarantee" in done.output
    assert "-DP for" not in done.output
    assert json.loads((folder / "shared" / "privacy.json").read_text()).get("epsilon") is None


def test_mistakes_are_one_line_before_anything_is_spent(folder: Path, tmp_path: Path) -> None:
    base = ("--model", folder / "base", *TINY, "--output", folder / "shared")
    (folder / "empty").mkdir()
    for arguments, message in (
        (("--data", folder / "none"), "is no folder. Pass one that holds e2e_test.txt"),
        ((), "Pass --data with a folder that holds e2e_test.txt"),
        (("--data", folder / "empty"), "holds none of e2e_train.txt, e2e_valid.txt"),
        (("--data", folder, "--method", "lorra"), "Did you mean 'lora'"),
        (("--data", folder, "--rows", 0), "Expected --rows >= 1, got 0"),
        (("--data", folder, "--eval-rows", 0), "Expected --eval-rows >= 1, got 0"),
        (("--data", folder, "--beams", 0), "Expected num_beams >= 1, got 0"),
        (("--data", folder, "--output", folder), "is not empty. Name a new folder"),
        (("--data", folder, "--scorer", folder / "x.py"), "is no file. Pass the path of measure_"),
        (("--data", folder, "--model", folder / "x"), "no causal language model"),
        (("--data", folder, "--max-length", 41), "--max-length of at most 40"),
        (("--data", folder, "--max-new-tokens", 39), "more than the 40 positions"),
        (("--data", folder, "--epsilon", "nan"), "epsilon"),
    ):
        done = _run("e2e", *base, *arguments)
        assert done.exit_code == 2, (arguments, done.output)
        (line,) = (line for line in done.output.splitlines() if line.startswith("Error: "))
        assert message in line, line
    assert not (tmp_path / "state").exists()  # no ledger: nothing was released
    assert not (folder / "shared").exists()


def test_a_task_that_is_none_of_these(tmp_path: Path) -> None:
    settings = Settings(
        task="wikibio", method="lora", epsilon=8, delta=1e-5, data=None, model="x", output=tmp_path
    )
    with pytest.raises(ArgumentError, match="Unknown task 'wikibio'. Tasks: e2e, dart"):
        run_generation(settings)


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (e2e.TRAIN, {"lora": 2e-3, "full": 2e-3, "bitfit": 1e-3}),  # the paper's is full's
        (e2e.VALID, {"lora": 1.5e-2, "full": 0.15 * 1.5e-2, "bitfit": 7.5e-3}),
    ],
)
def test_each_method_has_its_rate(folder: Path, file: str, expected: dict[str, float]) -> None:
    (folder / e2e.VALID).rename(folder / file)
    rates = {}
    for method in expected:
        settings = Settings(
            task="e2e", method=method, epsilon=8, delta=1e-5, data=folder, model="x", output=folder
        )
        rates[method] = load_task(settings).recipe.lr
    assert rates == pytest.approx(expected)


def test_a_recipe_fills_in_what_the_command_line_does_not_say(folder: Path) -> None:
    given = Settings(
        task="e2e",
        method="lora",
        epsilon=8.0,
        delta=1e-5,
        data=folder,
        model="smollm2",
        output=folder / "out",
        recipe={"epochs": 1.0, "lr": None},
        decoding={"num_beams": None, "max_new_tokens": 20},
    )
    silent = {"method": None, "epsilon": None, "model": None}
    filled = with_paper(given, "yu2022-lora-gpt2-medium-e2e", silent)
    assert (filled.model, filled.epsilon, filled.noise_multiplier) == ("gpt2-medium", None, 0.6)
    assert filled.private
    assert filled.options == {"r": 4, "lora_alpha": 32}
    task = load_task(filled)
    assert (task.recipe.epochs, task.recipe.lr, task.recipe.clipping) == (1.0, 4e-4, "per_layer")
    assert (task.decoding.num_beams, task.decoding.max_new_tokens) == (10, 20)
    spoken = with_paper(
        given, "yu2022-lora-gpt2-e2e", {"method": "full", "epsilon": 3.0, "model": "x"}
    )
    assert (spoken.method, spoken.model, spoken.options) == ("full", "x", {})
    assert spoken.noise_multiplier is None
    with pytest.raises(ArgumentError, match="is for e2e, not for dart"):
        with_paper(dataclasses.replace(given, task="dart"), "yu2022-lora-gpt2-e2e", silent)
