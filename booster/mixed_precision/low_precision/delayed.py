"""Delayed scaling: scales of whole matrices that follow from the largest magnitudes of earlier steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from booster.common import arguments
from booster.common.torch_internals.autograd_internals import compiler_is_loaded
from booster.mixed_precision.low_precision.linear import LowPrecisionLinear
from booster.mixed_precision.low_precision.recipes import DelayedScale
from booster.mixed_precision.policy import StepHistories
from booster.number_formats.number_format import E4M3, E5M2
from booster.number_formats.scaling import scale_of
from booster.ranks.agreement import all_names
from booster.ranks.messages import reduced

_MATRICES = 3  # of a layer: its input, its weight, and the gradient of its output


@dataclass(frozen=True, kw_only=True)
class DelayedScaling:
    """How scales follow from earlier steps, under the names of Transformer Engine; for `FP8MixedPrecision("tensorwise")`.

    amax_history_len: a scale fits the largest magnitude of so many steps.
    margin: a scale is 2**margin times as large, so that numbers may grow by that before they are cut off.
    """

    amax_history_len: int = 1024
    margin: int = 0

    def __post_init__(self) -> None:
        arguments.count("amax_history_len", self.amax_history_len, what="of steps")
        arguments.count("margin", self.margin, least=0)


class ScaleHistories(StepHistories):
    """The largest magnitudes in the layers of one model, and the scales of the step that follow from them.

    Listens to the optimizer's steps: after each, ranks agree on the largest magnitudes of it, in one collective for all layers,
    and every scale is made anew. A magnitude that is not finite does not count; a step that shows none but zeros, or none at
    all, counts as the one before. Gives `layers` recipes of their own.

    Where something may be compiled, the host reads which scales are known, after the steps 1, 2, 4, 8 and so on until all are:
    for those the compiler makes a second graph, which reads a matrix once.

    layers: by name. On ranks of `group` they may be others, as in a pipeline. device: where they are.
    """

    def __init__(
        self,
        plan: DelayedScaling,
        layers: Mapping[str, LowPrecisionLinear],
        device: torch.device,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.names = all_names(tuple(layers), group)
        self._margin, self._group = 2.0**plan.margin, group
        self._amax = torch.zeros(len(self.names), _MATRICES, dtype=torch.float32, device=device)
        self._scale = torch.zeros_like(self._amax)
        self._history = self._amax.new_zeros(plan.amax_history_len, *self._amax.shape)
        self._largest = self._amax.new_tensor([E4M3.largest, E4M3.largest, E5M2.largest])
        self._steps, self._scales = 0, dict[tuple[int, int], DelayedScale]()
        for row, name in enumerate(self.names):
            if name in layers:
                matrices = [DelayedScale(self._scale[row, i], self._amax[row, i]) for i in range(_MATRICES)]
                layers[name].recipe = layers[name].recipe.delayed(*matrices)
                self._scales.update(((row, i), matrix) for i, matrix in enumerate(matrices))

    @torch.no_grad()
    def after_step(self, update: Any, number: int, result: Any) -> None:
        if self._group is not None:
            self._amax.copy_(reduced(self._amax, dist.ReduceOp.MAX, self._group))
        # A step without numbers, as of a layer that was not used, would otherwise make the scale that of zeros.
        newest = torch.where(self._amax > 0, self._amax, self._history[0])
        self._history.copy_(self._history.roll(1, 0))
        self._history[0].copy_(newest)
        self._amax.zero_()
        self._rescale()
        self._steps += 1
        if self._steps & (self._steps - 1) == 0:
            self._mark_known()

    # ---- what a checkpoint holds

    def state_dict(self) -> dict[str, Any]:
        """The same on all ranks. history: of shape (steps, layers, 3), the newest step first."""
        return {"names": list(self.names), "history": self._history.clone()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on with `state`, of layers by name; of a history of another length its newest steps. Empty begins anew."""
        self._history.zero_()
        self._amax.zero_()
        places = {name: place for place, name in enumerate(state.get("names", []))}
        known = [row for row, name in enumerate(self.names) if name in places]
        if known:
            history = state["history"][: len(self._history), [places[self.names[row]] for row in known]]
            self._history[: len(history), known] = history.to(self._history)
        self._rescale()
        self._steps = 0
        for scale in self._scales.values():
            scale.known = False
        self._mark_known()

    # ---- inside

    def _mark_known(self) -> None:
        """Mark scales that stay known, those with a newest magnitude above zero. Waits for the device."""
        unknown = {place: scale for place, scale in self._scales.items() if not scale.known}
        if (
            not unknown
            or not compiler_is_loaded()
            or (self._scale.is_cuda and torch.cuda.is_current_stream_capturing())
        ):
            return
        known = (self._history[0] > 0).tolist()
        for (row, i), scale in unknown.items():
            scale.known = known[row][i]

    def _rescale(self) -> None:
        largest = self._history.amax(0)
        self._scale.copy_(torch.where(largest > 0, scale_of(largest / self._largest * self._margin), 0.0))
