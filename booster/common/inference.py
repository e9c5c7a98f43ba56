"""Leaving `torch.inference_mode`, whose tensors no later training can use."""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from collections.abc import Iterator


def outside_inference() -> AbstractContextManager[None]:
    """A context in which tensors are ordinary ones, but have no gradients, inside `torch.inference_mode`; else of nothing."""
    return _outside() if torch.is_inference_mode_enabled() else nullcontext()


@contextmanager
def _outside() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():  # leaving one turns gradients on
        yield
