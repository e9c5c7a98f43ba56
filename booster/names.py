"""Patterns for the qualified names of modules and parameters."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence


def matcher(pattern: str) -> Callable[[str], bool]:
    """Return what tells whether `pattern` says the whole of a name: `*` is anything within one part, `**` across parts."""
    parts = (re.escape(part).replace(r"\*", "[^.]*") for part in pattern.split("**"))
    expression = re.compile(".*".join(parts))
    return lambda name: expression.fullmatch(name) is not None


def parents(name: str) -> Iterator[str]:
    """Yield the names of what holds `name`, outermost first; the whole model, whose name is empty, is not among them."""
    parts = name.split(".")
    return (".".join(parts[:i]) for i in range(1, len(parts)))


def spelled(names: Sequence[str], most: int = 10) -> str:
    """Return `names` for a message: the first `most` of them, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def printable(text: str) -> str:
    """Return `text` with whatever a terminal would act on, or not show, as its escape: a name may come from a file."""
    return text if text.isprintable() else "".join(c if c.isprintable() else _escaped(c) for c in text)


def _escaped(char: str) -> str:
    return char.encode("unicode_escape").decode()
