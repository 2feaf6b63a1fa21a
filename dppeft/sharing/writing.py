"""``export``: adapter and head in PEFT's format, a privacy card, a model card; nothing else.

No optimizer state, no random state, no row, no metric of the private rows and no local path is
written, and no file is a pickle.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor, nn

from dppeft._kind import unwrap
from dppeft._types import Spent
from dppeft.errors import ArgumentError, ArgumentTypeError
from dppeft.privacy.card import PrivacyCard, library_versions
from dppeft.sharing.as_lora import as_lora
from dppeft.sharing.contents import (
    ADAPTER,
    ADAPTER_CONFIG,
    METHOD,
    WHOLE_MODEL,
    adapter_tensors,
    peel,
    public_name,
)
from dppeft.sharing.model_card import model_card
from dppeft.tuners import registry

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel


def export(
    model: nn.Module,
    directory: str | Path,
    *,
    spent: Spent | PrivacyCard | None = None,
    as_lora_rank: int | None = None,
) -> Path:
    """Writes what may be shared: trained tensors, privacy card and model card.

    A wrapped model gives its adapter and head in PEFT's format, so that plain
    ``peft.PeftModel.from_pretrained(base, directory)`` reads it; a model without adapter (method
    ``full``, or merged) is written whole. In a run of several processes call it in one of them.

    Args:
        model: of ``wrap``, or any ``transformers`` model.
        directory: made if missing; must be empty.
        spent: ``private.spent()`` or ``private.card()``, which knows more. None: the card says
            that no guarantee is claimed.
        as_lora_rank: for ``rgp``, whose result is a change of whole matrices: write its best
            approximation of this rank as a plain LoRA adapter, which needs no dppeft to be loaded;
            the card says how much of the change is in it. None: the change itself.

    Returns:
        The directory.

    Raises:
        ArgumentError: the directory is not empty, or ``as_lora_rank`` is given for another method.
        ArgumentTypeError: ``spent`` is of another type.
    """
    if as_lora_rank is not None and not hasattr(peel(model), "peft_config"):
        raise ArgumentError(
            f"as_lora_rank={as_lora_rank}: only method 'rgp' turns a full-size change into LoRA, "
            "and this model has no adapter. Leave as_lora_rank out."
        )
    card = _card(spent)
    path = Path(directory)
    if path.exists() and not path.is_dir():
        raise ArgumentError(f"directory={str(path)!r} is a file. Name a new folder.")
    if path.is_dir() and any(path.iterdir()):
        raise ArgumentError(
            f"directory={str(path)!r} is not empty: what lies there would be shared along. Name a "
            "new folder, or empty it."
        )
    if as_lora_rank is not None:
        tensors, config, share = as_lora(peel(model), as_lora_rank)
        note = (
            f"The change of the weights was written as LoRA of rank {config.r}, which keeps "
            f"{share:.4f} of its Frobenius norm."
        )
        card = dataclasses.replace(card, notes=[*card.notes, note])
        return write_shared(model, path, card=card, written_as=(tensors, config))
    return write_shared(model, path, card=card)


def write_shared(
    model: nn.Module,
    directory: str | Path,
    *,
    card: PrivacyCard,
    written_as: tuple[dict[str, Tensor], PeftConfig] | None = None,
) -> Path:
    """``export`` whatever lies in the directory already; files of the same name are replaced."""
    model = peel(model)
    path = Path(directory)
    path.mkdir(parents=True, exist_ok=True)
    if hasattr(model, "peft_config"):
        method = registry.method_of(model)
        tensors, config = written_as or (
            adapter_tensors(model),
            model.peft_config[model.active_adapter],
        )
        ours = type(config).__module__.startswith("dppeft.")
        _write_adapter(model, path, method, card, tensors, config)
    else:
        method, ours = "full", False
        _write_whole(model, path, card)
    card.write(path)
    base = unwrap(model)
    name = public_name(getattr(base, "name_or_path", None))
    (path / "README.md").write_text(
        model_card(base, name=name, method=method, card=card, needs_dppeft=ours), encoding="utf-8"
    )
    return path


def _card(spent: Spent | PrivacyCard | None) -> PrivacyCard:
    if spent is None:
        return PrivacyCard(versions=library_versions())
    if isinstance(spent, Spent):
        return PrivacyCard.from_spent(spent)
    if isinstance(spent, PrivacyCard):
        return spent
    raise ArgumentTypeError(
        f"Expected spent to be a Spent, a PrivacyCard or None, got {type(spent).__name__}. Pass "
        "private.spent() or private.card()."
    )


def _write_adapter(
    model: PeftModel,
    path: Path,
    method: str,
    card: PrivacyCard,
    tensors: dict[str, Tensor],
    config: PeftConfig,
) -> None:
    from safetensors.torch import save_file

    save_file(_own_memory(tensors), path / ADAPTER, metadata=_metadata(method, card))
    config = _public_config(config, model)
    config.save_pretrained(str(path), auto_mapping_dict=_auto_mapping(model, config))
    # The weights were written readable for their owner alone.
    (path / ADAPTER).chmod((path / ADAPTER_CONFIG).stat().st_mode & 0o777)


def _public_config(config: PeftConfig, model: PeftModel) -> PeftConfig:
    """The configuration as plain PEFT saves it, local paths taken out."""
    config = copy.deepcopy(config)
    config.inference_mode = True
    config.base_model_name_or_path = public_name(
        getattr(model.get_base_model(), "name_or_path", None)
    )
    if getattr(config, "tokenizer_name_or_path", None):
        config.tokenizer_name_or_path = public_name(config.tokenizer_name_or_path)
    return config


def _auto_mapping(model: PeftModel, config: PeftConfig) -> dict[str, str] | None:
    """What PEFT notes about the base where no task says it."""
    if config.task_type is not None:
        return None
    base = type(model.get_base_model())
    return {"base_model_class": base.__name__, "parent_library": base.__module__}


def _write_whole(model: nn.Module, path: Path, card: PrivacyCard) -> None:
    if hasattr(model, "save_pretrained"):
        model.save_pretrained(path)  # transformers leaves the local path out of config.json
        return
    from safetensors.torch import save_model

    save_model(model, str(path / WHOLE_MODEL), metadata=_metadata("full", card))


def _metadata(method: str, card: PrivacyCard) -> dict[str, str]:
    claim = {key: card.to_dict()[key] for key in ("guarantee", "epsilon", "delta", "unit")}
    return {"format": "pt", METHOD: method, "privacy": json.dumps(claim)}


def _own_memory(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """The same tensors, none sharing memory with another: safetensors refuses that."""
    seen: set[int] = set()
    own = {}
    for name, tensor in tensors.items():
        place = tensor.untyped_storage().data_ptr()
        own[name] = (tensor.clone() if place in seen else tensor).detach().cpu().contiguous()
        seen.add(place)
    return own
