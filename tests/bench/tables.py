"""The results of one part as a table, for a terminal or for a README.

A part is a dict: ``about``, what it is about; ``measured``, name -> unit -> number; ``ratios``,
name -> what ``measuring.compared`` makes. A ratio named as what is measured shares its line.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table

Line = tuple[str, str, str, str]


def heading(part: Mapping[str, Any]) -> Line:
    """Names of the columns."""
    return (str(part["about"]), "measured", "dppeft is, or ratio", "target")


def lines(part: Mapping[str, Any]) -> list[Line]:
    """What was measured, in the order measured, then ratios of their own."""
    measured, ratios = part["measured"], part["ratios"]
    names = [*measured, *(name for name in ratios if name not in measured)]
    return [(name, _numbers(measured.get(name, {})), *_ratio(ratios.get(name))) for name in names]


def terminal(part: Mapping[str, Any]) -> Table:
    """A rich table."""
    table = Table(*heading(part))
    for line in lines(part):
        table.add_row(*line)
    return table


def markdown(part: Mapping[str, Any]) -> str:
    """A table as GitHub renders it."""
    rows = [heading(part), ("---", "--:", "--:", "--:"), *lines(part)]
    return "\n".join(
        "| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows
    )


def _numbers(values: Mapping[str, float]) -> str:
    return ", ".join(
        f"{value:,.0f} {unit}" if value >= 10 else f"{value:.2g} {unit}"
        for unit, value in values.items()
    )


def _ratio(entry: Mapping[str, Any] | None) -> tuple[str, str]:
    if entry is None:
        return "", ""
    ratio, target = entry["ratio"], entry["target"]
    shown = (
        ratio if isinstance(ratio, str) else f"{ratio:.3f}" if entry["at_most"] else f"{ratio:.2f}x"
    )
    if target is None:
        return shown, ""
    return shown, f"at {'most' if entry['at_most'] else 'least'} {target:g}"
