"""`booster run`: start a script as the ranks of one job, on this machine or on several."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from booster.cli.agent import STOPPED_STATUS, Attempt, Stopped, loopback_variables, run_attempt, worker_command
from booster.cli.hosts import Host, NodeCommand, chosen_hosts, is_host_name, is_local, run_nodes, ssh_command
from booster.cli.option_values import say, spellings, whole
from booster.launch import TIMEOUT_VARIABLE, await_address

DEFAULT_MASTER_PORT = 29500

_EPILOG = """\
--name_with_underscores and --name-with-hyphens are the same option. Options of `booster run` stand before the script;
everything after the script's name goes to the script untouched.
"""


def parse(argv: Sequence[str]) -> tuple[argparse.ArgumentParser, argparse.Namespace]:
    """Parse and check `argv`; exits with status 2 and the reason on stderr, as argparse does."""
    parser = _parser()
    options = parser.parse_args(list(argv))
    command = options.command[options.command[:1] == ["--"] :]  # a "--" behind the script is the script's
    if not command:
        parser.error("the following arguments are required: script")
    options.script, options.args = command[0], command[1:]
    by_hosts = options.host is not None or options.hostfile is not None
    if by_hosts:
        for name in ("nnodes", "node_rank"):
            if getattr(options, name) is not None:
                parser.error(f"--{name} follows from the list of hosts; leave it out with --host or --hostfile")
    elif options.ssh_port is not None:
        parser.error("--ssh_port is for --host and --hostfile, and neither was given")
    options.nnodes = options.nnodes or 1
    options.ssh_port = options.ssh_port or 22
    if options.nnodes > 1:
        for name in ("node_rank", "master_addr"):
            if getattr(options, name) is None:
                parser.error(
                    f"--nnodes {options.nnodes} needs --{name}; run this command on each node with its own --node_rank"
                )
    elif not by_hosts and options.master_addr not in (None, "localhost", "127.0.0.1", "::1"):
        parser.error(f"--master_addr {options.master_addr} is for several nodes; give --nnodes and --node_rank too")
    options.node_rank = options.node_rank or 0
    if options.node_rank >= options.nnodes and not by_hosts:
        parser.error(f"--node_rank {options.node_rank} must be less than --nnodes {options.nnodes}")
    return parser, options


_LARGEST = 2**31 - 1
_positive = whole(1, _LARGEST, "a whole number of at least 1")
_natural = whole(0, _LARGEST, "a whole number of at least 0")
_port = whole(1, 65535, "a port from 1 to 65535")


def _process_number(text: str) -> str:
    if text not in ("gpu", "cpu"):
        whole(1, _LARGEST, "a whole number of at least 1, 'gpu' or 'cpu'")(text)
    return text


def _address(text: str) -> str:
    if not is_host_name(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not the name or address of a machine")
    return text


def _directory(text: str) -> str:
    if not text.strip() or (Path(text).exists() and not Path(text).is_dir()):
        raise argparse.ArgumentTypeError(f"{text!r} is not a directory, nor the name of one to be made")
    return text


def _streams(text: str) -> str:
    if not re.fullmatch(r"[0-3]|\d+:[0-3](,\d+:[0-3])*", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not 0, 1, 2 or 3, nor a list such as 0:3,1:2")
    return text


# name, what reads it, how its value is shown, default, help
_OPTIONS: tuple[tuple[str, Callable[[str], Any] | None, str, Any, str], ...] = (
    ("nproc_per_node", _process_number, "N|gpu|cpu", None, "processes on each node (default: GPUs, or 1)"),
    ("nnodes", _positive, "N", None, "number of nodes, when this command is run on each (default: 1)"),
    ("node_rank", _natural, "R", None, "this node's index, from 0"),
    ("master_addr", _address, "ADDR", None, "address of node 0 (default: this machine, or the first host)"),
    (
        "master_port",
        _port,
        "PORT",
        None,
        f"port of node 0 (default: a free one on one node, {DEFAULT_MASTER_PORT} on several)",
    ),
    ("host", None, "H1,H2", None, "start the job on these machines by ssh; the first is node 0"),
    ("hostfile", None, "FILE", None, "the same from a file: one `HOST` or `HOST slots=N` a line, # comments"),
    ("include", None, "H1,H2", None, "use only these hosts of the hostfile"),
    ("exclude", None, "H1,H2", None, "use all hosts of the hostfile but these"),
    ("ssh_port", _port, "PORT", None, "port of the ssh servers (default: 22)"),
    ("env", None, "NAME[=VALUE]", [], "set a variable on all nodes; may be repeated"),
    ("max_restarts", _natural, "N", 0, "relaunch the whole job up to N times (default: 0)"),
    (
        "grace_seconds",
        _natural,
        "S",
        30,
        "seconds that ranks have to save and end after SIGTERM, before they are killed (default: 30)",
    ),
    (
        "timeout",
        whole(1, 10**9, "a whole number of seconds, at least 1"),
        "S",
        None,
        "seconds that a collective waits for other ranks before it fails, where the script names none (default: torch's)",
    ),
    ("log_dir", _directory, "DIR", None, "keep each rank's stdout and stderr under DIR, and show them on the console"),
    (
        "tee",
        _streams,
        "0-3",
        None,
        "streams shown line by line with the rank in front: 1 stdout, 2 stderr, 3 both, 0 none; or RANK:N,RANK:N",
    ),
)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="booster run",
        usage="booster run [options] [-m] script [arguments of the script]",
        description="Start a script as the ranks of one job; it calls booster.launch_from_torch().",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    for name, read, metavar, default, text in _OPTIONS:
        repeated: Any = {"action": "append"} if isinstance(default, list) else {"type": read}
        parser.add_argument(*spellings(name), metavar=metavar, default=default, help=text, **repeated)
    # Of nodes that the launcher starts on other machines.
    parser.add_argument(*spellings("watch_stdin"), action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module name, as in `python -m`")
    # One argument, since argparse takes away a "--" between two.
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="script", help="the file to run (with -m: the module)"
    )
    return parser


def run(argv: Sequence[str]) -> int:
    """Run `booster run` with the options `argv`; return 0, the failing status, or 2 for a usage error."""
    parser, options = parse(argv)
    try:
        hosts = chosen_hosts(
            host=options.host, hostfile=options.hostfile, include=options.include, exclude=options.exclude
        )
        environment = {}
        for text in options.env:
            name, equals, value = text.partition("=")
            if not name.isidentifier():
                raise ValueError(f"--env {text!r}: {name!r} is not a variable name; give NAME or NAME=VALUE")
            if not equals and name not in os.environ:
                raise ValueError(f"--env {name}: the variable is not set here; give --env {name}=VALUE")
            environment[name] = value if equals else os.environ[name]
    except ValueError as error:
        parser.error(str(error))
    if options.watch_stdin:
        # End this node when its standard input closes, which is how the launcher's end reaches it through ssh. A line
        # that comes before is a request to stop, SIGUSR1.
        stdin = os.dup(0)
        with open(os.devnull, "rb") as nothing:
            os.dup2(nothing.fileno(), 0)  # the script must not read what is waited for here

        def pass_requests_on() -> None:
            while os.read(stdin, 4096):
                os.kill(os.getpid(), signal.SIGUSR1)
            os.kill(os.getpid(), signal.SIGTERM)

        threading.Thread(target=pass_requests_on, daemon=True).start()
    try:
        with _environment(environment), _stoppable():
            attempt = 0
            while True:
                attempt += 1
                status = _on_hosts(hosts, options, environment) if hosts else _run_locally(parser, options)
                if status in (0, STOPPED_STATUS) or attempt > options.max_restarts:
                    return status
                print(file=sys.stderr)
                say(
                    f"attempt {attempt} of {options.max_restarts + 1} failed with status {status}; relaunching the whole job"
                )
    except Stopped as stop:
        say(f"{stop}; all processes of the job have ended")
        return stop.status


def _run_locally(parser: argparse.ArgumentParser, options: argparse.Namespace) -> int:
    _check_script(parser, options)
    nproc = _process_count(parser, options.nproc_per_node)
    port = options.master_port
    if options.nnodes > 1:
        try:
            await_address("--master_addr", options.master_addr)
        except (RuntimeError, ValueError) as error:
            say(f"error: {error}")
            return 1
        port = port or DEFAULT_MASTER_PORT
        say(f"node {options.node_rank} of {options.nnodes} meets the others at {options.master_addr} port {port}")
    # Asked here, where the message can name the option.
    if port is not None and options.node_rank == 0 and not _port_is_free(port):
        default = ", or leave it out: a free port is taken by default" if options.nnodes == 1 else ""
        say(f"error: port {port} is in use on this machine (another job?); choose another --master_port{default}")
        return 1
    if options.log_dir is not None:
        try:
            Path(options.log_dir).mkdir(parents=True, exist_ok=True)
        except OSError as error:
            say(f"error: --log_dir {options.log_dir} cannot be made: {error}")
            return 1
    defaults = {"OMP_NUM_THREADS": str(max(1, _num_cores() // nproc))}
    if options.nnodes == 1:
        defaults |= loopback_variables()
    variables = {name: value for name, value in defaults.items() if name not in os.environ}
    if options.timeout is not None:
        variables[TIMEOUT_VARIABLE] = str(options.timeout)
    with _environment(variables):
        return run_attempt(
            Attempt(
                command=worker_command(options.script, options.args, is_module=options.module),
                nproc_per_node=nproc,
                nnodes=options.nnodes,
                node_rank=options.node_rank,
                master_addr=options.master_addr,
                master_port=port,
                log_dir=options.log_dir,
                tee=options.tee,
                grace_seconds=options.grace_seconds,
            )
        )


def _on_hosts(hosts: Sequence[Host], options: argparse.Namespace, environment: Mapping[str, str]) -> int:
    commands = []
    port = str(options.master_port or DEFAULT_MASTER_PORT)
    address = options.master_addr or ("127.0.0.1" if len(hosts) == 1 else hosts[0].name.rpartition("@")[2])
    remote_environment = dict(environment)
    if "PYTHONPATH" in os.environ:
        remote_environment.setdefault("PYTHONPATH", os.environ["PYTHONPATH"])
    for node_rank, host in enumerate(hosts):
        command = [sys.executable, "-m", "booster", "run", "--watch_stdin"]
        command += ["--nnodes", str(len(hosts)), "--node_rank", str(node_rank)]
        command += ["--master_addr", address, "--master_port", port, "--grace_seconds", str(options.grace_seconds)]
        nproc = options.nproc_per_node or host.slots
        given = {"nproc_per_node": nproc} | {name: getattr(options, name) for name in ("timeout", "log_dir", "tee")}
        for name, value in given.items():
            command += [f"--{name}", str(value)] if value is not None else []
        command += [*(["-m"] if options.module else []), options.script, *options.args]
        if is_local(host.name):
            commands.append(NodeCommand(host.name, command, environment))
        else:
            argv = ssh_command(host.name, options.ssh_port, os.getcwd(), command)
            commands.append(NodeCommand(host.name, argv, remote_environment, is_remote=True))
    return run_nodes(commands, options.grace_seconds)


def _check_script(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    if not options.module:
        if not Path(options.script).is_file():
            parser.error(f"script {options.script!r} is not a file (looked in {os.getcwd()}); use -m for a module")
        return
    top = options.script.partition(".")[0]
    sys.path.insert(0, os.getcwd())  # where `python -m` looks first
    try:
        found = importlib.util.find_spec(top) if top else None
    finally:
        sys.path.pop(0)
    if found is None:
        parser.error(
            f"module {options.script!r}: no package {top!r} here or installed; without -m it is read as a file"
        )


def _process_count(parser: argparse.ArgumentParser, given: str | None) -> int:
    if given == "cpu":
        return _num_cores()
    if given is not None and given != "gpu":
        return int(given)
    import torch

    num_gpus = torch.cuda.device_count()
    if given == "gpu" and num_gpus == 0:
        parser.error("--nproc_per_node gpu: no CUDA device is visible; give a number, or cpu for one per core")
    return num_gpus or 1


def _num_cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _port_is_free(port: int) -> bool:
    families = [(socket.AF_INET, "0.0.0.0")]
    if socket.has_ipv6:
        families.append((socket.AF_INET6, "::"))
    for family, address in families:
        try:
            with socket.socket(family, socket.SOCK_STREAM) as probe:
                if family == socket.AF_INET6:
                    probe.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                probe.setsockopt(
                    socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
                )  # as the store does: old connections are no use
                probe.bind((address, port))
        except OSError as error:
            if family == socket.AF_INET6 and error.errno not in (98, 48):  # no IPv6 here
                continue
            return False
    return True


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    """Set `variables` for the processes started meanwhile."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _stoppable() -> Iterator[None]:
    """Turn SIGINT, SIGTERM and SIGUSR1 into Stopped while no attempt has taken them over."""

    def stop(number: int, frame: object) -> None:
        raise Stopped(number)

    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
