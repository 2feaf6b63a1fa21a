"""Run in a new process by test_round_trip.py: reads exported adapters with plain PEFT, no dppeft.

``python -m tests.sharing.read_back FOLDER``: for each ``FOLDER/<model>-<method>`` writes the logits
on the model's batch to ``FOLDER/read_back.safetensors``. The base model gets another head than the
one that was trained, as a user's freshly loaded classifier has.
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
    for adapter in sorted(path for path in folder.iterdir() if path.is_dir()):
        name, _, _ = adapter.name.rpartition("-")
        base = build(name)
        torch.manual_seed(99)
        for head in ("classifier", "score"):
            for parameter in getattr(base, head, torch.nn.Module()).parameters():
                torch.nn.init.normal_(parameter)
        model = PeftModel.from_pretrained(base, adapter).eval()
        with torch.no_grad():
            logits[adapter.name] = model(**make_batch(name)).logits
    assert "dppeft" not in sys.modules
    save_file(logits, folder / "read_back.safetensors")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
