"""Labels of any kind -> class numbers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from dppeft.errors import DataError
from dppeft.text._refusal import refuse_rows


def encode_labels(
    values: Sequence[Any], names: Sequence[str] | None = None
) -> tuple[list[int], list[str]]:
    """Class number of each row, and the classes' names.

    Args:
        values: strings, whole numbers or bools, one per row.
        names: the classes of the training data, when evaluating; else they are read from
            ``values`` and sorted (numbers by value).

    Returns:
        Class numbers, and names with ``names[number]`` the label as a string.

    Raises:
        DataError: missing or fractional labels, one class only, or labels that ``names`` lacks.
    """
    if len(values) == 0:
        raise DataError("The label column has no rows. Check the file and the filters applied.")
    plain = [value.item() if hasattr(value, "item") else value for value in values]
    refuse_rows(
        [v is None or (isinstance(v, float) and math.isnan(v)) or v == "" for v in plain],
        "have no label",
        "Fill it in, or drop those rows",
    )
    refuse_rows(
        [isinstance(v, float) and v != int(v) for v in plain],
        "have a fractional label",
        "For regression pass the numbers as they are, with num_labels=1",
    )
    words = [str(int(v)) if isinstance(v, float) else str(v) for v in plain]
    if names is None:
        found = set(words)
        if len(found) == 1:
            raise DataError(
                f"The label column is constant over its {len(words)} rows: there is nothing to "
                "learn. Choose another label column."
            )
        names = sorted(found, key=_label_order)
    numbers_of = {name: number for number, name in enumerate(names)}
    refuse_rows(
        [word not in numbers_of for word in words],
        f"have a label that is not among the {len(numbers_of)} classes of the training data",
        "Drop those rows, or train with them",
    )
    return [numbers_of[word] for word in words], list(names)


def _label_order(word: str) -> tuple[bool, int, str]:
    whole = word.lstrip("-").isdigit()
    return (not whole, int(word) if whole else 0, word)
