"""A bar of progress on one rank, with the loss of the last backward pass."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sized
from typing import Any

from booster.common import arguments
from booster.data.epoch_iterator import EpochIterator
from booster.facade.booster_state import BoosterState, DisplayedLoss
from booster.ranks.coordinator import is_main


def progress(
    self: BoosterState, items: Iterable[Any], description: str = "", total: int | None = None
) -> Iterator[Any]:
    """`items` as they are, with a bar on rank 0: how many, how fast, the loss of the last `backward`, and how long yet.

    The other ranks draw nothing. No collective. The loss, which is this rank's, is read once a second; a GPU is then waited
    for.

    description: the text before the bar.
    total: how many there are; None asks `len(items)`, and a boosted loader, which a resumed epoch lets begin where it was
        left, for those before too. The bar is rich's; raises ImportError without it.
    """
    loss = self._shown_loss = DisplayedLoss()
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

    def drawn() -> Iterator[Any]:
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
