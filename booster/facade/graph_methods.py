"""The methods of `Booster` that make a CUDA graph of a training step, or say what keeps one from being made."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from booster.common import arguments
from booster.facade.booster_state import BoosterState

if TYPE_CHECKING:
    from booster.capture.captured import CapturedStep
    from booster.capture.graph import Recorder


def capturable(self: BoosterState, train_step: Callable[..., Any], *example_batch: Any) -> list[str]:
    """Run a whole training step and return what in it keeps a CUDA graph from being made of it, `path/file.py:LINE: what`.

    Empty where nothing does. No GPU is needed: boosted optimizers decide as they would on one, so what is listed is what
    a GPU would be waited for, found by running: `.item()`, `float(loss)`, an `if` on a tensor, printing, masks as indices;
    in helpers too; with the line of the user's statement. Besides, what a graph would do again with the numbers of its
    capture: options of a group written by Python, as by a scheduler that was not boosted, and copies of numbers to the
    device. Tensors that are made without naming a device lie on the host, and cost nothing to read.

    train_step: called with `example_batch`, on the device: forward, `backward`, clip, `optimizer.step()`,
        `scheduler.step()`,
    `zero_grad`. It runs twice, of which the second is looked at. Weights, states, gradients, loss scales, schedules and
    random states are afterwards what they were, also where it raises; what it does besides, such as appending to a list,
    it does. No line is written to a record. Costs a copy of all that training changes.
    """
    from booster.capture.trial import reads_of
    from booster.data.boosted_loader import to_device

    arguments.function("train_step", train_step, "a function that makes one training step of a batch")
    optimizers = self._boosted.all_optimizers("capturable")
    batch, roots = to_device(example_batch, self.device), self._boosted.modules()
    with nullcontext() if self._watcher is None else self._watcher.log.paused(), self._unrecorded():
        return reads_of(train_step, batch, roots=roots, optimizers=optimizers, device=self.device)


def capture(
    self: BoosterState, train_step: Callable[..., Any], *example_batch: Any, max_graphs: int = 8
) -> Callable[..., Any]:
    """Return `train_step` as a CUDA graph: one launch for a whole step, where launches are the price.

        step = b.capture(train_step, x, y)
        for x, y in loader:
            loss = step(x, y)

    train_step: a function of a batch that makes a step with boosted objects: forward, `backward`, clip, `optimizer.step()`,
    `scheduler.step()` of a boosted scheduler, `zero_grad`; or a part of one, such as a micro-batch of `accumulate`. It may
    return tensors and results of steps, which come back as copies, without a graph of autograd. What it computes from
    Python's numbers, and draws from Python's random ones, is the same in every replay. Numbers in the batch separate one kind
    of call from another, as do shapes, dtypes, modules in training or not, and gradients that wait. The first call of a
    kind runs `train_step`, the second is recorded, those after it are replayed; both run it for what it does besides.
    example_batch: one batch, on which it is looked at what a host would read.
    max_graphs: so many kinds; others run without a graph, to the same bits.

    Learning rates are read from tensors, in float32 on a GPU, so schedules go on; other options of a group that change,
    loaded states and new groups have graphs made anew. Skips, loss scales, counters and results are those of each step.
    While a record is written or skipped steps are diagnosed, steps run without a graph. Where there is no GPU all do, and
    one WARNING says so. Nothing changes before the first call; on a GPU `train_step` runs twice, as for `capturable`.
    Raises RuntimeError for what `capturable` lists, by line, and by name for several ranks, optimizers that decide on the
    host, offloaded states and release_gradients.
    """
    from booster.capture.graph import recorder_of

    arguments.function("train_step", train_step, "a function that makes one training step of a batch")
    arguments.count("max_graphs", max_graphs)
    return captured(self, train_step, example_batch, recorder_of(self.device), max_graphs)


def captured(
    self: BoosterState,
    train_step: Callable[..., Any],
    example_batch: Sequence[Any],
    recorder: Recorder | None,
    max_graphs: int,
) -> CapturedStep:
    """Do what `capture` does, by `recorder`, which tests choose; None captures nothing."""
    from booster.capture.captured import CapturedStep
    from booster.capture.trial import check

    optimizers = self._boosted.all_optimizers("capture")
    if recorder is not None:
        check(optimizers, plugin=type(self.plugin).__name__, several_ranks=self.plugin.group is not None)
        reads = self.capturable(train_step, *example_batch)
        if reads:
            lines = "".join(f"\n  {line}" for line in reads)
            raise RuntimeError(
                f"capture() makes no graph of a step that a host has a part in; capturable() lists:{lines}"
            )
    return CapturedStep(
        train_step,
        modules=self._boosted.modules(),
        optimizers=optimizers,
        passes=self._accumulations,
        device=self.device,
        recorder=recorder,
        max_graphs=max_graphs,
        switch_if_due=self._run.switch_if_due,
    )
