"""A shared folder holds what was trained and what is claimed, and nothing that is private."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from safetensors import safe_open
from safetensors.torch import load_file
from transformers import AutoModelForSequenceClassification

import dppeft
from dppeft.errors import ArgumentError, ArgumentTypeError
from dppeft.privacy.card import PrivacyCard
from tests.sharing.adapters import ADAPTER, PAIRS, SPENT, trained_numbers, tuned
from tests.tiny import build, wake


@pytest.mark.parametrize(("name", "method"), PAIRS, ids=lambda value: value)
def test_E2_E6_the_folder_holds_the_trained_tensors_and_nothing_else(name, method, shared) -> None:
    folder = shared[0] / f"{name}-{method}"
    assert {p.name for p in folder.iterdir()} == {
        ADAPTER, "adapter_config.json", "privacy.json", "README.md",
    }  # fmt: skip
    tensors = load_file(folder / ADAPTER)
    odd = ("_module.", "module.", "_orig_mod", "grad_sample", "original_module", "modules_to_save")
    for key in tensors:
        assert key.startswith("base_model.model.")
        assert not any(word in key.replace("base_model.model.", "") for word in odd), key
    trained = trained_numbers(dppeft.wrap(build(name), method))
    if method == "ffa_lora":  # its frozen half is random, so it must be shared too
        trained += sum(t.numel() for key, t in tensors.items() if "lora_A" in key)
    if method == "rgp":  # full matrices move, through carriers that are not shared
        model = dppeft.wrap(build(name), method)
        trained -= sum(p.numel() for n, p in model.named_parameters() if ".rgp_carriers." in n)
        trained += sum(p.numel() for n, p in model.named_parameters() if ".rgp_weight." in n)
    if name == "gpt2" or name.endswith("mlm"):
        tensors = {key: t for key, t in tensors.items() if "decoder.bias" not in key}
    assert sum(t.numel() for t in tensors.values()) == trained
    size = sum(path.stat().st_size for path in folder.iterdir())
    assert size <= 1.2 * 4 * trained + 100_000
    with safe_open(folder / ADAPTER, "pt") as opened:
        claim = json.loads(opened.metadata()["privacy"])
    assert claim == {"guarantee": True, "epsilon": 3.0, "delta": 1e-5, "unit": "one row"}


def test_H3_no_local_path_is_shared(tmp_path: Path) -> None:
    private_place = tmp_path / "ward-7" / "tiny-bert"
    build("bert").save_pretrained(private_place)
    for method in ("lora", "full"):
        base = AutoModelForSequenceClassification.from_pretrained(private_place)
        path = dppeft.export(wake(dppeft.wrap(base, method)), tmp_path / "out" / method)
        for file in path.iterdir():
            assert b"ward-7" not in file.read_bytes(), file
            assert str(tmp_path).encode() not in file.read_bytes(), file
        assert "tiny-bert" in (path / "README.md").read_text()
    config = json.loads((tmp_path / "out" / "lora" / "adapter_config.json").read_text())
    assert config["base_model_name_or_path"] == "tiny-bert"


@pytest.mark.parametrize(
    ("name", "public"),
    [
        ("bert-base-uncased", "bert-base-uncased"),
        ("org/model", "org/model"),
        ("/home/alice/org/model", "model"),
        ("./model", "model"),
        ("~/models/model", "model"),
        ("a/b/model", "model"),
        (r"C:\Users\alice\model", "model"),
        ("", None),
        (None, None),
    ],
)
def test_public_names(name: str | None, public: str | None) -> None:
    from dppeft.sharing.contents import public_name

    assert public_name(name) == public


def test_cards_say_what_is_claimed(tmp_path: Path) -> None:
    model = tuned("bert")
    path = dppeft.export(model, tmp_path / "none")
    assert json.loads((path / "privacy.json").read_text())["guarantee"] is False
    assert "No privacy guarantee is claimed" in (path / "README.md").read_text()
    card = PrivacyCard.from_spent(SPENT, looked_at_without_noise=["the vocabulary"])
    text = (dppeft.export(model, tmp_path / "card", spent=card) / "README.md").read_text()
    assert "library_name: peft" in text
    assert "- differential-privacy" in text
    assert "method: `lora`" in text
    assert "(3, 1e-05)" in text
    assert "the vocabulary" in text
    assert "AutoModelForSequenceClassification" in text
    assert "num_labels=3" in text
    assert PrivacyCard.read(tmp_path / "card") == card
    full = dppeft.export(build("bert"), tmp_path / "full", spent=SPENT)
    assert "library_name: transformers" in (full / "README.md").read_text()
    claim = json.loads((full / "privacy.json").read_text())
    assert (claim["epsilon"], claim["steps"]) == (3.0, 10)


def test_export_refuses_what_it_cannot_honour(tmp_path: Path) -> None:
    model = tuned("bert")
    (tmp_path / "taken").mkdir()
    (tmp_path / "taken" / "rows.csv").write_text("private")
    with pytest.raises(ArgumentError, match="is not empty.*Name a new folder"):
        dppeft.export(model, tmp_path / "taken")
    with pytest.raises(ArgumentError, match="is a file"):
        dppeft.export(model, tmp_path / "taken" / "rows.csv")
    with pytest.raises(ArgumentError, match="as_lora_rank=4: only method 'rgp'"):
        dppeft.export(model, tmp_path / "new", as_lora_rank=4)
    with pytest.raises(ArgumentTypeError, match="Spent, a PrivacyCard or None, got float"):
        dppeft.export(model, tmp_path / "new", spent=3.0)  # type: ignore[arg-type]
    assert not (tmp_path / "new").exists()
