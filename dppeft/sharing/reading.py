"""``load``: an adapter back onto its base model, or an error; never a silent half."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dppeft._kind import kind_of, unwrap
from dppeft.errors import ArgumentError, CheckpointError
from dppeft.sharing.contents import (
    ADAPTER,
    ADAPTER_CONFIG,
    METHOD,
    WHOLE_MODEL,
    adapter_tensors,
)
from dppeft.text import synthetic_rows
from dppeft.tuners import fitting, registry
from dppeft.tuners.joining import join_peft

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel

_PICKLES = ("adapter_model.bin", "pytorch_model.bin")
_SHOWN = 3  # tensors named in an error


def load(base_model: nn.Module, directory: str | Path, *, is_trainable: bool = False) -> PeftModel:
    """The adapter and head of a shared folder on a base model.

    Stricter than ``PeftModel.from_pretrained``: every tensor of the file must have its place and
    every place its tensor, of the right shape, and the outputs must differ from the base model's.
    Reads JSON and safetensors only; a pickle is never opened.

    Args:
        base_model: the model that was wrapped, loaded anew.
        directory: as ``export`` or PEFT's ``save_pretrained`` wrote it.
        is_trainable: to go on training. False: everything is frozen, in evaluation mode.

    Returns:
        The ``PeftModel``; for a folder of method ``full`` the base model with those weights.

    Raises:
        CheckpointError: a file is missing, damaged or a pickle, does not fit the base model, or
            changes nothing.
    """
    fitting.refuse_unfit(base_model)
    path = Path(directory)
    if not path.is_dir():
        raise CheckpointError(f"{path} is no folder. Give the folder that dppeft.export wrote.")
    if (path / WHOLE_MODEL).is_file() and not (path / ADAPTER_CONFIG).is_file():
        return _load_whole(base_model, path, is_trainable=is_trainable)
    config = _read_config(path, is_trainable=is_trainable)
    tensors, metadata = _read_tensors(path, ADAPTER)
    fitting.set_pad_token(base_model, kind_of(base_model))
    before = _outputs(base_model)
    wanted_grad = [(p, p.requires_grad) for p in base_model.parameters()]
    model = _build(base_model, config, path)
    try:
        _check_fit(model, tensors, path)
        _fill(model, tensors, path)
    except CheckpointError:
        _unwrap_again(model, wanted_grad)
        raise
    if metadata.get(METHOD) == "ffa_lora":
        registry.freeze_a(model)
    after = _outputs(model)
    if before is not None and after is not None and torch.equal(before, after):
        _unwrap_again(model, wanted_grad)
        raise CheckpointError(
            f"The adapter in {path} has no effect: the outputs on made-up rows equal the base "
            "model's. It was written before training, or is in the base model already."
        )
    if not is_trainable:
        model.requires_grad_(False)  # PEFT leaves the biases of bias="all" trainable
    model.train(base_model.training if is_trainable else False)
    return model


def _read_json(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path.parent} has no {path.name}. Expected a folder that dppeft.export or PEFT's "
            "save_pretrained wrote."
        ) from None
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{path} is no readable JSON: {type(error).__name__}.") from error
    if not isinstance(values, dict):
        raise CheckpointError(f"{path} holds no JSON object. Export the adapter again.")
    return values


def _read_config(path: Path, *, is_trainable: bool) -> PeftConfig:
    from peft.mapping import PEFT_TYPE_TO_CONFIG_MAPPING

    join_peft()
    values = _read_json(path / ADAPTER_CONFIG)
    kind = values.get("peft_type")
    if kind not in list(PEFT_TYPE_TO_CONFIG_MAPPING):
        raise CheckpointError(
            f"{path / ADAPTER_CONFIG} says peft_type={kind!r}, which the installed PEFT does not "
            f"know. Known: {', '.join(sorted(str(k.value) for k in PEFT_TYPE_TO_CONFIG_MAPPING))}."
        )
    try:
        config = PEFT_TYPE_TO_CONFIG_MAPPING[kind].from_pretrained(str(path))
    except (TypeError, ValueError, KeyError, OSError) as error:
        raise CheckpointError(
            f"{path / ADAPTER_CONFIG} is no configuration of {kind}: {' '.join(str(error).split())}"
        ) from error
    if config.is_prompt_learning and is_trainable:
        raise ArgumentError(
            f"is_trainable=True: PEFT keeps of {kind} only what inference needs, so it cannot be "
            "trained on. Load it with is_trainable=False, or restore the run instead."
        )
    config.inference_mode = not is_trainable
    config.base_model_name_or_path = None  # get_peft_model takes the base model's own
    # Values that only an initialisation would read, from files that are not part of this folder.
    if hasattr(config, "prompt_tuning_init_state_dict_path"):
        config.prompt_tuning_init_state_dict_path = None
    if hasattr(config, "prompt_tuning_init"):
        config.prompt_tuning_init = "RANDOM"
    return config


def _read_tensors(path: Path, name: str) -> tuple[dict[str, Tensor], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    file = path / name
    if not file.is_file():
        pickles = [pickle for pickle in _PICKLES if (path / pickle).exists()]
        if pickles:
            raise CheckpointError(
                f"{path / pickles[0]} is a pickle, which can run code when it is opened; dppeft "
                "opens none. Ask for the adapter as safetensors."
            )
        raise CheckpointError(f"{path} has no {name}. Give the folder that dppeft.export wrote.")
    try:
        with safe_open(file, framework="pt") as opened:
            tensors = {key: opened.get_tensor(key) for key in opened.keys()}  # noqa: SIM118
            return tensors, opened.metadata() or {}
    except (SafetensorError, OSError, ValueError) as error:
        raise CheckpointError(
            f"{file} is no safetensors file, or damaged: {' '.join(str(error).split())}. Copy or "
            "export it again."
        ) from error


def _build(base_model: nn.Module, config: PeftConfig, path: Path) -> PeftModel:
    from peft import get_peft_model

    try:
        return get_peft_model(base_model, config)
    except fitting.PEFT_FAILURES as error:
        raise CheckpointError(
            f"The adapter in {path} cannot be put on {type(base_model).__name__}: "
            f"{' '.join(str(error).split())} Is it the model that was tuned? Load the base model "
            "again before the next try."
        ) from error


def _check_fit(model: PeftModel, tensors: dict[str, Tensor], path: Path) -> None:
    """Every tensor has its place, every place its tensor."""
    places = adapter_tensors(model)
    spare = {".original_module.", ".modules_to_save."}  # plain PEFT writes these with bias="all"
    given = {name: t for name, t in tensors.items() if not any(part in name for part in spare)}
    faults = []
    if missing := sorted(places.keys() - given.keys()):
        faults.append(f"{len(missing)} missing ({_some(missing)})")
    if unexpected := sorted(given.keys() - places.keys()):
        faults.append(f"{len(unexpected)} without a place ({_some(unexpected)})")
    resized = str(model.active_peft_config.peft_type.value) == "ADALORA"  # ranks are pruned
    wrong = [
        f"{name} is {tuple(given[name].shape)} and should be {tuple(places[name].shape)}"
        for name in sorted(places.keys() & given.keys())
        if given[name].shape != places[name].shape and not resized
    ]
    if wrong:
        faults.append(f"{len(wrong)} of another shape ({_some(wrong)})")
    if faults:
        raise CheckpointError(
            f"The adapter in {path} does not fit {type(unwrap(model)).__name__} with method "
            f"{registry.method_of(model)!r}: {'; '.join(faults)}. Load the base model that was "
            "tuned (same size, same number of labels) and an unchanged folder."
        )


def _some(names: list[str]) -> str:
    return ", ".join(names[:_SHOWN]) + (", ..." if len(names) > _SHOWN else "")


def _fill(model: PeftModel, tensors: dict[str, Tensor], path: Path) -> None:
    from peft import set_peft_model_state_dict

    try:
        set_peft_model_state_dict(model, tensors, adapter_name=model.active_adapter)
    except (RuntimeError, KeyError, ValueError) as error:
        raise CheckpointError(
            f"The adapter in {path} does not fit {type(unwrap(model)).__name__}: "
            f"{' '.join(str(error).split())}"
        ) from error


def _unwrap_again(model: PeftModel, wanted_grad: list[tuple[nn.Parameter, bool]]) -> None:
    """Gives the base model back as it was, so that the next try need not load it again."""
    base, prefix = model.get_base_model(), "base_model.model."
    kept = {
        name.removeprefix(prefix): module.original_module
        for name, module in model.named_modules()
        if hasattr(module, "original_module") and name.startswith(prefix)
    }
    if not model.active_peft_config.is_prompt_learning and hasattr(model.base_model, "unload"):
        model.base_model.unload()
    for name, module in kept.items():  # unload() leaves PEFT's copy of the head in its place
        base.set_submodule(name, module)
    for parameter, requires_grad in wanted_grad:
        parameter.requires_grad_(requires_grad)


def _outputs(model: nn.Module) -> Tensor | None:
    """Outputs on made-up rows, in evaluation mode; None where no rows can be made up."""
    base = unwrap(model)
    try:
        rows = dict(synthetic_rows(base, length=5))
    except ArgumentError:
        return None
    labels = rows.pop("labels", None)
    rows.pop("start_positions", None), rows.pop("end_positions", None)
    if kind_of(base) == "seq2seq_lm" and labels is not None:
        rows["decoder_input_ids"] = labels.clamp_min(0)
    device = next(base.parameters()).device
    training = [(module, module.training) for module in model.modules()]
    try:
        with torch.no_grad():
            output = model.eval()(**{name: value.to(device) for name, value in rows.items()})
    except (TypeError, ValueError, RuntimeError, IndexError):
        return None  # it wants inputs that cannot be made up (task ids, images)
    finally:
        for module, mode in training:
            module.training = mode
    first = output if isinstance(output, Tensor) else output[0]
    return first if isinstance(first, Tensor) else None


def _load_whole(base_model: nn.Module, path: Path, *, is_trainable: bool) -> nn.Module:
    tensors, _ = _read_tensors(path, WHOLE_MODEL)
    places = base_model.state_dict()
    # Tied tensors are written once: a missing one must share its memory with one that is there.
    written = {places[name].data_ptr() for name in tensors if name in places}
    missing = [n for n in places if n not in tensors and places[n].data_ptr() not in written]
    wrong = [n for n in tensors if n not in places or places[n].shape != tensors[n].shape]
    if missing or wrong:
        raise CheckpointError(
            f"The model in {path} does not fit {type(base_model).__name__}: {len(missing)} tensors "
            f"missing, {len(wrong)} of another name or shape ({_some([*missing, *wrong])}). Load "
            "the base model that was tuned (same size, same number of labels)."
        )
    base_model.load_state_dict(tensors, strict=False)
    base_model.requires_grad_(is_trainable)
    return base_model.train(base_model.training if is_trainable else False)
