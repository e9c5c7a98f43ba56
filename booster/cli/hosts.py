"""Start a job's nodes, this machine directly and the others by ssh, and end all when one fails.

Which machines a job runs on: --host, --hostfile, --include and --exclude.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, cast

from booster.cli.agent import REPORT_START, STOPPED_STATUS, Stopped
from booster.common.untrusted_files import read_regular

# What a node needs, beyond the grace time of its ranks, to end its processes before its connection is cut.
_NODE_SECONDS = 20.0
_KEPT_LINES = 200
_SSH_FAILED = 255


# Reads one line of JSON and no byte beyond it, and becomes its arguments with these variables added. In one line, which all
# shells take; in Python that imports nothing of this package, which may be found by a PYTHONPATH that is among them alone.
_RECEIVER = (
    "import json, os, sys; line = b''.join(iter(lambda: os.read(0, 1) or sys.exit(255), b'\\n')); "
    "os.execvpe(sys.argv[1], sys.argv[1:], {**os.environ, **json.loads(line)})"
)


@dataclass(frozen=True)
class NodeCommand:
    """The argument list that runs one node, and the variables that it gets in addition to its machine's.

    is_remote: they go over standard input, as `ssh_command` reads them.
    """

    host: str
    argv: Sequence[str]
    environment: Mapping[str, str]
    is_remote: bool = False


def ssh_command(host: str, port: int, directory: str, command: Sequence[str]) -> list[str]:
    """Return the ssh argument list that runs `command` in `directory` of `host`, once it has its variables."""
    # Variables come by standard input: every user of both machines can read the arguments of a process.
    receiver = (sys.executable, "-I", "-S", "-c", _RECEIVER)
    remote = f"{shlex.join(['cd', directory])} && {shlex.join(['exec', *receiver, *command])}"
    return ["ssh", "-p", str(port), host, remote]


def run_nodes(commands: Sequence[NodeCommand], grace_seconds: float) -> int:
    """Run all nodes and return 0, or the exit status of the first that failed; the others are then ended.

    Raises Stopped after SIGINT or SIGTERM, when all nodes have ended, and with their status after SIGUSR1, which is passed on
    to them.
    """
    # Each node watches its standard input and ends its processes when that closes.
    # So the end of this process, for whatever reason, ends the job.
    nodes: list[_Node] = []
    asked = False

    def ask(number: int, frame: object) -> None:
        nonlocal asked
        asked = True
        for node in nodes:
            node.ask()

    def stop(number: int, frame: object) -> None:
        raise Stopped(number)

    handlers = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    handlers[signal.SIGUSR1] = signal.signal(signal.SIGUSR1, ask)
    try:
        for command in commands:
            nodes.append(_Node(command))
            if asked:
                nodes[-1].ask()
        index = _first_failure(nodes)
    finally:
        for number in handlers:
            signal.signal(number, signal.SIG_IGN)  # a second Ctrl-C must not interrupt the ending of the others
        _end(nodes, grace_seconds)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    status = 0 if index is None else _report(index, nodes[index])
    if asked:
        raise Stopped(signal.SIGUSR1, status)
    return status


class _Node:
    """A node that runs, and what it says of the rank that failed.

    Attributes:
        host: its name.
        process: it, or the ssh that it is behind.
        stdin, stderr: its pipes.
        relay: the thread that passes `stderr` on.
        report: the lines of the report.
    """

    def __init__(self, command: NodeCommand) -> None:
        self.host = command.host
        self.process = subprocess.Popen(
            list(command.argv),
            stdin=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=os.environ if command.is_remote else {**os.environ, **command.environment},
            start_new_session=True,  # Ctrl-C comes here only; the nodes are then ended in order
        )
        self.stdin, self.stderr = cast(BinaryIO, self.process.stdin), cast(BinaryIO, self.process.stderr)
        # The first line is the environment; all after it are requests to stop, and the end of the stream ends the node.
        if command.is_remote:
            with suppress(BrokenPipeError):  # ssh has ended, and its status says why
                self.stdin.write(json.dumps(dict(command.environment)).encode() + b"\n")
                self.stdin.flush()
        self.report: list[bytes] = []
        self.relay = threading.Thread(target=_relay, args=(self.stderr, self.report), daemon=True)
        self.relay.start()
        self._asked = False

    def ask(self) -> None:
        """Ask the node's ranks to stop, once."""
        if not self._asked:
            self._asked = True  # first: the next signal may come while this one is written
            with suppress(BrokenPipeError, ValueError):  # it has ended
                self.stdin.write(b"stop\n")
                self.stdin.flush()


def _relay(stream: BinaryIO, report: list[bytes]) -> None:
    """Copy a node's stderr to ours and keep its report of the failing rank."""
    for line in stream:
        sys.stderr.buffer.write(line)
        sys.stderr.buffer.flush()
        if line.startswith(REPORT_START.encode()):
            report.clear()
            report.append(line)
        # A traceback has an end; what a job prints after it may not.
        elif report and len(report) < _KEPT_LINES:
            report.append(line)


def _first_failure(nodes: Sequence[_Node]) -> int | None:
    """Wait until all nodes ended well (None), or one did not (its index)."""
    while True:
        statuses = [node.process.poll() for node in nodes]
        for index, status in enumerate(statuses):
            if status not in (None, 0):
                return index
        if all(status == 0 for status in statuses):
            return None
        # Polled, because a wait for one process would miss that another one failed.
        time.sleep(0.1)


