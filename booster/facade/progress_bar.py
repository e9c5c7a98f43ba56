"""A bar of progress on one rank, with the loss of the last backward pass."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Iterator, Sized
from typing import Any, TypeVar

import torch

from booster.common import arguments
from booster.data.epoch_iterator import EpochIterator
from booster.ranks.coordinator import is_main

T = TypeVar("T")


class DisplayedLoss:
    """The loss next to a bar of progress: that of the last backward pass, which is read once a second.

    Reading waits for the device.
    """

    def __init__(self) -> None:
        self._loss: torch.Tensor | None = None
        self._read = -math.inf
        self.words = ""

    def keep(self, loss: torch.Tensor) -> None:
        """Keep `loss`, of one element, without its graph, until the next one."""
        loss = loss.detach()
        self._loss = loss.to_local() if hasattr(loss, "to_local") else loss  # of a DTensor: who reads it reads it alone

    def text(self, *, now: bool = False) -> str:
        """Return the loss in words, as it was when it was last read; `now` reads it."""
        if self._loss is not None and (now or time.monotonic() - self._read >= 1.0):
            self.words = f"loss {self._loss.item():.4g}"
            self._read = time.monotonic()
        return self.words


def progress(items: Iterable[T], description: str, total: int | None, loss: DisplayedLoss) -> Iterator[T]:
    """`Booster.progress`, which says what this does."""
    arguments.instance("items", items, Iterable, "a loader, or anything that a `for` goes through")
    arguments.instance("description", description, str, "a string")
    if total is not None:
        arguments.count("total", total, least=0, also="None")
    if not is_main():
        return iter(items)
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError as error:
        raise ImportError("the bar is drawn by rich: pip install rich") from error

    words = TextColumn("{task.description}"), BarColumn(None), MofNCompleteColumn(), TextColumn("{task.fields[rate]}")
    bar = Progress(*words, TextColumn("{task.fields[loss]}"), TimeRemainingColumn(), expand=True)

    def drawn() -> Iterator[T]:
        began, each, seen = time.monotonic(), iter(items), 0
        known = _known_length(items) if total is None else total
        if isinstance(each, EpochIterator) and total is None:  # of an epoch that may go on where it was left
            known, seen = each.num_batches, each.progress.num_batches
        with bar:
            task = bar.add_task(description, total=known, completed=seen, rate="", loss="")
            for count, item in enumerate(each, 1):
                yield item
                rate = count / (time.monotonic() - began)
                pace = f"{rate:.3g}/s" if rate >= 1 else f"{1 / rate:.3g} s each"
                bar.update(task, completed=seen + count, rate=pace, loss=loss.text())
            bar.update(task, loss=loss.text(now=True))

    return drawn()


def _known_length(items: Iterable[Any]) -> int | None:
    """How many there are; None where it is not known, as of a loader of a stream, which has a `__len__` all the same."""
    try:
        return len(items) if isinstance(items, Sized) else None
    except (TypeError, NotImplementedError):
        return None
