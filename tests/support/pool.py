"""A pool of processes that are already joined in one gloo group, so that a distributed test costs milliseconds.

Starting ranks takes seconds and a case takes milliseconds; so one group serves the whole session. A case that fails or
hangs leaves the ranks out of step with each other and would fail every later case: the pool then kills the group, and
the next case starts a fresh one.

Each gloo group has a thread that wakes a hundred times a second, also where nothing is sent, and a case may leave several. So
ranks that have no case are stopped, where the kernel lets them go on when the session is killed.
"""

import contextlib
import faulthandler
import fcntl
import gc
import io
import multiprocessing as mp
import os
import random
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
import warnings
import weakref
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from booster.kernels import eligibility as choice

PROCESS_GROUP_TIMEOUT = 480.0  # seconds a collective waits for its peers
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
CASE_TIMEOUT = 600.0  # seconds one case may take, on a machine that does much else
CASES = 40  # of one group of ranks that have many threads: each process group that a case makes keeps a few
THREADS = 48  # which take a hundredth of a core while they wait; what a fresh rank imports and makes takes a second
STOPS = sys.platform == "linux"
# Imported once, before the ranks are forked, and not by each rank of each group again, nor by its DataLoader workers.
PRELOADED = [
    "numpy",
    "torch._dynamo",  # by the first optimizer that a process makes
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "torch.distributed.pipelining",
    "torch.distributed.tensor.parallel",
    "booster.plugin.hybrid",
    "pytest",
]
GRACE = 5.0  # seconds the other ranks have to answer after the first failure


class RanksFailed(AssertionError):
    """A case failed on at least one rank. `tracebacks` maps every failed rank to its traceback."""

    def __init__(self, name: str, world_size: int, tracebacks: dict[int, str]) -> None:
        self.tracebacks = tracebacks
        parts = [f"{name} failed on {len(tracebacks)} of {world_size} ranks"]
        parts += [f"----- rank {rank} -----\n{text.rstrip()}" for rank, text in sorted(tracebacks.items())]
        super().__init__("\n".join(parts))


class _Job(NamedTuple):
    path: list[str]  # sys.path of the test, by which its module is found
    filters: list[tuple[Any, str, Any, str, int]]
    call: bytes  # pickled (fn, args)
    by_kernels: tuple[str, ...]  # devices on which steps are made by kernels, see `--kernels`


class RankPool:
    """`world_size` processes in one gloo group; `run` sends one function to all of them."""

    def __init__(
        self, world_size: int, *, case_timeout: float = CASE_TIMEOUT, grace: float = GRACE, num_cases: int = CASES
    ) -> None:
        """num_cases: after how many a fresh group begins, where ranks have more than `THREADS` threads."""
        self.world_size = world_size
        self.case_timeout = case_timeout
        self.grace = grace
        self.num_cases = num_cases
        self._group: _Group | None = None
        self._num_cases = 0

    def run(self, fn: Callable[..., Any], *args: Any) -> list[Any]:
        """Call `fn(rank, world_size, *args)` on every rank and return the results in rank order.

        fn: a module-level function; args and results: anything that pickles (tensors are copied).
        Every rank starts from the same seed, and sees the warning filters of the calling test.
        Raises RanksFailed with the traceback of every failed rank; ranks that hang show where they hang.
        """
        job = _Job(list(sys.path), _filters(), _dumps((fn, args)), choice.TAKEN_BY_TRUE)
        if self._num_cases >= self.num_cases and self._group is not None and self._group.num_threads() > THREADS:
            self.close()
        if self._group is None:
            self._group = _Group(self.world_size)
            self._num_cases = 0
        self._num_cases += 1
        try:
            results, failures = self._group.call(_dumps(job), self.case_timeout, self.grace)
        except BaseException:  # an interrupt, or an answer that does not unpickle: later answers are still on their way
            self.close()
            raise
        if failures:
            self.close()
            raise RanksFailed(getattr(fn, "__qualname__", repr(fn)), self.world_size, failures)
        return [results[rank] for rank in range(self.world_size)]

    @property
    def pids(self) -> list[int]:
        """Process ids of the running group; empty before the first case and after a failure."""
        return [] if self._group is None else [process.pid for process in self._group.processes]

    def close(self) -> None:
        """Kill the group, if there is one. The next `run` starts another."""
        if self._group is not None:
            self._group.kill()
            self._group = None


