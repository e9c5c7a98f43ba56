"""Whether a device multiplies in a format."""

from __future__ import annotations

import functools
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from booster.mixed_precision.switches import ONEDNN, switched
from booster.torch_internals import int_mm


def missing(name: str, device: torch.device, *, capability: tuple[int, int], generations: str) -> str:
    """What `device` lacks to multiply in `name`, as a sentence; empty where it lacks nothing.

    capability: the least compute capability of a CUDA device that does. generations: of which that is the first.
    """
    if device.type == "cpu":
        found = "this is a CPU"
    elif torch.version.hip:
        found = f"{torch.cuda.get_device_name(device)} is AMD's, on which this library has not been tried"
    else:
        has = torch.cuda.get_device_capability(device)
        if has >= capability:
            return ""
        found = f"{torch.cuda.get_device_name(device)} has {has[0]}.{has[1]}"
    return (
        f"{name} needs an NVIDIA GPU of compute capability {capability[0]}.{capability[1]} ({generations}), and {found}"
    )


def missing_on_cpu(name: str, device: torch.device) -> str:
    """What `device` lacks to round what float32 products read to bfloat16, as a sentence; empty where it lacks nothing."""
    if device.type != "cpu":
        found = f"the device is {device}"
    elif not torch.backends.mkldnn.is_available():
        found = "this torch is built without oneDNN"
    elif rounds_to_bfloat16():
        return ""
    else:
        has = torch.cpu.get_capabilities()
        found = f"on this one, {has.get('cpu_name') or has.get('architecture', 'another')}, it computes them in float32"
    return f"{name} need a CPU on which oneDNN rounds to bfloat16, of x86 one with AMX, and {found}"


@functools.cache
def rounds_to_bfloat16() -> bool:
    """Whether oneDNN makes use of the permission to read float32 in bfloat16: looked at once, on a product of 256 x 256.

    What a CPU says of itself does not tell: with AVX512-BF16 alone oneDNN computes in float32, and it may have been told to
    leave instructions unused.
    """

    def rounds() -> bool:
        x = torch.full((256, 256), 1 + 2.0**-10, dtype=torch.float32, device="cpu")  # in bfloat16 it is 1
        with switched(ONEDNN, "bf16"):
            return bool((x @ x)[0, 0] == 256)

    return _alone(rounds)


@functools.cache
def sums_int8_exactly() -> bool:
    """Whether this CPU's product of int8 matrices is exact: looked at once.

    Without VNNI instructions oneDNN adds two products of int8 in 16 bits, where they saturate.
    """

    def sums() -> bool:
        left = torch.full((32, 256), 127, dtype=torch.int8, device="cpu")
        right = left.clone()
        right[::2] = -127
        wide = left.to(torch.int32) @ right.to(torch.int32).t()
        return torch.equal(int_mm(left, right.t()), wide)

    return _alone(sums)


def _alone(look: Callable[[], bool]) -> bool:
    """The answer of `look` in a thread of its own, where no mode of the caller's, such as one of fake tensors, is in force."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(look).result()
