"""Tuned models to share, and what they compute."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import dppeft
from tests.tiny import build, make_batch, wake

ADAPTER = "adapter_model.safetensors"
SPENT = dppeft.Spent(
    epsilon=3.0, delta=1e-5, steps=10, sample_rate=0.1, noise_multiplier=1.1, accountant="pld"
)
PAIRS = [
    *((name, m) for name in ("bert", "gpt2-classify") for m in ("lora", "dora", "ffa_lora")),
    *((name, m) for name in ("bert", "gpt2-classify") for m in ("head", "bitfit")),
    *((name, "lora") for name in ("roberta", "distilbert", "llama", "t5", "bert-mlm", "gpt2")),
    ("gpt2", "bitfit"),
]


def tuned(name: str, method: str = "lora", **options: object) -> nn.Module:
    return wake(dppeft.wrap(build(name), method, **options)).eval()


def logits(model: nn.Module, name: str) -> Tensor:
    batch = make_batch(name)
    if name != "t5":  # makes its decoder inputs from them
        del batch["labels"]
    with torch.no_grad():
        return model.eval()(**batch).logits


def trained_numbers(model: nn.Module) -> int:
    return sum(p.numel() for p in model.parameters() if p.requires_grad)
