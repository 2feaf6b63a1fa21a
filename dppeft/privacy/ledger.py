"""The ledger: one JSON line per release, on disk before the release is used.

A crash can lose work, but never spent budget. Each line holds the hash of the line before it, so an
edit, a removal or a reordering within the file is found when it is opened. (Lines cut off at the
end leave a valid file: compare ``len(ledger)`` and ``ledger.head`` with what the run recorded.)
The file holds public numbers only: never a drawn batch size, a per-example value or a secret.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import uuid
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dppeft import _validate
from dppeft._types import Spent
from dppeft.errors import ArgumentError, ArgumentTypeError, LedgerError
from dppeft.privacy import accounting
from dppeft.privacy.plan import SAMPLER, UNIT, PrivacyPlan

_VERSION = 1
_FIRST = "0" * 64  # the "prev" of the header
_RELEASE_KEYS = {
    "kind",
    "step",
    "sample_rate",
    "noise_multiplier",
    "l2_bound",
    "expected_batch_size",
    "torn",
    "prev",
    "hash",
}


@dataclass(frozen=True, kw_only=True)
class Release:
    """One noised sum that left the private side, as the ledger records it.

    ``torn`` marks a release whose own line a crash cut off: it is charged with the dearer of the
    plan's values and the ones before it, although its update was probably never applied.
    """

    step: int
    sample_rate: float
    noise_multiplier: float
    l2_bound: float
    expected_batch_size: float
    torn: bool = False

    def __post_init__(self) -> None:
        """Refuses values that no release can have."""
        if isinstance(self.step, bool) or not isinstance(self.step, int) or self.step < 0:
            raise ArgumentError(f"Expected step to be a whole number >= 0, got step={self.step!r}.")
        _validate.probability(open_interval=False, sample_rate=self.sample_rate)
        noise = _validate.non_negative(noise_multiplier=self.noise_multiplier)
        bound = _validate.positive(allow_inf=True, l2_bound=self.l2_bound)
        _validate.positive(expected_batch_size=self.expected_batch_size)
        if noise > 0 and math.isinf(bound):
            raise ArgumentError("Expected a finite l2_bound with noise, got l2_bound=inf.")


def plan_header(plan: PrivacyPlan, *, seeded: bool) -> dict[str, Any]:
    """The header that describes a run of ``plan``; all of it may be published."""
    return {
        "unit": UNIT,
        "sampler": SAMPLER,
        "num_examples": plan.num_examples,
        "delta": plan.delta,
        "seeded": seeded,
        "plan": plan.summary(),
    }


class Ledger:
    """An append-only record of releases. Made by ``Ledger.create`` or ``Ledger.open``."""

    def __init__(self, path: Path, header: dict[str, Any], head: str) -> None:
        self._path = path
        self._header = header
        self._head = head
        self._entries: list[Release] = []
        self._next_byte = 0  # where the next line starts
        self._pending: list[Release] = []  # charged, but not yet on disk under their own line

    @classmethod
    def create(cls, path: str | os.PathLike[str], header: Mapping[str, Any]) -> Ledger:
        """Starts a new file with ``header`` plus version and run id, and syncs it to the disk.

        Raises:
            LedgerError: the file exists already.
            ArgumentTypeError: the header holds something that is not JSON.
        """
        path = Path(path)
        full = {"version": _VERSION, "run_id": uuid.uuid4().hex, **header, "kind": "header"}
        line, digest = _seal(full, _FIRST)
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(path, "xb") as file:
                _write(file, line)
        except FileExistsError:
            raise LedgerError(
                f"{path} exists already: Ledger.open continues it; a new run needs a new file."
            ) from None
        _sync_folder(path.parent)
        ledger = cls(path, json.loads(line), digest)
        ledger._next_byte = len(line)
        return ledger

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Ledger:
        """Reads a ledger and checks every line; nothing is written until the next ``append``.

        A last line that a crash cut off counts as one release: it was written before its update, so
        the update was most likely not applied, but forgetting is the only wrong answer. If its
        values cannot be read, the dearer of the plan's and the previous line's stand in.

        Raises:
            LedgerError: the file is missing, is not a ledger, or was changed.
        """
        path = Path(path)
        try:
            data = path.read_bytes()
        except OSError as reason:
            raise LedgerError(f"Cannot read the ledger {path}: {reason.strerror}.") from None
        lines = data.split(b"\n")
        torn = lines.pop()  # b"" when the last line is whole
        if not lines:
            raise LedgerError(f"{path} has no whole line: it is not a ledger, or was never begun.")
        header = _unseal(lines[0], _FIRST, f"{path} line 1")
        if header.get("kind") != "header" or header.get("version") != _VERSION:
            raise LedgerError(
                f"{path} line 1: expected a ledger header of version {_VERSION}, got "
                f"kind={header.get('kind')!r}, version={header.get('version')!r}."
            )
        ledger = cls(path, header, header["hash"])
        for number, line in enumerate(lines[1:], start=2):
            record = _unseal(line, ledger._head, f"{path} line {number}")
            ledger._entries.append(_release(record, f"{path} line {number}"))
            ledger._head = record["hash"]
        ledger._next_byte = len(data) - len(torn)
        if torn:
            try:  # whole but for its newline: then its own values count
                record = _unseal(torn, ledger._head, f"{path}, last line")
                release = _release(record, f"{path}, last line")
            except LedgerError:
                release = ledger._torn_release()
            ledger._entries.append(release)
            ledger._pending.append(release)
        return ledger

    @property
    def path(self) -> Path:
        """The file."""
        return self._path

    @property
    def header(self) -> dict[str, Any]:
        """A copy of the header: run id, unit, rows, delta, sampler, seeded, plan."""
        header: dict[str, Any] = json.loads(json.dumps(self._header))
        return header

    @property
    def head(self) -> str:
        """Hash of the last line: together with the file it shows that nothing is missing."""
        return self._head

    @property
    def entries(self) -> tuple[Release, ...]:
        """Every release, in the order in which it was written."""
        return tuple(self._entries)

    def __len__(self) -> int:
        """Number of releases."""
        return len(self._entries)

    def append(
        self,
        *,
        step: int,
        sample_rate: float,
        noise_multiplier: float,
        l2_bound: float,
        expected_batch_size: float,
    ) -> Release:
        """Writes one release through to the disk; call it before the update is applied.

        Steps may repeat (a run resumed from an earlier checkpoint): each line is charged.

        Raises:
            ArgumentError: a value that no release can have.
            LedgerError: the line could not be written, so the release must not happen.
        """
        release = Release(
            step=step,
            sample_rate=float(sample_rate),
            noise_multiplier=float(noise_multiplier),
            l2_bound=float(l2_bound),
            expected_batch_size=float(expected_batch_size),
        )
        head = self._head
        text = b""
        for one in [*self._pending, release]:
            line, head = _seal(_record(one), head)
            text += line
        try:
            # Over the torn line, if any: it stays in place until its replacement is there.
            with open(self._path, "r+b") as file:
                file.seek(0, os.SEEK_END)
                if file.tell() < self._next_byte or (
                    not self._pending and file.tell() != self._next_byte
                ):
                    raise LedgerError(
                        f"{self._path} has changed since it was opened: another process writes to "
                        "it. Give each run its own ledger."
                    )
                file.seek(self._next_byte)
                _write(file, text, cut=True)
        except OSError as reason:
            raise LedgerError(
                f"Cannot write to the ledger {self._path}: {reason.strerror}. The step is refused."
            ) from None
        self._head = head
        self._next_byte += len(text)
        self._pending.clear()
        self._entries.append(release)
        return release

    def spent(self, delta: float | None = None, accountant: str = "pld") -> Spent:
        """The guarantee of everything in the ledger together, whatever was planned.

        Args:
            delta: default: the header's.
            accountant: "pld", "rdp" or "prv".
        """
        if delta is None:
            delta = self._header.get("delta")
        if delta is None:
            raise ArgumentError(
                "Expected delta: this ledger's header has none. Give spent(delta=)."
            )
        counts = Counter((entry.sample_rate, entry.noise_multiplier) for entry in self._entries)
        pairs = sorted(counts)
        epsilon = 0.0
        if pairs:
            epsilon = accounting.epsilon(
                sample_rate=[rate for rate, _ in pairs],
                noise_multiplier=[noise for _, noise in pairs],
                steps=[counts[pair] for pair in pairs],
                delta=delta,
                accountant=accountant,
            )
        last = self._entries[-1] if self._entries else None
        return Spent(
            epsilon=epsilon,
            delta=delta,
            steps=len(self._entries),
            sample_rate=last.sample_rate if last else self._planned("sample_rate"),
            noise_multiplier=last.noise_multiplier if last else self._planned("noise_multiplier"),
            accountant=accountant,
            unit=self._header.get("unit", UNIT),
        )

    def _planned(self, name: str) -> float:
        planned = self._header.get("plan") or {}
        return float(planned.get(name, 0.0))

    def _torn_release(self) -> Release:
        """The release of a line that was cut off: the dearer of the plan's and the last values."""
        rate, noise = self._planned("sample_rate"), self._planned("noise_multiplier")
        batch, bound = self._planned("expected_batch_size"), self._planned("max_grad_norm")
        step = 0
        if self._entries:
            last = self._entries[-1]
            step, batch, bound = last.step + 1, last.expected_batch_size, last.l2_bound
            rate = max(rate, last.sample_rate)
            noise = min(noise, last.noise_multiplier) if noise else last.noise_multiplier
        if not batch:
            raise LedgerError(
                f"{self._path}: the only release's line was cut off and the header has no plan to "
                "charge it by. Begin a new ledger."
            )
        return Release(
            step=step,
            sample_rate=rate,
            noise_multiplier=noise,
            l2_bound=bound,
            expected_batch_size=batch,
            torn=True,
        )


