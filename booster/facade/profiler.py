"""Steps under torch's profiler, one trace for each rank."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from booster.common import arguments

if TYPE_CHECKING:
    from torch.profiler import profile

_logger = logging.getLogger(__name__)


@contextmanager
def profiled(
    folder: str | os.PathLike[str],
    device: torch.device,
    *,
    skip: int,
    steps: int,
    shapes: bool,
    memory: bool,
    stacks: bool,
) -> Iterator[profile]:
    """`Booster.profile`, which says what this does."""
    target = arguments.path("folder", folder)
    arguments.count("skip", skip, least=1)
    arguments.count("steps", steps)
    for name, value in (("shapes", shapes), ("memory", memory), ("stacks", stacks)):
        arguments.flag(name, value)
    from torch import profiler

    rank = dist.get_rank() if dist.is_available() and dist.is_initialized() else 0
    target.mkdir(parents=True, exist_ok=True)
    path = target / f"rank_{rank}.json"
    written = False

    def write(finished: Any) -> None:
        nonlocal written
        finished.export_chrome_trace(str(path))
        written = True
        _logger.info("wrote %s; drop it on https://ui.perfetto.dev, or open it in chrome://tracing", path)

    activities = [profiler.ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(profiler.ProfilerActivity.CUDA)
    with profiler.profile(
        activities=activities,
        # The last step that is skipped warms the profiler up.
        schedule=profiler.schedule(wait=skip - 1, warmup=1, active=steps, repeat=1),
        on_trace_ready=write,
        record_shapes=shapes,
        profile_memory=memory,
        with_stack=stacks,
        # There is one cycle; torch 2.12 warns, whatever their number, that all but the last would be lost.
        acc_events=True,
    ) as running:
        yield running
    if not written:
        raise RuntimeError(
            f"profile: no step was recorded; call .step() of what `with` gave after each of the {skip + steps} steps that "
            f"skip={skip} and steps={steps} need"
        )
