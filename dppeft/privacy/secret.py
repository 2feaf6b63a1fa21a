"""The secret that sampling and noise are drawn from. It is never written to any file."""

from __future__ import annotations

import hashlib
import secrets
from typing import NoReturn

from dppeft.errors import ArgumentTypeError

_KEY_BYTES = 32


class Secret:
    """A 256-bit key. Streams spawned from it under different names are independent.

    Attributes:
        seeded: True when a user's seed made it, so that whoever knows the seed can undo the noise.
    """

    __slots__ = ("_key", "seeded")

    def __init__(self, key: bytes, *, seeded: bool) -> None:
        if not isinstance(key, bytes) or len(key) != _KEY_BYTES:
            raise ArgumentTypeError(f"Expected a key of {_KEY_BYTES} bytes: use fresh_secret().")
        self._key = key
        self.seeded = seeded

    def spawn(self, purpose: str) -> Secret:
        """An independent secret for one purpose, the same each time."""
        return Secret(self._digest(b"spawn:" + purpose.encode()), seeded=self.seeded)

    def integer(self, *index: int) -> int:
        """A 256-bit integer that depends on the secret and on every index given."""
        label = "integer:" + ",".join(str(int(i)) for i in index)
        return int.from_bytes(self._digest(label.encode()), "big")

    def to_bytes(self) -> bytes:
        """Key and seeded flag, to send to other ranks of the same run; never to be stored."""
        return bytes([self.seeded]) + self._key

    @staticmethod
    def from_bytes(data: bytes) -> Secret:
        """The inverse of ``to_bytes``."""
        return Secret(bytes(data[1:]), seeded=bool(data[0]))

    def _digest(self, message: bytes) -> bytes:
        return hashlib.blake2b(message, key=self._key, digest_size=_KEY_BYTES).digest()

    def __repr__(self) -> str:
        """Without the key, which must not reach a log."""
        return f"Secret(seeded={self.seeded})"

    def __deepcopy__(self, memo: object) -> Secret:
        """Itself: it does not change."""
        return self

    def __reduce__(self) -> NoReturn:
        """Refused, so that no checkpoint holds the key."""
        raise TypeError("A Secret is not pickled: send to_bytes() to the ranks that need it.")


def fresh_secret(seed: int | None = None) -> Secret:
    """A secret from the operating system's entropy, or, marked as seeded, from ``seed``."""
    if seed is None:
        return Secret(secrets.token_bytes(_KEY_BYTES), seeded=False)
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ArgumentTypeError(f"Expected seed={seed!r} to be a whole number or None.")
    return Secret(hashlib.sha256(f"dppeft seed {seed}".encode()).digest(), seeded=True)
