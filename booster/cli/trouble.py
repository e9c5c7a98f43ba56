"""How a command ends that cannot go on: one line on stderr and a status, or quietly, where nobody reads on."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["UNREAD_STATUS", "leave_unread", "told"]

UNREAD_STATUS = 128 + signal.SIGPIPE  # what a shell reports of a Unix tool whose reader has gone, as in `| head`


@contextmanager
def told(command: str, *errors: type[Exception], status: int) -> Iterator[None]:
    """Turn any of `errors` into a line on stderr, with the user's own line that raised it, and the exit status `status`.

    A reader that has gone is none of them, though its BrokenPipeError is an OSError: `booster.cli.main` ends then.
    """
    try:
        yield
    except BrokenPipeError:
        raise
    except errors as error:
        from booster.user_code import where_raised  # which needs torch, as whatever raised here did

        place = where_raised(error)
        print(f"booster {command}: {error}{f' ({place})' if place else ''}", file=sys.stderr)
        raise SystemExit(status) from None


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
