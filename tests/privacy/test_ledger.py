"""The ledger: durable before use, and no change to it goes unnoticed."""

from __future__ import annotations

import json
import math
import os
import pickle
from pathlib import Path

import pytest

import dppeft
from dppeft.errors import ArgumentError, ArgumentTypeError, LedgerError
from dppeft.privacy.ledger import Ledger, Release, plan_header

PLAN = dppeft.plan(num_examples=10_000, batch_size=100, steps=50, delta=1e-5, noise_multiplier=1.0)


def release(step, rate=0.01, noise=1.0):
    return {
        "step": step,
        "sample_rate": rate,
        "noise_multiplier": noise,
        "l2_bound": 0.5,
        "expected_batch_size": 100,
    }


@pytest.fixture
def path(tmp_path) -> Path:
    """A ledger of five releases."""
    ledger = Ledger.create(tmp_path / "ledger.jsonl", plan_header(PLAN, seeded=False))
    for step in range(5):
        ledger.append(**release(step))
    return ledger.path


def lines_of(path: Path) -> list[bytes]:
    return path.read_bytes().splitlines(keepends=True)


def test_what_was_written_is_read_back(path):
    ledger = Ledger.open(path)
    assert len(ledger) == 5
    assert ledger.entries[3] == Release(**release(3))
    assert ledger.header["num_examples"] == 10_000
    assert ledger.header["delta"] == 1e-5
    assert ledger.header["unit"] == "one row, add or remove"
    assert ledger.header["seeded"] is False
    assert ledger.header["plan"] == PLAN.summary()
    assert len(ledger.header["run_id"]) == 32


def test_spent_composes_what_is_in_the_file_not_what_was_planned(path):
    ledger = Ledger.open(path)
    assert ledger.spent().epsilon == PLAN.epsilon(steps=5)
    assert ledger.spent().steps == 5
    ledger.append(**release(5, rate=0.02, noise=0.8))
    ledger.append(**release(6, rate=0.02, noise=0.8))
    spent = ledger.spent(accountant="rdp", delta=1e-6)
    assert spent.epsilon == dppeft.epsilon(
        sample_rate=[0.01, 0.02],
        noise_multiplier=[1.0, 0.8],
        steps=[5, 2],
        delta=1e-6,
        accountant="rdp",
    )
    assert (spent.sample_rate, spent.noise_multiplier, spent.steps) == (0.02, 0.8, 7)
    assert (spent.accountant, spent.delta) == ("rdp", 1e-6)


def test_nothing_released_is_nothing_spent(tmp_path):
    ledger = Ledger.create(tmp_path / "new.jsonl", plan_header(PLAN, seeded=True))
    spent = ledger.spent()
    assert (spent.epsilon, spent.steps, spent.sample_rate) == (0.0, 0, 0.01)
    assert Ledger.open(ledger.path).spent() == spent


def test_a_release_without_noise_is_an_infinite_epsilon(tmp_path):
    ledger = Ledger.create(tmp_path / "new.jsonl", {})
    ledger.append(**{**release(0, noise=0.0), "l2_bound": math.inf})
    again = Ledger.open(ledger.path)
    assert again.entries[0].l2_bound == math.inf
    assert again.spent(delta=1e-5).epsilon == math.inf
    with pytest.raises(ArgumentError, match="this ledger's header has none"):
        again.spent()


def test_A15_a_step_may_be_repeated_and_each_is_charged(path):
    ledger = Ledger.open(path)
    ledger.append(**release(2))
    assert [entry.step for entry in ledger.entries] == [0, 1, 2, 3, 4, 2]
    assert ledger.spent().epsilon == PLAN.epsilon(steps=6)


# ---- durability


def test_each_line_is_on_disk_before_append_returns(path, monkeypatch):
    synced = []
    real = os.fsync

    def fsync(handle):
        synced.append(os.fstat(handle).st_size)
        real(handle)

    monkeypatch.setattr(os, "fsync", fsync)
    ledger = Ledger.open(path)
    ledger.append(**release(5))
    assert synced == [path.stat().st_size]
    assert json.loads(lines_of(path)[-1])["step"] == 5


