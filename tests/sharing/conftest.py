"""Every pair of PAIRS, exported once."""

from __future__ import annotations

from pathlib import Path

import pytest
from torch import Tensor

import dppeft
from tests.sharing.adapters import PAIRS, SPENT, logits, tuned


@pytest.fixture(scope="session")
def shared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Tensor]]:
    """Every pair exported, and the logits of each model before it was."""
    folder, expected = tmp_path_factory.mktemp("shared"), {}
    for name, method in PAIRS:
        model = tuned(name, method)
        expected[f"{name}-{method}"] = logits(model, name)
        dppeft.export(model, folder / f"{name}-{method}", spent=SPENT)
    return folder, expected
