"""One attempt of a job's processes on this machine: torchrun's agent, in process, signals passed on to ranks, and a guard.

Nodes meet, and their ranks after them, by a store that listens on one interface and unpickles nothing. When ranks have failed,
a report says which was the first, how it ended, and its traceback.
"""

from __future__ import annotations

import dataclasses
import ipaddress
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from booster.cli.option_values import say

REPORT_START = "booster run: rank"

# With this exit status (EX_TEMPFAIL) a script says that it has stopped because it was asked to, before it had finished.
STOPPED_STATUS = 75


@dataclass(frozen=True, kw_only=True)
class Attempt:
    """What one attempt needs: `command` is the worker's argument list, after the interpreter."""

    command: tuple[str, ...]
    nproc_per_node: int
    nnodes: int = 1
    node_rank: int = 0
    master_addr: str | None = None
    master_port: int | None = None
    log_dir: str | None = None
    tee: str | None = None
    grace_seconds: int = 30


def report_failures(failures: dict[int, Any], deaths: dict[int, int], attempt: Attempt) -> int:
    """Print which rank of this machine failed first, how, and its traceback; return the exit status of the attempt.

    failures: what torchrun's agent found, by rank. deaths: when processes died, by pid, in ns.
    """
    # The agent also stops processes that had come to the end of their script.
    unwell = {
        rank: failure
        for rank, failure in failures.items()
        if failure.exitcode != -signal.SIGTERM or _extra(failure).get("status") != 0
    }
    failures = unwell or failures
    ordered = sorted(failures.items(), key=lambda item: _moment(item[1], deaths))
    rank, first = ordered[0]
    if STOPPED_STATUS in (first.exitcode, _extra(first).get("status")):
        say(f"the job stopped on request before it had finished: status {STOPPED_STATUS} of rank {rank}")
        return STOPPED_STATUS
    if first.exitcode > 0:
        status, how = first.exitcode, f"exit code {first.exitcode}"
    elif _extra(first).get("status"):  # raised or left, and was stopped before it had ended by itself
        status = int(_extra(first)["status"])
        how = "an uncaught exception" if _extra(first)["py_callstack"] else f"exit code {status}"
    else:
        status, how = 128 - first.exitcode, f"signal {first.signal_name()}"
    where = f" of node {attempt.node_rank}" if attempt.nnodes > 1 else ""
    lines = [f"{REPORT_START} {rank} (local rank {first.local_rank}{where}, pid {first.pid}) failed first: {how}"]
    if attempt.log_dir:
        lines.append(f"booster run: the output of each rank is under {attempt.log_dir}")
    first_rank = attempt.node_rank * attempt.nproc_per_node
    ended = sorted(set(range(first_rank, first_rank + attempt.nproc_per_node)) - set(failures))
    if ended and _extra(first).get("is_cut_off"):
        lines.append(f"booster run: rank(s) {ended} had ended before, without an error: they came to their end earlier")
    tracebacks = [(other, str(_extra(failure).get("py_callstack", ""))) for other, failure in ordered]
    tracebacks = [(other, callstack) for other, callstack in tracebacks if callstack]
    if tracebacks:
        other, callstack = tracebacks[0]
        lines.append(f"booster run: the first traceback, of rank {other}:\n{callstack.rstrip()}")
    if not tracebacks or tracebacks[0][0] != rank:  # the cause comes last, where it is read first
        after = "\n" if tracebacks else ""
        # Only the system or a person sends this signal.
        killed = ": killed from outside, or by the system for want of memory, which its log then says (dmesg)"
        by_whom = killed if first.exitcode == -signal.SIGKILL else ""
        lines.append(
            f"{after}booster run: the first to end was rank {rank}: {how}{by_whom}. It left no Python traceback; see "
            "its output above"
        )
    sys.stdout.flush()
    print("\n" + "\n".join(lines), file=sys.stderr, flush=True)
    return status


def _extra(failure: Any) -> dict[str, Any]:
    message = failure.error_file_data.get("message")
    extra = message.get("extraInfo") if isinstance(message, dict) else None
    return extra if isinstance(extra, dict) and "py_callstack" in extra else {}


