"""The methods of `Booster` that look at a run: its record, a bad step, its memory, a trace of torch's profiler, a progress bar.

What they need is imported when they are called: most scripts never do.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Iterable, Iterator, Sequence, Sized
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import Optimizer

from booster.common import arguments
from booster.data.epoch_iterator import EpochIterator
from booster.facade import refusals
from booster.facade.booster_state import BoosterState, DisplayedLoss, Optimizers
from booster.interface.optimizer import OptimizerWrapper
from booster.ranks.agreement import is_main

if TYPE_CHECKING:
    from booster.memory import Estimate, Measured
    from booster.numerics import Diagnosis, Record


def record(
    self: BoosterState,
    folder: str | os.PathLike[str],
    *,
    every: int | None = 100,
    activations: str | Sequence[str] = (),
    tracker: Callable[[dict[str, float], int], Any] | None = None,
) -> Record:
    """Write down every optimizer step from now on, in `folder`: losses, scales, norms, clips, and skips with culprits.

    folder: is made; each rank appends to its own file there, so ranks exchange nothing, and a kill loses no line that
        was written.
    every: in the first step and in every so many, gradients and weights are looked at too, parameter by parameter: how
        their magnitudes are spread, what underflows, which weights stand still; None never looks.
    activations: names of modules of which outputs, and their gradients, are looked at in these steps too, by forward
        hooks; `*` matches anything within one part of a name, `**` across parts. Written names of a second model begin
        with its class.
    tracker: also called with the numbers of each step by name, and the number of the step; a tracker's own
        `log(values, step)` will do. What it raises is warned of once, and training goes on. None calls nothing.

    A disk that is full ends the record with a warning, and not the training. Nothing in a step waits for a device: there,
    lines follow some steps later. `booster report FOLDER` shows it. Returns the record; `close()` ends it, and the end of
    the process does too.

    Raises ValueError for a folder that this Booster writes to already, and unless every=None under release_gradients, where
    no gradients are left to look at; OSError where it cannot write.
    """
    # Imported here, as for `diagnose`: most scripts never need it.
    from booster.numerics.record.record import Records

    refusals.check_recorded(every, activations, self._options)

    if self._records is None:
        self._records = Records(self.precision, self.plugin, self.device)
    return self._records.open(
        folder,
        self._boosted.wrappers(),
        self._boosted.optimizers.values(),
        every=every,
        activations=activations,
        tracker=tracker,
    )


def diagnose(self: BoosterState, forward: Callable[[], Any], optimizer: Optimizers) -> Diagnosis:
    """Replay a step that went bad, and say which operation made the first inf or NaN, why, and what helps.

    forward: computes the loss and returns it, `lambda: criterion(model(x), y)`; or runs a whole step but for
        `optimizer.step()`, by `backward` or `execute_pipeline`, and returns the loss. It is called several times, with
        the random states of now.
    optimizer: as for `backward`. The loss scale is that of its last step where that was skipped, else the present one.

    Nothing changes: weights, buffers, gradients, loss scale and random states are as before, and nothing is hooked.
    What `forward` does besides, such as reading the next batch or printing, is done each time. A collective: all ranks
    call it alike. Cost: about three steps for a replay; one to some ten of them, and a copy of what they write to.
    Raises what `forward` raises, and TypeError for a `forward` that returns no loss.
    """
    from booster.numerics.diagnosis.replay import replayed_scale
    from booster.numerics.diagnosis.trials import diagnose

    arguments.function("forward", forward, "a function that computes and returns the loss")
    optimizers = refusals.check_boosted_optimizers(optimizer, "diagnose")
    with nullcontext() if self._watcher is None else self._watcher.log.paused():
        replay = self._replay(forward, optimizers, replayed_scale(optimizers))
        return diagnose(replay, group=self.plugin.group, device=self.device)


def estimate_memory(
    self: BoosterState, model: nn.Module, optimizer: Optimizer, batch: Any, criterion: Callable[..., Any]
) -> Estimate:
    """Estimate what a training step takes of memory on this rank, before `boost`; nothing is allocated, nothing changes.

    model, optimizer: not boosted yet; the model may be on the meta device.
    batch: of this rank, (inputs..., target), or a mapping that the model takes by keyword and the criterion whole; tensors
        may be on the meta device.
    criterion: a function of output and target.

    The precision is this Booster's, of a schedule the phase that takes most; so are plugin, number of ranks and device.
    No collective. Raises ValueError for what is not known, as pipelines and tensor parallelism, and as `memory.estimate`.
    """
    from booster.memory import estimate_placed

    refusals.check_model(model, self._boosted.models, self.plugin)
    arguments.function("criterion", criterion, "a function of output and target")
    arguments.instance("optimizer", optimizer, Optimizer, "a torch.optim.Optimizer")
    placed: Any = {"plugin": self.plugin, "device": self.device, "options": self._options}
    each = (
        estimate_placed(model, optimizer, batch, criterion, precision=phase, **placed) for phase in self._run.precisions
    )
    return max(each, key=lambda estimate: estimate.peak)


def memory(self: BoosterState, model: nn.Module, optimizer: OptimizerWrapper) -> Measured:
    """Count what the boosted `model` and its `optimizer` hold on this rank now; no collective, no copy.

    After a step, with gradients there, it compares with what `estimate_memory` said.
    """
    from booster.memory import measure

    wrappers = refusals.check_boosted_optimizers(optimizer, "memory")
    if len(wrappers) > 1:
        raise ValueError(f"memory needs one optimizer, got {len(wrappers)}; count each by itself")
    return measure(self._boosted.own(model, "memory"), wrappers[0])


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


def progress(
    self: BoosterState, items: Iterable[Any], description: str = "", total: int | None = None
) -> Iterator[Any]:
    """`items` as they are, with a bar on rank 0: how many, how fast, the loss of the last `backward`, and how long yet.

    The other ranks draw nothing. No collective. The loss, which is this rank's, is read once a second; a GPU is then waited
    for.

    description: the text before the bar.
    total: how many there are; None asks `len(items)`, and a boosted loader, which a resumed epoch lets begin where it was
        left, for those before too. The bar is rich's; raises ImportError without it.
    """
    loss = self._shown_loss = DisplayedLoss()
    arguments.instance("items", items, Iterable, "a loader, or anything that a `for` goes through")
    arguments.instance("description", description, str, "a string")
    if total is not None:
        arguments.count("total", total, least=0, also="None")
    if not is_main():
        return iter(items)
    try:
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
    except ImportError as error:
        raise ImportError("the bar is drawn by rich: pip install rich") from error

    words = TextColumn("{task.description}"), BarColumn(None), MofNCompleteColumn(), TextColumn("{task.fields[rate]}")
    bar = Progress(*words, TextColumn("{task.fields[loss]}"), TimeRemainingColumn(), expand=True)

    def drawn() -> Iterator[Any]:
        began, each, completed = time.monotonic(), iter(items), 0
        length = _known_length(items) if total is None else total
        if isinstance(each, EpochIterator) and total is None:  # of an epoch that may go on where it was left
            length, completed = each.num_batches, each.progress.num_batches
        with bar:
            task = bar.add_task(description, total=length, completed=completed, rate="", loss="")
            for count, item in enumerate(each, 1):
                yield item
                rate = count / (time.monotonic() - began)
                pace = f"{rate:.3g}/s" if rate >= 1 else f"{1 / rate:.3g} s each"
                bar.update(task, completed=completed + count, rate=pace, loss=loss.text())
            bar.update(task, loss=loss.text(now=True))

    return drawn()


def _known_length(items: Iterable[Any]) -> int | None:
    """How many there are; None where it is not known, as of a loader of a stream, which has a `__len__` all the same."""
    try:
        return len(items) if isinstance(items, Sized) else None
    except (TypeError, NotImplementedError):
        return None
