"""Whose code a line is: the user's, or that of torch, of booster, or of Python itself."""

from __future__ import annotations

import functools
import os
from types import CodeType, TracebackType

import torch

__all__ = ["is_users", "where_raised"]

_STANDARD = os.path.dirname(os.__file__) + os.sep
_LIBRARIES = tuple(os.path.dirname(file or "") + os.sep for file in (torch.__file__, __file__))


@functools.lru_cache(maxsize=4096)
def is_users(code: CodeType) -> bool:
    """Return whether `code` is neither torch's nor booster's nor of the standard library."""
    file = code.co_filename
    return not file.startswith(("<", *_LIBRARIES)) and (not file.startswith(_STANDARD) or "site-packages" in file)


def where_raised(error: BaseException) -> str:
    """Return "file:line in function" of the innermost line of the user's below which `error` was raised, "" without one.

    Only what ran below the frame that caught it counts.
    """
    found = ""
    trace: TracebackType | None = error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if is_users(code):
            found = f"{code.co_filename}:{trace.tb_lineno} in {code.co_name}"
        trace = trace.tb_next
    return found