def _moment(failure: Any, deaths: dict[int, int]) -> tuple[bool, int, bool]:
    """Order failures by when they happened: by the record of an exception or exit, else by when a death was noted."""
    extra = _extra(failure)
    is_cut_off = bool(extra and extra["is_cut_off"])
    if extra and not is_cut_off:
        return False, int(extra["timestamp_ns"]), False
    # Those count by their death, too, that raise because a peer is gone: their sockets report it before the death of the peer
    # is noted.
    if failure.pid in deaths:
        return False, deaths[failure.pid], is_cut_off
    # A death that was not noted is known to the agent in whole seconds, cut off: it counts as the end of that second, so it
    # never comes before what has a record.
    # What the agent stopped comes last. Of two deaths noted together the peer's was first.
    return failure.exitcode == -signal.SIGTERM, (failure.timestamp + 1) * 10**9, is_cut_off


RENDEZVOUS = "booster"  # the name under which torch's launcher finds it
LOOPBACK = "127.0.0.1"
_TIMEOUT = 600  # seconds that a node waits for the others


def register() -> None:
    """Make this rendezvous known to torch's launcher, which looks them up by name; again is nothing."""
    from torch.distributed.elastic.rendezvous import rendezvous_handler_registry

    rendezvous_handler_registry.register(RENDEZVOUS, _handler)


def loopback_variables() -> dict[str, str]:
    """Return what has the process groups of ranks listen on the loopback interface alone; the job must be on one machine."""
    names = [name for _, name in socket.if_nameindex() if name in ("lo", "lo0")]  # of Linux, of macOS and BSD
    return dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), names[0]) if names else {}


def _handler(parameters: Any) -> Any:
    """Return what torch's launcher asks for when nodes meet: node 0 serves the store, the others connect."""
    from torch.distributed import PrefixStore, TCPStore
    from torch.distributed.elastic.rendezvous import RendezvousInfo, RendezvousStoreInfo
    from torch.distributed.elastic.rendezvous.static_tcp_rendezvous import StaticTCPRendezvous

    # Torch's "c10d" and "static" listen on every interface, and "c10d" unpickles what any client writes there.
    class Rendezvous(StaticTCPRendezvous):
        def get_backend(self) -> str:
            return RENDEZVOUS

        def next_rendezvous(self) -> RendezvousInfo:
            address, port, rank, num_nodes = self.master_addr, self.master_port, self.rank, self.world_size
            listener = _listener(address, port, is_one_machine=num_nodes == 1) if rank == 0 else None
            options: dict[str, Any] = {} if listener is None else {"master_listen_fd": listener.fileno()}
            port = port if listener is None else listener.getsockname()[1]
            self._store = TCPStore(address, port, num_nodes, rank == 0, self.timeout, **options)
            if listener is not None:
                listener.detach()  # the store closes it
            return RendezvousInfo(
                PrefixStore(self.run_id, self._store), rank, num_nodes, RendezvousStoreInfo(address, port)
            )

        def shutdown(self) -> bool:
            self._store = None  # the port is free again
            return True

    address, port, rank = (parameters.config[name] for name in ("address", "port", "rank"))
    return Rendezvous(address, port, rank, parameters.max_nodes, parameters.run_id, _TIMEOUT)


def _listener(address: str, port: int, *, is_one_machine: bool) -> socket.socket | None:
    """Return a socket that listens where `address` is; None where that is no interface of this machine, and says so."""
    found = [
        (family, place)
        for family, _, _, _, place in socket.getaddrinfo(address, port, type=socket.SOCK_STREAM)
        # A name that its own machine knows by a loopback address alone is another address to the others.
        if is_one_machine or address == "localhost" or not _is_loopback(place) or _is_loopback((address,))
    ]
    for family, place in found:
        listener = socket.socket(family, socket.SOCK_STREAM)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            listener.bind(place)
        except OSError:
            listener.close()
            if is_one_machine:
                raise
            continue
        listener.listen(2048)
        return listener
    say(
        f"{address} is no address of this machine's interfaces, so port {port} listens on all of them; give --master_addr the "
        "address of one to listen there alone"
    )
    return None


