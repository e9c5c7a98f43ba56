"""The form of a record's lines: what a reader may take for granted of each key, whoever wrote the file."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

__all__ = ["held_to_form"]

_MOST = 2**63
_LAST_YEAR = 2**37  # seconds since 1970: the year 6325
_MOST_COUNTS = 256  # exponents of float32
_LOWEST, _HIGHEST = -2400, 2400  # exponents of float64, times a loss scale
_FORMATS = ("float16", "bfloat16", "float32", "float64")

Check = Callable[[Any], bool]


def held_to_form(line: Mapping[str, Any]) -> dict[str, Any]:
    """Return `line` without the lists and objects of keys that readers do not know.

    Raises ValueError that names the key, where a known one is missing or holds what no line of its kind holds.
    """
    kind = line["kind"]
    if not isinstance(kind, str):
        raise ValueError(f"its kind is {_shown(kind)}, and no text")
    required, optional = _FORMS.get(kind, ({}, {}))
    missing = required.keys() - line.keys()
    if missing:
        raise ValueError(f"a line of the kind {kind} needs {', '.join(sorted(missing))}")
    known = {**required, **optional}
    for key, value in line.items():
        if key in known and not known[key][0](value):
            raise ValueError(f"{key} is {_shown(value)}, and not {known[key][1]}")
    return {key: value for key, value in line.items() if key in known or not isinstance(value, (dict, list))}


def _shown(value: Any) -> str:
    if isinstance(value, (list, dict)):
        return f"a {type(value).__name__} of {len(value)}"
    text = repr(value) if not isinstance(value, int) or abs(value) < 2**64 else "a number of more than 64 bits"
    return text if len(text) <= 40 else f"{text[:40]}..."


def _whole(least: int, most: int) -> tuple[Check, str]:
    return lambda value: type(value) is int and least <= value <= most, f"a whole number from {least} to {most}"


def _number(value: Any) -> bool:
    return type(value) is float or (type(value) is int and abs(value) <= _MOST)


def _finite(value: Any) -> bool:
    return _number(value) and math.isfinite(value)


def _counts(value: Any) -> bool:
    if not isinstance(value, list) or len(value) > _MOST_COUNTS:
        return False
    return all(_COUNT[0](count) for count in value) and (not value or any(value))


_TEXT: tuple[Check, str] = (lambda value: isinstance(value, str), "a text")
_TEXTS: tuple[Check, str] = (
    lambda value: isinstance(value, list) and all(isinstance(entry, str) for entry in value),
    "a list of texts",
)
_NUMBER: tuple[Check, str] = (_number, "a number")
_STEP = _whole(0, 2**53)
_COUNT = _whole(0, _MOST)
_TIME: tuple[Check, str] = (lambda value: _finite(value) and 0 <= value <= _LAST_YEAR, "a time in seconds since 1970")
_RATES: tuple[Check, str] = (
    lambda value: isinstance(value, list) and all(rate is None or _finite(rate) for rate in value),
    "a list of numbers",
)
_BINS: tuple[Check, str] = (_counts, f"a list of at most {_MOST_COUNTS} counts that are not all zero")
_FORMAT: tuple[Check, str] = (lambda value: value in _FORMATS, f"one of {', '.join(_FORMATS)}")

_FORMS: dict[str, tuple[dict[str, tuple[Check, str]], dict[str, tuple[Check, str]]]] = {
    "run": (
        {},
        {
            "schema": _whole(0, 2**31),
            "rank": _whole(0, 2**31),
            "world_size": _whole(1, 2**31),
            "time": _TIME,
            **dict.fromkeys(("precision", "plugin", "format", "device", "booster", "torch"), _TEXT),
        },
    ),
    "step": (
        {"optimizer": _TEXT, "step": _STEP, "time": _TIME, "applied": (lambda value: type(value) is bool, "a boolean")},
        {
            **dict.fromkeys(("loss", "loss_scale", "grad_norm", "clip"), _NUMBER),
            "lr": _RATES,
            "reason": _TEXT,
            "culprit": _TEXTS,
        },
    ),
    "sample": (
        {
            **dict.fromkeys(("optimizer", "of", "name"), _TEXT),
            "step": _STEP,
            "format": _FORMAT,
            **dict.fromkeys(("scale", "largest"), _NUMBER),
            **dict.fromkeys(("zeros", "nonfinite"), _COUNT),
            "low": _whole(_LOWEST, _HIGHEST),
            "counts": _BINS,
        },
        {
            **dict.fromkeys(("place", "group", "still", "looked"), _COUNT),
            "copies": _whole(1, 2**31),
            "stored": _TEXT,
            **dict.fromkeys(("norm", "update_norm", "weight_norm"), _NUMBER),
        },
    ),
}
