"""The harness itself: tables, and which parts are asked for. Nothing is measured here."""

from __future__ import annotations

import pytest

from tests.bench import __main__ as bench
from tests.bench import tables
from tests.bench.measuring import compared, interleaved, speed_ratio


def test_a_table_shows_ratios_beside_what_was_measured_and_reasons_in_their_place():
    part = {
        "about": "x",
        "measured": {"plain": {"ms": 120.4, "GFLOP": 3.14}},
        "ratios": {
            "plain": compared(0.931, 0.85),
            "memory": compared(1.2049, 1.35, at_most=True),
            "ghost": compared("TypeError: a|b", 1.8),
        },
    }
    assert tables.lines(part) == [
        ("plain", "120 ms, 3.1 GFLOP", "0.93x", "at least 0.85"),
        ("memory", "", "1.205", "at most 1.35"),
        ("ghost", "", "TypeError: a|b", "at least 1.8"),
    ]
    assert tables.terminal(part).row_count == 3
    assert tables.markdown(part).splitlines()[-1].startswith("| ghost |  | TypeError: a\\|b |")


def test_passes_are_interleaved_and_the_first_is_not_timed():
    order: list[str] = []
    times = interleaved({"a": lambda: order.append("a"), "b": lambda: order.append("b")}, 2)
    assert "".join(order) == "ababab"
    assert [len(values) for values in times.values()] == [2, 2]
    assert speed_ratio([1.0, 2.0, 4.0], [2.0, 4.0, 4.0]) == 2.0


def test_parts_may_be_given_together_or_one_by_one():
    assert bench._parse(["--only", "full", "tuners"]).only == ["full", "tuners"]
    assert bench._parse(["--only", "full", "--only", "speed"]).only == ["full", "speed"]
    assert bench._parse([]).only is None
    with pytest.raises(SystemExit):
        bench._parse(["--only", "nothing"])