def _is_loopback(place: tuple[Any, ...]) -> bool:
    try:
        return ipaddress.ip_address(str(place[0]).partition("%")[0]).is_loopback
    except ValueError:  # a name
        return False


PIDS_VARIABLE = "BOOSTER_RUN_PIDS"  # read by worker.py, which imports nothing of this package
_INTERVAL = 0.01  # seconds
_WORKER = str(Path(__file__).with_name("worker.py"))


class RankProcesses:
    """The ranks that have left their pid as a file in the folder `pids`, which they do when they start.

    Attributes:
        deaths: when ranks died, in ns, by pid. Torchrun's agent reaps them some time later, and knows whole seconds.
        asked: the last signal that was passed on.
    """

    def __init__(self, pids: Path, grace_seconds: float) -> None:
        self.deaths: dict[int, int] = {}
        self.asked: signal.Signals | None = None
        self._pids = pids
        self._grace_seconds = grace_seconds
        self._signals: list[signal.Signals] = []
        self._sent: set[tuple[int, int]] = set()
        self._deadline: float | None = None

    def pass_on(self, number: int, frame: object = None) -> None:
        """Pass a signal on to every rank, those too that have yet to start; a handler of signals."""
        self.asked = signal.Signals(number)
        if self.asked not in self._signals:
            # Not to what ranks have started: torch's data workers die of SIGTERM, and their rank of that.
            self._signals.append(self.asked)
        if number == signal.SIGTERM and self._deadline is None:
            self._deadline = time.monotonic() + self._grace_seconds

    @contextmanager
    def reaping(self) -> Iterator[None]:
        """Look after the ranks in a thread, as long as the context is entered."""
        done = threading.Event()
        self._pids.mkdir()
        os.environ[PIDS_VARIABLE] = str(self._pids)

        def reap() -> None:
            while not done.is_set():
                self._reap()
                done.wait(_INTERVAL)

        thread = threading.Thread(target=reap, daemon=True)
        thread.start()
        try:
            yield
        finally:
            done.set()
            thread.join()
            del os.environ[PIDS_VARIABLE]

    def _reap(self) -> None:
        # A wait for any child would report one death alone.
        alive = [pid for path in self._pids.iterdir() if (pid := int(path.name)) not in self.deaths]
        dead = []
        for pid in alive:
            try:
                if os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None:
                    dead.append(pid)
            except ChildProcessError:  # the agent was faster
                dead.append(pid)
        for pid in dead:  # later its number may be that of another's process
            (self._pids / str(pid)).unlink()
        self.deaths.update(dict.fromkeys(dead, time.time_ns()))
        alive = [pid for pid in alive if pid not in self.deaths]
        for number in self._signals:
            for pid in alive:
                if (pid, number) not in self._sent:
                    self._sent.add((pid, number))
                    os.kill(pid, number)  # not reaped yet, or a moment ago: the pid is no other's
        if self._deadline is not None and time.monotonic() > self._deadline:
            kill_groups(alive)


