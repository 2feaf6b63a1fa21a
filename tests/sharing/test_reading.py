"""What does not fit, or could run code, is an error and leaves the base model as it was."""

from __future__ import annotations

import json
import pickle
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import dppeft
from dppeft.errors import ArgumentError, CheckpointError
from tests.sharing.adapters import ADAPTER, logits, tuned
from tests.tiny import build


@pytest.fixture
def adapter(tmp_path: Path) -> Path:
    return dppeft.export(tuned("bert"), tmp_path / "adapter")


def edit(path: Path, change) -> None:
    tensors = change(load_file(path / ADAPTER))
    save_file(tensors, path / ADAPTER)


def refused(base: nn.Module, path: Path, message: str) -> None:
    """The error, and a base model that still computes what it did and can be used again."""
    before = logits(base, "bert")
    grads = [p.requires_grad for p in base.parameters()]
    with pytest.raises(CheckpointError, match=message):
        dppeft.load(base, path)
    assert torch.equal(logits(base, "bert"), before)
    assert [p.requires_grad for p in base.parameters()] == grads
    dppeft.wrap(base)


def test_E3_a_renamed_missing_or_added_tensor(adapter: Path) -> None:
    original = load_file(adapter / ADAPTER)
    first = next(iter(original))
    edit(adapter, lambda t: {key.replace("lora_A", "lora_a"): v for key, v in t.items()})
    refused(build("bert"), adapter, r"4 missing \(.*lora_A.*4 without a place \(.*lora_a")
    edit(adapter, lambda t: {k: v for k, v in original.items() if k != first})
    refused(build("bert"), adapter, f"1 missing .{first}")
    edit(adapter, lambda t: {k: v for k, v in original.items() if "classifier" not in k})
    refused(build("bert"), adapter, "2 missing .*classifier")
    edit(adapter, lambda t: original | {"base_model.model.extra": torch.zeros(1)})
    refused(build("bert"), adapter, "1 without a place .base_model.model.extra")


@pytest.mark.filterwarnings("ignore:Unexpected keyword arguments")  # PEFT's word on VERA
def test_E3_another_size_rank_or_method(adapter: Path, tmp_path: Path) -> None:
    refused(
        build("bert", num_labels=5), adapter, r"2 of another shape .*classifier.*\(3,\).*\(5,\)"
    )
    config = json.loads((adapter / "adapter_config.json").read_text())

    def changed(**fields: object) -> Path:
        (adapter / "adapter_config.json").write_text(json.dumps(config | fields))
        return adapter

    refused(build("bert"), changed(r=4), "8 of another shape")
    refused(build("bert"), changed(use_dora=True), "with method 'dora': 4 missing")
    refused(build("bert"), changed(target_modules=["query"]), "4 without a place")
    refused(build("bert"), changed(peft_type="VERA"), "without a place|cannot be put on|no conf")
    refused(
        build("bert"), changed(peft_type="NOVEL"), "peft_type='NOVEL', which the installed PEFT"
    )
    refused(build("bert"), changed(target_modules=["c_attn"]), "cannot be put on BertFor")
    other = dppeft.export(tuned("gpt2"), tmp_path / "gpt2")
    refused(build("bert"), other, "cannot be put on BertFor")
    changed()
    assert dppeft.load(build("bert"), adapter) is not None


def test_E3_another_width(tmp_path: Path) -> None:
    class Two(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.a, self.head = nn.Linear(3, width), nn.Linear(width, 2)

    path = dppeft.export(dppeft.wrap(Two(4), target_modules=["a"]), tmp_path / "two")
    with pytest.raises(CheckpointError, match="2 of another shape .*should be"):
        dppeft.load(Two(5), path)


def test_E3_an_adapter_without_effect(tmp_path: Path) -> None:
    path = dppeft.export(dppeft.wrap(build("gpt2")), tmp_path / "untrained")
    with pytest.raises(CheckpointError, match="has no effect.*written before training"):
        dppeft.load(build("gpt2"), path)


class _Trap:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return (Path.touch, (self.marker,))


@pytest.mark.parametrize(
    ("file", "message"),
    [
        (ADAPTER, "no safetensors file, or damaged"),
        ("adapter_config.json", "no readable JSON"),
        ("adapter_model.bin", "is a pickle, which can run code"),
    ],
)
def test_H1_a_pickle_is_never_opened(file: str, message: str, adapter: Path) -> None:
    marker = adapter / "marker"
    if file.endswith(".bin"):
        (adapter / ADAPTER).unlink()
    (adapter / file).write_bytes(pickle.dumps(_Trap(marker)))
    refused(build("bert"), adapter, message)
    assert not marker.exists()
    full = dppeft.export(build("bert"), adapter / "full")
    (full / "model.safetensors").write_bytes(pickle.dumps(_Trap(marker)))
    with pytest.raises(CheckpointError, match="no safetensors file, or damaged"):
        dppeft.load(build("bert"), full)
    assert not marker.exists()


def test_load_names_what_is_missing(adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="is no folder"):
        dppeft.load(build("bert"), tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError, match="has no adapter_config.json"):
        dppeft.load(build("bert"), tmp_path / "empty")
    (adapter / ADAPTER).unlink()
    with pytest.raises(CheckpointError, match=f"has no {ADAPTER}"):
        dppeft.load(build("bert"), adapter)
    (adapter / "adapter_config.json").write_text("[]")
    with pytest.raises(CheckpointError, match="holds no JSON object"):
        dppeft.load(build("bert"), adapter)
    with pytest.raises(ArgumentError, match="wrapped already"):
        dppeft.load(tuned("bert"), adapter)
    full = dppeft.export(build("bert"), tmp_path / "full")
    with pytest.raises(CheckpointError, match="2 of another name or shape .classifier"):
        dppeft.load(build("bert", num_labels=5), full)
