"""Thirteen architectures, tiny and random: those of ``tiny`` and some that only this needs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    DebertaV2Config,
    DebertaV2ForSequenceClassification,
    Qwen2Config,
    Qwen2ForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

from tests import tiny

Batch = dict[str, Tensor]


def _deberta() -> nn.Module:
    return DebertaV2ForSequenceClassification(
        DebertaV2Config(
            **tiny._ENCODER,
            num_labels=3,
            pooler_dropout=0.0,
            relative_attention=True,
            pos_att_type=["c2p", "p2c"],
            share_att_key=True,
            position_buckets=16,
            norm_rel_ebd="layer_norm",
        )
    )


def _qwen() -> nn.Module:
    return Qwen2ForCausalLM(
        Qwen2Config(
            vocab_size=tiny.VOCAB,
            hidden_size=tiny.WIDTH,
            intermediate_size=tiny.INNER,
            num_hidden_layers=tiny.LAYERS,
            num_attention_heads=tiny.HEADS,
            num_key_value_heads=1,
            max_position_embeddings=tiny.POSITIONS,
            bos_token_id=0,
            eos_token_id=0,
            pad_token_id=tiny.PAD,
        )
    )


def _bart() -> nn.Module:
    return BartForConditionalGeneration(
        BartConfig(
            vocab_size=tiny.VOCAB,
            d_model=tiny.WIDTH,
            encoder_layers=tiny.LAYERS,
            decoder_layers=tiny.LAYERS,
            encoder_attention_heads=tiny.HEADS,
            decoder_attention_heads=tiny.HEADS,
            encoder_ffn_dim=tiny.INNER,
            decoder_ffn_dim=tiny.INNER,
            max_position_embeddings=tiny.POSITIONS,
            dropout=0.0,
            pad_token_id=tiny.PAD,
            bos_token_id=0,
            eos_token_id=0,
            decoder_start_token_id=0,
            forced_eos_token_id=None,
        )
    )


def _vit() -> nn.Module:
    return ViTForImageClassification(
        ViTConfig(
            hidden_size=tiny.WIDTH,
            num_hidden_layers=tiny.LAYERS,
            num_attention_heads=tiny.HEADS,
            intermediate_size=tiny.INNER,
            image_size=8,
            patch_size=4,
            num_labels=3,
            hidden_dropout_prob=0.0,
            attention_probs_dropout_prob=0.0,
        )
    )


def _resnet() -> nn.Module:
    """With GroupNorm in place of every BatchNorm."""
    model = ResNetForImageClassification(
        ResNetConfig(
            embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], num_labels=3, layer_type="basic"
        )
    )
    for module in list(model.modules()):
        for name, child in module.named_children():
            if isinstance(child, nn.BatchNorm2d):
                setattr(module, name, nn.GroupNorm(4, child.num_features))
    return model


_MORE: dict[str, Callable[[], nn.Module]] = {
    "deberta": _deberta,
    "qwen": _qwen,
    "bart": _bart,
    "vit": _vit,
    "resnet": _resnet,
}
_BATCH_LIKE = {"deberta": "bert", "qwen": "llama", "bart": "t5"}
NAMES = (
    *("bert", "roberta", "distilbert", "albert", "electra", "deberta", "gpt2", "llama", "qwen"),
    *("t5", "bart", "vit", "resnet"),
)
IMAGES = ("vit", "resnet")
# What LoRA goes onto where no default fits.
LORA: dict[str, Any] = {
    "resnet": {"target_modules": "all-linear", "modules_to_save": ["classifier"]},
}


def build(name: str, *, seed: int = 0) -> nn.Module:
    """As ``tiny.build``, for all thirteen."""
    if name not in _MORE:
        return tiny.build(name, seed=seed)
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = _MORE[name]()
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    return model.train()


def batch_and_rows(name: str, *, seed: int = 0) -> tuple[Batch, list[Batch]]:
    """A batch that fits, and each of its examples alone without padding."""
    if name in IMAGES:
        generator = torch.Generator().manual_seed(seed)
        side = 8 if name == "vit" else 32
        batch = {
            "pixel_values": torch.randn(4, 3, side, side, generator=generator),
            "labels": torch.randint(3, (4,), generator=generator),
        }
        return batch, [{k: v[i : i + 1] for k, v in batch.items()} for i in range(4)]
    batch = tiny.make_batch(_BATCH_LIKE.get(name, name), seed=seed)
    return batch, [tiny.row(batch, i) for i in range(len(batch["labels"]))]
