"""The options of `booster run`."""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from pathlib import Path

from booster.cli.hosts import is_host_name

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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="booster run",
        usage="booster run [options] [-m] script [arguments of the script]",
        description="Start a script as the ranks of one job; it calls booster.launch_from_torch().",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )

    def add(name: str, **settings: object) -> None:
        spellings = dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}"))
        parser.add_argument(*spellings, **settings)  # type: ignore[arg-type]

    add(
        "nproc_per_node", type=_process_number, metavar="N|gpu|cpu", help="processes on each node (default: GPUs, or 1)"
    )
    add("nnodes", type=_positive, metavar="N", help="number of nodes, when this command is run on each (default: 1)")
    add("node_rank", type=_natural, metavar="R", help="this node's index, from 0")
    add(
        "master_addr",
        type=_address,
        metavar="ADDR",
        help="address of node 0 (default: this machine, or the first host)",
    )
    add(
        "master_port",
        type=_port,
        metavar="PORT",
        help=f"port of node 0 (default: a free one on one node, {DEFAULT_MASTER_PORT} on several)",
    )
    add("host", metavar="H1,H2", help="start the job on these machines by ssh; the first is node 0")
    add("hostfile", metavar="FILE", help="the same from a file: one `HOST` or `HOST slots=N` a line, # comments")
    add("include", metavar="H1,H2", help="use only these hosts of the hostfile")
    add("exclude", metavar="H1,H2", help="use all hosts of the hostfile but these")
    add("ssh_port", type=_port, metavar="PORT", help="port of the ssh servers (default: 22)")
    add("env", action="append", default=[], metavar="NAME[=VALUE]", help="set a variable on all nodes; may be repeated")
    add("max_restarts", type=_natural, default=0, metavar="N", help="relaunch the whole job up to N times (default: 0)")
    add(
        "grace_seconds",
        type=_natural,
        default=30,
        metavar="S",
        help="seconds that ranks have to save and end after SIGTERM, before they are killed (default: 30)",
    )
    add(
        "timeout",
        type=_seconds,
        metavar="S",
        help="seconds that a collective waits for other ranks before it fails, where the script names none (default: torch's)",
    )
    add(
        "log_dir",
        type=_directory,
        metavar="DIR",
        help="keep each rank's stdout and stderr under DIR, and show them on the console",
    )
    add(
        "tee",
        type=_streams,
        metavar="0-3",
        help="streams shown line by line with the rank in front: 1 stdout, 2 stderr, 3 both, 0 none; or RANK:N,RANK:N",
    )
    add("watch_stdin", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("-m", "--module", action="store_true", help="the script is a module name, as in `python -m`")
    # In one, since argparse takes away a "--" between two.
    parser.add_argument(
        "command", nargs=argparse.REMAINDER, metavar="script", help="the file to run (with -m: the module)"
    )
    return parser


def _whole(text: str, low: int, high: int, what: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = low - 1
    if not low <= value <= high:
        raise argparse.ArgumentTypeError(f"{text!r} is not {what}")
    return value


def _positive(text: str) -> int:
    return _whole(text, 1, 2**31 - 1, "a whole number of at least 1")


def _seconds(text: str) -> int:
    return _whole(text, 1, 10**9, "a whole number of seconds, at least 1")


def _natural(text: str) -> int:
    return _whole(text, 0, 2**31 - 1, "a whole number of at least 0")


def _port(text: str) -> int:
    return _whole(text, 1, 65535, "a port from 1 to 65535")


def _process_number(text: str) -> str:
    if text not in ("gpu", "cpu"):
        _whole(text, 1, 2**31 - 1, "a whole number of at least 1, 'gpu' or 'cpu'")
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
