"""Arguments of public calls, checked: each function returns the value as a plain Python one, or says what is wrong with it; and
how messages and tables are worded: names in a sentence, counts, columns, dtypes and powers.

All messages have one form, so that a call can be mended without reading code: the argument and what was given, what is
legal, and the way out where there is one (`fix`). Another kind of object is a TypeError, another value a ValueError; None, and
a bool or fraction where a count is wanted, are values. Numbers and counts of numpy are legal.

also: what the caller lets pass besides, such as "None", for the message.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from fractions import Fraction
from numbers import Integral, Number, Real
from pathlib import Path
from typing import Any, TypeGuard, TypeVar

import torch
import torch.distributed as dist

T = TypeVar("T")

_LONGEST = 80  # characters of a value in a message; of longer ones it has the type


def flag(name: str, value: Any, *, also: str = "") -> bool:
    """Return `value`, True or False."""
    if not isinstance(value, bool):
        raise TypeError(refusal(name, value, "True or False", also))
    return value


def number(
    name: str,
    value: Any,
    *,
    least: float = -math.inf,
    above: float = -math.inf,
    most: float = math.inf,
    below: float = math.inf,
    infinite: bool = False,
    also: str = "",
    fix: str = "",
) -> float:
    """Return `value`, a number of at least `least` and above `above`, at most `most` and below `below`; never NaN.

    infinite: infinity is legal where the bounds allow it. The number keeps its type, so that an int stays exact.
    """
    noun = "a number" if infinite else "a finite number"
    bounds = [
        *([f"of at least {least:g}"] if least > -math.inf else []),
        *([f"above {above:g}"] if above > -math.inf else []),
        *([f"at most {most:g}"] if most < math.inf else []),
        *([f"below {below:g}"] if below < math.inf else []),
    ]
    legal = " ".join([noun, " and ".join(bounds)]) if bounds else noun
    if isinstance(value, bool) or not isinstance(value, Real):
        raise _kind(value)(refusal(name, value, legal, also, fix))
    value = value if isinstance(value, (int, float)) else float(value)
    above_low = value >= least and (value > above or above == -math.inf)
    below_high = value <= most and (value < below or below == math.inf)
    if not (above_low and below_high and (infinite or _is_finite(value))):
        raise ValueError(refusal(name, value, legal, also, fix))
    return value


def count(
    name: str, value: Any, *, least: int = 1, most: int | None = None, what: str = "", also: str = "", fix: str = ""
) -> int:
    """Return `value`, a whole number from `least` to `most`. what: of what, for the message."""
    bounds = f"of at least {least}" if most is None else f"from {least} to {most}"
    legal = f"a whole number {bounds}{f', {what}' if what else ''}"
    if not is_whole(value):
        raise _kind(value)(refusal(name, value, legal, also, fix))
    if value < least or (most is not None and value > most):
        raise ValueError(refusal(name, value, legal, also, fix))
    return int(value)


def text(name: str, value: Any, what: str = "a string", *, also: str = "") -> str:
    """Return `value`, a string that is not empty. what: the string that it is, for the message."""
    if not isinstance(value, str):
        raise TypeError(refusal(name, value, what, also))
    if not value.strip():
        raise ValueError(refusal(name, value, what, also))
    return value


def path(name: str, value: Any) -> Path:
    """Return `value` as a path."""
    legal = "a path, as a string or a Path"
    if isinstance(value, str):
        text(name, value, legal)
    elif not isinstance(value, os.PathLike) or not isinstance(os.fspath(value), str):
        raise TypeError(refusal(name, value, legal))
    return Path(value)


def choice(name: str, value: T, legal: Sequence[Any], *, fix: str = "") -> T:
    """Return `value`, one of `legal`; 1 is not True."""
    if not any(type(value) is type(entry) and value == entry for entry in legal):
        written = [repr(entry) for entry in legal]
        few = f"{', '.join(written[:-1])} or {written[-1]}"
        choose = few if len(written) <= 3 else f"one of [{', '.join(written)}]"
        raise ValueError(f"{name}={shown(value)} is not legal; choose {choose}{f'; {fix}' if fix else ''}")
    return value


def floating_dtype(name: str, value: Any) -> torch.dtype:
    """Return `value`, a floating dtype of torch."""
    if not isinstance(value, torch.dtype) or not value.is_floating_point:
        raise ValueError(refusal(name, value, "a floating torch dtype", "None"))
    return value


def instance(name: str, value: Any, kind: type[T] | tuple[type[T], ...], what: str, *, fix: str = "") -> T:
    """Return `value`, of the type `kind`. what: what that is called, None included where it is legal."""
    if not isinstance(value, kind):
        hint = "pass an instance of it" if isinstance(value, type) else ""
        hints = "; ".join(part for part in (hint, fix) if part)
        raise TypeError(f"{name} must be {what}, got {described(value)}{f'; {hints}' if hints else ''}")
    return value


def group(name: str, value: Any) -> dist.ProcessGroup:
    """Return `value`, a process group, or what torch gives those outside one it makes: using it says so."""
    if type(value) is int and value == dist.GroupMember.NON_GROUP_MEMBER:
        return value  # type: ignore[return-value]
    return instance(name, value, dist.ProcessGroup, "a process group of torch.distributed, or None for the world")


def function(name: str, value: Any, what: str = "a function", *, also: str = "", fix: str = "") -> Any:
    """Return `value`, which can be called. what: what it is, for the message."""
    if not callable(value):
        raise TypeError(refusal(name, value, what, also, fix))
    return value


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether `value` is a finite real number, of Python or numpy, and no bool."""
    return isinstance(value, Real) and not isinstance(value, bool) and _is_finite(value)