def _record(release: Release) -> dict[str, Any]:
    record: dict[str, Any] = {
        "kind": "release",
        "step": release.step,
        "sample_rate": release.sample_rate,
        "noise_multiplier": release.noise_multiplier,
        # JSON has no infinity (a run without noise may have no bound).
        "l2_bound": release.l2_bound if math.isfinite(release.l2_bound) else "inf",
        "expected_batch_size": release.expected_batch_size,
    }
    return {**record, "torn": True} if release.torn else record


def _release(record: dict[str, Any], where: str) -> Release:
    unknown = record.keys() - _RELEASE_KEYS
    if record.get("kind") != "release" or unknown:
        raise LedgerError(
            f"{where}: expected a release, got kind={record.get('kind')!r}, {unknown}."
        )
    try:
        return Release(
            step=record["step"],
            sample_rate=record["sample_rate"],
            noise_multiplier=record["noise_multiplier"],
            l2_bound=float(record["l2_bound"]),
            expected_batch_size=record["expected_batch_size"],
            torn=record.get("torn", False),
        )
    except (KeyError, TypeError, ValueError) as reason:
        raise LedgerError(f"{where}: not a release that this version wrote ({reason}).") from None


def _digest(record: Mapping[str, Any]) -> str:
    text = json.dumps(record, sort_keys=True, separators=(",", ":"), allow_nan=False)
    return hashlib.sha256(text.encode()).hexdigest()


