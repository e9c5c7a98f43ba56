"""Who is missing where ranks wait for each other: ranks tell it through the store of the process group, by no collective."""

from __future__ import annotations

import atexit
import logging
import math
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
import torch.distributed as dist

from booster.common.frames import first_user_frame, is_users, line_of, where_raised
from booster.common.store_barrier import StoreBarrier
from booster.common.torch_internals.fsdp_internals import gathered_name
from booster.common.torch_internals.tensor_internals import agent_serves_store, default_store
from booster.common.untrusted_files import printable

PATIENCE = 30.0  # seconds
_PROMPT = 4.0  # seconds that a call has stood still before the others are asked where they are
_INTERVAL = 1.0  # seconds between looks
_ANSWERS = 3  # looks that the others have to answer
_FAREWELL = timedelta(seconds=5)  # that the others have to see that the rank which serves the store ends
_LONGEST = 10_000  # characters of a place, an error or a call

_PACKAGE, _TORCH = (f"{Path(file).parent}/" for file in (Path(__file__).parent, torch.__file__))
# What the library calls where waiting is what was asked for, or is for data, and what started the script, whose frames lie
# below all of its own: files or folders of the package, and of a file the functions, or all.
_WAITS_ON_PURPOSE: Mapping[str, tuple[str, ...]] = {
    "ranks/coordinator.py": (),
    "launch.py": ("close_group",),
    "data/": (),
}
_STARTERS: Mapping[str, tuple[str, ...]] = {"cli/": (), "launch.py": ("launch_notebook", "_rank")}

_FORWARD = ("forward", "_run")  # of a boosted model

_logger = logging.getLogger(__name__)


