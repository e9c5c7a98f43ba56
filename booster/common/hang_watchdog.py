"""The hang watchdog: a thread that names the ranks that are missing where this rank waits, through the store of the group.

Ranks meet there in rounds: each posts a value and reads those of the others, without a collective (`StoreBarrier`).
"""

from __future__ import annotations

import atexit
import json
import logging
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import timedelta
from pathlib import Path
from types import CodeType, FrameType, NoneType
from typing import Any

import torch
import torch.distributed as dist

from booster.common.misuse import first_user_frame, is_users, line_of, where_raised
from booster.common.torch_internals.fsdp_internals import gathered_name
from booster.common.torch_internals.tensor_internals import abort_gloo_waits, agent_serves_store, default_store
from booster.common.untrusted_files import parse_json, printable


class StoreBarrier:
    """Rounds of `size` ranks in `store`, numbered from 1.

    All values of a round are one value of the store, which appends by itself: none overwrites another, and a rank posts in
    one request and reads all in another. A round of W ranks is O(W) requests in all.

    name: of this series, unique in `store`.
    """

    def __init__(self, store: dist.Store, name: str, rank: int, size: int) -> None:
        self.rank, self.size = rank, size
        self._store, self._name = store, name
        self._count, self._closed = f"{name}/called", f"{name}/closed"
        self._series = 0  # how many groups of ranks have joined under this name, this one included

    def join(self) -> int:
        """Return the number of the latest round; every rank calls it before any of them joins for another group."""
        self._series = (self._store.add(f"{self._name}/come", 1) - 1) // self.size + 1
        self._store.add(self._closed, 0)
        return self._store.add(self._count, 0)

    def latest(self) -> tuple[int, bool]:
        """Return the number of the latest round, and whether the store is about to close."""
        last, closed = self._store.multi_get([self._count, self._closed])
        return int(last), int(closed) == self._series

    def start(self, last: int) -> int:
        """Start the round after `last`, delete the one before it, and return the number of the round to post in."""
        # Where several ranks start one at once, all get the same number.
        number = int(self._store.compare_set(self._count, str(last), str(last + 1)))
        self.delete(last - 1)
        return number

    def post(self, number: int, value: Any) -> None:
        """Post `value`, which JSON can write, in round `number`; a second one replaces the first."""
        self._store.append(self._key(number), json.dumps([self.rank, value]) + "\n")  # type: ignore[attr-defined]

    def posted(self, number: int) -> dict[int, Any]:
        """Return what was posted in round `number` up to now, by rank, unchecked. This rank has posted in it before."""
        values = {}
        for line in self._store.get(self._key(number)).splitlines():
            try:
                rank, value = parse_json(line)
            # Whoever reaches the store can write there.
            except (ValueError, TypeError):
                continue
            if type(rank) is int and 0 <= rank < self.size:
                values[rank] = value
        return values

    def wait(self, number: int, timeout: timedelta | None = None) -> dict[int, Any]:
        """Return what was posted once all ranks have, or after `timeout`; None: after the store's own."""
        values = self.posted(number)
        if len(values) == self.size:  # the others wait for this
            self._store.set(self._whole(number), "")
            # All ranks wait in all rounds of the series, since each deletes the round before.
            self.delete(number - 1)
            return values
        with suppress(RuntimeError):  # of ranks that come too late, or not at all
            self._store.wait([self._whole(number)], *([] if timeout is None else [timeout]))
        return self.posted(number)

    def delete(self, number: int) -> None:
        """Delete what was posted in round `number`, if there was one."""
        self._store.delete_key(self._key(number))
        self._store.delete_key(self._whole(number))

    def give_reason(self, text: str) -> None:
        """Keep `text` as why ranks of this series cannot go on; of several, the last."""
        self._store.set(f"{self._name}/reason/{self._series}", text)

    def reason(self) -> str:
        """Return what `give_reason` kept; empty if nothing."""
        key = f"{self._name}/reason/{self._series}"
        return self._store.get(key).decode(errors="replace") if self._store.check([key]) else ""

    def withdraw(self) -> None:
        """Say that this rank asks nothing more."""
        if self._store.add(self._gone, 1) == self.size:
            self._store.set(f"{self._gone}/all", "")

    def close(self, timeout: timedelta) -> None:
        """Say that the store will close, and return when all ranks have left, this one among them, or after `timeout`."""
        self._store.set(self._closed, str(self._series))
        until = time.monotonic() + timeout.total_seconds()
        # Polled: torch warns of a wait that a store answers too late.
        while not self._store.check([f"{self._gone}/all"]) and time.monotonic() < until:
            time.sleep(0.02)

    @property
    def _gone(self) -> str:
        return f"{self._name}/gone/{self._series}"

    def _key(self, number: int) -> str:
        return f"{self._name}/{number}"

    def _whole(self, number: int) -> str:
        return f"{self._name}/{number}/whole"


