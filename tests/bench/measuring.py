"""How every bench measures: processor time pass by pass, operations, peaks of new processes."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from torch.utils.flop_counter import FlopCounterMode

# glibc gives freed memory back to the system and asks for it again page by page, more or less often
# by chance. Contestants are timed without that, as with other allocators (jemalloc, a GPU's).
KEEPS_FREED_MEMORY = {
    "MALLOC_TRIM_THRESHOLD_": "100000000000",
    "MALLOC_MMAP_THRESHOLD_": "1000000000",
}

Work = Callable[[], object]  # one pass over what is measured


def interleaved(contestants: dict[str, Work], repeats: int) -> dict[str, list[float]]:
    """Seconds of processor time of each pass; the contestants take turns."""
    times: dict[str, list[float]] = {name: [] for name in contestants}
    for repeat in range(repeats + 1):
        for name, work in contestants.items():
            start = time.process_time()
            work()
            if repeat:  # the first pass warms caches
                times[name].append(time.process_time() - start)
    return times


def speed_ratio(ours: list[float], other: list[float]) -> float:
    """How many times faster ours is, pass by pass: what slows the machine a while slows both."""
    return statistics.median(b / a for a, b in zip(ours, other, strict=True))


def compared(
    ratio: float | str, target: float | None = None, *, at_most: bool = False
) -> dict[str, Any]:
    """One entry of ``ratios``; a contestant that cannot run has the reason in place of a number."""
    return {"ratio": ratio, "target": target, "at_most": at_most}


def flops(work: Work) -> int:
    """Floating-point operations of matrix products in one pass."""
    with FlopCounterMode(display=False) as counter:
        work()
    return counter.get_total_flops()


def peak_mib() -> float:
    """The most memory this process ever held (Linux)."""
    status = Path("/proc/self/status").read_text()
    (line,) = (line for line in status.splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


def in_a_new_process(module: str, *arguments: str) -> dict[str, float]:
    """What ``python -m module arguments`` prints last, as JSON; its memory is managed as usual."""
    usual = {name: value for name, value in os.environ.items() if name not in KEEPS_FREED_MEMORY}
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=usual,
        cwd=Path(__file__).parents[2],
    )
    if done.returncode:
        raise RuntimeError(f"{module} {' '.join(arguments)}: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])
