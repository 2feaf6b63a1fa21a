"""How rows are refused: how many, which comes first, never what they hold."""

from __future__ import annotations

from collections.abc import Sequence

from dppeft.errors import DataError


def refuse_rows(wrong: Sequence[bool], what: str, remedy: str) -> None:
    """An error that says how many rows are wrong and which comes first; never what they hold."""
    if any(wrong):
        raise DataError(
            f"{sum(wrong)} of {len(wrong)} rows {what}; the first is row {list(wrong).index(True)} "
            f"(from 0). {remedy}."
        )
