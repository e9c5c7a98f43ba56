"""torch's switches for what products of float32 numbers read, turned on for a while; they are one for the process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from booster.cast_regions import surrounding


def CUDA() -> tuple[Any, ...]:
    """Products, convolutions and recurrent layers on NVIDIA GPUs."""
    cudnn: Any = torch.backends.cudnn
    return torch.backends.cuda.matmul, cudnn.conv, cudnn.rnn


def ONEDNN() -> tuple[Any, ...]:
    """The same on CPUs."""
    onednn: Any = torch.backends.mkldnn
    return onednn.matmul, onednn.conv, onednn.rnn


@contextmanager
def switched(switches: Callable[[], tuple[Any, ...]], precision: str) -> Iterator[None]:
    """Inside, `fp32_precision` of `switches` is `precision`, but in regions of other precisions; afterwards it is what it was,
    also after an error."""
    found = switches()
    before = [switch.fp32_precision for switch in found]
    with _turned(found, [precision] * len(found)), surrounding(lambda: _turned(found, before)):
        yield


@contextmanager
def _turned(found: tuple[Any, ...], precisions: list[str]) -> Iterator[None]:
    before = [switch.fp32_precision for switch in found]
    try:
        for switch, precision in zip(found, precisions, strict=True):
            switch.fp32_precision = precision
        yield
    finally:
        for switch, was in zip(found, before, strict=True):
            switch.fp32_precision = was
