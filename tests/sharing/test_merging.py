"""Folding in changes no output, and no weight that is tied to another."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

import dppeft
from dppeft.errors import ArgumentError, ArgumentTypeError
from tests.sharing.adapters import PAIRS, logits, tuned
from tests.tiny import build, wake


@pytest.mark.parametrize(("name", "method"), PAIRS, ids=lambda value: value)
def test_E4_merged_logits_are_the_unmerged_ones(name: str, method: str) -> None:
    model = wake(dppeft.wrap(build(name, double=True), method), std=0.05).eval()
    expected = logits(model, name)
    merged = dppeft.merge(model)
    assert type(merged) is type(build(name))
    names = [key for key, _ in merged.named_parameters()]
    assert not any(part in key for key in names for part in ("lora_", "rgp_", "modules_to_save"))
    torch.testing.assert_close(logits(merged, name), expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("targets", [["c_attn"], ["attn.c_proj"], "all-linear"])
def test_E4_conv1d_square_or_not(targets) -> None:
    model = tuned("gpt2", target_modules=targets)
    expected = logits(model, "gpt2")
    model.merge_adapter()
    torch.testing.assert_close(logits(model, "gpt2"), expected, rtol=1e-4, atol=1e-4)
    model.unmerge_adapter()
    base = build("gpt2")
    for name, parameter in model.get_base_model().named_parameters():
        if "lora_" not in name:
            original = base.get_parameter(name.replace(".base_layer", ""))
            torch.testing.assert_close(parameter, original, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(logits(dppeft.merge(model), "gpt2"), expected, rtol=1e-4, atol=1e-4)


def test_E4_a_tied_weight_is_not_folded_into() -> None:
    with pytest.warns(UserWarning, match="tie"):  # PEFT says it too, and goes on
        model = tuned("gpt2", target_modules=["lm_head"])
    embedding = model.get_input_embeddings().weight.clone()
    with pytest.raises(ArgumentError, match="weight of lm_head is tied to another layer"):
        dppeft.merge(model)
    assert torch.equal(model.get_input_embeddings().weight, embedding)


def test_E5_a_merged_tied_model_is_written_once_and_read_back_tied(tmp_path: Path) -> None:
    model = tuned("gpt2")
    expected = logits(model, "gpt2")
    path = dppeft.export(dppeft.merge(model), tmp_path / "merged")
    assert "lm_head.weight" not in load_file(path / "model.safetensors")
    again = AutoModelForCausalLM.from_pretrained(path)
    assert again.lm_head.weight is again.transformer.wte.weight
    torch.testing.assert_close(logits(again, "gpt2"), expected, rtol=1e-4, atol=1e-4)


def test_merge_refuses_what_has_nothing_to_fold_in() -> None:
    with pytest.raises(ArgumentTypeError, match="BertForSequenceClassification has no adapter"):
        dppeft.merge(build("bert"))
    with pytest.raises(ArgumentError, match="'prompt_tuning' changes the inputs of layers"):
        dppeft.merge(tuned("gpt2", "prompt_tuning"))
