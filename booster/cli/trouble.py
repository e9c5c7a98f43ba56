"""How a command ends that cannot go on: one line on stderr and a status, or quietly, where nobody reads on."""

from __future__ import annotations

import os
import select
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from booster.names import printable

__all__ = ["UNREAD_STATUS", "leave_unread", "reader_has_gone", "told"]

UNREAD_STATUS = 128 + signal.SIGPIPE  # what a shell reports of a Unix tool whose reader has gone, as in `| head`


@contextmanager
def told(command: str, *errors: type[Exception], status: int) -> Iterator[None]:
    """Turn any of `errors` into a line on stderr, with the user's own line that raised it, and the exit status `status`.

    Where nobody reads what is printed any more, a BrokenPipeError is none of them, though an OSError: `booster.cli.main`
    ends then.
    """
    try:
        yield
    except errors as error:
        if isinstance(error, BrokenPipeError) and reader_has_gone():
            raise
        from booster.user_code import where_raised  # which needs torch, as whatever raised here did

        place = where_raised(error)
        text = f"booster {command}: {error}{f' ({place})' if place else ''}"
        print("\n".join(map(printable, text.split("\n"))), file=sys.stderr)
        raise SystemExit(status) from None


def reader_has_gone() -> bool:
    """Return whether nobody reads stdout or stderr any more."""
    for stream in (sys.stdout, sys.stderr):
        try:
            file = stream.fileno()
        except OSError:  # what stands for it is no file
            continue
        asked = select.poll()
        asked.register(file, 0)
        if any(event & (select.POLLERR | select.POLLHUP) for _, event in asked.poll(0)):
            return True
    return False


def leave_unread() -> int:
    """Drop what nobody reads of stdout and stderr, so that the interpreter ends without a word of it; return the status."""
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            nothing = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nothing, stream.fileno())
            os.close(nothing)
    return UNREAD_STATUS
