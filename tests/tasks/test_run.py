"""The demo's whole way, on a tiny encoder and made-up rows in SST-2's form."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from transformers import AutoTokenizer

import dppeft
from dppeft.errors import ArgumentError
from dppeft.text import TokenDataset
from tasks.classifying import Work, run_task
from tasks.common import Recipe, Rows, Task
from tasks.objectives import make_objective
from tasks.settings import Settings
from tasks.training import encode, majority_accuracy, make_optimizer, with_settings, words_accuracy
from tests.tiny import build, opinions, save_folder


def _settings(folder: Path, base: Path, **more: object) -> Settings:
    fields = {
        "task": "sst2",
        "method": "lora",
        "epsilon": 1000.0,
        "delta": 1e-5,
        "compare": True,
        "data": folder,
        "model": str(base),
        "output": folder / "shared",
        "sentences": ["a very good film", "an awful plot"],
        "rows": None,
        "engine_options": {"seed": 0},
        "recipe": {"epochs": 15, "batch_size": 100, "lr": 0.02, "head_lr": 0.05, "max_length": 16},
    }
    return Settings(**{**fields, **more})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    for split, count, seed in (("train", 400, 0), ("dev", 100, 1)):
        lines = [
            f"{text}\t{label}" for text, label in zip(*opinions(count, seed=seed), strict=True)
        ]
        (tmp_path / f"sst2_{split}.tsv").write_text("\n".join(["sentence\tlabel", *lines]) + "\n")
    return tmp_path


@pytest.fixture
def sentence_folder(tmp_path: Path) -> Path:
    base = save_folder(tmp_path / "base")
    (base / "1_Pooling").mkdir()
    (base / "1_Pooling" / "config.json").write_text('{"pooling_mode_mean_tokens": true}')
    return base


def test_the_main_job_from_rows_to_a_new_process(
    folder: Path, sentence_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    torch.manual_seed(0)  # LoRA's start; the noise has the run's own seed
    run_task(_settings(folder, sentence_folder))
    text = capsys.readouterr().out
    assert text.index("epsilon (pld)") < text.index("trained 80 steps")  # the plan comes first
    accuracy = float(text.split("accuracy: ")[1].split()[0])
    assert accuracy > 0.8
    for row in ("majority class", "private bag of words", "private lora", "without privacy"):
        assert row in text
    card = json.loads((folder / "shared" / "privacy.json").read_text())
    size = sum(f.stat().st_size for f in (folder / "shared").rglob("*") if f.is_file())
    assert f"shared: {size:,} bytes" in text
    assert f"({card['epsilon']:.2f}, 1e-05)-DP for one row" in text
    new_process = text.split("read back in a new process")[1]
    for sentence in ("a very good film", "an awful plot"):
        (line,) = (line for line in new_process.splitlines() if line.endswith(sentence))
        assert line.split()[0] in ("positive", "negative")


@pytest.mark.parametrize("method", ["lora", "full"])
def test_infilling_from_rows_to_a_new_process(
    method: str, folder: Path, sentence_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A masked language model, no head, and the same report; it reads words back elsewhere."""
    build("bert-mlm", vocab_size=17, pad_token_id=0).save_pretrained(sentence_folder)
    words = ["bad", "good"]
    settings = _settings(
        folder,
        sentence_folder,
        method=method,
        compare=False,
        objective="infilling",
        template="{text} very {mask}",
        label_words=words,
        result=folder / "found.json",
    )
    torch.manual_seed(0)
    run_task(settings)
    text = capsys.readouterr().out
    assert "trained 60 steps" in text  # no warm start: there is no head
    assert "negative" in text.split("read back in a new process")[1]
    found, untrained = json.loads((folder / "found.json").read_text())
    assert found["task"] == "sst2, infilling"
    assert found["value"] > 0.8
    assert "--template '{text} very {mask}' --label-word bad --label-word good" in found["command"]
    assert (untrained["method"], untrained["trained_parameters"]) == ("none", 0)
    assert untrained["value"] < found["value"]


