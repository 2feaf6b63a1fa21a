"""What was exported reads back exactly, in plain PEFT too, and can be trained on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import dppeft
from dppeft.errors import ArgumentError
from tests.sharing.adapters import ADAPTER, PAIRS, logits, same, trained_numbers, tuned
from tests.tiny import build, wake

ROOT = Path(__file__).parents[2]


def test_plain_peft_in_a_new_process_computes_the_same(shared) -> None:
    folder, expected = shared
    subprocess.run(
        [sys.executable, "-m", "tests.sharing.read_back", str(folder)],
        cwd=ROOT,
        check=True,
        timeout=300,
    )
    actual = load_file(folder / "read_back.safetensors")
    (folder / "read_back.safetensors").unlink()
    assert actual.keys() == expected.keys()
    for pair, values in expected.items():
        assert same(actual[pair], values, pair.rpartition("-")[2]), pair


@pytest.mark.parametrize(("name", "method"), PAIRS, ids=lambda value: value)
def test_load_restores_adapter_and_head_exactly(name: str, method: str, shared) -> None:
    folder, expected = shared
    base = build(name)
    for head in ("classifier", "score"):
        for parameter in getattr(base, head, nn.Module()).parameters():
            nn.init.normal_(parameter)
    model = dppeft.load(base, folder / f"{name}-{method}")
    assert same(logits(model, name), expected[f"{name}-{method}"], method)
    assert not model.training
    assert trained_numbers(model) == 0


@pytest.mark.parametrize("name", ["bert", "gpt2"])
def test_full_and_merged_models_are_written_whole(name: str, tmp_path: Path) -> None:
    model = wake(dppeft.wrap(build(name), "full")).eval()
    path = dppeft.export(model, tmp_path / "full")
    auto = AutoModelForCausalLM if name == "gpt2" else AutoModelForSequenceClassification
    assert torch.equal(logits(auto.from_pretrained(path), name), logits(model, name))
    assert torch.equal(logits(dppeft.load(build(name, seed=5), path), name), logits(model, name))


def test_plain_modules_round_trip(tmp_path: Path) -> None:
    def make() -> nn.Module:
        torch.manual_seed(0)
        body = nn.Sequential(nn.Linear(3, 4), nn.ReLU())
        return nn.Sequential(body, nn.Linear(4, 2))

    x = torch.randn(5, 3)
    for method in ("lora", "full"):
        options = {"target_modules": ["0.0"]} if method == "lora" else {}
        model = wake(dppeft.wrap(make(), method, **options))
        path = dppeft.export(model, tmp_path / method)
        assert torch.equal(dppeft.load(make(), path)(x), model(x))


@pytest.mark.parametrize("method", ["prompt_tuning", "p_tuning", "ia3", "vera", "adalora", "loha"])
@pytest.mark.filterwarnings("ignore")  # PEFT's own remarks
def test_other_tuners_round_trip(method: str, tmp_path: Path) -> None:
    options = {"total_step": 10} if method == "adalora" else {}
    model = tuned("roberta", method, **options)
    path = dppeft.export(model, tmp_path / method)
    assert torch.equal(
        logits(dppeft.load(build("roberta"), path), "roberta"), logits(model, "roberta")
    )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_F3_half_precision_dtypes_survive_the_round_trip(dtype: torch.dtype, tmp_path) -> None:
    model = wake(dppeft.wrap(build("bert").to(dtype)), std=0.05).eval()
    path = dppeft.export(model, tmp_path / "half")
    kinds = {("lora" in name): t.dtype for name, t in load_file(path / ADAPTER).items()}
    assert kinds == {True: torch.float32, False: dtype}
    assert torch.equal(
        logits(dppeft.load(build("bert").to(dtype), path), "bert"), logits(model, "bert")
    )


@pytest.mark.parametrize("method", ["lora", "dora", "ffa_lora", "bitfit", "head"])
def test_E7_load_for_more_training_trains_what_was_trained(method: str, tmp_path: Path) -> None:
    model = tuned("bert", method)
    path = dppeft.export(model, tmp_path / "adapter")
    again = dppeft.load(build("bert").train(), path, is_trainable=True)
    names = {n for n, p in again.named_parameters() if p.requires_grad}
    assert names == {n for n, p in model.named_parameters() if p.requires_grad}
    assert again.training
    assert torch.equal(logits(again, "bert"), logits(model, "bert"))
    second = dppeft.export(wake(again, seed=3), tmp_path / "second")
    assert torch.equal(logits(dppeft.load(build("bert"), second), "bert"), logits(again, "bert"))


def test_E7_prompts_cannot_be_trained_on(tmp_path: Path) -> None:
    path = dppeft.export(tuned("gpt2", "prompt_tuning"), tmp_path / "prompts")
    with pytest.raises(ArgumentError, match="PEFT keeps of PROMPT_TUNING only what inference"):
        dppeft.load(build("gpt2"), path, is_trainable=True)