def _seal(record: Mapping[str, Any], prev: str) -> tuple[bytes, str]:
    """(line with "prev" and "hash", the hash)."""
    chained = {**record, "prev": prev}
    try:
        digest = _digest(chained)
    except (TypeError, ValueError) as reason:
        raise ArgumentTypeError(f"Expected a header of plain JSON values: {reason}.") from None
    line = json.dumps({**chained, "hash": digest}, separators=(",", ":"), allow_nan=False)
    return line.encode() + b"\n", digest


def _unseal(line: bytes, prev: str, where: str) -> dict[str, Any]:
    """The record of a line; an error unless its hash and its link to the line before are right."""
    try:
        record = json.loads(line)
    except ValueError:
        raise LedgerError(f"{where}: not JSON. The ledger was changed or damaged.") from None
    if not isinstance(record, dict):
        raise LedgerError(f"{where}: expected a JSON object. The ledger was changed or damaged.")
    body = {key: value for key, value in record.items() if key != "hash"}
    try:
        right = record.get("hash") == _digest(body) and record.get("prev") == prev
    except ValueError:
        right = False
    if not right:
        raise LedgerError(
            f"{where}: its checksum is wrong, so this line or the one before it was edited, "
            "removed or moved. The ledger is not trusted; restore it from a copy."
        )
    return record


def _write(file: Any, data: bytes, *, cut: bool = False) -> None:
    file.write(data)
    if cut:
        file.truncate()
    file.flush()
    os.fsync(file.fileno())


def _sync_folder(folder: Path) -> None:
    """Makes a new file's name durable, where the system lets a folder be synced."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)
