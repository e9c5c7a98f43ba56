"""Shares of a whole, as they are written."""

from __future__ import annotations

from fractions import Fraction

_FINEST = 10**9


def exact(share: float) -> Fraction:
    """Return the simple fraction that `share` was meant to be: 0.55 is 11/20, and 0.55 of 100 is 55 and not a bit more."""
    return Fraction(share).limit_denominator(_FINEST)
