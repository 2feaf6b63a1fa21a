"""Tests of one sample against a distribution, each able to reject: the wrong alternative is tried.

Two-sided at one in a million, so that a suite of hundreds of them stays quiet.
"""

from __future__ import annotations

from scipy.stats import chi2

LEVEL = 1e-6


def chi_square_rejects(value: float, degrees: float) -> bool:
    """Whether a sum of ``degrees`` squared standard normals is not what ``value`` is."""
    tail = min(chi2.cdf(value, degrees), chi2.sf(value, degrees))
    return 2 * tail < LEVEL
