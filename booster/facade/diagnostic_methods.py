"""The methods of `Booster` that look at a run: its record, a bad step, and its memory.

What they need is imported when they are called: most scripts never do.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

from torch import nn
from torch.optim import Optimizer

from booster.common import arguments
from booster.facade import refusals
from booster.facade.booster_state import BoosterState, Optimizers
from booster.interface.optimizer import OptimizerWrapper

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
    return max(each, key=lambda found: found.peak)


def memory(self: BoosterState, model: nn.Module, optimizer: OptimizerWrapper) -> Measured:
    """Count what the boosted `model` and its `optimizer` hold on this rank now; no collective, no copy.

    After a step, with gradients there, it compares with what `estimate_memory` said.
    """
    from booster.memory import measure

    wrappers = refusals.check_boosted_optimizers(optimizer, "memory")
    if len(wrappers) > 1:
        raise ValueError(f"memory needs one optimizer, got {len(wrappers)}; count each by itself")
    return measure(self._boosted.own(model, "memory"), wrappers[0])
