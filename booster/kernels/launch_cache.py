"""Launches through compiled kernels that are kept: Triton's own way looks at every argument of every launch anew."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch


class CompiledKernels:
    """Compiled kernels, by what of their arguments they were compiled for, which is `key`."""

    def __init__(self) -> None:
        self._compiled: dict[Any, tuple[Any, tuple[Any, ...]]] = {}

    def launch(
        self, kernel: Any, key: Any, programs: int, args: Sequence[Any], constants: Mapping[str, Any], warps: int = 4
    ) -> None:
        """Launch `kernel` on `args`, its first parameters; `constants` are the others, by name. warps: of a program."""
        cached = self._compiled.get((kernel, key))
        if cached is not None:
            # Triton's own launcher takes longer on the host than a small kernel on the device.
            compiled, others = cached
            compiled[(programs, 1, 1)](*args, *others)
            return
        # No fused multiply-adds: they round once where a CPU rounds twice, and results are to be the same.
        compiled = kernel[(programs,)](*args, **constants, enable_fp_fusion=False, num_warps=warps)
        if compiled is not None:  # where it is interpreted there is none
            self._compiled[kernel, key] = compiled, tuple(constants[name] for name in kernel.arg_names[len(args) :])


def current(device: torch.device) -> AbstractContextManager[Any]:
    """Inside, `device` is the one that Triton launches on."""
    return torch.cuda.device(device) if device.type == "cuda" else nullcontext()


def kinds_of(args: Sequence[Any]) -> tuple[Any, ...]:
    """Return what tells which kernel is compiled for `args`, tensors or None."""
    return tuple([None if arg is None else arg.dtype for arg in args])  # a generator is a call for each


def failure(error: Exception, device: torch.device) -> str:
    """Return what a trial of kernels on `device` raised. Raises RuntimeError where the process can use the device no more."""
    said = f"a trial raised {type(error).__name__}: {' '.join(str(error).split())[:200]}"
    try:
        torch.empty(1, dtype=torch.float32, device=device).fill_(0.0).item()
    except Exception as lost:
        raise RuntimeError(
            f"{said}. A Triton kernel left {device} unusable in this process; switch it off in booster/kernels/switches.py, "
            "or step by torch (fused_optimizer=False), and start again"
        ) from lost
    return said
