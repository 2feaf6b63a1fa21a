"""Run in a new process by test_round_trip.py: reads exported adapters with plain PEFT.

``python -m tests.sharing.read_back FOLDER``: for each ``FOLDER/<model>-<method>`` writes the logits
on the model's batch to ``FOLDER/read_back.safetensors``. The base model gets another head than the
one that was trained, as a user's freshly loaded classifier has. Adapters of PEFT's own kinds are
read without dppeft; ours come last, after an ``import dppeft`` that finds PEFT loaded.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import torch
from peft import PeftModel
from safetensors.torch import save_file

from tests.tiny import build, make_batch


def main(folder: Path) -> None:
    warnings.simplefilter("error")  # PEFT only warns of missing tensors
    warnings.filterwarnings("ignore", message="`is_gradient_checkpointing` is deprecated")
    logits = {}
    folders = sorted(path for path in folder.iterdir() if path.is_dir())
    for adapter in sorted(folders, key=_is_ours):
        if _is_ours(adapter):
            import dppeft  # noqa: F401  (PEFT learns our kinds)
        else:
            assert "dppeft" not in sys.modules
        name, _, _ = adapter.name.rpartition("-")
        base = build(name)
        torch.manual_seed(99)
        for head in ("classifier", "score"):
            for parameter in getattr(base, head, torch.nn.Module()).parameters():
                torch.nn.init.normal_(parameter)
        model = PeftModel.from_pretrained(base, adapter).eval()
        with torch.no_grad():
            logits[adapter.name] = model(**make_batch(name)).logits
    save_file(logits, folder / "read_back.safetensors")


def _is_ours(adapter: Path) -> bool:
    return adapter.name.endswith(("-adapter", "-compacter", "-rgp"))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
