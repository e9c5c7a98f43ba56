"""Parameters that are stepped as they are, beside masters: those that stay in float32."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from booster.tensors.flat import is_dense, pack, split_by_device
from booster.tensors.trees import HALF_DTYPES
from booster.update.application import lay_states

_contiguous: Callable[[torch.Tensor], bool] = torch.Tensor.is_contiguous


def step_batches(params: Iterable[torch.Tensor], size: int) -> list[tuple[list[torch.Tensor], bool]]:
    """Divide those of `params` that have a gradient into lots of at most `size` elements, to be stepped one by one.

    Also says of each lot whether a fused kernel may step it: it walks raw memory, and overwrites what lies in the gaps of a
    parameter that has any.
    """
    own = [p for p in params if p.grad is not None and p.dtype not in HALF_DTYPES]
    loose = [] if all(map(_contiguous, own)) else [p for p in own if not is_dense(p)]
    dense = own if not loose else [p for p in own if is_dense(p)]
    return [
        ([piece.param for piece in lot], kind is dense)
        for kind in (dense, loose)
        for alike in split_by_device(kind)
        for lot in pack(alike, size)
    ]


class StateLayouts:
    """Keeps states in the memory order of their parameters, which fused kernels take for granted."""

    def __init__(self) -> None:
        self._state: Any = None  # that was looked at; it is replaced when one is loaded
        self._strides: dict[
            torch.Tensor, tuple[int, ...]
        ] = {}  # of parameters that are not contiguous, or were not once

    def follow(self, params: Sequence[torch.Tensor], state: Mapping[Any, dict[str, Any]]) -> None:
        """Lay the states of `params` anew where parameter or state lies otherwise than at the last call."""
        if state is self._state and not self._strides and all(map(_contiguous, params)):
            return
        for param in params:
            if state is not self._state or self._strides.get(param) != param.stride():
                lay_states(param, state.get(param, {}))
            if param in self._strides or not param.is_contiguous():
                self._strides[param] = param.stride()
        self._state = state
