"""What was released, and where it is written down.

The ledger is a file that only the main process writes. It is the account that a guarantee rests on,
so a run that is stopped, restored or continued always goes on from the longest account there is:
a crash can lose work, never spent budget.
"""

from __future__ import annotations

import os
import secrets
import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dppeft._types import Spent
from dppeft.errors import ArgumentError, CheckpointError, LedgerError
from dppeft.privacy.accounting import epsilon
from dppeft.privacy.ledger import Ledger, plan_header
from dppeft.privacy.plan import PrivacyPlan
from dppeft.training.distributed import Processes


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The public numbers of one step, from the plan."""

    sample_rate: float
    expected_batch_size: float
    noise_multiplier: float


class Record:
    """The releases of a run, on every process; the ledger, on the main one.

    Args:
        plan: what the run was planned to spend.
        processes: who writes.
        path: the ledger; None: a new file of its own. An existing one is continued: its releases
            are composed with this run's.
        seeded: whether whoever knows a seed can remove the noise.
    """

    def __init__(
        self, plan: PrivacyPlan, processes: Processes, *, path: Path | None, seeded: bool
    ) -> None:
        self._plan = plan
        self._processes = processes
        self.seeded = seeded
        self.ledger: Ledger | None = None
        if processes.is_main:
            self.ledger = self._open_or_create(path)
        self._read_releases()
        self.earlier = len(self._releases)

    @property
    def steps(self) -> int:
        """Updates released by this run, without what the ledger held before it."""
        return len(self._releases) - self.earlier

    def release(self, step: int, rates: Rates, l2_bound: float) -> None:
        """Write one release down, flushed to disk, before the update can be applied."""
        if self.ledger is not None:
            self.ledger.append(
                step=step,
                sample_rate=rates.sample_rate,
                noise_multiplier=rates.noise_multiplier,
                l2_bound=l2_bound,
                expected_batch_size=rates.expected_batch_size,
            )
        self._releases.append((rates.sample_rate, rates.noise_multiplier))

    def spent(self) -> Spent:
        """The guarantee of everything in the ledger, this run's releases and earlier ones."""
        delta, accountant = self._plan.delta, self._plan.accountant
        if self.ledger is not None:
            return self.ledger.spent(delta, accountant)
        rates, noises = zip(*self._releases, strict=True) if self._releases else ((), ())
        return Spent(
            epsilon=epsilon(
                sample_rate=rates,
                noise_multiplier=noises,
                steps=[1] * len(rates),
                delta=delta,
                accountant=accountant,
            ),
            delta=delta,
            steps=len(rates),
            sample_rate=rates[-1] if rates else self._plan.sample_rate,
            noise_multiplier=noises[-1] if noises else self._plan.noise_multiplier,
            accountant=accountant,
        )

    def notes(self) -> list[str]:
        """What a reader of the privacy card must know beside the numbers."""
        if not self.earlier:
            return []
        return [
            f"Epsilon covers {self.earlier} releases recorded before this run (other settings of "
            "the same model, say) and this run's, composed."
        ]

    def save_copy(self, path: Path) -> dict[str, Any]:
        """Copy the ledger beside saved weights; what a restore needs to find the original."""
        if self.ledger is None:
            return {}
        partial = path.with_name(f".{path.name}.partial")
        shutil.copyfile(self.ledger.path, partial)
        os.replace(partial, path)
        return {
            "path": str(self.ledger.path.resolve()),
            "earlier": self.earlier,
            "length": len(self.ledger),
            "head": self.ledger.head,
        }

    def adopt(self, copy: Path, saved: dict[str, Any]) -> None:
        """Go on from the account of a saved run: the longer of the copy and the original.

        Args:
            copy: the ledger as it was when the weights were saved.
            saved: what :meth:`save_copy` returned.
        """
        if self.ledger is not None:
            self.ledger = self._longest(copy, saved)
            self.seeded = self.seeded or bool(self.ledger.header.get("seeded"))
        self.earlier = int(saved["earlier"])
        self._read_releases()

    def _open_or_create(self, path: Path | None) -> Ledger:
        path = _default_path() if path is None else path
        header = plan_header(self._plan, seeded=self.seeded)
        if not path.exists():
            try:
                return Ledger.create(path, header)
            except OSError as error:
                raise LedgerError(
                    f"The ledger {path} cannot be written ({error.strerror}). A guarantee cannot "
                    "be checked without it: pass ledger=, a path that will outlive the run."
                ) from None
        ledger = Ledger.open(path)
        for name in ("num_examples", "delta", "unit"):
            if ledger.header.get(name) != header[name]:
                raise ArgumentError(
                    f"The ledger {path} is of a run with {name}={ledger.header.get(name)!r}, this "
                    f"one has {header[name]!r}: their releases cannot be composed. Use a new "
                    "ledger file."
                )
        return ledger

    def _longest(self, copy: Path, saved: dict[str, Any]) -> Ledger:
        assert self.ledger is not None
        original, own = Path(saved["path"]), self.ledger.path
        kept = Ledger.open(copy)
        if len(kept) != saved["length"] or kept.head != saved["head"]:
            raise LedgerError(
                f"{copy} is not the ledger that was saved with these weights: lines are missing or "
                "it was replaced. Restore from an untouched copy of the directory."
            )
        is_own = original.exists() and original.samefile(own)
        if not is_own and self.steps:
            raise CheckpointError(
                f"This run has already made {self.steps} updates, recorded in {own}. Restore a "
                "saved run into a new one, before its first step."
            )
        if not original.exists():
            # Moved to another machine, say: the copy is all there is.
            return self._continue_copy(copy, own)
        current = Ledger.open(original)
        shorter, longer = sorted((kept.entries, current.entries), key=len)
        if longer[: len(shorter)] != shorter:
            raise LedgerError(
                f"The ledgers {copy} and {original} tell different histories of one run. Restore "
                "with the file that belongs to the saved weights."
            )
        if len(current) < len(kept):
            current = self._continue_copy(copy, original)
        if not is_own and not len(self.ledger):
            own.unlink()  # made for this run and never used
        return current

    @staticmethod
    def _continue_copy(copy: Path, target: Path) -> Ledger:
        """The saved ledger in the place of one that is empty or shorter."""
        partial = target.with_name(f".{target.name}.partial")
        shutil.copyfile(copy, partial)
        os.replace(partial, target)
        return Ledger.open(target)

    def _read_releases(self) -> None:
        """The releases so far, on every process."""
        mine = None
        if self.ledger is not None:
            mine = [(e.sample_rate, e.noise_multiplier) for e in self.ledger.entries]
        self._releases: list[tuple[float, float]] = self._processes.object_from_main(mine)


def _default_path() -> Path:
    """A new file where programs keep state that must outlive them; its name tells no data."""
    home = os.environ.get("XDG_STATE_HOME")
    base = Path(home) if home else Path.home() / ".local" / "state"
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(4)}.jsonl"
    return base / "dppeft" / "ledgers" / name