def test_infilling_refuses_what_does_not_fit_before_the_plan(
    folder: Path, sentence_folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = {"objective": "infilling", "compare": False}
    with pytest.raises(ArgumentError, match="'terrible' is 1 tokens .* Choose a commoner word"):
        run_task(_settings(folder, sentence_folder, **given))
    two = {"label_words": ["bad", "good"]}
    with pytest.raises(ArgumentError, match="no head for masked words .* Pass --model with"):
        run_task(_settings(folder, sentence_folder, **given, **two))
    words = {"label_words": ["bad", "good", "not"]}
    with pytest.raises(ArgumentError, match=r"3 label words for 2 classes \(negative, positive\)"):
        run_task(_settings(folder, sentence_folder, **given, **words))
    with pytest.raises(ArgumentError, match="A head takes no template or label words"):
        run_task(_settings(folder, sentence_folder, label_words=["bad", "good"]))
    with pytest.raises(ArgumentError, match="Unknown objective 'infiling'"):
        run_task(_settings(folder, sentence_folder, objective="infiling"))
    assert "epsilon" not in capsys.readouterr().out


def test_wrong_use_is_refused_before_anything_is_read(folder: Path, sentence_folder: Path) -> None:
    with pytest.raises(ArgumentError, match="Unknown task 'sst3'. Tasks: movie_reviews, sst2"):
        run_task(_settings(folder, sentence_folder, task="sst3"))
    with pytest.raises(ArgumentError, match="Did you mean 'lora'"):
        run_task(_settings(folder, sentence_folder, method="lorra"))
    with pytest.raises(ArgumentError, match="is not empty. Name a new folder"):
        run_task(_settings(folder, sentence_folder, output=folder))
    with pytest.raises(ArgumentError, match="Expected --rows >= 1, got 0"):
        run_task(_settings(folder, sentence_folder, rows=0))


def test_the_two_rates_fall_to_zero() -> None:
    model = dppeft.wrap(build("bert"), "lora")
    recipe = Recipe(lr=0.1, head_lr=0.3)
    optimizer, schedule = make_optimizer(model, recipe, steps=4)
    assert sum(len(group["params"]) for group in optimizer.param_groups) == sum(
        p.requires_grad for p in model.parameters()
    )
    rates = []
    for _ in range(5):
        rates.append([group["lr"] for group in optimizer.param_groups])
        optimizer.step()
        schedule.step()
    expected = [[0.3, 0.1], [0.225, 0.075], [0.15, 0.05], [0.075, 0.025], [0.0, 0.0]]
    torch.testing.assert_close(torch.tensor(rates), torch.tensor(expected))


def test_a_head_alone_has_one_rate() -> None:
    optimizer, _ = make_optimizer(dppeft.wrap(build("bert"), "head"), Recipe(head_lr=0.3), steps=4)
    assert [group["lr"] for group in optimizer.param_groups] == [0.3]


def test_bag_of_words_learns_with_its_own_plan(tmp_path: Path) -> None:
    train, held_out = (
        Rows(name="x", texts=texts, labels=labels)
        for texts, labels in (opinions(600), opinions(200, seed=1))
    )
    plan = dppeft.plan(num_examples=600, batch_size=100, steps=5, epsilon=100, delta=1e-5)
    options = {"ledger": tmp_path / "ledger.jsonl", "seed": 0}
    score = words_accuracy(train, held_out, classes=2, plan=plan, options=options)
    assert score > 0.9 > majority_accuracy(held_out.labels)


def test_settings_of_the_command_line_replace_the_recipe() -> None:
    recipe = with_settings(Recipe(epochs=3, lr=1.0), epochs=5.0, lr=None)
    assert (recipe.epochs, recipe.lr) == (5.0, 1.0)


def test_the_warm_start_spends_from_the_one_budget(
    sentence_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    texts, labels = opinions(200)
    tokenizer = AutoTokenizer.from_pretrained(sentence_folder)
    recipe = Recipe(epochs=2, batch_size=50, head_steps=5, warm_lr=0.3, bare_layers=0.5)
    assert recipe.steps(200) == 5 + 8
    plan = dppeft.plan(
        num_examples=200, batch_size=50, steps=13, epsilon=20, delta=1e-3, max_grad_norm=1.0
    )
    tokens, _ = encode(Rows(name="x", texts=texts, labels=labels), tokenizer, recipe)
    work = Work(
        console=Console(quiet=True),
        task=Task(
            name="x",
            train=Rows(name="x", texts=texts, labels=labels),
            evaluation=[],
            classes=("no", "yes"),
            recipe=recipe,
        ),
        objective=make_objective(
            "head",
            str(sentence_folder),
            tokenizer,
            classes=("no", "yes"),
            template="",
            label_words=(),
        ),
        plan=plan,
        tokens=tokens,
        cut=0,
        dataset=TokenDataset(tokens, labels),
        method="lora",
        engine_options={"seed": 1},
    )
    model, done = work.train(plan, "private")
    spent = done.run.spent()
    assert spent.steps == 13
    assert spent.epsilon == pytest.approx(plan.epsilon(), rel=1e-6)
    assert [e.step for e in done.run.ledger.entries] == [*range(5), *range(8)]
    adapters = [name for name, p in model.named_parameters() if "lora_" in name]
    assert adapters
    assert not any("layer.0." in name for name in adapters)
