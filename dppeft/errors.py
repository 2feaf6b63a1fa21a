"""The errors that dppeft raises: one base class, and the builtin that fits.

Every message names the value given, what was expected and the remedy, and is raised before any
private row has been used.
"""


class DppeftError(Exception):
    """Base class of every error that dppeft raises on purpose."""


class ArgumentError(DppeftError, ValueError):
    """An argument has a value that cannot be honoured."""


class ArgumentTypeError(DppeftError, TypeError):
    """An argument has the wrong type, or its name is unknown."""


class DataError(DppeftError, ValueError):
    """The rows given cannot be trained on (columns, labels, lengths, empty texts)."""


class UnsupportedModelError(DppeftError, RuntimeError):
    """Per-example gradients of this model cannot be computed exactly, so it is refused."""


class ChangedCallError(UnsupportedModelError):
    """A module was called with other inputs than when it was examined; the engine looks again."""


class BudgetError(DppeftError, RuntimeError):
    """The next step would exceed the plan, or break the order in which draws must be released."""


class LedgerError(DppeftError, RuntimeError):
    """A ledger is missing, unreadable, or does not match its own checksums."""


class CheckpointError(DppeftError, RuntimeError):
    """A saved adapter or run cannot be loaded as what it claims to be."""


class PrivacyWarning(UserWarning):
    """A choice is allowed but weakens what the guarantee means."""
