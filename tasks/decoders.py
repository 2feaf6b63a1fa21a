"""The causal language model that a run starts from."""

from __future__ import annotations

from typing import Any

from dppeft.errors import ArgumentError
from tasks import smollm2
from tasks.prompts import with_padding


def load_decoder(name: str) -> tuple[Any, Any]:
    """Model and tokenizer for ``smollm2``, a folder, or a name on the hub.

    Float32, dropout off: clipped gradients need no further noise. The tokenizer can pad.

    Raises:
        ArgumentError: nothing of that name, or no causal language model.
        DataError: a package of ``smollm2`` is missing, or the tokenizer has no end token.
    """
    from torch import nn

    model, tokenizer = smollm2.load() if name == smollm2.NAME else _pretrained(name)
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    if hasattr(model.config, "attention_dropout"):
        model.config.attention_dropout = 0.0
    return model, with_padding(tokenizer)


def _pretrained(name: str) -> tuple[Any, Any]:
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    try:
        model = AutoModelForCausalLM.from_pretrained(name, dtype=torch.float32)
        return model, AutoTokenizer.from_pretrained(name)
    except (OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise ArgumentError(
            f"--model {name}: no causal language model and tokenizer could be read ({reason}). "
            f"Name a folder, a model of the hub such as gpt2, or {smollm2.NAME}."
        ) from error


def lora_options(method: str) -> dict[str, Any]:
    """LoRA as Yu et al. (2022, arXiv 2110.06500) use it for generation: r = 4, alpha = 32, q and v.

    On separate projections (Llama: ``q_proj``, ``v_proj``) that is what trains. GPT-2 has one
    matrix for queries, keys and values (``c_attn``); PEFT 0.21 puts one pair of factors beside it
    and has no option that leaves out the keys, so that these are adapted, too. The numbers trained
    are as many: r x d and 3d x r here, 2r x d and 2d x r in the paper's merged layer.
    """
    if method != "lora":
        return {}
    return {"r": 4, "lora_alpha": 32}
