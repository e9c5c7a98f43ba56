"""Ranks started from a notebook, where there is no script that a launcher could start."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from booster import arguments
from booster.launch import DEFAULT_SEED, close_group, start

__all__ = ["launch_notebook"]


def launch_notebook(
    function: Callable[..., Any],
    num_processes: int,
    *args: Any,
    backend: str | None = None,
    seed: int = DEFAULT_SEED,
    timeout: float | None = None,
) -> None:
    """Call `function(*args)` on `num_processes` ranks of this machine, and return when all of them have.

    Each rank is a process forked from this one by torch.multiprocessing, so that `function` may be defined in a cell and
    finds what the cells before it made. It is launched when `function` begins: process group, device and seeds, as by
    `launch_from_torch`, which it does not call. What it changes is gone with its process: save what you want to keep.
    A rank computes with one thread on CPU, since the threads of this process do not live on in it.

    backend, seed, timeout: those of `launch_from_torch`. Raises RuntimeError where this process has used CUDA, which no fork
    can use again, or has a process group; torch's ProcessRaisedException, with the traceback of the first rank that failed,
    after the others were ended; RuntimeError on Windows.
    """
    arguments.function("function", function)
    arguments.count("num_processes", num_processes, what="the number of ranks")
    if sys.platform == "win32":
        raise RuntimeError("Windows is not supported; run under WSL2 (Windows Subsystem for Linux) instead")
    if torch.cuda.is_initialized():
        raise RuntimeError(
            "launch_notebook: this process has used CUDA, and processes forked from it cannot; restart the kernel, and put "
            "nothing on a GPU before launch_notebook"
        )
    if dist.is_available() and dist.is_initialized():
        raise RuntimeError(
            "launch_notebook: this process has a process group already; destroy_process_group() first, or restart the kernel"
        )
    # Imported here: no script that is launched otherwise needs it.
    from torch import multiprocessing

    sys.stdout.flush()  # or every rank would print again what waits here
    sys.stderr.flush()
    with tempfile.TemporaryDirectory(prefix="booster-notebook-") as folder:
        meeting = f"file://{Path(folder) / 'meeting'}"
        given = (function, args, num_processes, backend, seed, timeout, meeting)
        multiprocessing.start_processes(_rank, given, nprocs=num_processes, start_method="fork")


def _rank(
    rank: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    world_size: int,
    backend: str | None,
    seed: int,
    timeout: float | None,
    meeting: str,
) -> None:
    torch.set_num_threads(1)
    start(rank, world_size, backend, rank, seed, init_method=meeting, timeout=timeout)
    function(*args)
    close_group()
