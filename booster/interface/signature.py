"""What a function of the user's accepts."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any


def takes(function: Callable[..., Any], name: str) -> bool:
    """Whether `function` may be called with the keyword `name`; True where its signature cannot be read."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return True
    return name in parameters or any(p.kind is inspect.Parameter.VAR_KEYWORD for p in parameters.values())