PATIENCE = 30.0  # seconds
_PROMPT = 4.0  # seconds that a call has not moved before the others are asked where they are
_INTERVAL = 1.0  # seconds between polls
_ANSWERS = 3  # polls that the others have to answer
_FAREWELL = timedelta(seconds=5)  # that the others have to see that the rank which serves the store ends
_LONGEST = 10_000  # characters of a place, an error or a call

_PACKAGE, _TORCH = (f"{Path(file).parent}/" for file in (Path(__file__).parent, torch.__file__))
# Files or folders of the package, and which functions of a file (none: all). In the first ones waiting is what was asked for,
# or is for data; the second ones started the script, so their frames are outside of the script's.
_WAITS_ON_PURPOSE: Mapping[str, tuple[str, ...]] = {
    "ranks/agreement.py": (),
    "launch.py": ("close_group",),
    "data/": (),
}
_STARTERS: Mapping[str, tuple[str, ...]] = {"cli/": (), "launch.py": ("launch_notebook", "_rank")}

_FORWARD = ("forward", "_run")  # of a boosted model
# Calls that all ranks make alike in a step.
_STEP = "backward step accumulate no_sync zero_grad execute_pipeline unscale_grads clip_grad_by_norm clip_grad_by_value"
_PASSES = frozenset(("the model's forward()", *(f"{name}()" for name in _STEP.split())))
_REPORTED = "_booster_left_a_pass"  # attribute of an exception
_LOST = ("onnection ", "pair closure", "Broken pipe")  # what gloo says where another rank has gone

_logger = logging.getLogger(__name__)


def start_watchdog(timeout: float | None) -> None:
    """Have a watchdog on this process, if it is one of several ranks; one that runs already takes over `timeout`."""
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
        return
    store = default_store()
    for thread in threading.enumerate():
        if isinstance(thread, HangWatchdog) and thread.belongs_to(store):
            thread.timeout = timeout
            return
    watchdog = HangWatchdog(store, dist.get_rank(), dist.get_world_size(), timeout)
    atexit.register(watchdog.stop)  # a thread inside the store at the interpreter's end may abort the process
    watchdog.start()


def abandon_pass(error: Exception) -> None:
    """Have other ranks know that `error` ends a pass on this rank, so that those which wait for it there raise as well.

    Raises RuntimeError in place of `error` where that is only what another rank's error made here.
    """
    # A call inside of this one may have reported it, or raised it from what was reported.
    if any(_REPORTED in vars(each) for each in (error, error.__cause__) if each is not None):
        return
    vars(error)[_REPORTED] = True
    for thread in threading.enumerate():
        if isinstance(thread, HangWatchdog):
            thread.abandon_pass(error)


@contextmanager
def leaving_pass() -> Iterator[None]:
    """Context, or decorator of a call that all ranks make alike: an error in it is reported as by `abandon_pass`."""
    try:
        yield
    except Exception as error:
        abandon_pass(error)
        raise


