"""Training state on disk: safetensors for the tensors, JSON for the rest. Nothing is unpickled.

A pickle runs code when it is read; a checkpoint may come from somewhere else.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from dppeft.errors import CheckpointError

FORMAT = 1
WEIGHTS, OPTIMIZER, MANIFEST = "trained.safetensors", "optimizer.safetensors", "run.json"


def save_state(
    directory: Path,
    *,
    trained: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
    manifest: dict[str, Any],
) -> None:
    """Write trained weights, optimizer state and the manifest, which comes last.

    Each file replaces its predecessor in one move, so that a crash leaves whole files.
    """
    directory.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    described = _encode(optimizer.state_dict(), tensors, "optimizer")
    _save_tensors(directory / WEIGHTS, {name: p.detach() for name, p in trained.items()})
    _save_tensors(directory / OPTIMIZER, tensors)
    text = json.dumps({"format": FORMAT, **manifest, "optimizer": described}, indent=1)
    partial = directory / f".{MANIFEST}.partial"
    partial.write_text(text + "\n", encoding="utf-8")
    os.replace(partial, directory / MANIFEST)


def read_manifest(directory: Path) -> dict[str, Any]:
    """The manifest of a saved run; a CheckpointError if there is none or it is not ours."""
    path = directory / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(
            f"{path} does not exist: expected a directory written by PrivateRun.save()."
        ) from None
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise CheckpointError(f"{path} is not readable JSON ({type(error).__name__}).") from None
    if not isinstance(manifest, dict) or manifest.get("format") != FORMAT:
        raise CheckpointError(
            f"{path} has format {manifest.get('format') if isinstance(manifest, dict) else None!r};"
            f" this version of dppeft reads format {FORMAT}."
        )
    return manifest


def load_state(
    directory: Path,
    manifest: Mapping[str, Any],
    *,
    trained: Mapping[str, Tensor],
    optimizer: torch.optim.Optimizer,
) -> None:
    """Put saved weights and optimizer state into a run that trains the same tensors.

    Everything is checked before anything is changed.
    """
    weights = _load_tensors(directory / WEIGHTS)
    _check_same_tensors(directory / WEIGHTS, weights, trained)
    tensors = _load_tensors(directory / OPTIMIZER)
    try:
        state = _decode(manifest["optimizer"], tensors)
        optimizer.load_state_dict(state)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"{directory / OPTIMIZER} does not fit this {type(optimizer).__name__} ({error}). Make "
            "the optimizer with the class and the parameter groups that the saved run had."
        ) from None
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(weights[name])


def _check_same_tensors(
    path: Path, weights: Mapping[str, Tensor], trained: Mapping[str, Tensor]
) -> None:
    different = sorted(weights.keys() ^ trained.keys())
    if different:
        raise CheckpointError(
            f"{path} holds other tensors than this run trains; first difference: {different[0]!r}. "
            "Wrap the model with the method and options of the saved run."
        )
    for name, parameter in trained.items():
        if weights[name].shape != parameter.shape:
            raise CheckpointError(
                f"{path}: {name!r} has shape {tuple(weights[name].shape)}, this run's has "
                f"{tuple(parameter.shape)}. Wrap the model with the options of the saved run."
            )


def _save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    partial = path.with_name(f".{path.name}.partial")
    # Clones: tied tensors share memory, which safetensors refuses.
    save_file({name: t.contiguous().clone() for name, t in tensors.items()}, partial)
    os.replace(partial, path)


def _load_tensors(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"{path} is not a readable safetensors file ({type(error).__name__})."
        ) from None


def _encode(value: Any, tensors: dict[str, Tensor], path: str) -> Any:
    """JSON for ``value``; its tensors go into ``tensors`` under their path."""
    if isinstance(value, Tensor):
        tensors[path] = value.detach()
        return {"tensor": path}
    if isinstance(value, Mapping):
        items = [[key, _encode(item, tensors, f"{path}.{key}")] for key, item in value.items()]
        return {"dict": items}  # pairs: JSON would turn the whole-number keys into text
    if isinstance(value, list | tuple):
        kind = "tuple" if isinstance(value, tuple) else "list"
        return {kind: [_encode(item, tensors, f"{path}.{i}") for i, item in enumerate(value)]}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    raise CheckpointError(
        f"The optimizer's state holds a {type(value).__name__} at {path!r}; only tensors, numbers, "
        "texts and lists of them can be saved."
    )


def _decode(value: Any, tensors: Mapping[str, Tensor]) -> Any:
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _decode(item, tensors) for key, item in content}
    items = [_decode(item, tensors) for item in content]
    return tuple(items) if kind == "tuple" else items
