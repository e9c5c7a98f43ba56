"""Whose code runs: who called a function, and which line of the user's code an error comes from.

Frames are compared by the names of their modules and functions, so nothing has to be imported to be recognised.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Container
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch

_STANDARD = os.path.dirname(os.__file__) + os.sep
_LIBRARIES = tuple(os.path.dirname(file) + os.sep for file in (str(torch.__file__), os.path.dirname(__file__)))


@functools.lru_cache(maxsize=4096)
def is_users(code: CodeType) -> bool:
    """Return whether `code` is neither torch's nor booster's nor of the standard library."""
    file = code.co_filename
    # site-packages is a folder of the standard library.
    return not file.startswith(("<", *_LIBRARIES)) and (not file.startswith(_STANDARD) or "site-packages" in file)


def first_user_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of the user's code among `frame` and its callers."""
    while frame is not None and not is_users(frame.f_code):
        frame = frame.f_back
    return frame


def called_by(functions: Container[tuple[Any, str]], *, through: tuple[str, ...] = ("",)) -> bool:
    """Return whether one of `functions` is among the callers of the function that asks.

    functions: pairs of the name of a module and of a function in it.
    through: how the names of modules begin that may be between; the search ends at the first caller of another module.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(through):
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) in functions:
            return True
        frame = frame.f_back
    return False


def called_from(modules: tuple[str, ...], *, through: tuple[str, ...]) -> bool:
    """Return whether the innermost caller of the function that asks, modules `through` left out, is of one of `modules`."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(through):
        frame = frame.f_back
    # Both are beginnings of names.
    return frame is not None and str(frame.f_globals.get("__name__")).startswith(modules)


def raised_in(error: BaseException) -> TracebackType | None:
    """Return the innermost line of the user's code below which `error` was raised; None without one."""
    found: TracebackType | None = None
    trace: TracebackType | None = error.__traceback__
    # Only what ran below the frame that caught it counts.
    while trace is not None:
        if is_users(trace.tb_frame.f_code):
            found = trace
        trace = trace.tb_next
    return found


def where_raised(error: BaseException) -> str:
    """Return "file:line in function" of that line, "" without one."""
    trace = raised_in(error)
    return "" if trace is None else line_of(trace.tb_frame.f_code, trace.tb_lineno)


def line_of(code: CodeType, number: int) -> str:
    """Return "file:line in function", as messages name a line."""
    return f"{code.co_filename}:{number} in {code.co_name}"
