"""A bar of progress on one rank."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sized
from typing import TypeVar

from booster import arguments
from booster.coordinator import is_main

__all__ = ["progress"]

T = TypeVar("T")


def progress(items: Iterable[T], description: str = "", total: int | None = None) -> Iterator[T]:
    """`Booster.progress`, which says what this does."""
    arguments.instance("items", items, Iterable, "a loader, or anything that a `for` goes through")
    arguments.instance("description", description, str, "a string")
    if total is not None:
        arguments.count("total", total, least=0, also="None")
    if not is_main():
        return iter(items)
    try:
        from rich.progress import track
    except ImportError as error:
        raise ImportError("the bar is drawn by rich: pip install 'booster-amp[report]'") from error

    known = len(items) if total is None and isinstance(items, Sized) else total
    return iter(track(items, description, total=known, transient=False))
