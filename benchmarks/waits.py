"""Counting what would wait for a GPU, on CPU tensors that take the path of one."""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from booster.update import choice

_READS = {"item", "tolist", "__bool__", "__float__", "__int__", "__index__", "numpy", "cpu", "nonzero", "equal"}
_COPIES = {"tensor", "as_tensor"}  # of numbers, from the host to a device that is named, each of which waits


class HostReads(TorchFunctionMode):
    """While entered, counts by name in `found` what reads a tensor on the host, or copies a number from there."""

    def __init__(self) -> None:
        super().__init__()
        self.found: Counter[str] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        there = (kwargs or {}).get("device") is not None
        copies = name in _COPIES and there and not isinstance(args[0], torch.Tensor)
        if name in _READS or copies:
            self.found[name] += 1
        return func(*args, **(kwargs or {}))


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Inside, steps of optimizers that are boosted there are decided on the device, which is the CPU, and tensors say that they
    do not lie on the CPU: code that may read numbers where that costs nothing then does not."""
    before = choice.DECIDING
    choice.DECIDING = ("cpu",)
    torch.Tensor.is_cpu = property(lambda tensor: False)  # type: ignore[assignment,method-assign]
    try:
        yield
    finally:
        choice.DECIDING = before
        del torch.Tensor.is_cpu
