"""Memory that holds a pattern before it is written to: what is read of it by mistake differs from pattern to pattern."""

import ctypes
from contextlib import contextmanager

import torch

_PERTURB, _MMAP_THRESHOLD = -6, -3  # of glibc's mallopt


@contextmanager
def memory_that_holds(byte):
    """Have what the allocator gives, below 32 MiB, hold `byte` everywhere; raises where this process has another allocator.

    Up to 1 KiB memory may come from a cache of the thread, as it was left.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    assert mallopt is not None, "there is no mallopt"
    mallopt(_MMAP_THRESHOLD, 2**25)  # what is mapped anew is zero
    mallopt(_PERTURB, byte ^ 0xFF)
    try:
        assert all((torch.empty(size, dtype=torch.uint8) == byte).all() for size in (4_000, 10_000, 2**20))
        yield
    finally:
        mallopt(_PERTURB, 0)
