"""Modules of a model that begin to compute in float32 during the run, because they overflowed again and again."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from booster import arguments
from booster.mixed_precision.keep_fp32 import compute_as_before, compute_in_fp32
from booster.names import parents

SKIPS = 2
"""So many skipped steps that begin in one module pin it."""
WINDOW = 100
"""Steps that these lie within, at most."""


class RunPins:
    """Counts the skips of one boosted model by the module that each began in, and pins those that have too many.

    For models under autocast, whose weights are float32 anyway: a pin changes what is computed in, from the next forward
    pass on. model: the user's. device_type: where autocast is on. names: pinned so far, in order.
    """

    def __init__(self, model: nn.Module, device_type: str) -> None:
        self.names: list[str] = []
        self._model, self._device_type = model, device_type
        self._skips: dict[str, list[int]] = {}

    def note(self, name: str, step: int) -> bool:
        """Take note that the skip of `step` began in the module `name`; returns whether that pins it now."""
        if not self.can_pin(name):
            return False
        steps = [each for each in self._skips.get(name, []) if step - WINDOW < each < step]
        self._skips[name] = [*steps, step]
        if len(self._skips[name]) < SKIPS:
            return False
        self._pin(name)
        return True

    def can_pin(self, name: str) -> bool:
        """Return whether `name` is a module inside the model that is not pinned yet, nor is what holds it."""
        inside = dict(self._model.named_modules())
        return bool(name) and name in inside and not {name, *parents(name)} & {*self.names}

    def missing(self, state: Mapping[str, Any]) -> list[str]:
        """Return the modules of `state`, which `state_dict` gave, that the model does not have."""
        inside = dict(self._model.named_modules())
        return [name for name in state.get("names", []) if name not in inside]

    def state_dict(self) -> dict[str, Any]:
        """What is pinned, and the skips that count towards the next pin, as plain containers."""
        return {"names": list(self.names), "skips": {name: list(steps) for name, steps in self._skips.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Pin what was pinned when `state` was taken, and nothing else. An empty one: nothing was."""
        for name in self.names:
            compute_as_before(self._model.get_submodule(name))
        self.names = []
        for name in state.get("names", []):
            self._pin(arguments.text("the name of a pinned module", name))
        self._skips = {name: list(steps) for name, steps in state.get("skips", {}).items()}

    def _pin(self, name: str) -> None:
        compute_in_fp32(self._model.get_submodule(name), self._device_type)
        self.names.append(name)
        self._skips.pop(name, None)
