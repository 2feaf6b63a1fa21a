"""The privacy card: what is claimed about a shared adapter, for programs and for people.

It holds public numbers only: no seed, no drawn batch size, no un-noised measurement.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from dppeft._types import Spent
from dppeft.errors import ArgumentError, CheckpointError
from dppeft.privacy.plan import SAMPLER, UNIT, PrivacyPlan

FILE_NAME = "privacy.json"
_FORMAT = 1
_LIBRARIES = ("dppeft", "torch", "transformers", "peft", "opacus", "dp-accounting")


@dataclass(frozen=True, kw_only=True)
class PrivacyCard:
    """What is claimed, for which unit, and by which mechanism. None: not known or not claimed.

    Attributes:
        unit: whose presence is hidden, e.g. "one row".
        neighbour_relation: how neighbouring data sets differ.
        epsilon: None when no guarantee is claimed; an infinite value becomes None.
        delta: of the guarantee.
        accountant: the one that computed epsilon.
        sampler: how rows were drawn.
        sample_rate: of the last step.
        noise_multiplier: of the last step.
        steps: noised releases that epsilon covers.
        max_grad_norm: clipping threshold.
        clipping: "flat", "per_layer" or "automatic".
        num_examples: rows of the private data set.
        seeded: True when sampling and noise came from a seed that somebody chose: the guarantee
            then holds only towards those who do not know it. The seed itself is not recorded.
        versions: library -> version.
        looked_at_without_noise: what was computed from private rows without noise.
        notes: anything else a reader must know.
    """

    unit: str = "one row"
    neighbour_relation: str = "add or remove"
    epsilon: float | None = None
    delta: float | None = None
    accountant: str | None = None
    sampler: str | None = None
    sample_rate: float | None = None
    noise_multiplier: float | None = None
    steps: int | None = None
    max_grad_norm: float | None = None
    clipping: str | None = None
    num_examples: int | None = None
    seeded: bool | None = None
    versions: Mapping[str, str] = field(default_factory=dict)
    looked_at_without_noise: Sequence[str] = ()
    notes: Sequence[str] = ()

    def __post_init__(self) -> None:
        """An infinite epsilon claims nothing; a negative or missing number is refused."""
        if self.epsilon is not None:
            if math.isnan(self.epsilon) or self.epsilon < 0:
                raise ArgumentError(f"Expected epsilon >= 0 or None, got epsilon={self.epsilon}.")
            if math.isinf(self.epsilon):
                object.__setattr__(self, "epsilon", None)
        if self.epsilon is not None and (self.delta is None or not 0 < self.delta < 1):
            raise ArgumentError(
                f"Expected delta in (0, 1) beside epsilon={self.epsilon:g}, got delta={self.delta}."
            )
        object.__setattr__(self, "versions", dict(self.versions))
        object.__setattr__(self, "looked_at_without_noise", tuple(self.looked_at_without_noise))
        object.__setattr__(self, "notes", tuple(self.notes))

    @classmethod
    def from_spent(
        cls,
        spent: Spent,
        *,
        plan: PrivacyPlan | None = None,
        clipping: str | None = None,
        seeded: bool | None = None,
        looked_at_without_noise: Sequence[str] = (),
        notes: Sequence[str] = (),
    ) -> PrivacyCard:
        """The card of what was spent; facts that only the plan knows come from ``plan``."""
        unit, _, relation = spent.unit.partition(", ")
        return cls(
            unit=unit,
            neighbour_relation=relation or UNIT.partition(", ")[2],
            epsilon=spent.epsilon,
            delta=spent.delta,
            accountant=spent.accountant,
            sampler=SAMPLER if plan is not None else None,
            sample_rate=spent.sample_rate,
            noise_multiplier=spent.noise_multiplier,
            steps=spent.steps,
            max_grad_norm=plan.max_grad_norm if plan is not None else None,
            clipping=clipping,
            num_examples=plan.num_examples if plan is not None else None,
            seeded=seeded,
            versions=library_versions(),
            looked_at_without_noise=looked_at_without_noise,
            notes=notes,
        )

    @property
    def guarantee(self) -> bool:
        """Whether a differential privacy guarantee is claimed."""
        return self.epsilon is not None

    def without_guarantee(self, why: str | None = None) -> PrivacyCard:
        """The same facts with no guarantee claimed."""
        return replace(self, epsilon=None, notes=(*self.notes, why) if why else self.notes)

    def to_dict(self) -> dict[str, Any]:
        """Plain JSON values; ``from_dict`` gives an equal card back."""
        values = {one.name: getattr(self, one.name) for one in fields(self)}
        bound = self.max_grad_norm
        return {
            "format": _FORMAT,
            "guarantee": self.guarantee,
            **values,
            "max_grad_norm": "inf" if bound is not None and math.isinf(bound) else bound,
            "versions": dict(self.versions),
            "looked_at_without_noise": list(self.looked_at_without_noise),
            "notes": list(self.notes),
        }

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PrivacyCard:
        """The card of ``to_dict``.

        Raises:
            CheckpointError: another format, unknown fields, or a guarantee without an epsilon.
        """
        values = dict(values)
        version, claimed = values.pop("format", None), values.pop("guarantee", None)
        unknown = values.keys() - {one.name for one in fields(cls)}
        if version != _FORMAT or unknown:
            raise CheckpointError(
                f"Expected a privacy card of format {_FORMAT}, got format={version!r}"
                + (f" with unknown fields {sorted(unknown)}." if unknown else ".")
            )
        if values.get("max_grad_norm") == "inf":
            values["max_grad_norm"] = math.inf
        try:
            card = cls(**values)
        except (TypeError, ValueError) as reason:
            raise CheckpointError(f"Not a privacy card that dppeft wrote: {reason}") from None
        if claimed is not card.guarantee:
            raise CheckpointError(
                f"This privacy card says guarantee={claimed!r} with epsilon={card.epsilon!r}: it "
                "was changed by hand and is not trusted."
            )
        return card

    def write(self, directory: str | os.PathLike[str]) -> Path:
        """Writes ``privacy.json`` into ``directory``, which must exist; returns its path."""
        path = Path(directory) / FILE_NAME
        text = json.dumps(self.to_dict(), indent=2, allow_nan=False)
        path.write_text(text + "\n", encoding="utf-8")
        return path

    @classmethod
    def read(cls, directory: str | os.PathLike[str]) -> PrivacyCard:
        """Reads ``privacy.json`` from ``directory``.

        Raises:
            CheckpointError: there is none, or it is not a card that dppeft wrote.
        """
        path = Path(directory) / FILE_NAME
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as reason:
            raise CheckpointError(f"Cannot read the privacy card {path}: {reason}") from None
        if not isinstance(values, dict):
            raise CheckpointError(f"{path} is not a privacy card: expected a JSON object.")
        return cls.from_dict(values)

    def markdown(self) -> str:
        """A section for the model card ``README.md``."""
        lines = ["## Privacy", "", self._claim(), ""]
        facts = [(label, value) for label, value in self._facts() if value is not None]
        if facts:
            lines += [
                "| | |",
                "|---|---|",
                *(f"| {label} | {value} |" for label, value in facts),
                "",
            ]
        if self.seeded:
            lines += [
                "Sampling and noise came from a chosen seed, so the run can be repeated. The "
                "guarantee does not hold towards anyone who knows or guesses the seed.",
                "",
            ]
        if self.looked_at_without_noise:
            lines += ["Looked at without noise, and not covered by the guarantee:", ""]
            lines += [*(f"- {what}" for what in self.looked_at_without_noise), ""]
        lines += [f"{note}\n" for note in self.notes]
        return "\n".join(lines).rstrip() + "\n"

    def _claim(self) -> str:
        if not self.guarantee:
            return (
                "**No privacy guarantee is claimed for these weights.** They may reveal rows of "
                "the data they were trained on."
            )
        return (
            f"These weights are ({self._rounded_up()}, {self.delta:g})-differentially private for "
            f"{self.unit} ({self.neighbour_relation})."
        )

    def _rounded_up(self) -> str:
        """Epsilon to four decimals, never below the value claimed."""
        assert self.epsilon is not None
        return f"{math.ceil(self.epsilon * 1e4) / 1e4:.10g}"

    def _facts(self) -> list[tuple[str, str | None]]:
        def number(value: float | None, form: str = "g") -> str | None:
            return None if value is None else f"{value:{form}}"

        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        return [
            ("unit", f"{self.unit}, {self.neighbour_relation}"),
            ("epsilon", self._rounded_up() if self.guarantee else "none claimed"),
            ("delta", number(self.delta)),
            ("accountant", self.accountant),
            ("sampling", self.sampler),
            ("sampling rate", number(self.sample_rate, ".6g")),
            ("noise multiplier", number(self.noise_multiplier, ".6g")),
            ("steps", number(self.steps, "d")),
            ("max_grad_norm", number(self.max_grad_norm)),
            ("clipping", self.clipping),
            ("rows", number(self.num_examples, ",d")),
            ("seeded", None if self.seeded is None else ("yes" if self.seeded else "no")),
            ("versions", versions or None),
        ]


def library_versions() -> dict[str, str]:
    """Versions of the installed libraries that the guarantee rests on."""
    found = {}
    for name in _LIBRARIES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    if "dppeft" not in found:  # run from a checkout
        from dppeft import __version__  # noqa: PLC0415

        found = {"dppeft": __version__, **found}
    return found