def watch(patience: float | None) -> None:
    """Have this process watched, if it is one of several ranks; a watch that there is already takes over `patience`."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    store = default_store()
    for thread in threading.enumerate():
        if isinstance(thread, HangWatchdog) and thread.watches(store):
            thread.patience = patience
            return
    call = HangWatchdog(store, dist.get_rank(), dist.get_world_size(), patience)
    atexit.register(call.stop)  # a thread that meets the end of the interpreter inside the store may abort the process
    call.start()


class HangWatchdog(threading.Thread):
    """Looks where the main thread is, and asks the other ranks where they are when it waits for them in one call.

    The call is the library's, such as `save`, or a collective of torch's own. Once it has stood still for `_PROMPT` seconds,
    ranks are named that live on after an exception, or stand still in the script's own code; after `patience` seconds all that
    are not in the same call, or wait in it in another collective (None: never). Each is a WARNING, once for a wait, which goes
    on: what ends it is the process group's timeout.

    Nothing is noted in a step: what is read is the stack, once a second. As often the store is asked whether any rank asks:
    then all meet there, and those that wait conclude from what is said. Ranks that begin to wait at the same time are in the
    same meeting, so that a look costs O(W) requests of W ranks in all.

    Torch warns of a request that a store does not answer with a page of its stack. So the rank whose process serves the store
    says at its end that it goes, and the others look no more, though they may live on for long; it waits for them, which
    takes a look, and `_FAREWELL` at most.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, patience: float | None) -> None:
        super().__init__(name="booster-roll-call", daemon=True)
        self.patience = patience
        self._watched: dist.Store | None = store
        # A client of its own: a wait of another thread would hold it.
        own: dist.Store = store.clone()  # type: ignore[attr-defined]
        own.set_timeout(timedelta(seconds=5))
        self._meetings = StoreBarrier(own, "booster/roll_call", rank, size)
        self._stopped = threading.Event()
        self._main = threading.main_thread().ident
        self._stand: tuple[Any, ...] = ()
        self._since = time.monotonic()
        # Of the last meeting that this rank has seen: a group that met in this store before may have asked. Here, and not in
        # the thread, since all ranks of this group come to it before one of them can be in the next.
        self._number = self._meetings.begin()
        self._looks = 0  # since this rank spoke in it
        self._has_spoken = False
        self._asks = False  # it waited as it spoke, and has not concluded yet
        self._told: set[int] = set()  # the ranks that this wait has named

    def watches(self, store: dist.Store) -> bool:
        """Say whether this is the watch of the process group that met by `store`."""
        return self._watched is store and not self._stopped.is_set()

    def _is_watched_still(self) -> bool:
        try:
            return dist.is_initialized() and default_store() is self._watched
        except ValueError:  # the group has gone just now
            return False

    def stop(self) -> None:
        """End the watch; returns when its thread has ended."""
        self._stopped.set()
        if self.is_alive():
            self.join(10.0)  # a store whose host is gone without a word answers nobody

    def run(self) -> None:
        try:
            while not self._stopped.wait(min(_INTERVAL, self._prompt / 4)):
                if not self._is_watched_still() or not self.look():
                    break
            self._leave()
        except (RuntimeError, ValueError) as error:  # the store has gone without a word, or holds what no rank wrote
            _logger.debug("the roll call ends: %s", error)
        self._stopped.set()
        self._watched = None
        del self._meetings

    def look(self) -> bool:
        """Look where the main thread is, answer who asks, and ask or conclude where it waits; False: the store will close."""
        word = self._word()
        waits = word["call"] is not None and word["still"] >= self._prompt
        self._asks = self._asks and waits
        self._looks += 1
        last, will_close = self._meetings.called()
        if will_close:
            return False
        can_hear = waits and self._has_spoken and last <= self._number + 1  # what was said before has left the store
        heard = self._meetings.heard(self._number) if can_hear else {}
        is_over = not self._has_spoken or len(heard) == self._meetings.size or self._looks > _ANSWERS
        if self._asks and is_over:
            self._asks = False  # and again at the next look
            others = {rank: _answer(other) for rank, other in heard.items() if rank != self._meetings.rank}
            self._conclude(word, {rank: other for rank, other in others.items() if other is not None})
        elif waits and is_over and last == self._number:
            last = self._meetings.call(last)
        if last > self._number:
            self._meetings.say(last, word)
            self._number, self._looks, self._has_spoken, self._asks = last, 0, True, waits
        return True

    def _leave(self) -> None:
        self._meetings.leave()
        if self._meetings.rank == 0 and _is_tcp(self._watched) and not agent_serves_store():
            self._meetings.close(_FAREWELL)

    @property
    def _prompt(self) -> float:
        return _PROMPT if self.patience is None else min(_PROMPT, self.patience)

    def _word(self) -> dict[str, Any]:
        """Return where this rank is, in words that the others can tell."""
        every = _frames(sys._current_frames().get(self._main or 0))
        frames = [frame for frame in every if not _is_of(_STARTERS, frame.f_code)]  # the innermost first
        stand = tuple((id(frame), frame.f_lasti) for frame in frames)
        if stand != self._stand:
            self._stand, self._since = stand, time.monotonic()
            self._told.clear()
        error = _error(self._main)
        return {
            "call": _call(frames),
            "still": time.monotonic() - self._since,
            "where": _where(frames),
            "collective": _collective(frames),
            "is_outside": not any(frame.f_code.co_filename.startswith((_TORCH, _PACKAGE)) for frame in frames),
            "error": error,
        }

    def _conclude(self, word: Mapping[str, Any], others: Mapping[int, Mapping[str, Any]]) -> None:
        apart = {rank: other for rank, other in others.items() if other["call"] != word["call"]}
        if self.patience is not None and word["still"] >= self.patience:
            silent = set(range(self._meetings.size)) - {self._meetings.rank} - set(others)
            apart |= {
                rank: other
                for rank, other in others.items()
                if None not in (other["collective"], word["collective"])
                and other["collective"] != word["collective"]
                and other["still"] >= self._prompt
            }
        else:
            silent = set()
            apart = {
                rank: other
                for rank, other in apart.items()
                if other["error"] or (other["is_outside"] and other["still"] >= self._prompt)
            }
        absent = {rank: other for rank, other in apart.items() if rank not in self._told}
        silent -= self._told
        if absent or silent:
            self._told |= {*absent, *silent}
            self._tell(word, absent, sorted(silent))

    def _tell(
        self, word: Mapping[str, Any], absent: Mapping[int, Mapping[str, Any]], silent: Sequence[int] = ()
    ) -> None:
        told, inside = [], any(other["call"] == word["call"] for other in absent.values())
        for rank, other in sorted(absent.items()):
            other_way = f", in the same call, in {other['collective']}" if other["call"] == word["call"] else ""
            raised = f"raised {other['error']}, and " if other["error"] else ""
            told.append(f"rank {rank} {raised}is at {other['where']}{other_way}")
        told += [f"rank {rank} does not answer: it has ended, or is held up outside of Python" for rank in silent]
        _logger.warning(
            "rank %d has waited %.0f s in %s (%s%s) for ranks %s, which have not called %s: %s. It goes on waiting, until "
            "the timeout of the process group; all ranks must make this call%s",
            self._meetings.rank,
            word["still"],
            word["call"],
            word["where"],
            f", in {word['collective']}" if word["collective"] else "",
            sorted({*absent, *silent}),
            "this collective" if inside else "it",
            "; ".join(told),
            ", and come to the same collectives in it" if inside else "",
        )