def _end(nodes: Sequence[_Node], grace_seconds: float) -> None:
    for node in nodes:
        with suppress(BrokenPipeError):
            node.stdin.close()
    deadline = time.monotonic() + grace_seconds + _NODE_SECONDS
    for node in nodes:
        for last_resort in (node.process.terminate, node.process.kill, None):
            try:
                node.process.wait(max(0.1, deadline - time.monotonic()))
                break
            except subprocess.TimeoutExpired:
                if last_resort is not None:
                    last_resort()
    for node in nodes:
        node.relay.join(timeout=1.0)  # whoever inherited the pipe could keep it open
        if not node.relay.is_alive():
            node.stderr.close()


def _report(index: int, node: _Node) -> int:
    status = node.process.returncode
    how = f"exit status {status}" if status > 0 else f"signal {signal.Signals(-status).name}"
    lines = [f"booster run: node {index} ({node.host}) failed first: {how}; the other nodes were stopped"]
    if status == STOPPED_STATUS:
        lines = [f"booster run: the job stopped on request before it had finished: {how} of node {index} ({node.host})"]
    if status == _SSH_FAILED and not node.report:
        lines.append(f"booster run: 255 is ssh's own failure; does `ssh {node.host} true` work without a password?")
    print("\n" + "\n".join(lines), file=sys.stderr, flush=True)
    sys.stderr.buffer.write(b"".join(node.report))
    sys.stderr.buffer.flush()
    return status if status > 0 else 128 - status


# A user, a name or address, no leading dash: ssh would read "-oProxyCommand=..." as an option.
_HOST_PATTERN = re.compile(r"[A-Za-z0-9_\[:][A-Za-z0-9_.@:%\[\]-]*")
_LARGEST_HOSTFILE = 2**24  # bytes


@dataclass(frozen=True)
class Host:
    """A machine; slots: processes to start there, None where the hostfile does not say."""

    name: str
    slots: int | None = None


def read_hostfile(path: str) -> list[Host]:
    """Read one host a line, optionally `slots=N`; `#` starts a comment, empty lines count for nothing.

    Errors: ValueError naming the file, the line number and the fault.
    """
    try:
        text = read_regular(Path(path), _LARGEST_HOSTFILE).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"hostfile {path!r} cannot be read: {error}") from None
    hosts: dict[str, Host] = {}
    for number, line in enumerate(text.splitlines(), start=1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        where = f"hostfile {path!r}, line {number}"
        name = _checked_name(words[0], where)
        if name in hosts:
            raise ValueError(f"{where}: {name!r} was listed before; give each host once, with slots=N processes")
        slots = None
        for word in words[1:]:
            match = re.fullmatch(r"slots=([1-9][0-9]{0,8})", word)
            if match is None or slots is not None:
                raise ValueError(f"{where}: {word!r} is not understood; a line is `HOST` or `HOST slots=N`, N >= 1")
            slots = int(match[1])
        hosts[name] = Host(name, slots)
    if not hosts:
        raise ValueError(f"hostfile {path!r} lists no host; write one host a line")
    return list(hosts.values())


def chosen_hosts(*, host: str | None, hostfile: str | None, include: str | None, exclude: str | None) -> list[Host]:
    """Return the machines the options name, in order (the first is node 0); [] where no option names any.

    Errors: ValueError for options that contradict each other and for unknown or repeated hosts.
    """
    if host is not None and hostfile is not None:
        raise ValueError("--host and --hostfile were both given; keep one (--include selects from a hostfile)")
    if include is not None and exclude is not None:
        raise ValueError("--include and --exclude were both given; keep one")
    if hostfile is None:
        if include is not None or exclude is not None:
            option = "--include" if include is not None else "--exclude"
            raise ValueError(
                f"{option} selects from a hostfile and none was given; add --hostfile, or list the hosts by --host"
            )
        return [Host(name) for name in _names(host, "--host")] if host is not None else []
    hosts = read_hostfile(hostfile)
    listed = [entry.name for entry in hosts]
    if include is not None:
        wanted = _checked_selection(_names(include, "--include"), listed, "--include")
        return [entry for entry in hosts if entry.name in wanted]
    if exclude is not None:
        unwanted = _checked_selection(_names(exclude, "--exclude"), listed, "--exclude")
        hosts = [entry for entry in hosts if entry.name not in unwanted]
        if not hosts:
            raise ValueError(f"--exclude {exclude} leaves no host of {listed}")
    return hosts


def is_host_name(text: str) -> bool:
    """Say whether `text` is written as names and addresses of machines are, which says nothing of whether it is known."""
    return _HOST_PATTERN.fullmatch(text) is not None


def is_local(name: str) -> bool:
    """Say whether `name` is this machine by its usual names, so that no ssh is needed."""
    return name in {"localhost", "127.0.0.1", "::1", socket.gethostname()}


def _names(text: str, option: str) -> list[str]:
    names = [_checked_name(name.strip(), option) for name in text.split(",")]
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"{option} {text}: {repeated[0]!r} is given twice")
    return names


def _checked_name(name: str, where: str) -> str:
    if not is_host_name(name):
        raise ValueError(f"{where}: {name!r} is not a host; give names or addresses, for instance node1,node2")
    return name


def _checked_selection(names: Sequence[str], listed: list[str], option: str) -> set[str]:
    for name in names:
        if name not in listed:
            raise ValueError(f"{option}: {name!r} is not in the hostfile, which lists {listed}")
    return set(names)
