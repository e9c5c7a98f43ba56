"""Tests in several processes that are forked once they are all collected: `pytest --forks 4`.

What pytest-xdist starts imports torch and collects 10,000 tests by itself, in each process; and so does the server that ranks
and programs are forked from (pool.py, programs.py). Here each worker is a fork of the process that has collected, and so is
its server. Files are dealt one at a time, the longest first, those on ranks to every second worker as long as there are others:
each worker has groups of its own, whose ranks take a second each to start. A worker that dies fails its test, and another goes
on.
"""

import atexit
import contextlib
import faulthandler
import logging
import os
import signal
import socket
import sys
import threading
import traceback
import warnings
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from importlib import import_module
from multiprocessing import Pipe, connection, forkserver, resource_tracker
from multiprocessing.connection import Connection
from typing import Any

import pytest
import torch
from _pytest.pathlib import cleanup_numbered_dir
from _pytest.reports import TestReport
from _pytest.runner import runtestprotocol
from _pytest.tmpdir import TempPathFactory
from pool import PRELOADED

# Before all others, in this order: 10 seconds of a core and more each. Who comes last has the others wait.
LONGEST = (
    "matrix", "tensor_parallel", "fsdp", "zero", "pipeline_engine", "hybrid", "fuzz", "memory_ranks", "at_rest", "launcher",
    "capture", "docs", "masters_compiled", "model_wrapper", "update_scalars", "zoo", "memory_estimate", "apex_reference",
)  # fmt: skip

Indices = list[int]  # of the session's items


@dataclass
class _Worker:
    number: int
    pid: int
    pipe: Connection
    left: Indices  # of what it was dealt, those that it has not reported


def run(session: pytest.Session, count: int) -> None:
    """Run all items of `session` in `count` forks, with reports to the hooks of this process."""
    for name in PRELOADED:
        import_module(name)
    files = deque(_files(session.items))
    session.config._tmp_path_factory.getbasetemp()  # type: ignore[attr-defined]  (below which those of workers are)
    workers = [_fork(session, number) for number in range(min(count, len(files)))]
    try:
        while workers:
            ready = connection.wait([worker.pipe for worker in workers])
            for worker in [each for each in workers if each.pipe in ready]:
                if _hear(session, worker, files):
                    continue
                workers.remove(worker)
                os.waitpid(worker.pid, 0)
                if worker.left:
                    _tell_death(session, session.items[worker.left.pop(0)])
                    if worker.left:
                        (files.append if worker.number % 2 else files.appendleft)(worker.left)
                    workers.append(_fork(session, worker.number))
                if session.shouldfail:
                    raise session.Failed(session.shouldfail)
        if files:
            raise session.Failed(f"all workers ended with {len(files)} files before them; stderr has why")
    finally:
        for worker in workers:
            os.kill(worker.pid, signal.SIGKILL)
            os.waitpid(worker.pid, 0)


def _files(items: list[pytest.Item]) -> list[Indices]:
    """The items of each file: of files on ranks the longest come first of all, of the others last."""
    files: dict[str, Indices] = {}
    for index, item in enumerate(items):
        files.setdefault(str(item.path), []).append(index)
    places = {f"test_{name}": place for place, name in enumerate(LONGEST)}
    ordered = sorted(files.values(), key=lambda file: places.get(items[file[0]].path.stem, len(places)))
    on_ranks = [any("run_on_ranks" in getattr(items[index], "fixturenames", ()) for index in file) for file in ordered]
    others = [file for file, yes in zip(ordered, on_ranks, strict=True) if not yes]
    return [file for file, yes in zip(ordered, on_ranks, strict=True) if yes] + others[::-1]


def _hear(session: pytest.Session, worker: _Worker, files: deque[Indices]) -> bool:
    """Take one message of a worker; False where it has ended."""
    try:
        kind, content = worker.pipe.recv()
    except (EOFError, ConnectionResetError):
        return False
    hook, config = session.config.hook, session.config
    if kind == "next":
        take = files.pop if worker.number % 2 else files.popleft
        worker.left = take() if files else []
        with contextlib.suppress(BrokenPipeError):
            worker.pipe.send(worker.left)
    elif kind == "report":
        hook.pytest_runtest_logreport(report=hook.pytest_report_from_serializable(config=config, data=content))
    elif kind == "warning":
        hook.pytest_warning_recorded.call_historic(kwargs=content)
    else:
        worker.left.remove(content)
        if session.shouldfail:
            raise session.Failed(session.shouldfail)
        if session.shouldstop:
            raise session.Interrupted(session.shouldstop)
    return True


