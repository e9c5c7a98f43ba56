"""`keep_fp32="auto"`: skipped steps are diagnosed, and a module that several begin in is pinned to float32."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist

from booster.communicate import exchange
from booster.interface.model import ModelWrapper, pins_of
from booster.interface.optimizer import OptimizerWrapper
from booster.interface.tape import Pass
from booster.logging import get_dist_logger
from booster.mixed_precision.run_pins import SKIPS, WINDOW
from booster.numerics.diagnosis import Diagnosis
from booster.numerics.replay import Replay
from booster.numerics.skips import SkipWatcher
from booster.update.outcome import StepResult

__all__ = ["PinningWatcher", "culprit"]

_COMPILED = "_orig_mod."  # what torch.compile puts before the names of a model

_logger = get_dist_logger("booster.numerics")


class PinningWatcher(SkipWatcher):
    """Diagnoses every skipped step, as `SkipWatcher` does, and tells the pins of the model in which it began.

    models: the boosted ones by label, as diagnoses name their modules. All ranks of `group` pin alike: where they do not
    name one and the same module, none does.
    """

    def __init__(
        self,
        models: Callable[[], Mapping[str, ModelWrapper]],
        make_replay: Callable[[Callable[[], Any], Sequence[OptimizerWrapper], float], Replay],
        group: dist.ProcessGroup | None,
        device: torch.device,
    ) -> None:
        super().__init__("every", make_replay, group, device)
        self._models = models

    def follow(self, model: ModelWrapper, criterion: Any, optimizers: Iterable[OptimizerWrapper]) -> None:
        """As `SkipWatcher.follow`. Raises ValueError for a second model of one class, which names would not tell apart."""
        kinds = [type(each.unwrap()).__name__ for each in self._models().values()]
        if len(set(kinds)) < len(kinds):
            raise ValueError(
                f"keep_fp32='auto' names modules of models by the class of the model, and two of these are alike: {kinds}; use "
                "a Booster for each"
            )
        super().follow(model, criterion, optimizers)

    # ------------------------------------------------------------------ inside

    def _settled(self, passes: list[Pass], result: StepResult) -> None:
        before = len(self.diagnoses)
        super()._settled(passes, result)
        if result.applied:
            return
        own = culprit(self.diagnoses[-1]) if len(self.diagnoses) > before else ""
        own = own.replace(_COMPILED, "")
        told = {data.decode() for data in exchange(own.encode(), self._group)}
        if len(told) > 1 or not own:
            return
        optimizer = passes[0].optimizers[0]
        step = optimizer.num_applied + optimizer.num_skipped
        for label, model in self._models().items():
            name = own.removeprefix(f"{label}.") if label else own
            if label and name == own:
                continue
            pins = pins_of(model)
            if pins is not None and pins.note(name, step):
                _logger.warning(
                    f"{own} computes in float32 from now on (keep_fp32='auto'): {SKIPS} skipped steps within {WINDOW}, the "
                    f"last of them {step}, began there. Checkpoints keep it; a new run has it from the start with "
                    f"keep_fp32=[{name!r}, 'auto']",
                    ranks=[0],
                )


def culprit(found: Diagnosis) -> str:
    """Return the module that `found` blames and float32 would help; "" where there is none.

    The innermost module with which, computed in float32, the replay was finite; where no single module was enough, because
    several overflow, that of the first overflow. None for bad data or weights, and where a smaller loss scale is enough.
    """
    if found.kind not in ("overflow", "operation"):
        return ""
    for name in reversed(found.modules):
        if f"finite with keep_fp32={name!r}" in found.remedies:
            return name
    return found.module if found.kind == "overflow" else ""
