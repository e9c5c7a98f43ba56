"""Counting calls, for what is to grow as the number of tensors."""

import sys

from booster.torch_internals import TorchDispatchMode

FEW, MANY = 40, 160
MOST = 1.15 * MANY / FEW  # times as many calls


def count(function, inside=""):
    """Calls of Python and C functions while `function` runs; a generator counts as often as it goes on.

    inside: the folder or file whose functions count, and what of C they call.
    """
    calls = 0

    def look(frame, event, arg):
        nonlocal calls
        calls += event in ("call", "c_call") and frame.f_code.co_filename.startswith(inside)

    before = sys.getprofile()
    sys.setprofile(look)
    try:
        function()
    finally:
        sys.setprofile(before)
    return calls


class Messages(TorchDispatchMode):
    """Counts what is handed to process groups while it is active."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.namespace in ("c10d", "_c10d_functional") and "wait" not in func.overloadpacket.__name__
        return func(*args, **(kwargs or {}))