def kill_groups(pids: Iterable[int]) -> None:
    """Kill ranks with all that is left in their sessions (data workers, subprocesses)."""
    for pid in pids:
        try:
            os.killpg(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


# After this many seconds a process is killed that ignores Ctrl-C, or the end of another.
_SHUTDOWN_SECONDS = 10


class Stopped(Exception):
    """The launcher was asked by signal `number` to end the job, and it has ended, with `status`: 128 + number by default."""

    def __init__(self, number: int, status: int | None = None) -> None:
        super().__init__(f"stopped by {signal.Signals(number).name}")
        self.number = number
        self.status = 128 + number if status is None else status


def run_attempt(attempt: Attempt) -> int:
    """Start the processes, wait, and return the exit status: 0, the first failing rank's, or 128 + its signal.

    On a failure the other processes are stopped and the first failing rank's traceback is the last thing on stderr, or, where
    it left none, a line that says how it ended.
    Raises Stopped when a signal to this process ended the job. SIGTERM and SIGUSR1 are passed on to the ranks, which may
    save and stop: after SIGTERM within the grace time, after SIGUSR1 as soon as they like; the status is then theirs.
    Side effects: while it runs, SIGINT, SIGTERM, SIGUSR1, SIGHUP and SIGQUIT are handled in this process.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    own = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    handlers = {number: signal.getsignal(number) for number in (*own, signal.SIGHUP, signal.SIGQUIT)}
    if attempt.nnodes > 1:
        # Waiting for other nodes happens inside the store's C++ code, where Python handlers do not run. No process
        # has been started then, so the default action is right; handlers are set before any is started.
        for number in own:
            signal.signal(number, signal.SIG_DFL)
    with tempfile.TemporaryDirectory(prefix="booster_run_") as scratch, _guarded(scratch):
        ranks = RankProcesses(Path(scratch, "pids"), attempt.grace_seconds)

        def pass_signals_on() -> None:
            for number in (signal.SIGTERM, signal.SIGUSR1):
                signal.signal(number, ranks.pass_on)

        config = _config(attempt, scratch, before_start=pass_signals_on)
        status = 0
        try:
            with ranks.reaping():
                elastic_launch(config, sys.executable)("-u", *attempt.command)
        except ChildFailedError as error:
            kill_groups([failure.pid for failure in error.failures.values()])
            if ranks.asked != signal.SIGTERM:
                status = report_failures(error.failures, ranks.deaths, attempt)
        except SignalException as stop:
            raise Stopped(int(stop.sigval)) from None
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        if ranks.asked is not None:
            raise Stopped(ranks.asked, None if ranks.asked == signal.SIGTERM else status)
        return status


@contextmanager
def _guarded(folder: str) -> Iterator[None]:
    """Have a process end the ranks and remove `folder`, should this one be killed meanwhile."""
    command = [sys.executable, "-I", "-S", _WORKER, "--guard", folder]
    # It has its own session, where no Ctrl-C comes.
    guard = subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        yield
    finally:
        # It is gone before `folder` is.
        guard.kill()
        guard.communicate()


def _config(attempt: Attempt, scratch: str, *, before_start: Callable[[], None]) -> Any:
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig

    class Logs(DefaultLogsSpecs):
        """The agent asks where output goes when all nodes have met, and before it starts processes."""

        def reify(self, envs: dict[int, dict[str, str]]) -> Any:
            before_start()
            return super().reify(envs)

    # Kept logs hold all output; what `tee` names is shown on the console as well.
    tee = Std.from_str(attempt.tee) if attempt.tee is not None else (Std.ALL if attempt.log_dir else Std.NONE)
    redirects = Std.ALL if attempt.log_dir else Std.NONE
    register()
    options: dict[str, Any] = {
        "rdzv_backend": RENDEZVOUS,
        "rdzv_configs": {
            "rank": attempt.node_rank,
            "address": attempt.master_addr or LOOPBACK,
            # Port 0: the store binds a port the system knows to be free, so two jobs on one machine cannot meet.
            "port": attempt.master_port or 0,
        },
    }
    if "shutdown_timeout" in {field.name for field in dataclasses.fields(LaunchConfig)}:
        options["shutdown_timeout"] = _SHUTDOWN_SECONDS  # not in every supported torch; 30 s there
    return LaunchConfig(
        min_nodes=attempt.nnodes,
        max_nodes=attempt.nnodes,
        nproc_per_node=attempt.nproc_per_node,
        run_id="booster",
        log_line_prefix_template="[rank${rank}]: ",
        max_restarts=0,  # torchrun's restart in place can hang; `booster run` relaunches the whole job instead
        monitor_interval=0.1,
        signals_to_handle="SIGINT,SIGHUP,SIGQUIT",  # those that are not passed on
        logs_specs=Logs(log_dir=attempt.log_dir or scratch, redirects=redirects, tee=tee),
        **options,
    )


def worker_command(script: str, arguments: list[str], *, is_module: bool) -> tuple[str, ...]:
    """Return what the interpreter is given to run `script`, or the module of that name, as one rank."""
    return (_WORKER, *(["-m"] if is_module else []), script, *arguments)
