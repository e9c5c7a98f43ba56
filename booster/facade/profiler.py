"""Steps under torch's profiler, one trace for each rank."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist

from booster.common import arguments
from booster.facade.booster_state import BoosterState

_logger = logging.getLogger(__name__)


@contextmanager
def profile(
    self: BoosterState,
    folder: str | os.PathLike[str],
    *,
    skip: int = 2,
    steps: int = 3,
    shapes: bool = False,
    memory: bool = False,
    stacks: bool = False,
) -> Iterator[torch.profiler.profile]:
    """Context in which torch's profiler records `steps` steps after the first `skip`, on every rank.

        with b.profile("trace") as profile:
            for x, y in loader:
                ...
                profile.step()

    folder: each rank writes `folder/rank_N.json`; drop it on https://ui.perfetto.dev.
    skip: steps before it begins, at least 1.
    steps: that are recorded.
    shapes: also note shapes of inputs, which slows the steps, as do the next two.
    memory: also note memory.
    stacks: also note lines of Python.

    It yields a `torch.profiler.profile`, with tables too. No collective. Raises RuntimeError at the end where `.step()` was
    not called often enough to record a step.
    """
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
    if self.device.type == "cuda":
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
