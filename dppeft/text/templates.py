"""A template turns a text, or a pair of texts, into a sentence with one slot for a word."""

from __future__ import annotations

import string
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from dppeft.errors import ArgumentError

_PUNCTUATION = frozenset(string.punctuation)
FIELDS = ("text", "pair", "mask")


def _lower_first(text: str) -> str:
    return text[:1].lower() + text[1:]


def _without_end(text: str) -> str:
    """Without the punctuation at its end, if there is any."""
    while text and text[-1] in _PUNCTUATION:
        text = text[:-1].rstrip()
    return text


# What may follow a field's name, as in {text:bare}.
CHANGES: dict[str, Callable[[str], str]] = {
    "bare": _without_end,
    "cut": lambda text: text[:-1],  # whatever the last character is, as the paper's code does it
    "lower": _lower_first,
}


@dataclass(frozen=True)
class Piece:
    """A part of a template: fixed words, or the place of a text or of the mask.

    Attributes:
        field: "text", "pair" or "mask"; empty for fixed words.
        words: the fixed words, spaces included; of a place, the space before it.
        change: what is done to the text first, a key of ``CHANGES``; empty for nothing.
    """

    field: str
    words: str = ""
    change: str = ""

    def fill(self, text: str) -> str:
        """What stands there for a row's text."""
        changed = CHANGES[self.change](text) if self.change else text
        return f"{self.words}{changed}"


@dataclass(frozen=True)
class Template:
    """``"{text} It was {mask}."``, read once and checked.

    Fields: ``{text}``, ``{pair}`` (the second text) and ``{mask}``. A change may follow a text's
    name: ``{text:bare}`` drops punctuation at its end, ``{text:cut}`` its last character whatever
    that is, ``{pair:lower}`` puts its first letter in lower case.

    Raises:
        ArgumentError: no mask or several, no text, a field or change that is not known.
    """

    template: str

    def __post_init__(self) -> None:
        """Refuses what cannot be a template."""
        fields = [piece.field for piece in self.pieces if piece.field]
        for name, least in (("mask", 1), ("text", 1), ("pair", 0)):
            if not least <= fields.count(name) <= 1:
                raise ArgumentError(
                    f"Expected {{{name}}} {'once' if least else 'at most once'} in the template "
                    f"{self.template!r}, found it {fields.count(name)} times. An example: "
                    "'{text} It was {mask}.'"
                )

    @property
    def takes_pairs(self) -> bool:
        """Whether it has a place for a second text."""
        return any(piece.field == "pair" for piece in self.pieces)

    @property
    def pieces(self) -> Sequence[Piece]:
        """Its parts in order. A space before a place belongs to it, as in byte-pair tokens."""
        try:
            parsed = list(string.Formatter().parse(self.template))
        except ValueError as error:
            raise ArgumentError(f"Template {self.template!r}: {error}.") from error
        found: list[Piece] = []
        for words, name, change, conversion in parsed:
            kept = words.rstrip(" ") if name is not None else words
            if kept:
                found.append(Piece("", kept))
            if name is None:
                continue
            if name not in FIELDS or conversion or (change and change not in CHANGES):
                raise ArgumentError(
                    f"Unknown place {{{name}{':' + change if change else ''}}} in the template "
                    f"{self.template!r}. Places: {', '.join(FIELDS)}; changes of a text: "
                    f"{', '.join(CHANGES)}."
                )
            if name == "mask" and change:
                raise ArgumentError(f"Template {self.template!r}: the mask has no change.")
            found.append(Piece(name, words[len(words.rstrip(" ")) :], change or ""))
        return found
