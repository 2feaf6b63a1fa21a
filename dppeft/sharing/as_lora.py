"""A full-size change of weights as a plain LoRA adapter: post-processing of what was released."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from dppeft import _validate
from dppeft.errors import ArgumentError
from dppeft.sharing.contents import adapter_tensors

if TYPE_CHECKING:
    from peft import LoraConfig, PeftModel


def as_lora(model: PeftModel, rank: int) -> tuple[dict[str, Tensor], LoraConfig, float]:
    """The best approximation of rank ``rank`` of each matrix's change (singular values).

    Returns:
        The tensors in PEFT's names, with those that are trained whole; the configuration; and the
        Frobenius norm of what is kept over that of the change.

    Raises:
        ArgumentError: the method does not change whole matrices.
    """
    rank = _validate.positive_integer(as_lora_rank=rank)
    if str(model.active_peft_config.peft_type.value) != "RGP":
        raise ArgumentError(
            f"as_lora_rank={rank}: only method 'rgp' turns a full-size change into LoRA, and this "
            "model was not trained with it. Leave as_lora_rank out."
        )
    tensors = {n: t for n, t in adapter_tensors(model).items() if ".rgp_" not in n}
    kept = whole = 0.0
    for path, layer in _layers(model).items():
        if getattr(layer.get_base_layer(), "dilation", (1, 1)) != (1, 1):
            raise ArgumentError(
                f"{path.removeprefix('base_model.model.')} is a dilated convolution, which PEFT's "
                "LoRA computes without its dilation. Leave as_lora_rank out."
            )
        left, right, shares = _factors(layer.change(model.active_adapter), rank)
        kept, whole = kept + shares[0], whole + shares[1]
        if layer.get_base_layer().weight.dim() == 4:  # a convolution into r channels, and 1 x 1
            left = left[:, :, None, None]
            right = right.view(rank, *layer.get_base_layer().weight.shape[1:])
        tensors[f"{path}.lora_A.weight"] = right.contiguous()
        tensors[f"{path}.lora_B.weight"] = left.contiguous()
    return tensors, _config(model, rank), math.sqrt(kept / whole) if whole else 1.0


def _layers(model: PeftModel) -> dict[str, Any]:
    from dppeft.tuners.rgp import RgpLayer

    mine = model.active_adapter  # another adapter may sit in other places
    return {
        path: m
        for path, m in model.named_modules()
        if isinstance(m, RgpLayer) and mine in m.rgp_weight
    }


def _factors(change: Tensor, rank: int) -> tuple[Tensor, Tensor, tuple[float, float]]:
    """(p, rank) and (rank, d), filled up with zeros; squared norms of the product and of all."""
    u, s, v = torch.linalg.svd(change.float(), full_matrices=False)
    k = min(rank, len(s))
    root = s[:k].sqrt()
    left = change.new_zeros(len(change), rank, dtype=torch.float32)
    right = change.new_zeros(rank, change.shape[1], dtype=torch.float32)
    left[:, :k], right[:k] = u[:, :k] * root, root[:, None] * v[:k]
    return left, right, (float(s[:k].square().sum()), float(s.square().sum()))


def _config(model: PeftModel, rank: int) -> LoraConfig:
    from peft import LoraConfig
    from transformers.pytorch_utils import Conv1D

    own: Any = model.active_peft_config
    bases = [layer.get_base_layer() for layer in _layers(model).values()]
    return LoraConfig(
        r=rank,
        lora_alpha=rank,  # a scale of 1
        target_modules=own.target_modules,
        exclude_modules=own.exclude_modules,
        layers_to_transform=own.layers_to_transform,
        layers_pattern=own.layers_pattern,
        modules_to_save=own.modules_to_save,
        task_type=own.task_type,
        fan_in_fan_out=all(isinstance(base, Conv1D) for base in bases),
    )
