"""RGP's change of full matrices, shared as a plain LoRA adapter that needs no dppeft."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import dppeft
from dppeft.tuners.rgp import RgpLayer
from tests import architectures, tiny

READ_BACK = """
import sys, torch
from peft import PeftModel
from safetensors.torch import load_file, save_file
assert "dppeft" not in sys.modules
sys.path.insert(0, sys.argv[3])
from tests import architectures
base = architectures.build(sys.argv[1])
torch.manual_seed(9)
for p in base.classifier.parameters():
    torch.nn.init.normal_(p)
model = PeftModel.from_pretrained(base, sys.argv[2]).eval()
batch = {k: v for k, v in architectures.batch_and_rows(sys.argv[1])[0].items() if k != "labels"}
with torch.no_grad():
    save_file({"logits": model(**batch).logits.contiguous()}, sys.argv[2] + "/read.safetensors")
assert "dppeft" not in sys.modules, "the adapter needs dppeft"
"""


def moved(name: str, rank: int, scale: float = 0.05) -> nn.Module:
    """An RGP model whose matrices have moved by something of this rank."""
    model = dppeft.wrap(architectures.build(name), "rgp", r=4)
    torch.manual_seed(0)
    with torch.no_grad():
        for layer in model.modules():
            if isinstance(layer, RgpLayer):
                p, d = layer.change("default").shape
                change = scale * torch.randn(p, rank) @ torch.randn(rank, d)
                layer.rgp_weight["default"].add_(layer._weight(change))
        for name_, parameter in model.named_parameters():
            if parameter.requires_grad and ".rgp_" not in name_:
                parameter.add_(0.1)
    return model.eval()


def logits(model: nn.Module, name: str) -> Tensor:
    batch = architectures.batch_and_rows(name)[0]
    with torch.no_grad():
        return model.eval()(**batch).logits


@pytest.mark.parametrize("name", ["bert", "resnet"])
def test_plain_peft_without_dppeft_computes_the_same(name: str, tmp_path: Path) -> None:
    model = moved(name, rank=3)
    folder = dppeft.export(model, tmp_path / "lora", as_lora_rank=3)
    root = str(Path(__file__).parents[2])
    subprocess.run(
        [sys.executable, "-c", READ_BACK, name, str(folder), root], check=True, timeout=300
    )
    found = load_file(folder / "read.safetensors")["logits"]
    torch.testing.assert_close(found, logits(model, name), atol=2e-5, rtol=1e-4)
    assert not torch.allclose(found, logits(architectures.build(name).eval(), name), atol=1e-2)


@pytest.mark.parametrize("name", ["bert", "gpt2", "t5"])
def test_what_is_left_out_is_what_the_card_says(name: str, tmp_path: Path) -> None:
    model = moved(name, rank=8)
    kept = whole = 0.0
    for layer in model.modules():
        if isinstance(layer, RgpLayer):
            values = torch.linalg.svdvals(layer.change("default"))
            kept, whole = (
                kept + float(values[:2].square().sum()),
                whole + float(values.square().sum()),
            )
    folder = dppeft.export(model, tmp_path / "lora", as_lora_rank=2)
    notes = json.loads((folder / "privacy.json").read_text())["notes"]
    assert any(f"keeps {(kept / whole) ** 0.5:.4f} of its Frobenius norm" in note for note in notes)
    loaded = dppeft.load(tiny.build(name), folder)
    best = moved_by_truncation(name, model, rank=2)
    torch.testing.assert_close(logits(loaded, name), logits(best, name), atol=1e-4, rtol=1e-3)


def moved_by_truncation(name: str, model: nn.Module, *, rank: int) -> nn.Module:
    """The merged model whose changes are cut to a rank by another way than SVD factors."""
    layers = {n: m for n, m in model.named_modules() if isinstance(m, RgpLayer)}
    with torch.no_grad():
        for layer in layers.values():
            change = layer.change("default")
            leading = torch.linalg.eigh(change @ change.T)[1][:, -rank:]
            cut = leading @ leading.T @ change
            layer.rgp_weight["default"].copy_(layer.get_base_layer().weight + layer._weight(cut))
    return model


def test_the_file_is_small(tmp_path: Path) -> None:
    model = moved("bert", rank=2)
    sizes = {}
    for rank in (None, 2):
        folder = dppeft.export(model, tmp_path / str(rank), as_lora_rank=rank)
        sizes[rank] = (folder / "adapter_model.safetensors").stat().st_size
    assert sizes[2] < sizes[None] / 2


def test_exact_export_is_exact(tmp_path: Path) -> None:
    model = moved("gpt2", rank=8)
    again = dppeft.load(architectures.build("gpt2"), dppeft.export(model, tmp_path / "exact"))
    assert torch.equal(logits(again, "gpt2"), logits(model, "gpt2"))


@pytest.mark.parametrize("method", ["lora", "full"])
def test_other_methods_have_no_such_change(method: str, tmp_path: Path) -> None:
    model = dppeft.wrap(tiny.build("bert"), method)
    with pytest.raises(dppeft.DppeftError, match="only method 'rgp'"):
        dppeft.export(model, tmp_path / "out", as_lora_rank=4)
    assert not (tmp_path / "out").exists()


def test_a_rank_must_be_a_whole_number(tmp_path: Path) -> None:
    with pytest.raises(dppeft.DppeftError, match="as_lora_rank=0"):
        dppeft.export(moved("bert", 2), tmp_path / "out", as_lora_rank=0)
