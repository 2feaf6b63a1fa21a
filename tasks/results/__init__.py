"""What was measured, one JSON file for each run or set of runs, for ``python -m tasks.table``."""

from __future__ import annotations

import dataclasses
import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from dppeft.errors import DataError

FOLDER = Path(__file__).parent
NOT_TRAINED = "none"  # the method of a model as it was published


def hardware() -> str:
    """This machine in a few words."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return f"{os.cpu_count()} cores, {device}, {torch.get_num_threads()} threads"


@dataclass(frozen=True, kw_only=True)
class Result:
    """One run. ``epsilon`` is None where nothing was clipped or noised."""

    task: str
    model: str
    method: str
    epsilon: float | None
    metric: str
    value: float
    trained_parameters: int
    examples_per_second: float
    seconds: float
    private_rows: int
    command: str
    bytes_shared: int | None = None
    delta: float | None = None
    seed: int | None = None  # of the start values; draws and noise have none
    note: str = ""
    recipe: str = ""  # of tasks/recipes, where the run was of one
    hardware: str = field(default_factory=hardware)


def write_results(path: Path, results: Iterable[Result]) -> None:
    """All of them into one file, which is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [dataclasses.asdict(result) for result in results]
    path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def read_results(folder: Path = FOLDER) -> Sequence[Result]:
    """Those of every file of a folder.

    Raises:
        DataError: a file is no such list.
    """
    return [result for path in sorted(folder.glob("*.json")) for result in read_file(path)]


def read_file(path: Path) -> Sequence[Result]:
    """Those of one file.

    Raises:
        DataError: it is no such list.
    """
    try:
        return [Result(**row) for row in json.loads(path.read_text(encoding="utf-8"))]
    except (ValueError, TypeError) as error:
        raise DataError(f"{path} holds no results: {error}") from error
