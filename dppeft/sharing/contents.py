"""What a shared folder holds: file names, the adapter's tensors, a base model's public name."""

from __future__ import annotations

import os
from pathlib import PurePosixPath, PureWindowsPath
from typing import TYPE_CHECKING

from torch import Tensor, nn

if TYPE_CHECKING:
    from peft import PeftModel

ADAPTER = "adapter_model.safetensors"
ADAPTER_CONFIG = "adapter_config.json"
WHOLE_MODEL = "model.safetensors"
METHOD = "dppeft_method"  # key of the safetensors metadata


def peel(model: nn.Module) -> nn.Module:
    """The model inside torch.compile and data-parallel wrappers; a PeftModel stays one."""
    while True:
        if isinstance(getattr(model, "_orig_mod", None), nn.Module):
            model = model._orig_mod
        elif isinstance(model, nn.parallel.DistributedDataParallel | nn.DataParallel):
            model = model.module
        else:
            return model


def adapter_tensors(model: PeftModel) -> dict[str, Tensor]:
    """Name in the file -> tensor: what plain PEFT writes, less what the base model holds anyway."""
    from peft import get_peft_model_state_dict

    # Embeddings are written only where they are trained: the base model has the others.
    tensors = get_peft_model_state_dict(
        model, adapter_name=model.active_adapter, save_embedding_layers=False
    )
    # With bias="all" PEFT lists the untrained head, and the trained one a second time.
    return {
        name: tensor
        for name, tensor in tensors.items()
        if ".original_module." not in name and ".modules_to_save." not in name
    }


def public_name(name: str | None) -> str | None:
    """A base model's name as it may be shared: of a local folder the last part only."""
    if not name:
        return None
    parts = PureWindowsPath(name) if "\\" in name else PurePosixPath(name)
    local = parts.is_absolute() or os.path.isdir(name) or name.startswith((".", "~"))
    if local or len(parts.parts) > 2 or "\\" in name:
        return parts.name or None
    return name
