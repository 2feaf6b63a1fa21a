"""The table of results says what the files say."""

from __future__ import annotations

from pathlib import Path

import pytest

from dppeft.errors import DataError
from tasks.results import Result, read_results, write_results
from tasks.table import END, README, REPRODUCTION, START, into_readme, reproduction, table


def result(**changes: object) -> Result:
    fields: dict[str, object] = {
        "task": "sst2",
        "model": "MiniLM-L6",
        "method": "lora",
        "epsilon": 8.0,
        "metric": "accuracy",
        "value": 0.8,
        "trained_parameters": 1234,
        "examples_per_second": 100.0,
        "seconds": 10.0,
        "private_rows": 5,
        "command": "python -m tasks.run sst2",
    }
    return Result(**{**fields, **changes})  # type: ignore[arg-type]


def test_runs_of_one_setting_share_a_line() -> None:
    runs = [result(value=0.80), result(value=0.82), result(value=0.84)]
    other = [result(epsilon=None, value=0.9), result(method="rgp", bytes_shared=2000, delta=1e-5)]
    lines = table([*runs, *other]).splitlines()
    assert lines[2] == (
        "| sst2, MiniLM-L6 | 5 | lora | 1,234 | no privacy | 0.900 | 1 |  | 100 | 10 |  | 1 |"
    )
    assert lines[3].startswith(
        "| sst2, MiniLM-L6 | 5 | lora | 1,234 | 8 | 0.820 | 3 | 0.800 to 0.840 |"
    )
    assert "| 8, 1e-05 |" in lines[4]
    assert lines[4].endswith("| 2,000 | 1 |")
    assert lines[5:7] == ["", f"1. `python -m tasks.run sst2`; {runs[0].hardware}"]
    assert len(lines) == 7


@pytest.mark.parametrize("change", [{"private_rows": 6}, {"delta": 1e-6}, {"model": "another"}])
def test_runs_on_other_rows_or_budgets_are_never_averaged(change: dict[str, object]) -> None:
    lines = table([result(value=0.2), result(value=0.6, **change)]).splitlines()[2:4]
    assert sorted(line.split(" | ")[5] for line in lines) == ["0.200", "0.600"]


def test_metrics_are_never_averaged_and_a_few_of_them_are_shown() -> None:
    runs = [result(metric="BLEU", value=40.0), result(metric="NIST", value=5.0), result(value=0.5)]
    lines = table(runs).splitlines()[2:4]
    assert [line.split(" | ")[0] for line in lines] == [
        "| sst2, MiniLM-L6",
        "| sst2 (BLEU), MiniLM-L6",
    ]
    assert [line.split(" | ")[5] for line in lines] == ["0.500", "40.000"]


def test_each_line_names_the_commands_that_made_it() -> None:
    runs = [
        result(command="a", hardware="x", note="half the rows"),
        result(command="b", hardware="x", method="none"),
        result(command="a", hardware="x", epsilon=3.0, note="half the rows"),
    ]
    lines = table(runs).splitlines()
    assert lines[5:] == ["", "1. `a`; half the rows; x", "2. `b`; x"]
    assert [line.split(" | ")[-1] for line in lines[2:5]] == ["1 |", "2 |", "1 |"]
    assert "|  |  |  |" in lines[3]  # what was not trained has no rows, no speed


def test_results_are_written_and_read(tmp_path: Path) -> None:
    rows = [result(), result(epsilon=3.0)]
    write_results(tmp_path / "a" / "one.json", rows)
    assert read_results(tmp_path / "a") == rows
    (tmp_path / "a" / "two.json").write_text('[{"task": "x"}]')
    with pytest.raises(DataError, match="two.json holds no results"):
        read_results(tmp_path / "a")


def test_only_the_part_between_the_marks_changes() -> None:
    text = f"before\n{START}\nold\n{END}\nafter"
    assert into_readme(text, "new") == f"before\n{START}\n\nnew\n\n{END}\nafter"


def test_the_readme_holds_the_committed_results() -> None:
    text = README.read_text(encoding="utf-8")
    assert text.count(START) == text.count(END) == 1
    assert table(read_results()) in text
    assert reproduction(read_results()) in REPRODUCTION.read_text(encoding="utf-8")


def test_a_papers_figure_stands_beside_what_was_measured_and_nothing_else() -> None:
    name = "yu2022-lora-roberta-base-sst2"
    (line,) = (line for line in reproduction([]).splitlines() if f"| {name} |" in line)
    assert "| 6.7 | 0.922 (unverified) | not run here: needs the weights of roberta-base" in line
    assert f"`python -m tasks.run sst2 --recipe {name}`" in line
    same = {"recipe": name, "hardware": "a machine", "epsilon": 6.7}
    runs = [result(**same, value=v) for v in (0.90, 0.92)]
    without = [result(recipe=name, epsilon=None), result(recipe=name, epsilon=3.0)]
    (line,) = (x for x in reproduction([*runs, *without]).splitlines() if f"| {name} |" in x)
    assert line.endswith("| 0.91 (2 runs, 0.9 to 0.92; on 5 rows; a machine) |")
    verified = [line for line in reproduction([]).splitlines() if "lora-roberta-large-mnli" in line]
    assert "| 0.878 |" in verified[0]
