"""How the frozen part of a model is computed during a step, and leaving no trace of it afterwards.

bfloat16: the forward and backward pass run under autocast, and the frozen weights of linear and
embedding layers are held as bfloat16 copies made once, so that no step casts them again. Trained
weights, per-example norms, clipping factors, sums and noise stay float32.

Attention: on a CPU the plain ("eager") attention is faster than torch's fused one while rows are
short. Both compute the same function.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from dppeft import _validate
from dppeft.errors import ArgumentError

PRECISIONS = ("auto", "float32", "bf16")
# What transformers and bitsandbytes write on a model and on a weight that they quantised.
_QUANTISED_MODEL = ("quantization_method", "is_loaded_in_4bit", "is_loaded_in_8bit")
_QUANTISED_WEIGHTS = ("Params4bit", "Int8Params")

# Tokens per row up to which eager attention is not slower on a CPU (22M-parameter encoder, 1,280
# tokens per physical batch, float32: time relative to the fused one 0.97 to 1.01 up to 64 tokens,
# then 1.17 at 128 and 1.47 at 512). Where bfloat16 is native it gains much more on short rows.
EAGER_UP_TO = 64


def choose_precision(precision: str, device: torch.device) -> str:
    """``"auto"`` resolved to ``"bf16"`` where the processor computes it natively."""
    _validate.one_of(PRECISIONS, precision=precision)
    if precision != "auto":
        return precision
    return "bf16" if has_native_bf16(device) else "float32"


def has_native_bf16(device: torch.device) -> bool:
    """Whether matrix products in bfloat16 are done by the hardware rather than emulated."""
    if device.type == "cuda":
        return bool(torch.cuda.is_bf16_supported(including_emulation=False))
    if device.type == "cpu":
        # Names with an underscore, so asked for with care: absent means no.
        checks = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
        return any(getattr(torch.cpu, name, lambda: False)() for name in checks)
    return False


class Computation:
    """The numeric setting of a model's forward and backward pass.

    Args:
        model: the model; outside :meth:`active` it is exactly as the user left it.
        precision: ``"float32"`` (the model's own dtypes) or ``"bf16"``.
        device: where the model is.
    """

    def __init__(self, model: nn.Module, *, precision: str, device: torch.device) -> None:
        self.precision = precision
        self._device = device
        self._frozen = _frozen_weights(model) if precision == "bf16" else []
        self._copies: dict[int, tuple[tuple[int, int], Tensor]] = {}
        self._configs = _fused_attention_configs(model) if device.type == "cpu" else []

    @contextmanager
    def active(self) -> Iterator[None]:
        """Frozen weights in bfloat16 and autocast on, when the precision says so."""
        if self.precision != "bf16":
            yield
            return
        originals = [(parameter, parameter.data) for parameter in self._frozen]
        try:
            for parameter, data in originals:
                parameter.data = self._copy(parameter, data)
            with torch.autocast(self._device.type, dtype=torch.bfloat16):
                yield
        finally:
            for parameter, data in originals:
                parameter.data = data

    @contextmanager
    def attention_for(self, length: int) -> Iterator[None]:
        """The faster attention for rows of ``length`` tokens; the config is put back on exit."""
        if length > EAGER_UP_TO or not self._configs:
            yield
            return
        try:
            for config in self._configs:
                config._attn_implementation_internal = "eager"
            yield
        finally:
            for config in self._configs:
                config._attn_implementation_internal = "sdpa"

    def _copy(self, parameter: nn.Parameter, data: Tensor) -> Tensor:
        """The bfloat16 copy, made again only if the weight was changed from outside."""
        stamp = (data.data_ptr(), parameter._version)
        kept = self._copies.get(id(parameter))
        if kept is None or kept[0] != stamp:
            kept = (stamp, data.to(torch.bfloat16))
            self._copies[id(parameter)] = kept
        return kept[1]


def check_trained_dtypes(trained: dict[str, nn.Parameter]) -> None:
    """An error unless every trained tensor is a plain one of float32 or float64.

    A step in bfloat16 has 8 bits of mantissa: most of a small update, and of its noise, would be
    rounded away. A quantised or sharded weight does not hold the numbers that noise is added to.
    """
    for name, p in trained.items():
        if type(p) is not nn.Parameter:
            raise ArgumentError(
                f"Trained tensor {name} is a {type(p).__name__}; expected a plain nn.Parameter of "
                "float32. A quantised weight can only be frozen: train an adapter beside it, "
                "dppeft.wrap(model, 'lora'), or load the model without quantization_config."
            )
    low = [name for name, p in trained.items() if p.dtype not in (torch.float32, torch.float64)]
    if low:
        raise ArgumentError(
            f"Trained tensors have dtype {str(trained[low[0]].dtype).removeprefix('torch.')}: "
            f"{', '.join(low[:3])}{', ...' if len(low) > 3 else ''}. Expected float32. Load the "
            "model with dtype=torch.float32; precision='bf16' still computes its frozen part in "
            "bfloat16."
        )


def check_quantised(model: nn.Module) -> None:
    """An error for quantised weights that ought to train.

    Frozen weights of 4 or 8 bits beside float32 adapters are fine.
    """
    quantised = {name for name, p in model.named_parameters() if _is_quantised(p)}
    if not (quantised or any(map(_says_quantised, model.modules()))):
        return
    if any(vars(module).get("peft_config") for module in model.modules()):
        return
    if all(p.requires_grad for name, p in model.named_parameters() if name not in quantised):
        raise ArgumentError(
            "The model is quantised and all of its other tensors train (method='full'): weights of "
            "4 or 8 bits cannot train and would silently stay as they are. Train an adapter, "
            "dppeft.wrap(model, 'lora'), or load the model without quantization_config."
        )


def _is_quantised(parameter: nn.Parameter) -> bool:
    return type(parameter).__name__ in _QUANTISED_WEIGHTS or not parameter.is_floating_point()


def _says_quantised(module: nn.Module) -> bool:
    own = vars(module)
    # dequantize() sets is_quantized to False and may leave the others.
    return bool(own.get("is_quantized", any(own.get(name) for name in _QUANTISED_MODEL)))


def _frozen_weights(model: nn.Module) -> list[nn.Parameter]:
    from transformers.pytorch_utils import Conv1D

    weights: dict[int, nn.Parameter] = {}
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding | Conv1D):
            for parameter in module.parameters(recurse=False):
                if not parameter.requires_grad and parameter.dtype == torch.float32:
                    weights[id(parameter)] = parameter
    return list(weights.values())


def _fused_attention_configs(model: nn.Module) -> list[Any]:
    """Configs whose models read the attention's name at each call and now say ``sdpa``."""
    configs: dict[int, Any] = {}
    for module in model.modules():
        config = getattr(module, "config", None)
        # The internal name: the public setter would change the configs nested in this one as well.
        if getattr(config, "_attn_implementation_internal", None) == "sdpa":
            configs[id(config)] = config
    return list(configs.values())
