"""Waits of the host for a CUDA device, made errors."""

import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import torch


@contextmanager
def syncs_forbidden() -> Iterator[None]:
    """Inside, what makes the host wait for the device raises RuntimeError; afterwards torch's mode is what it was.

    torch warns once of the mode as a prototype, while it turns it on, and warnings are errors in tests.
    """
    torch.cuda.synchronize()
    before = torch.cuda.get_sync_debug_mode()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