def is_whole(value: Any) -> TypeGuard[int]:
    """Return whether `value` is a whole number, of Python or numpy, and no bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def as_fraction(share: float) -> Fraction:
    """Return the simple fraction that `share` was meant to be: 0.55 is 11/20, and 0.55 of 100 is 55 and not a bit more."""
    return Fraction(share).limit_denominator(10**9)


def plain(value: Any) -> Any:
    """Return the number in a 0-dim tensor, which waits for its device; any other value as it is."""
    return value.item() if isinstance(value, torch.Tensor) and value.dim() == 0 else value


def refusal(name: str, value: Any, legal: str, also: str = "", fix: str = "") -> str:
    """Return the message: what was given, what is legal, the way out."""
    return f"{name}={shown(value)} is not legal; it must be {legal}{f', or {also}' if also else ''}{f'; {fix}' if fix else ''}"


def shown(value: Any) -> str:
    """Return `value` as it is written, or, where that is long, what it is."""
    written = repr(value)
    return written if len(written) <= _LONGEST and "\n" not in written else f"<{type(value).__name__}>"


def described(value: Any) -> str:
    """Return what `value` is, and how it is written where that is short."""
    if value is None or isinstance(value, type):
        return repr(value)
    kind, written = type(value).__name__, shown(value)
    return kind if kind in written else f"{kind} {written}"


def _kind(value: Any) -> type[Exception]:
    return ValueError if value is None or isinstance(value, Number) else TypeError


def _is_finite(value: Any) -> bool:
    try:
        return math.isfinite(value)
    except OverflowError:  # an int that no float holds
        return False


_SUPERSCRIPTS = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")


def listed(names: Sequence[str], most: int = 10) -> str:
    """Return `names` for a message: the first `most` of them, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def counted(count: int, noun: str) -> str:
    """Return `count` of `noun`, an "s" behind it but for one."""
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def columns(rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()) -> str:
    """Return `rows` as lines, every column as wide as its widest cell. right: places of columns that end alike."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = (
        "  ".join(f"{cell:{'>' if place in right else '<'}{widths[place]}}" for place, cell in enumerate(row)).rstrip()
        for row in rows
    )
    return "\n".join(lines)


def print_table(console: Any, table: Any) -> None:
    """Print `table` of rich on its `console`. Where that is no terminal, lines end with their last letter, not with blanks."""
    if console.is_terminal or console.record:
        console.print(table)
        return
    with console.capture() as captured:
        console.print(table)
    console.file.writelines(f"{line.rstrip()}\n" for line in captured.get().splitlines())


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of `dtype` in torch, as "float32"."""
    return str(dtype).removeprefix("torch.")


def raised(exponent: int) -> str:
    """Return `exponent` in superscript."""
    return str(exponent).translate(_SUPERSCRIPTS)


def shortened(name: str, most: int) -> str:
    """Return `name` in `most` letters: which block it is, and which of its weights, is kept."""
    *modules, last = name.split(".")
    for place, module in enumerate(modules):
        # As far as is needed modules are named by their first letter, from the outermost on.
        if len(name) > most and not module.isdigit():
            modules[place] = module[:1]
            name = ".".join([*modules, last])
    # Then the middle is left out.
    before = (most - 1) // 3
    return name if len(name) <= most else name[:before] + "…" + name[len(name) - (most - 1 - before) :]