def _tell_death(session: pytest.Session, item: pytest.Item) -> None:
    text = f"the process died that ran {item.nodeid}"
    report = TestReport(item.nodeid, item.location, {}, "failed", text, "call")
    session.config.hook.pytest_runtest_logreport(report=report)


def _fork(session: pytest.Session, number: int) -> _Worker:
    ours, theirs = Pipe()
    sys.stdout.flush()
    pid = os.fork()
    if pid:
        theirs.close()
        return _Worker(number, pid, ours, [])
    try:
        ours.close()
        _work(session, number, theirs)
    except BaseException:
        traceback.print_exc(file=sys.__stderr__)
    os._exit(0)


# ---- in the worker ----


class _Reports:
    """Sends the reports of tests in place of logging them."""

    def __init__(self, pipe: Connection) -> None:
        self._pipe = pipe

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> bool:
        for report in runtestprotocol(item, log=False, nextitem=nextitem):
            self.send(item.config, report)
        return True

    @pytest.hookimpl
    def pytest_warning_recorded(
        self, warning_message: warnings.WarningMessage, when: str, nodeid: str, location: Any
    ) -> None:
        warning_message.source = None  # which need not pickle
        told = {"warning_message": warning_message, "when": when, "nodeid": nodeid, "location": location}
        self._pipe.send(("warning", told))

    def send(self, config: pytest.Config, report: TestReport) -> None:
        self._pipe.send(("report", config.hook.pytest_report_to_serializable(config=config, report=report)))


def _work(session: pytest.Session, number: int, pipe: Connection) -> None:
    # After a fork torch makes its pool of threads anew when it is asked for first: threads that ask at once may find none.
    torch.set_num_threads(1)
    config = session.config
    atexit.unregister(cleanup_numbered_dir)  # the parent's, which programs and ranks would do at their ends
    config.option.basetemp = config._tmp_path_factory.getbasetemp() / f"fork{number}"  # type: ignore[attr-defined]
    config._tmp_path_factory = TempPathFactory.from_config(config, _ispytest=True)  # type: ignore[attr-defined]
    reports = _Reports(pipe)
    config.pluginmanager.register(reports)
    with _own_capture(config):
        _serve_forks(pipe)
    item = None
    for index, following in _dealt(session, pipe):
        item = session.items[index]
        config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        pipe.send(("done", index))
    try:
        session._setupstate.teardown_exact(None)
    except Exception:
        assert item is not None
        reports.send(config, TestReport(item.nodeid, item.location, {}, "failed", traceback.format_exc(), "teardown"))


def _dealt(session: pytest.Session, pipe: Connection) -> Iterator[tuple[int, Any]]:
    """Each item's index with the next item of its file, or with the session, in which another file may come."""
    while True:
        pipe.send(("next", None))
        indices = pipe.recv()
        if not indices:
            return
        yield from zip(indices, [*(session.items[index] for index in indices[1:]), session], strict=True)


@contextlib.contextmanager
def _own_capture(config: pytest.Config) -> Iterator[None]:
    """Write what tests print into files of this process; within, what is started is captured too."""
    capture: Any = config.pluginmanager.getplugin("capturemanager")
    capture.stop_global_capturing()
    capture.start_global_capturing()
    _mend_handlers()
    yield
    capture.suspend_global_capture()


def _serve_forks(pipe: Connection) -> None:
    """Begin multiprocessing's server of forks as a fork of this process, which has not run anything yet."""
    server: Any = forkserver._forkserver  # type: ignore[attr-defined]
    if hasattr(server, "_forkserver_authkey"):  # of Python 3.14 on: it starts one by itself
        return
    resource_tracker.ensure_running()
    address = connection.arbitrary_address("AF_UNIX")  # type: ignore[attr-defined]
    alive, ours = os.pipe()
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(address)
        listener.listen()
        pid = os.fork()
        if not pid:
            pipe.close()
            os.close(ours)
            _as_started()
            try:
                forkserver.main(os.dup(listener.fileno()), alive, [])
            finally:
                os._exit(0)
    os.close(alive)
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, ours, pid


def _as_started() -> None:
    """Leave what pytest has set in a process for its tests."""
    before = sys.stderr
    sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
    sys.stderr = open(2, "w", buffering=1, errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.excepthook, sys.unraisablehook = sys.__excepthook__, sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__
    logging.root.handlers.clear()
    _mend_handlers(before)
    faulthandler.disable()


def _mend_handlers(before: Any = None) -> None:
    """Have those log to stderr that do to `before`, or did to what took its place while tests were collected."""
    for logger in [logging.root, *logging.root.manager.loggerDict.values()]:
        for handler in getattr(logger, "handlers", ()):
            stream = getattr(handler, "stream", None)
            if stream is not None and (stream is before or stream.closed):
                handler.stream = sys.stderr
