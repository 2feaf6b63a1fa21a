"""Files of labelled rows: the same rows from every format, and one line for every bad file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from dppeft.errors import DataError
from dppeft.tables import text_table

ROWS = [("good, very good", "1"), ('a "fine" film', "1"), ("bad", "0")]


def _write(path: Path, rows: list[tuple[str, str]] = ROWS) -> Path:
    if path.suffix == ".csv":
        quoted = [f'"{text.replace(chr(34), chr(34) * 2)}",{label}' for text, label in rows]
        path.write_text("\n".join(["text,label", *quoted]) + "\n", encoding="utf-8")
    elif path.suffix == ".tsv":
        path.write_text("\n".join(["text\tlabel", *("\t".join(row) for row in rows)]) + "\n")
    elif path.suffix == ".jsonl":
        lines = [json.dumps({"text": text, "label": int(label)}) for text, label in rows]
        path.write_text("\n".join(lines) + "\n\n")
    else:
        parquet = pytest.importorskip("pyarrow.parquet")
        from pyarrow import table

        columns = {"text": [row[0] for row in rows], "label": [float(row[1]) for row in rows]}
        parquet.write_table(table(columns), path)
    return path


@pytest.mark.parametrize("suffix", [".csv", ".tsv", ".jsonl", ".parquet"])
def test_every_format_gives_the_same_rows(tmp_path: Path, suffix: str) -> None:
    table = text_table(_write(tmp_path / f"rows{suffix}"), text="text", label="label")
    assert list(table.texts) == [text for text, _ in ROWS]
    assert list(table.labels or ()) == [label for _, label in ROWS]
    assert table.pairs is None
    assert len(table) == 3


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "has no rows"),
        ("text,label\n", "has no rows"),
        ("text,label\na,1,2\n", "row 2 has 3 fields and the header 2"),
        ("txt,label\na,1\n", "no column 'text'; it has 'txt', 'label'. Did you mean 'txt'"),
        (
            "text,label\na,1\n ,0\nb,\n",
            r"2 row\(s\) have an empty text or label, the first is row 2",
        ),
        ("text,label\n,1\n", "empty text"),
    ],
)
def test_a_bad_csv_is_refused_in_one_line(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(content)
    with pytest.raises(DataError, match=message) as error:
        text_table(path, text="text", label="label")
    assert "\n" not in str(error.value)


def test_rows_without_text_are_left_out_on_request(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("text,label\na,1\n ,0\nb,\nc,0\n")
    table = text_table(path, text="text", label="label", drop_empty=True)
    assert list(table.texts) == ["a", "c"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("rows.xlsx", b"", "files of kind '.xlsx' are not read"),
        ("rows.jsonl", b'{"text": 1}\n{', "line 2 is not JSON"),
        ("rows.jsonl", b"[1]\n", "line 1 is not a JSON object"),
        ("rows.csv", b"text\n\xff\xfe", "is not UTF-8"),
        ("rows.parquet", b"no", "is not a parquet file"),
    ],
)
def test_unreadable_files_are_refused(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(DataError, match=message):
        text_table(path, text="text")


def test_a_missing_file_is_named() -> None:
    with pytest.raises(DataError, match=r"nowhere\.csv: no such file"):
        text_table(Path("nowhere.csv"), text="text")