class _Group:
    """One generation of rank processes, the pipes to them, and the folder they meet in."""

    def __init__(self, world_size: int) -> None:
        context = mp.get_context("forkserver")
        context.set_forkserver_preload(PRELOADED)
        self.folder = Path(tempfile.mkdtemp(prefix="booster-ranks-"))
        self.pipes: list[Connection] = []
        self.processes: list[Any] = []
        self.kill = weakref.finalize(self, _kill, self.processes, self.pipes, self.folder)
        for rank in range(world_size):
            ours, theirs = context.Pipe()
            # Not daemonic: a daemonic process may not start DataLoader workers.
            process = context.Process(target=_serve, args=(rank, world_size, str(self.folder), theirs), daemon=False)
            process.start()
            theirs.close()
            self.pipes.append(ours)
            self.processes.append(process)

    def call(self, job: bytes, timeout: float, grace: float) -> tuple[dict[int, Any], dict[int, str]]:
        """Return (results by rank, tracebacks by rank); every rank is in exactly one of the two."""
        results: dict[int, Any] = {}
        failures: dict[int, str] = {}
        waiting = dict(enumerate(self.pipes))
        if STOPS:
            self._signal(signal.SIGCONT)
        for rank, pipe in list(waiting.items()):
            try:
                pipe.send_bytes(job)
            except OSError:
                failures[rank] = self._epitaph(rank)
                del waiting[rank]
        deadline = time.monotonic() + timeout
        reason = f"no answer within {timeout:g} s"
        while waiting:
            if failures and time.monotonic() + grace < deadline:
                deadline = time.monotonic() + grace
                reason = f"no answer within {grace:g} s after the failure of rank {min(failures)}"
                grace = timeout  # the first failure alone shortens the wait
            ready = wait(list(waiting.values()), max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for rank in [r for r, pipe in waiting.items() if pipe in ready]:
                del waiting[rank]
                try:
                    ok, value = _loads(self.pipes[rank].recv_bytes())
                except (EOFError, OSError):
                    failures[rank] = self._epitaph(rank)
                else:
                    (results if ok else failures)[rank] = value
        for rank in waiting:
            failures[rank] = f"{reason}; it was here:\n{self._stack(rank)}"
        if STOPS and not failures:
            self._signal(signal.SIGSTOP)
        return results, failures

    def num_threads(self) -> int:
        """Of the rank that has most; where the kernel does not say, as if there were many."""
        folders = [Path(f"/proc/{process.pid}/task") for process in self.processes]
        return max(sum(1 for _ in folder.iterdir()) if folder.exists() else 1000 for folder in folders)

    def _signal(self, number: signal.Signals) -> None:
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, number)

    def _epitaph(self, rank: int) -> str:
        self.processes[rank].join(60)
        return f"the process ended with exit code {self.processes[rank].exitcode}\n{self._dump(rank).read_text()}"

    def _dump(self, rank: int) -> Path:
        return self.folder / f"stack{rank}"

    def _stack(self, rank: int) -> str:
        """Ask the rank's faulthandler where it is."""
        dump = self._dump(rank)
        if not dump.exists() or self.processes[rank].exitcode is not None:
            return "(not started, or already gone)"
        os.kill(self.processes[rank].pid, signal.SIGUSR1)
        until, before = time.monotonic() + 60.0, 0
        while time.monotonic() < until:
            time.sleep(0.1)
            size = dump.stat().st_size
            if size and size == before:  # it is written line by line
                break
            before = size
        return dump.read_text() or "(it does not answer)"