class HangWatchdog(threading.Thread):
    """Looks where the main thread is, and asks the other ranks where they are when it waits for them in one call.

    The call is the library's, such as `save`, or a collective of torch's own. Once it has not moved for `_PROMPT` seconds,
    ranks are named that live on after an exception, or do not move in the script's own code; after `timeout` seconds all that
    are not in the same call, or wait in it in another collective (None: never). Each is a WARNING, once for a wait, which goes
    on: what ends it is the process group's timeout. A rank that waits in a pass which another one has left by an exception
    ends its wait, under gloo: it closes its groups, so that the pass raises.

    Nothing is recorded in a step: what is read is the stack, once a second. As often the store is asked whether any rank asks:
    then all post their report in one round of a `StoreBarrier`, and those that wait conclude from the reports. Ranks that begin
    to wait at the same time are in the same round, so that a poll costs O(W) requests of W ranks in all.

    Torch warns of a request that a store does not answer, with a page of its stack. So the rank that serves the store
    says at its end that it goes, and the others poll no more, though they may live on for long; it waits for them, which takes
    a poll, and `_FAREWELL` at most.
    """

    def __init__(self, store: dist.Store, rank: int, size: int, timeout: float | None) -> None:
        super().__init__(name="booster-hang-watchdog", daemon=True)
        self.timeout = timeout
        self._watched: dist.Store | None = store
        # Another client: a wait of another thread would hold the one there is.
        own: dist.Store = store.clone()  # type: ignore[attr-defined]
        own.set_timeout(timedelta(seconds=5))
        self._barrier = StoreBarrier(own, "booster/hang_watchdog", rank, size)
        self._stopped = threading.Event()
        self._main = threading.main_thread().ident
        self._stack: tuple[Any, ...] = ()
        self._since = time.monotonic()  # when the stack was last seen to move
        # The latest round that this rank has seen: a group that was in this store before may have asked. Joined here, and not
        # in the thread, since all ranks of this group come here before one of them can be in the next group.
        self._round = self._barrier.join()
        self._polls = 0  # since this rank posted in it
        self._has_posted = False
        self._asks = False  # it waited as it posted, and has not concluded yet
        self._named: set[int] = set()  # the ranks that were named for this wait
        self._failure: str | None = None  # by which this rank left a pass, until it is in another one
        self._num_failures = 0  # ranks that raised equally often left their passes together
        self._has_left = False  # it was seen outside of passes last
        self._cause: str | None = None  # why this rank has closed its groups

    def belongs_to(self, store: dist.Store) -> bool:
        """Return whether this is the watchdog of the process group of `store`."""
        return self._watched is store and not self._stopped.is_set()

    def abandon_pass(self, error: Exception) -> None:
        cause = self._cause
        with suppress(RuntimeError, AttributeError):  # the store has gone
            if cause is None and any(text in str(error) for text in _LOST):
                cause = self._barrier.reason()
            elif cause is None:
                text, place = str(error).partition("\n")[0][:500], where_raised(error)
                named = f"rank {dist.get_rank()} raised {type(error).__name__}: {text}{f' at {place}' if place else ''}"
                self._barrier.give_reason(named)
                self._failure, self._num_failures = named, self._num_failures + 1
        if cause:
            raise RuntimeError(
                f"{printable(cause[:_LONGEST])}. So the pass of rank {dist.get_rank()}, which waited for it, cannot end, and "
                "its groups are closed: start again. All ranks make the same passes: mend it there, or agree to leave a step "
                "together, as by b.reduce(flag, 'max') before it"
            ) from error

    def _group_is_there(self) -> bool:
        try:
            return dist.is_initialized() and default_store() is self._watched
        except ValueError:  # the group has gone just now
            return False

    def stop(self) -> None:
        """End the watchdog; returns when its thread has ended."""
        self._stopped.set()
        if self.is_alive():
            self.join(10.0)  # a store that is gone without a word never answers

    def run(self) -> None:
        try:
            while not self._stopped.wait(min(_INTERVAL, self._prompt / 4)):
                if not self._group_is_there() or not self.poll():
                    break
            self._barrier.withdraw()
            if self._barrier.rank == 0 and _is_tcp(self._watched) and not agent_serves_store():
                self._barrier.close(_FAREWELL)
        except (RuntimeError, ValueError) as error:  # the store has gone without a word, or holds what no rank wrote
            _logger.debug("the hang watchdog ends: %s", error)
        self._stopped.set()
        self._watched = None
        del self._barrier

    def poll(self) -> bool:
        """Look where the main thread is, answer who asks, and ask or conclude where it waits; False: the store will close."""
        report = self._report()
        waits = report["call"] is not None and report["still"] >= self._prompt
        self._asks = self._asks and waits
        self._polls += 1
        last, will_close = self._barrier.latest()
        if will_close:
            return False
        can_read = waits and self._has_posted and last <= self._round + 1  # older rounds are deleted
        posted = self._barrier.posted(self._round) if can_read else {}
        is_over = not self._has_posted or len(posted) == self._barrier.size or self._polls > _ANSWERS
        if self._asks and is_over:
            self._asks = False  # and again at the next poll
            others = {rank: _checked(other) for rank, other in posted.items() if rank != self._barrier.rank}
            self._conclude(report, {rank: other for rank, other in others.items() if other is not None})
        elif waits and is_over and last == self._round:
            last = self._barrier.start(last)
        if last > self._round:
            self._barrier.post(last, report)
            self._round, self._polls, self._has_posted, self._asks = last, 0, True, waits
        return True

    @property
    def _prompt(self) -> float:
        return _PROMPT if self.timeout is None else min(_PROMPT, self.timeout)

    def _report(self) -> dict[str, Any]:
        """Return where this rank is, of the form of `_FORM`."""
        frames, frame = [], sys._current_frames().get(self._main or 0)  # the innermost first
        while frame is not None:
            if not _is_of(_STARTERS, frame.f_code):
                frames.append(frame)
            frame = frame.f_back
        stack = tuple((id(frame), frame.f_lasti) for frame in frames)
        if stack != self._stack:
            self._stack, self._since = stack, time.monotonic()
            self._named.clear()
        call = _call(frames)
        if call in _PASSES and self._has_left and self._failure is not None:
            self._failure = None
            self._barrier.give_reason("")
        self._has_left = call not in _PASSES
        user = first_user_frame(frames[0]) or frames[-1] if frames else None  # else the outermost, as of `python -c`
        return {
            "call": call,
            "still": time.monotonic() - self._since,
            "where": "its end" if user is None else line_of(user.f_code, user.f_lineno),
            "collective": _collective(frames),
            "is_outside": not any(frame.f_code.co_filename.startswith((_TORCH, _PACKAGE)) for frame in frames),
            "error": _error(self._main),
            "failure": self._failure,
            "failures": self._num_failures,
        }

    def _conclude(self, report: Mapping[str, Any], others: Mapping[int, Mapping[str, Any]]) -> None:
        """Warn of the ranks that are not where this one waits, and were not named yet; or end the wait."""
        for other in others.values() if report["call"] in _PASSES else ():
            if other["failure"] and other["failures"] > report["failures"] and other["call"] not in _PASSES:
                self._cause = other["failure"]
                abort_gloo_waits()
                return
        waited_long = self.timeout is not None and report["still"] >= self.timeout
        absent = {}
        for rank, other in others.items():
            is_still = other["still"] >= self._prompt
            if other["call"] != report["call"]:
                missing = waited_long or other["error"] or (other["is_outside"] and is_still)
            else:
                collectives = {other["collective"], report["collective"]}
                missing = waited_long and len(collectives) == 2 and None not in collectives and is_still
            if missing and rank not in self._named:
                absent[rank] = other
        silent = set(range(self._barrier.size)) - {self._barrier.rank, *others} - self._named if waited_long else set()
        if absent or silent:
            self._named |= {*absent, *silent}
            self._warn(report, absent, sorted(silent))

    def _warn(
        self, report: Mapping[str, Any], absent: Mapping[int, Mapping[str, Any]], silent: Sequence[int] = ()
    ) -> None:
        lines, inside = [], any(other["call"] == report["call"] for other in absent.values())
        for rank, other in sorted(absent.items()):
            same_call = f", in the same call, in {other['collective']}" if other["call"] == report["call"] else ""
            raised = f"raised {other['error']}, and " if other["error"] else ""
            lines.append(f"rank {rank} {raised}is at {other['where']}{same_call}")
        lines += [f"rank {rank} does not answer: it has ended, or is held up outside of Python" for rank in silent]
        _logger.warning(
            "rank %d has waited %.0f s in %s (%s%s) for ranks %s, which have not called %s: %s. It goes on waiting, until "
            "the timeout of the process group; all ranks must make this call%s",
            self._barrier.rank,
            report["still"],
            report["call"],
            report["where"],
            f", in {report['collective']}" if report["collective"] else "",
            sorted({*absent, *silent}),
            "this collective" if inside else "it",
            "; ".join(lines),
            ", and come to the same collectives in it" if inside else "",
        )


