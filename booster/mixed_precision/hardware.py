"""Whether a device multiplies in a format.

torch's switches for what products of float32 numbers read, turned on for a while; they are one for the process.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Literal, TypeVar

import torch

from booster.common.torch_internals.tensor_internals import int_mm
from booster.tensors.cast_regions import surrounding

Answer = TypeVar("Answer")


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
    # Regions of another precision inside turn the switches back for their length.
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


def missing(name: str, device: torch.device, *, capability: tuple[int, int], generations: str) -> str:
    """What `device` lacks to multiply in `name`, as a sentence; empty where it lacks nothing. capability: the least on CUDA."""
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
    """Whether oneDNN makes use of the permission to read float32 in bfloat16: looked at once, on a product of 256 x 256."""

    # The flags of a CPU do not decide it: with AVX512-BF16 alone oneDNN computes in float32, and a variable may have it leave
    # instructions unused.
    def rounds() -> bool:
        x = torch.full((256, 256), 1 + 2.0**-10, dtype=torch.float32, device="cpu")  # in bfloat16 it is 1
        with switched(ONEDNN, "bf16"):
            return bool((x @ x)[0, 0] == 256)

    return alone(rounds)


@functools.cache
def sums_int8_exactly() -> bool:
    """Whether this CPU's product of int8 matrices is exact: looked at once."""

    # Without VNNI instructions oneDNN adds two products of int8 in 16 bits, where they saturate.
    def sums() -> bool:
        left = torch.full((32, 256), 127, dtype=torch.int8, device="cpu")
        right = left.clone()
        right[::2] = -127
        wide = left.to(torch.int32) @ right.to(torch.int32).t()
        return torch.equal(int_mm(left, right.t()), wide)

    return alone(sums)


@functools.cache
def gives_float32_sums(device: torch.device) -> bool:
    """Whether `device` multiplies matrices of bfloat16 fast and gives their sums as float32: looked at once, on a GPU."""
    # Not on a CPU: torch has no such product there, see `multiplies_into_sums`.
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    return alone(lambda: bool((torch.mm(*_with_long_sums(device), out_dtype=torch.float32) == 257).all()))


@functools.cache
def multiplies_into_sums() -> bool:
    """Whether this CPU multiplies matrices of bfloat16 fast and a factor into their sums before they are rounded: looked at
    once."""
    if "matrix product" in slow_products(torch.bfloat16):
        return False

    def multiplies() -> bool:
        left, right = _with_long_sums(torch.device("cpu"))
        return bool((torch.addmm(left.new_zeros(()), left, right, beta=0, alpha=3) == 772).all())  # 768 of rounded sums

    return alone(multiplies)


def _with_long_sums(device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Two matrices with a product of 257 everywhere, which is no number of bfloat16."""
    ones = torch.ones(16, 264, dtype=torch.bfloat16, device=device)
    some = ones.clone()
    some[:, 257:] = 0
    return ones, some.t()


def alone(look: Callable[[], Answer]) -> Answer:
    """The answer of `look` in another thread, where no mode of the caller, such as one of fake tensors, is in force."""
    with ThreadPoolExecutor(max_workers=1) as thread:
        return thread.submit(look).result()


ProductKind = Literal["matrix product", "convolution", "recurrent layer", "attention"]
KINDS: frozenset[ProductKind] = frozenset(("matrix product", "convolution", "recurrent layer", "attention"))

# What torch computes several times slower than in float32 in the backward pass, in either half dtype and whatever the units.
SLOW_BACKWARD: frozenset[ProductKind] = frozenset(("attention",))

# The least level at which oneDNN reckons with units, by the names that its variable takes; it ignores others.
_LEVELS = {
    **dict.fromkeys(("SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2"), 0),
    **dict.fromkeys(("AVX512_CORE", "AVX512_CORE_VNNI"), 1),
    "AVX512_CORE_BF16": 2,
    **dict.fromkeys(("AVX512_CORE_FP16", "AVX10_1_512"), 3),
    **dict.fromkeys(("AVX512_CORE_AMX", "AVX10_1_512_AMX"), 4),
    **dict.fromkeys(("AVX512_CORE_AMX_FP16", "AVX10_1_512_AMX_FP16"), 5),
}


def slow_products(dtype: torch.dtype) -> frozenset[ProductKind]:
    """The kinds of operation that this CPU computes faster in float32 than in `dtype`; in training `SLOW_BACKWARD` besides."""
    # By the units that the CPU has, as far as ONEDNN_MAX_CPU_ISA (or DNNL_MAX_CPU_ISA) lets oneDNN use them.
    units = half_units()
    if dtype == torch.bfloat16:
        # CPUs that have AVX512-FP16 multiply vectors of bfloat16 at half the speed of float32, those without at twice.
        fast = "AMX-BF16" in units or ("AVX512-BF16" in units and "AVX512-FP16" not in all_half_units())
        # Nothing is timed here, so that a run repeats to the bit.
        return frozenset() if fast else KINDS
    # torch hands float16 to oneDNN for matrix products alone.
    return KINDS - {"matrix product"} if "AVX512-FP16" in units or "AMX-FP16" in units else KINDS


# Of the best kind first: what they are called, torch's flag, and the least level at which oneDNN uses them.
_UNITS = (
    ("AMX-FP16", "amx_fp16", 5),
    ("AMX-BF16", "amx_bf16", 4),
    ("AVX512-FP16", "avx512_fp16", 3),
    ("AVX512-BF16", "avx512_bf16", 2),
)


def half_units() -> tuple[str, ...]:
    """The units of this CPU for half precision that oneDNN uses: of "AMX-FP16", "AMX-BF16", "AVX512-FP16", "AVX512-BF16"."""
    # oneDNN reads the variables once, when it first multiplies; torch's flags do not show them.
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA") or os.environ.get("DNNL_MAX_CPU_ISA") or ""
    level = _LEVELS.get(limit.upper(), 9)
    least = {name: level for name, _, level in _UNITS}
    return tuple(name for name in all_half_units() if level >= least[name])


def all_half_units() -> tuple[str, ...]:
    """The units of this CPU for half precision, whether oneDNN may use them or not; none where torch has no oneDNN."""
    has = torch.cpu.get_capabilities() if torch.backends.mkldnn.is_available() else {}
    return tuple(name for name, flag, _ in _UNITS if has.get(flag))


def cpu_name() -> str:
    """What this CPU calls itself."""
    has = torch.cpu.get_capabilities()
    return str(has.get("cpu_name") or has.get("architecture", "unknown"))
