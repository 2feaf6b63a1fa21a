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
METHODS = ("lora", "dora", "ffa_lora", "adapter", "compacter", "rgp", "bitfit", "head")
HEADLESS, WITHOUT_BIASES = ("gpt2", "llama", "t5", "bert-mlm"), ("llama", "t5")
PAIRS = [
    (name, method)
    for name in ("bert", "roberta", "distilbert", "gpt2-classify", *HEADLESS)
    for method in METHODS
    if not (method == "head" and name in HEADLESS)
    if not (method == "bitfit" and name in WITHOUT_BIASES)
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


def same(a: Tensor, b: Tensor, method: str) -> bool:
    """Equal to the bit, with two exceptions.

    The rounding of Compacter's small products varies with where its memory lies, and RGP writes
    displaced coordinates (a test's doing) into the weight.
    """
    close = method in ("compacter", "rgp") and torch.allclose(a, b, rtol=1e-3, atol=1e-4)
    return close or torch.equal(a, b)
