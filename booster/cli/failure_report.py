"""What the launcher prints when ranks have failed: which was the first, how it ended, and its traceback."""

from __future__ import annotations

import signal
import sys
from typing import Any

from booster.cli.option_values import say

REPORT_START = "booster run: rank"

# With this exit status (EX_TEMPFAIL) a script says that it has stopped because it was asked to, before it had finished.
STOPPED_STATUS = 75


def report_failures(
    failures: dict[int, Any],
    deaths: dict[int, int],
    *,
    node: int | None,
    first_rank: int,
    num_ranks: int,
    log_dir: str | None,
) -> int:
    """Print which rank of this machine failed first, how, and its traceback; return the exit status of the attempt.

    failures: what torchrun's agent found, by rank. deaths: when processes died, by pid, in ns. node: the index of this machine,
    None where it is the only one. first_rank, num_ranks: the ranks of this machine.
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
    where = "" if node is None else f" of node {node}"
    lines = [f"{REPORT_START} {rank} (local rank {first.local_rank}{where}, pid {first.pid}) failed first: {how}"]
    if log_dir:
        lines.append(f"booster run: the output of each rank is under {log_dir}")
    ended = sorted(set(range(first_rank, first_rank + num_ranks)) - set(failures))
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
