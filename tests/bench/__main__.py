"""The table of speed and memory.

DPPEFT_DATA=folder python -m tests.bench --rows 2048 --repeats 5 --json bench.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import warnings
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rich.console import Console
from rich.table import Table
from transformers import logging


def main() -> None:
    """Measure, print, save."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench")
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--json", type=Path, default=Path("bench.json"))
    parser.add_argument("--only", choices=["speed", "memory"])
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    logging.set_verbosity_error()
    warnings.simplefilter("ignore")

    results: dict[str, Any] = {"torch": torch.__version__, "machine": platform.processor()}
    if arguments.only != "memory":
        from tests.bench import speed

        results["speed"] = speed.measure(arguments.rows, arguments.repeats)
    if arguments.only != "speed":
        from tests.bench import memory

        results["memory"] = memory.measure()
    _print(results)
    arguments.json.write_text(json.dumps(results, indent=2) + "\n")


def _print(results: dict[str, Any]) -> None:
    console = Console(width=110)
    if "speed" in results:
        speed = results["speed"]
        table = Table("on " + speed["rows"], "examples/s", "dppeft is", "target")
        for name, rate in speed["examples_per_second"].items():
            ratio = speed["ratios"].get(name)
            compared = ("", "") if ratio is None else (f"{ratio['ratio']:.2f}x", ratio["target"])
            table.add_row(name, f"{rate:.0f}", compared[0], str(compared[1]))
        console.print(table)
    if "memory" in results:
        memory = results["memory"]
        table = Table("peak memory", "MiB", "of it the step")
        for name, mib in memory["mib"].items():
            table.add_row(name, f"{mib['peak']:.0f}", f"{mib['peak'] - mib['before']:.0f}")
        console.print(table)
        for name, ratio in memory["ratios"].items():
            console.print(f"{name}: {ratio['ratio']:.3f} (target: at most {ratio['target']})")


if __name__ == "__main__":
    main()