def _is_tcp(store: dist.Store | None) -> bool:
    """Return whether one process serves `store` to the others, which lose it when that one ends."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return isinstance(store, dist.TCPStore)


_FORM: dict[str, tuple[type, ...]] = {
    "call": (str, NoneType),
    "still": (int, float),
    "where": (str,),
    "collective": (str, NoneType),
    "is_outside": (bool,),
    "error": (str, NoneType),
    "failure": (str, NoneType),
    "failures": (int,),
}


def _checked(report: Any) -> dict[str, Any] | None:
    """Return the report of another rank, safe to print; None for what no rank posts, since others can write to the store."""
    if not isinstance(report, dict) or not all(isinstance(report.get(key, ()), kinds) for key, kinds in _FORM.items()):
        return None
    if any(isinstance(report[key], str) and len(report[key]) > _LONGEST for key in _FORM):
        return None
    return {key: printable(report[key]) if isinstance(report[key], str) else report[key] for key in _FORM}


def _call(frames: Sequence[FrameType]) -> str | None:
    """Return the outermost call in which ranks may wait for each other: of the library, or of torch.distributed."""
    codes = [frame.f_code for frame in reversed(frames)]
    for code in codes:
        if _is_of(_WAITS_ON_PURPOSE, code):
            return None
        if code.co_filename.startswith(_PACKAGE):
            name = "the model's forward" if code.co_name in _FORWARD else code.co_name
            return f"{name}()"
    distributed = [code for code in codes if code.co_filename.startswith(f"{_TORCH}distributed/")]
    if distributed and codes[-1] is distributed[-1]:
        named = [code for code in distributed if code.co_name != "wrapper"]
        return f"torch.distributed's {(named or codes)[0].co_name}()"
    return None


def _is_of(places: Mapping[str, tuple[str, ...]], code: CodeType) -> bool:
    return any(
        code.co_filename.startswith(_PACKAGE + file) and (not functions or code.co_name in functions)
        for file, functions in places.items()
    )


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
    """Return what exception the script handles now in `thread`, or an interactive session showed last, and its line."""
    error: Any = sys._current_exceptions().get(thread or 0)
    if isinstance(error, tuple):  # before Python 3.12
        error = error[1]
    caught = error.__traceback__ if isinstance(error, BaseException) else None
    if caught is None or not is_users(caught.tb_frame.f_code):  # as Path.exists handles its own
        error = getattr(sys, "last_value", None)
    if (
        error is None or error.__traceback__ is None
    ):  # a warning of C++ as an error leaves one there that no line raised
        return None
    place, text = where_raised(error), str(error).partition("\n")[0][:300]
    return f"{type(error).__name__}: {text}{f' at {place}' if place else ''}"
