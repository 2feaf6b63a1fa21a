"""The tables of speed and memory.

DPPEFT_DATA=folder python -m tests.bench --rows 2048 --repeats 5 --json bench.json
python -m tests.bench --only full tuners --markdown
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import platform
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rich.console import Console
from transformers import logging

from tests.bench import tables
from tests.bench.measuring import KEEPS_FREED_MEMORY

PARTS = ("speed", "memory", "full", "tuners", "rgp", "infilling", "generation", "mlm")


def main(given: Sequence[str] | None = None) -> None:
    """Measure, print, save."""
    arguments = _parse(given)
    torch.set_num_threads(arguments.threads)
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")
    takes: dict[str, tuple[int, ...]] = {
        "speed": (arguments.rows, arguments.repeats),
        "memory": (),
        "full": (arguments.repeats,),
        "tuners": (arguments.repeats,),
        "rgp": (arguments.repeats,),
        "infilling": (arguments.repeats,),
        "generation": (arguments.repeats,),
        "mlm": (arguments.repeats,),
    }
    results: dict[str, Any] = {"torch": torch.__version__, "machine": platform.processor()}
    console = Console(width=130)
    for part in PARTS:
        if part not in (arguments.only or PARTS):
            continue
        # Loaded when asked for: a part does not need what another one compares with.
        measure = importlib.import_module(f"tests.bench.{part}").measure
        results[part] = measure(*takes[part])
        if arguments.markdown:
            print(tables.markdown(results[part]), end="\n\n", flush=True)
        else:
            console.print(tables.terminal(results[part]))
        arguments.json.write_text(json.dumps(results, indent=2) + "\n")


def _parse(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench")
    parser.add_argument("--rows", type=int, default=2048, help="of the part 'speed'")
    parser.add_argument("--repeats", type=int, default=5, help="timed passes of each contestant")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, default=Path("bench.json"))
    parser.add_argument(
        "--only", choices=PARTS, nargs="+", action="extend", help="parts; may be given repeatedly"
    )
    parser.add_argument("--markdown", action="store_true", help="print tables for a README")
    return parser.parse_args(given)


if __name__ == "__main__":
    if not KEEPS_FREED_MEMORY.items() <= os.environ.items():  # read by glibc at the start only
        command = [sys.executable, "-m", "tests.bench", *sys.argv[1:]]
        os.execve(sys.executable, command, {**os.environ, **KEEPS_FREED_MEMORY})
    main()
