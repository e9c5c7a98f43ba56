"""The options of `booster run`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from booster.cli.hosts import is_host_name
from booster.cli.option_values import spellings

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


def _ranged(low: int, high: int, what: str) -> Callable[[str], int]:
    """Return what reads whole numbers from `low` to `high`. what: what one of them is, for the message."""

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
        return value

    return read


_positive = _ranged(1, 2**31 - 1, "a whole number of at least 1")
_natural = _ranged(0, 2**31 - 1, "a whole number of at least 0")
_port = _ranged(1, 65535, "a port from 1 to 65535")


def _process_number(text: str) -> str:
    if text not in ("gpu", "cpu"):
        _ranged(1, 2**31 - 1, "a whole number of at least 1, 'gpu' or 'cpu'")(text)
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
        _ranged(1, 10**9, "a whole number of seconds, at least 1"),
        "S",
        None,
        "seconds that a collective waits for other ranks before it fails, where the script names none (default: torch's)",
    ),
    (
        "log_dir",
        _directory,
        "DIR",
        None,
        "keep each rank's stdout and stderr under DIR, and show them on the console",
    ),
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
