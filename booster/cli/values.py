"""What options of commands take: text to values, refused by argparse where it is none, so that the option is named."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from pathlib import Path

__all__ = ["device", "elsewhere", "file_path", "listed", "number", "precisions", "whole"]


def whole(low: int, high: int | None = None) -> Callable[[str], int]:
    """Whole numbers from `low` on, up to `high`."""
    bounds = f"of at least {low}" if high is None else f"between {low} and {high}"

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number {bounds}")
        return value

    return read


def number(above: float, below: float = math.inf, what: str = "a finite number") -> Callable[[str], float]:
    """Finite numbers above `above` and below `below`. what: what it is, for the message."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not above < value < below:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what} above {above:g}")
        return value

    return read


def file_path(text: str) -> Path:
    """A path, which blanks are not."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is not a path")
    return Path(text)


def listed(text: str) -> list[str]:
    """Names by commas, at least one."""
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing")
    return names


def elsewhere(text: str) -> str:
    """Return what `text` is instead, for a message that says what it is not; "" where it is not known."""
    from booster.checks import meant_by

    meant, _ = meant_by(text)
    return "" if meant is None else f"; {text} is a {'precision' if meant == 'mixed_precision' else meant}"


def precisions(text: str) -> list[str]:
    """Names of precisions by commas."""
    from booster.mixed_precision import available

    names = listed(text)
    for name in names:
        if name not in available():
            legal = ", ".join(available())
            raise argparse.ArgumentTypeError(f"{name!r} is no precision{elsewhere(name)}; choose from {legal}")
    return names


def device(text: str) -> str:
    """A device that is there."""
    from booster.device import resolve_device

    try:
        resolve_device(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}{elsewhere(text)}") from None
    return text
