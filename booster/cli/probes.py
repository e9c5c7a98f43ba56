"""Short timings of each precision: a matrix product, a convolution and an attention, forward and backward."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial

import torch
import torch.nn.functional as F

from booster.torch_internals import scaled_matmul

__all__ = ["Probe", "probe_all"]

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Probe:
    """One timing. gflops: forward and backward together (fp8: forward only); error: why it does not run here."""

    precision: str
    operation: str
    shape: str
    gflops: float | None = None
    milliseconds: float | None = None
    error: str | None = None

    def as_dict(self) -> dict[str, object]:
        return asdict(self)


def probe_all(device: torch.device, seconds: float) -> list[Probe]:
    """Time every precision on `device`, `seconds` for each probe at most by intention (one warm-up run on top)."""
    probes = []
    for name, dtype in _DTYPES.items():
        probes.append(_timed(name, "matmul", partial(_matmul, device, dtype), device, seconds))
        probes.append(_timed(name, "convolution", partial(_convolution, device, dtype), device, seconds))
        probes.append(_timed(name, "attention", partial(_attention, device, dtype), device, seconds))
    probes.append(_timed("fp8", "matmul", partial(_fp8_matmul, device), device, seconds))
    return probes


_Built = tuple[str, float, Callable[[], object]]


def _timed(precision: str, operation: str, build: Callable[[], _Built], device: torch.device, seconds: float) -> Probe:
    shape = "-"
    try:
        shape, operations, once = build()
        once()  # the first call compiles, allocates and picks kernels
        _wait(device)
        times: list[float] = []
        start = time.perf_counter()
        while len(times) < 3 or (time.perf_counter() - start < seconds and len(times) < 50):
            before = time.perf_counter()
            once()
            _wait(device)
            times.append(time.perf_counter() - before)
            if time.perf_counter() - start > 3 * seconds:
                break  # a very slow kernel: what there is must do
    except (RuntimeError, NotImplementedError, TypeError, AttributeError) as error:
        return Probe(precision, operation, shape, error=str(error).strip().splitlines()[0][:120])
    best = min(times)  # the least disturbed run
    return Probe(precision, operation, shape, gflops=operations / best / 1e9, milliseconds=best * 1e3)


def _matmul(device: torch.device, dtype: torch.dtype) -> _Built:
    size = 512 if device.type == "cpu" else 4096
    left, right = (torch.randn(size, size, device=device, dtype=dtype, requires_grad=True) for _ in range(2))
    gradient = torch.ones(size, size, device=device, dtype=dtype)

    def once() -> None:
        torch.autograd.grad(left @ right, (left, right), gradient)

    return f"{size}x{size}x{size}", 3 * 2.0 * size**3, once


def _convolution(device: torch.device, dtype: torch.dtype) -> _Built:
    batch, channels, side = (4, 32, 16) if device.type == "cpu" else (32, 256, 56)
    image = torch.randn(batch, channels, side, side, device=device, dtype=dtype, requires_grad=True)
    kernel = torch.randn(channels, channels, 3, 3, device=device, dtype=dtype, requires_grad=True)
    gradient = torch.ones(batch, channels, side, side, device=device, dtype=dtype)

    def once() -> None:
        torch.autograd.grad(F.conv2d(image, kernel, padding=1), (image, kernel), gradient)

    shape = f"{batch}x{channels}x{side}x{side}, 3x3"
    return shape, 3 * 2.0 * batch * side**2 * channels**2 * 9, once


def _attention(device: torch.device, dtype: torch.dtype) -> _Built:
    batch, heads, length, width = (4, 3, 128, 64) if device.type == "cpu" else (16, 16, 1024, 64)
    shape = (batch, heads, length, width)
    query, key, value = (torch.randn(shape, device=device, dtype=dtype, requires_grad=True) for _ in range(3))
    gradient = torch.ones(shape, device=device, dtype=dtype)

    def once() -> None:
        torch.autograd.grad(F.scaled_dot_product_attention(query, key, value), (query, key, value), gradient)

    # two products forward, four backward; recomputation is not counted
    return "x".join(map(str, shape)), 6 * 2.0 * batch * heads * length**2 * width, once


def _fp8_matmul(device: torch.device) -> _Built:
    # On CPU this kernel is a reference loop: at 128 it takes milliseconds, at 1024 seconds.
    size = 128 if device.type == "cpu" else 4096
    left = torch.randn(size, size, dtype=torch.float32, device=device).to(torch.float8_e4m3fn)
    right = torch.randn(size, size, dtype=torch.float32, device=device).to(torch.float8_e4m3fn).t()
    one = torch.ones((), dtype=torch.float32, device=device)

    def once() -> torch.Tensor:
        return scaled_matmul(left, right, one, one, torch.bfloat16)

    return f"{size}x{size}x{size}", 2.0 * size**3, once


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
