"""What holds for every test: one thread, no network, the folder of real data if there is one."""

from __future__ import annotations

import os
import socket
from pathlib import Path

# Before torch or transformers is imported by a test module.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_OFFLINE"] = "1"
os.environ["HF_DATASETS_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import pytest
import torch

torch.set_num_threads(1)  # the suite runs several workers; more threads each only get in the way


@pytest.fixture(autouse=True)
def _no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that would download something fails at once, with the address."""
    connect = socket.socket.connect

    def local_only(self: socket.socket, address: object) -> None:
        host = address[0] if isinstance(address, tuple) else "localhost"
        if host not in ("localhost", "127.0.0.1", "::1"):
            raise AssertionError(f"A test tried to reach {address!r}; tests run offline.")
        connect(self, address)  # type: ignore[arg-type]

    monkeypatch.setattr(socket.socket, "connect", local_only)


@pytest.fixture(scope="session")
def glue_folder() -> Path:
    """The folder with real GLUE files, named by DPPEFT_DATA; skips where there is none."""
    folder = os.environ.get("DPPEFT_DATA")
    if not folder:
        pytest.skip("DPPEFT_DATA is not set: no folder with real GLUE files to read")
    path = Path(folder)
    if not (path / "sst2_dev.tsv").exists():
        pytest.skip(f"DPPEFT_DATA={folder} has no sst2_dev.tsv")
    return path


@pytest.fixture(scope="session")
def base_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random encoder with its tokenizer, saved as a model folder."""
    from tests.tiny import save_folder

    return save_folder(tmp_path_factory.mktemp("base"))
