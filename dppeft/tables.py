"""Labelled texts from a file: .csv, .tsv, .jsonl or .parquet -> columns, checked before use."""

from __future__ import annotations

import csv
import difflib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dppeft.errors import DataError

Columns = dict[str, list[Any]]  # column name -> values, one per row


@dataclass(frozen=True, kw_only=True)
class TextTable:
    """Rows of text, in file order.

    Attributes:
        texts: first text of each row.
        pairs: second text of each row, or None.
        labels: the label of each row as text, or None where no column was asked for.
    """

    texts: Sequence[str]
    pairs: Sequence[str] | None
    labels: Sequence[str] | None

    def __len__(self) -> int:
        """Number of rows."""
        return len(self.texts)


def read_columns(path: Path) -> Columns:
    """All columns of a file, by its suffix.

    Raises:
        DataError: no such file, another kind of file, no rows, or a row that does not fit.
    """
    reader = _READERS.get(path.suffix.lower())
    if reader is None:
        raise DataError(
            f"{path}: files of kind {path.suffix or '(no suffix)'!r} are not read. "
            f"Expected one of {', '.join(_READERS)}."
        )
    if not path.is_file():
        raise DataError(f"{path}: no such file.")
    try:
        columns = reader(path)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text ({error.reason}). Convert it first.") from error
    if not columns or not next(iter(columns.values())):
        raise DataError(f"{path} has no rows. Expected at least one below the header.")
    return columns


def text_table(
    path: Path,
    *,
    text: str,
    label: str | None = None,
    text_pair: str | None = None,
    drop_empty: bool = False,
) -> TextTable:
    """The columns asked for, without rows whose text is empty.

    Args:
        path: .csv, .tsv, .jsonl or .parquet.
        text: column of the (first) text.
        label: column of the label.
        text_pair: column of the second text.
        drop_empty: leave rows with an empty text or label out instead of refusing the file.

    Raises:
        DataError: a column is missing, texts or labels are empty.
    """
    columns = read_columns(path)
    wanted = [name for name in (text, text_pair, label) if name is not None]
    for name in wanted:
        if name not in columns:
            raise DataError(_missing(path, name, columns))
    values = [[_as_text(value) for value in columns[name]] for name in wanted]
    kept = [i for i in range(len(values[0])) if all(column[i].strip() for column in values)]
    empty = len(values[0]) - len(kept)
    if empty and not drop_empty:
        first = next(i for i in range(len(values[0])) if i not in set(kept[: i + 1]))
        raise DataError(
            f"{path}: {empty} row(s) have an empty text or label, the first is row {first + 1}. "
            "Fill them in, or pass --drop-empty to leave them out."
        )
    if not kept:
        raise DataError(f"{path}: every row has an empty text or label. Name other columns.")
    by_name = {name: [column[i] for i in kept] for name, column in zip(wanted, values, strict=True)}
    return TextTable(
        texts=by_name[text],
        pairs=None if text_pair is None else by_name[text_pair],
        labels=None if label is None else by_name[label],
    )


def _missing(path: Path, name: str, columns: Mapping[str, Any]) -> str:
    near = difflib.get_close_matches(name, list(columns), n=1)
    hint = f" Did you mean {near[0]!r}?" if near else ""
    return f"{path} has no column {name!r}; it has {', '.join(map(repr, columns))}.{hint}"


def _as_text(value: Any) -> str:
    """A cell as text: None is empty, True/False and 1.0 read as written in other formats."""
    if value is None:
        return ""
    if isinstance(value, float) and value.is_integer():
        return str(int(value))
    return str(value)


def _separated(delimiter: str) -> Callable[[Path], Columns]:
    def read(path: Path) -> Columns:
        csv.field_size_limit(10**8)  # a text may be long; the default is 131,072 characters
        # A tab-separated file is not quoted (GLUE's way): a lone quote is part of the text.
        quoting = csv.QUOTE_NONE if delimiter == "\t" else csv.QUOTE_MINIMAL
        with path.open(encoding="utf-8-sig", newline="") as file:
            rows = list(csv.reader(file, delimiter=delimiter, quoting=quoting))
        if not rows:
            return {}
        header, body = rows[0], [row for row in rows[1:] if row]
        for number, row in enumerate(body, start=2):
            if len(row) != len(header):
                raise DataError(
                    f"{path}: row {number} has {len(row)} fields and the header {len(header)}. "
                    "Expected equal numbers; quote texts that hold the separator."
                )
        return {name: [row[i] for row in body] for i, name in enumerate(header)}

    return read


def _json_lines(path: Path) -> Columns:
    rows: list[dict[str, Any]] = []
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, start=1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except json.JSONDecodeError as error:
                raise DataError(f"{path}: line {number} is not JSON ({error.msg}).") from error
            if not isinstance(row, dict):
                raise DataError(f"{path}: line {number} is not a JSON object, one per line.")
            rows.append(row)
    names = list(dict.fromkeys(name for row in rows for name in row))
    return {name: [row.get(name) for row in rows] for name in names}


def _parquet(path: Path) -> Columns:
    try:
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(
            f"{path}: .parquet files need the extra: pip install 'dppeft[data]'."
        ) from error
    try:
        return pyarrow.parquet.read_table(path).to_pydict()
    except pyarrow.lib.ArrowInvalid as error:
        raise DataError(f"{path} is not a parquet file.") from error


_READERS: dict[str, Callable[[Path], Columns]] = {
    ".csv": _separated(","),
    ".tsv": _separated("\t"),
    ".jsonl": _json_lines,
    ".parquet": _parquet,
}
