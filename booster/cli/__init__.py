"""The `booster` command: `booster run` starts a job, the others look at machines, models, runs and checkpoints.

The idea: each command is one function of its arguments that returns an exit status. Its module is imported when the command is
called, so that help and errors of options come without importing torch. An example, `booster run --nproc_per_node 2 train.py`:

    main(["run", ...])                 here: finds `run` in `_COMMANDS`
    run(argv)                          run_command.py: checks options, hosts and the script
    run_attempt(Attempt(...))          agent.py: torchrun's agent starts two processes, and passes signals on to them
    python worker.py train.py          worker.py, twice: runs the script, writes down the exception that ends it
    report_failures(...)               agent.py, where one failed: which was first, and its traceback last

Files in reading order:

    option_values.py       parsers, values of options, lines for the terminal, errors as an exit status
    run_command.py         `booster run`: its options; this machine, or several by ssh
    agent.py               one attempt on this machine, around `torch.distributed.launcher`; in the place of torchrun's
                           rendezvous a store on one interface, which unpickles nothing
    worker.py              what the launcher runs as a file: a rank, or the guard that ends the ranks of a killed launcher
    hosts.py               --host and --hostfile, nodes started by ssh
    machine_commands.py    `check` and `env`
    planning_commands.py   `estimate` and `advise`
    reading_commands.py    `checkpoint`, `report` and `compare`
                           options, and calls of memory/, numerics/ and checkpoint/; no logic of their own

What may be touched: a command is a function and its line in `_COMMANDS`; `tests/support/cli_page.py` writes its page. Options,
exit statuses and variables of the environment are public. No other room imports this one; it and `launch.py` read the
environment, and `mixed_precision/hardware.py` what limits oneDNN.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

__all__ = ["main"]

_COMMANDS = {
    "run": ("run_command", "start a training script on one or several machines"),
    "check": ("machine_commands", "report versions, devices and the speed of each precision on this machine"),
    "env": ("machine_commands", "report versions, devices and settings, for bug reports"),
    "estimate": ("planning_commands", "say what training a model takes of memory, and what fits"),
    "checkpoint": ("reading_commands", "list, verify and convert checkpoints"),
    "report": ("reading_commands", "show what a run did: losses, scales, skips and their culprits"),
    "compare": ("reading_commands", "say where two runs part by more than their formats explain"),
    "advise": ("planning_commands", "train a few steps in every precision, and say which to take"),
}
"""By name, the module of a command, imported when the command is called, and what it does."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line `argv` (None: the process's own) and return its exit status; 2 is a usage error."""
    try:
        status = _status(list(sys.argv[1:] if argv is None else argv))
        sys.stdout.flush()  # here, where a reader that has gone can still be left in peace
        return status
    # Where what it prints is read no more, as after `| head`, it ends without a word, with 141, as other tools do.
    except BrokenPipeError:
        from booster.cli.option_values import leave_unread, reader_has_gone

        if not reader_has_gone():
            raise  # of a pipe of the user's own
        return leave_unread()


def _status(arguments: list[str]) -> int:
    try:
        if arguments and arguments[0] in _COMMANDS:
            name = arguments[0]
            status: int = getattr(import_module(f"booster.cli.{_COMMANDS[name][0]}"), name)(arguments[1:])
            return status
        parser = _parser()
        parser.parse_args(arguments)
        parser.error(f"no command given; choose one of {', '.join(_COMMANDS)}")
    except SystemExit as exit_request:  # argparse exits; main returns a status instead
        return exit_request.code if isinstance(exit_request.code, int) else 0
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    listing = "\n".join(f"  {name:<12}{text}" for name, (_, text) in _COMMANDS.items())
    parser = argparse.ArgumentParser(
        prog="booster",
        usage=f"booster [-h] [--version] {{{','.join(_COMMANDS)}}} ...",
        description="Mixed-precision training for PyTorch.",
        epilog=f"commands:\n{listing}\n\n`booster COMMAND --help` describes one of them.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"booster {_version()}")
    parser.add_argument("command", nargs="?", choices=sorted(_COMMANDS), help=argparse.SUPPRESS)
    return parser


def _version() -> str:
    import booster

    return booster.__version__