def _is_tcp(store: dist.Store | None) -> bool:
    """Say whether one process serves `store` to the others, which lose it when that one ends."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return isinstance(store, dist.TCPStore)


def _answer(told: Any) -> dict[str, Any] | None:
    """What another rank told, as a terminal may show it; None for what no rank tells. Who reaches the store can write there."""
    if not isinstance(told, dict) or not all(name in told and fits(told[name]) for name, fits in _FORM.items()):
        return None
    return {name: printable(told[name]) if isinstance(told[name], str) else told[name] for name in _FORM}


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= _LONGEST


def _is_text_or_none(value: Any) -> bool:
    return value is None or _is_text(value)


_FORM: dict[str, Callable[[Any], bool]] = {  # of what `HangWatchdog._word` tells
    "call": _is_text_or_none,
    "still": lambda value: isinstance(value, (int, float)) and math.isfinite(value),
    "where": _is_text,
    "collective": _is_text_or_none,
    "is_outside": lambda value: isinstance(value, bool),
    "error": _is_text_or_none,
}


def _frames(frame: FrameType | None) -> Iterator[FrameType]:
    while frame is not None:
        yield frame
        frame = frame.f_back


def _call(frames: Sequence[FrameType]) -> str | None:
    """Return the outermost call in which ranks may wait for each other: of the library, or of torch.distributed."""
    codes = [frame.f_code for frame in reversed(frames)]
    for code in codes:
        if _is_of(_WAITS_ON_PURPOSE, code):
            return None
        if code.co_filename.startswith(_PACKAGE):
            return f"{_shown(code)}()"
    if codes and codes[-1].co_filename.startswith(f"{_TORCH}distributed/"):
        own = [
            code for code in codes if code.co_filename.startswith(f"{_TORCH}distributed/") and code.co_name != "wrapper"
        ]
        return f"torch.distributed's {(own or codes)[0].co_name}()"
    return None


def _is_of(places: Mapping[str, tuple[str, ...]], code: CodeType) -> bool:
    return any(
        code.co_filename.startswith(_PACKAGE + file) and (not functions or code.co_name in functions)
        for file, functions in places.items()
    )


def _shown(code: CodeType) -> str:
    return "the model's forward" if code.co_name in _FORWARD else code.co_name


def _where(frames: Sequence[FrameType]) -> str:
    """Return file, line and function of the innermost frame that is the script's own, or somebody's it calls."""
    if not frames:
        return "its end"
    frame = first_user_frame(frames[0]) or frames[-1]  # the outermost, as of `python -c`
    return line_of(frame.f_code, frame.f_lineno)


def _collective(frames: Sequence[FrameType]) -> str | None:
    """Return which collective the innermost frames wait in, and of which parameters where that is known; None: in none."""
    if not frames or not frames[0].f_code.co_filename.startswith((f"{_TORCH}distributed/", f"{_PACKAGE}ranks/")):
        return None
    inner = [frame for frame in frames if not frame.f_code.co_filename.endswith("/c10d_logger.py")]
    outside = (
        place for place, frame in enumerate(inner) if not frame.f_code.co_filename.endswith("/distributed_c10d.py")
    )
    depth = next(outside, 0)
    name = f"{inner[depth - 1].f_code.co_name}() called by " if depth else ""
    groups = (gathered_name(frame.f_locals.get("self")) for frame in inner if "_fsdp_" in frame.f_code.co_filename)
    of = next((f", for the parameters of {group!r}" for group in groups if group), "")
    return f"{name}{line_of(inner[depth].f_code, inner[depth].f_lineno)}{of}"


def _error(thread: int | None) -> str | None:
    """Return what exception the script handles now in `thread`, or an interactive session showed last, and where it rose."""
    error: Any = sys._current_exceptions().get(thread or 0)
    if isinstance(error, tuple):  # before Python 3.12
        error = error[1]
    caught = error.__traceback__ if isinstance(error, BaseException) else None
    if caught is None or not is_users(caught.tb_frame.f_code):  # as Path.exists handles its own
        error = getattr(sys, "last_value", None)
    if error is None:
        return None
    place = where_raised(error)
    text = str(error).partition("\n")[0][:300]
    return f"{type(error).__name__}: {text}{f' at {place}' if place else ''}"