def _kill(processes: list[Any], pipes: list[Connection], folder: Path) -> None:
    for process in processes:
        for kill in (os.killpg, os.kill):  # the group takes the rank's own children along
            try:
                kill(process.pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
            break
    for process in processes:
        process.join()
        process.close()
    for pipe in pipes:
        pipe.close()
    shutil.rmtree(folder, ignore_errors=True)


def _dumps(value: Any) -> bytes:
    """Pickle by way of torch, which knows more dtypes than its tensors' own pickling."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def _loads(data: bytes) -> Any:
    # Both ends of the pipe are this program, so the data is trusted.
    return torch.load(io.BytesIO(data), weights_only=False)


def _filters() -> list[tuple[Any, str, Any, str, int]]:
    """The warning filters in force, first match first, as arguments of `warnings.filterwarnings`."""

    def pattern(text: "re.Pattern[str] | str | None") -> str:
        return text.pattern if isinstance(text, re.Pattern) else (text or "")

    return [(action, pattern(m), category, pattern(mod), line) for action, m, category, mod, line in warnings.filters]


# ---- in the rank ----


def _serve(rank: int, world_size: int, folder: str, pipe: Connection) -> None:
    gc.freeze()  # what was imported before the fork: no search for unreachable objects walks through it
    os.setpgid(0, 0)
    if STOPS:
        _go_on_when_parent_dies()
    dying = threading.Thread(target=_die_with_parent, args=(folder,), daemon=True)
    dying.start()
    dump = open(Path(folder) / f"stack{rank}", "w")  # noqa: SIM115  (faulthandler needs it for life)
    faulthandler.enable(dump)
    faulthandler.register(signal.SIGUSR1, dump, all_threads=False)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    if sys.version_info < (3, 12):
        # A rank inherits "forkserver", with which DataLoader workers take seconds. Later versions warn where a process
        # with threads, as a rank is, forks.
        mp.set_start_method("fork", force=True)
    dist.init_process_group(
        "gloo",
        init_method=f"file://{folder}/rendezvous",
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=PROCESS_GROUP_TIMEOUT),
    )
    while True:
        try:
            job = pipe.recv_bytes()
        except EOFError:
            dying.join()  # which clears up: to end here and now would leave that undone
        pipe.send_bytes(_answer(rank, world_size, job))


def _go_on_when_parent_dies() -> None:
    """Have the kernel send SIGCONT once the session has gone, which then ends this rank as it ends one that runs."""
    sentinel = mp.parent_process().sentinel  # type: ignore[union-attr]
    fcntl.fcntl(sentinel, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(sentinel, fcntl.F_SETSIG, signal.SIGCONT)  # type: ignore[attr-defined]
    fcntl.fcntl(sentinel, fcntl.F_SETFL, fcntl.fcntl(sentinel, fcntl.F_GETFL) | os.O_ASYNC)


def _die_with_parent(folder: str) -> None:
    parent = mp.parent_process()
    if parent is not None:
        parent.join()
    shutil.rmtree(folder, ignore_errors=True)
    os.killpg(0, signal.SIGKILL)  # also what this rank started


def _answer(rank: int, world_size: int, data: bytes) -> bytes:
    try:
        job: _Job = _loads(data)
        sys.path[:] = job.path
        choice.TAKEN_BY_TRUE = job.by_kernels
        if INTERPRETED:
            from quick_interpreter import quicken

            quicken()
        with warnings.catch_warnings():
            warnings.resetwarnings()
            for action, message, category, module, line in reversed(job.filters):
                warnings.filterwarnings(action, message, category, module, line)
            fn, args = _loads(job.call)
            random.seed(0)
            torch.manual_seed(0)
            return _dumps((True, fn(rank, world_size, *args)))
    except BaseException:  # SystemExit and pytest's outcomes are failures too
        return _dumps((False, traceback.format_exc()))
