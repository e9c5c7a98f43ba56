"""What the commands share: their parsers, values of options, lines broken for the terminal, and ends with a status."""

from __future__ import annotations

import argparse
import math
import os
import select
import shutil
import signal
import sys
import textwrap
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from booster.common.untrusted_files import printable


def command_parser(name: str, description: str, *, epilog: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of `booster NAME`."""
    return argparse.ArgumentParser(prog=f"booster {name}", description=description, epilog=epilog, allow_abbrev=False)


def spellings(name: str) -> list[str]:
    """Return the two ways in which an option is written, --like_this and --like-this."""
    return list(dict.fromkeys((f"--{name}", f"--{name.replace('_', '-')}")))


def width(otherwise: int) -> int:
    """How many columns the terminal has, or the variable COLUMNS says; `otherwise` where there is neither, as in a pipe."""
    return shutil.get_terminal_size((otherwise, 24)).columns


def wrapped(line: str, indent: int = 4) -> str:
    """`line` broken between words where the terminal is narrower, and continued by `indent` spaces; in a pipe as it is."""
    room = width(len(line))
    if len(line) <= room:
        return line
    return textwrap.fill(
        line, max(room, indent + 20), subsequent_indent=" " * indent, break_long_words=False, break_on_hyphens=False
    )


def say(text: str) -> None:
    """Print a line of `booster run` on stderr, at once."""
    print(f"booster run: {text}", file=sys.stderr, flush=True)


def whole(low: int, high: int | None = None, what: str | None = None) -> Callable[[str], int]:
    """Whole numbers from `low` on, up to `high`. what: what one of them is, for the message, if it is more than that."""
    legal = what or f"a whole number {f'of at least {low}' if high is None else f'between {low} and {high}'}"

    def read(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if value < low or (high is not None and value > high):
            raise argparse.ArgumentTypeError(f"{text!r} is not {legal}")
        return value

    return read


def number(above: float, below: float = math.inf, what: str = "a finite number") -> Callable[[str], float]:
    """Finite numbers above `above` and below `below`. what: what it is, for the message."""

    def read(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not above < value < below:
            raise argparse.ArgumentTypeError(f"{text!r} is not {what} above {above:g}")
        return value

    return read


def file_path(text: str) -> Path:
    """A path, which blanks are not."""
    if not text.strip():
        raise argparse.ArgumentTypeError(f"{text!r} is not a path")
    return Path(text)


def listed(text: str) -> list[str]:
    """Names by commas, at least one."""
    names = [part.strip() for part in text.split(",") if part.strip()]
    if not names:
        raise argparse.ArgumentTypeError(f"{text!r} names nothing")
    return names


def instead_of(text: str, wanted: str = "") -> str:
    """Return what `text` is instead of a value of the argument `wanted` of `Booster`, for a message; "" if unknown."""
    from booster.facade.foreign_names import meant_by

    meant, written = meant_by(text)
    if meant is not None and meant == wanted:
        return f"; write {written[1:-1]}"
    return "" if meant is None else f"; {text} is a {'precision' if meant == 'mixed_precision' else meant}"


def check_precision(name: str, more: str = "") -> None:
    """Refuse what is no name of a precision. more: what else is legal, for the message."""
    from booster.mixed_precision import available

    if name not in available():
        instead = instead_of(name, "mixed_precision")
        raise argparse.ArgumentTypeError(
            f"{name!r} is no precision{instead}; choose from {', '.join(available())}{more}"
        )


def precisions(text: str) -> list[str]:
    """Names of precisions by commas."""
    names = listed(text)
    for name in names:
        check_precision(name)
    return names


def device(text: str) -> str:
    """A device that is there."""
    from booster.common.devices import resolve_device

    try:
        resolve_device(text)
    except ValueError as error:
        raise argparse.ArgumentTypeError(f"{error}{instead_of(text)}") from None
    return text


UNREAD_STATUS = 128 + signal.SIGPIPE  # what a shell reports of a Unix tool that is read no more, as in `| head`


@contextmanager
def exit_on(command: str, *errors: type[Exception], status: int) -> Iterator[None]:
    """Turn any of `errors` into a line on stderr, with the user's own line that raised it, and the exit status `status`."""
    try:
        yield
    except errors as error:
        # Where what is printed is read no more, a BrokenPipeError is none of them, though an OSError: `booster.cli.main` ends
        # then.
        if isinstance(error, BrokenPipeError) and reader_has_gone():
            raise
        from booster.common.misuse import where_raised  # which needs torch, as whatever raised here did

        place = where_raised(error)
        text = f"booster {command}: {error}{f' ({place})' if place else ''}"
        print("\n".join(map(printable, text.split("\n"))), file=sys.stderr)
        raise SystemExit(status) from None


def reader_has_gone() -> bool:
    """Return whether stdout or stderr is read no more."""
    for stream in (sys.stdout, sys.stderr):
        try:
            file = stream.fileno()
        except OSError:  # it was replaced by something that is no file
            continue
        asked = select.poll()
        asked.register(file, 0)
        if any(event & (select.POLLERR | select.POLLHUP) for _, event in asked.poll(0)):
            return True
    return False


def leave_unread() -> int:
    """Drop what is not read of stdout and stderr, so that the interpreter ends without a word of it; return the status."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, stream.fileno())
            os.close(nothing)
    return UNREAD_STATUS
