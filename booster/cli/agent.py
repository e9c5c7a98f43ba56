"""One attempt of a job's processes on this machine: torchrun's agent, in process, and a report of what failed first."""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import tempfile
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Attempt", "run_attempt"]

# After this many seconds a process that ignores the closing signal is killed.
_SHUTDOWN_SECONDS = 10


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


def run_attempt(attempt: Attempt) -> int:
    """Start the processes, wait, and return the exit status: 0, the first failing rank's, or 128 + signal.

    On a failure the other processes are stopped and the first failing rank's traceback is the last thing on stderr.
    Side effects: while it runs, torchrun's agent handles SIGINT, SIGTERM, SIGHUP and SIGQUIT in this process.
    """
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    with tempfile.TemporaryDirectory(prefix="booster_run_") as scratch:
        config = _config(attempt, scratch)
        try:
            elastic_launch(config, sys.executable)("-u", *attempt.command)
            return 0
        except ChildFailedError as error:
            _kill_groups([failure.pid for failure in error.failures.values()])
            return _report(error.failures, attempt)
        except SignalException as stop:
            name = signal.Signals(stop.sigval).name
            print(f"booster run: stopped by {name}; all processes of this node have ended", file=sys.stderr, flush=True)
            return 128 + int(stop.sigval)
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)


def _config(attempt: Attempt, scratch: str) -> Any:
    from torch.distributed.elastic.multiprocessing.api import DefaultLogsSpecs, Std
    from torch.distributed.launcher.api import LaunchConfig

    # Kept logs hold all output; what `tee` names is shown on the console as well.
    tee = Std.from_str(attempt.tee) if attempt.tee is not None else (Std.ALL if attempt.log_dir else Std.NONE)
    redirects = Std.ALL if attempt.log_dir else Std.NONE
    options: dict[str, Any] = {}
    if attempt.nnodes == 1 and attempt.master_port is None:
        # Port 0: the store binds a port the system knows to be free, so two jobs on one machine cannot meet.
        options = {"rdzv_backend": "c10d", "rdzv_endpoint": "localhost:0", "run_id": str(uuid.uuid4())}
        options["local_addr"] = "127.0.0.1"
    else:
        address = attempt.master_addr or "127.0.0.1"
        endpoint = f"[{address}]:{attempt.master_port}" if ":" in address else f"{address}:{attempt.master_port}"
        options = {"rdzv_backend": "static", "rdzv_endpoint": endpoint, "run_id": "booster"}
        options["rdzv_configs"] = {"rank": attempt.node_rank}
    if "shutdown_timeout" in {field.name for field in dataclasses.fields(LaunchConfig)}:
        options["shutdown_timeout"] = _SHUTDOWN_SECONDS  # not in every supported torch; 30 s there
    return LaunchConfig(
        min_nodes=attempt.nnodes,
        max_nodes=attempt.nnodes,
        nproc_per_node=attempt.nproc_per_node,
        max_restarts=0,  # torchrun's restart in place can hang; `booster run` relaunches the whole job instead
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=attempt.log_dir or scratch, redirects=redirects, tee=tee),
        **options,
    )


def worker_command(script: str, arguments: list[str], *, is_module: bool) -> tuple[str, ...]:
    """Return what the interpreter is given to run `script`, or the module of that name, as one rank."""
    worker = str(Path(__file__).with_name("worker.py"))
    return (worker, *(["-m"] if is_module else []), script, *arguments)


def _kill_groups(pids: list[int]) -> None:
    """End what dead ranks left behind in their sessions (data workers, subprocesses)."""
    for pid in pids:
        try:
            os.killpg(pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            continue


def _report(failures: dict[int, Any], attempt: Attempt) -> int:
    rank, first = min(failures.items(), key=lambda item: _moment(item[1]))
    status = first.exitcode if first.exitcode > 0 else 128 - first.exitcode
    how = f"exit code {first.exitcode}" if first.exitcode > 0 else f"signal {first.signal_name()}"
    where = f" of node {attempt.node_rank}" if attempt.nnodes > 1 else ""
    lines = [f"booster run: rank {rank} (local rank {first.local_rank}{where}, pid {first.pid}) failed first: {how}"]
    if attempt.log_dir:
        lines.append(f"booster run: the output of each rank is under {attempt.log_dir}")
    callstack = _extra(first).get("py_callstack")
    if callstack:
        lines.append(str(callstack).rstrip())
    else:
        lines.append("booster run: that process left no Python traceback; its own output above is all there is")
    sys.stdout.flush()
    print("\n" + "\n".join(lines), file=sys.stderr, flush=True)
    return status


def _extra(failure: Any) -> dict[str, Any]:
    message = failure.error_file_data.get("message")
    extra = message.get("extraInfo", {}) if isinstance(message, dict) else {}
    return extra if isinstance(extra, dict) else {}


def _moment(failure: Any) -> tuple[bool, int]:
    """Order failures by when they happened; processes that the agent itself stopped come last."""
    stopped = failure.exitcode in (-signal.SIGTERM, -signal.SIGKILL) and not _extra(failure)
    nanoseconds = _extra(failure).get("timestamp_ns", failure.timestamp * 10**9)
    return stopped, int(nanoseconds)
