"""Files that somebody else may have put there: regular ones alone, opened without waiting, JSON of a bounded size, and new ones
written through no link.
"""

from __future__ import annotations

import json
import math
import os
import secrets
import stat
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

ROOM = 48 * 2**20
"""Bytes of memory that a small file may take, whatever its size is compared with."""

_KINDS = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a named pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISCHR, "a device"),
    (stat.S_ISBLK, "a device"),
)
# Bytes that a Python object takes for each character that begins one, or ends an entry of one, at most.
_COSTS = ((b"{", 190), (b"[", 64), (b",", 40), (b":", 40), (b'"', 26))


def names_a_regular_file(path: Path) -> bool:
    """Return whether `path` is a regular file, or a link to one; False where nothing can be seen."""
    try:
        return stat.S_ISREG(path.stat().st_mode)
    except (OSError, ValueError):  # a name with a NUL byte
        return False


def open_regular(path: Path, *, buffered: bool = True) -> IO[bytes]:
    """Open a regular file, or a link to one, for reading; OSError for whatever else has that name."""
    # Opening a named pipe would wait for a writer, and a device never ends.
    _refuse(path, os.stat(path).st_mode)
    # Whoever puts something else there meanwhile does not make this wait either.
    flags = os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_NOCTTY", 0) | getattr(os, "O_BINARY", 0)
    descriptor = os.open(path, flags)
    try:
        _refuse(path, os.fstat(descriptor).st_mode)
        return open(descriptor, "rb", buffering=-1 if buffered else 0)
    except BaseException:
        os.close(descriptor)
        raise


def read_regular(path: Path, most: int) -> bytes:
    """Return what a regular file holds; raises OSError where it is none, or has more than `most` bytes."""
    with open_regular(path) as file:
        size = os.fstat(file.fileno()).st_size
        parts, left = [], most + 1
        while size <= most and left and (part := file.read(min(left, 2**20))):
            parts.append(part)
            left -= len(part)
        if size > most or not left:
            raise OSError(f"{path} has {max(size, most + 1)} bytes, more than the {most} that it may have here")
        return b"".join(parts)


def replace_regular(path: Path, data: bytes) -> None:
    """Write a file that appears whole, in place of a regular one of that name; OSError for anything else."""
    # A link that somebody else put there would have its target written to.
    if path.is_symlink() or (path.exists() and not names_a_regular_file(path)):
        raise OSError(f"{path} is no regular file, so nothing is written to it; name another, or remove it")
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
    try:
        with temporary.open("xb") as file:
            file.write(data)
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


def printable(text: str) -> str:
    """Return `text` with whatever a terminal would act on, or not show, as its escape: a name may come from a file."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def json_cost(data: bytes) -> int:
    """Return the bytes of memory that reading a JSON text takes at most: the text, what it is decoded to, and its values."""
    # A character that is not ASCII, or written as \\u, makes a text of four bytes each.
    decoded = 1 if data.isascii() else 4
    values = decoded if b"\\u" not in data else 4
    # Counted by the characters that begin and end values, before anything is made of them.
    return sum(data.count(char) * cost for char, cost in _COSTS) + len(data) * (1 + decoded + values)


def parse_json(data: bytes, most: int = ROOM) -> Any:
    """Return what a JSON text says; raises ValueError for what is none, and where reading it would take over `most` bytes."""
    takes = json_cost(data)
    # As a million empty lists would.
    if takes > most:
        raise ValueError(f"its {len(data)} bytes would take {takes} in memory, and may take {most}")
    try:
        return json.loads(
            data.decode(),
            # Numbers are finite, and no object has a key twice.
            object_pairs_hook=_object,
            parse_int=_integer,
            parse_float=_float,
            parse_constant=_no_number,
        )
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


@dataclass(frozen=True)
class JsonForm:
    """What one value of a JSON text must be.

    Attributes:
        holds: whether a value is so.
        words: what it is then, for messages.
    """

    holds: Callable[[Any], bool]
    words: str


def whole(least: int, most: int) -> JsonForm:
    """Return the form of whole numbers, which booleans are not."""
    return JsonForm(
        lambda value: type(value) is int and least <= value <= most, f"a whole number from {least} to {most}"
    )


def one_of(kind: type, words: str) -> JsonForm:
    """Return the form of values of a type."""
    return JsonForm(lambda value: isinstance(value, kind), words)


TEXT = one_of(str, "a text")
ANY = JsonForm(lambda value: True, "anything")


def check_form(what: str, value: Any, form: Any) -> None:
    """Raise ValueError, which names the place, where `value`, read from JSON, has not its form.

    what: the value, in words. form: a `JsonForm`; a list of one form, for a list of such values; a dict, for an object: forms
    by key, "key?" where that may be missing, and "*" for all that are not named, which without it are not looked at.
    """
    if isinstance(form, JsonForm):
        if not form.holds(value):
            raise ValueError(f"{what} is {shown(value)}, and not {form.words}")
    elif not isinstance(value, type(form)):
        raise ValueError(f"{what} is {shown(value)}, and {'no list' if isinstance(form, list) else 'no object'}")
    elif isinstance(form, list):
        for number, entry in enumerate(value):
            check_form(f"{what}[{number}]", entry, form[0])
    else:
        missing = [key for key in form if key != "*" and not key.endswith("?") and key not in value]
        if missing:
            raise ValueError(f"{what} needs {', '.join(sorted(missing))}")
        for key, entry in value.items():
            inner = form.get(key, form.get(f"{key}?", form.get("*")))
            if inner is not None:
                check_form(f"{key!r} of {what}" if "*" in form else key, entry, inner)


def shown(value: Any) -> str:
    """Return what takes the place of a value in a message: itself where it is short."""
    if isinstance(value, (list, dict)):
        return f"a {type(value).__name__} of {len(value)}"
    # Python refuses to write out a number of some thousand digits.
    text = repr(value) if not isinstance(value, int) or abs(value) < 2**64 else "a number of more than 64 bits"
    return text if len(text) <= 40 else f"{text[:40]}..."


def _refuse(path: Path, mode: int) -> None:
    if not stat.S_ISREG(mode):
        kind = next((name for holds, name in _KINDS if holds(mode)), "something else")
        raise OSError(f"{path} is {kind}, and no regular file")


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    entries = dict(pairs)
    if len(entries) != len(pairs):
        raise ValueError("an object has a key twice")
    return entries


def _no_number(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON")


def _float(text: str) -> float:
    number = float(text)
    return number if math.isfinite(number) else _no_number(text)


def _integer(text: str) -> int:
    if text == "-0":  # a float to other readers
        raise ValueError("-0 is no whole number")
    return int(text)
