"""Sharing the small result: write an adapter with its privacy card, read one back, fold it in."""

from dppeft.sharing.merging import merge
from dppeft.sharing.reading import load
from dppeft.sharing.writing import export, write_shared

__all__ = ["export", "load", "merge", "write_shared"]