def test_a_line_that_cannot_be_written_refuses_the_step(path, monkeypatch):
    ledger = Ledger.open(path)

    def full(handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(LedgerError, match="No space left on device. The step is refused"):
        ledger.append(**release(5))
    assert len(ledger) == 5


def test_a_ledger_that_grew_elsewhere_is_not_overwritten(path):
    first, second = Ledger.open(path), Ledger.open(path)
    first.append(**release(5))
    with pytest.raises(LedgerError, match="has changed since it was opened"):
        second.append(**release(5))
    assert len(Ledger.open(path)) == 6


def test_a_run_continues_the_chain_after_reopening(path):
    for step in range(5, 8):
        Ledger.open(path).append(**release(step))
    assert [entry.step for entry in Ledger.open(path).entries] == list(range(8))


def test_every_torn_end_counts_the_release(path):
    """Whatever byte a crash stops at, no release is forgotten and the chain goes on."""
    whole = path.read_bytes()
    last = len(lines_of(path)[-1])
    for missing in range(1, last):
        path.write_bytes(whole[:-missing])
        ledger = Ledger.open(path)
        assert len(ledger) == 5
        assert ledger.entries[4].torn == (missing > 1)  # without its newline it can still be read
        assert ledger.spent().epsilon == PLAN.epsilon(steps=5)
        assert path.read_bytes() == whole[:-missing], "reading does not write"
        ledger.append(**release(5))
        again = Ledger.open(path)
        assert len(again) == 6
        assert again.entries == ledger.entries
        assert again.entries[4].torn == (missing > 1)


def test_a_torn_line_is_charged_with_the_dearer_values(tmp_path):
    plan = dppeft.plan(
        num_examples=10_000,
        batch_size=400,
        delta=1e-5,
        noise_multiplier=1.0,
        batch_schedule=[100, 400],
    )
    ledger = Ledger.create(tmp_path / "ledger.jsonl", plan_header(plan, seeded=False))
    for with_one in (False, True):
        if with_one:
            ledger.append(**release(0))
        with open(ledger.path, "ab") as file:
            file.write(b'{"kind":"release","st')
        ledger = Ledger.open(ledger.path)
        assert ledger.entries[-1].torn
        assert ledger.entries[-1].sample_rate == 0.04
        assert ledger.entries[-1].noise_multiplier == 1.0


def test_a_header_cut_off_is_no_ledger(path):
    path.write_bytes(lines_of(path)[0][:-5])
    with pytest.raises(LedgerError, match="no whole line"):
        Ledger.open(path)


# ---- changes


def edits(lines: list[bytes]) -> dict[str, list[bytes]]:
    def changed(number: int, **values) -> list[bytes]:
        record = {**json.loads(lines[number]), **values}
        return [*lines[:number], json.dumps(record).encode() + b"\n", *lines[number + 1 :]]

    return {
        "less noise recorded": changed(3, noise_multiplier=2.0),
        "smaller rate in the last line": changed(5, sample_rate=0.001),
        "another step": changed(2, step=7),
        "larger delta in the header": changed(0, delta=1e-2),
        "hash taken from elsewhere": changed(3, hash=json.loads(lines[2]).get("hash")),
        "hash removed": changed(3, hash=None),
        "a line removed": [*lines[:2], *lines[3:]],
        "the first release removed": [lines[0], *lines[2:]],
        "the header removed": lines[1:],
        "two lines swapped": [*lines[:2], lines[3], lines[2], *lines[4:]],
        "a line repeated": [*lines[:3], lines[2], *lines[3:]],
        "a line cut in the middle": [*lines[:2], lines[2][:40] + b"\n", *lines[3:]],
        "an empty line": [*lines[:2], b"\n", *lines[2:]],
        "not JSON at all": [*lines[:2], b"\x80\x04.\n", *lines[2:]],
        "a list": [*lines[:2], b"[1, 2]\n", *lines[2:]],
        "not a number": [*lines[:2], lines[2].replace(b"0.01", b"NaN"), *lines[3:]],
    }


@pytest.mark.parametrize("edit", edits([b"{}"] * 6))
def test_H1_a_changed_ledger_is_refused(path, edit):
    path.write_bytes(b"".join(edits(lines_of(path))[edit]))
    with pytest.raises(LedgerError, match=r"ledger.jsonl line \d"):
        Ledger.open(path)


def test_H1_lines_cut_off_at_the_end_show_in_head_and_length(path):
    whole = Ledger.open(path)
    path.write_bytes(b"".join(lines_of(path)[:-1]))
    shorter = Ledger.open(path)
    assert len(shorter) == len(whole) - 1
    assert shorter.head != whole.head


class Touch:
    """Would create a file when unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self):
        return Path.touch, (self.marker,)


def test_H1_a_pickle_in_place_of_the_ledger_is_not_run(tmp_path):
    marker, path = tmp_path / "marker", tmp_path / "ledger.jsonl"
    path.write_bytes(pickle.dumps(Touch(marker)) + b"\n")
    with pytest.raises(LedgerError):
        Ledger.open(path)
    assert not marker.exists()


def test_a_self_consistent_file_with_impossible_values_is_refused(tmp_path):
    from dppeft.privacy import ledger as module

    for wrong in ({"sample_rate": 1.5}, {"noise_multiplier": -1.0}, {"extra": 1}, {"step": "0"}):
        path = tmp_path / f"{next(iter(wrong))}.jsonl"
        made = Ledger.create(path, {"delta": 1e-5})
        line, _ = module._seal({"kind": "release", **release(0), **wrong}, made.head)
        with open(path, "ab") as file:
            file.write(line)
        with pytest.raises(LedgerError, match="line 2"):
            Ledger.open(path)


# ---- refusals


def test_an_existing_file_is_not_begun_again(path):
    before = path.read_bytes()
    with pytest.raises(LedgerError, match="exists already: Ledger.open continues it"):
        Ledger.create(path, {})
    assert path.read_bytes() == before


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(LedgerError, match=r"nothing\.jsonl: No such file"):
        Ledger.open(tmp_path / "nothing.jsonl")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"step": -1}, "step to be a whole number >= 0, got step=-1"),
        ({"sample_rate": 2.0}, "sample_rate=2"),
        ({"noise_multiplier": -1.0}, "noise_multiplier=-1"),
        ({"noise_multiplier": math.nan}, "noise_multiplier=nan"),
        ({"l2_bound": math.inf}, "finite l2_bound with noise"),
        ({"l2_bound": 0.0}, "l2_bound=0"),
        ({"expected_batch_size": 0}, "expected_batch_size=0"),
    ],
)
def test_an_impossible_release_is_refused_and_not_written(path, wrong, message):
    before = path.read_bytes()
    ledger = Ledger.open(path)
    with pytest.raises(ArgumentError, match=message):
        ledger.append(**{**release(5), **wrong})
    assert path.read_bytes() == before
    assert len(ledger) == 5


def test_H2_only_public_plain_values_get_into_the_file(path, tmp_path):
    allowed = {"kind", "step", "sample_rate", "noise_multiplier", "l2_bound"}
    allowed |= {"expected_batch_size", "prev", "hash"}
    for line in lines_of(path)[1:]:
        assert json.loads(line).keys() == allowed
    with pytest.raises(ArgumentTypeError, match="plain JSON"):
        Ledger.create(tmp_path / "secret.jsonl", {"secret": b"bytes"})
    assert not (tmp_path / "secret.jsonl").exists()
    header = json.loads(lines_of(path)[0])
    assert not [name for name in header if "seed" in name and name != "seeded"]
