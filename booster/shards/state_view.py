"""The state of an optimizer that steps parts, by parameter."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch

from booster.shards.base import State


class StateOfParts(Mapping[Any, State]):
    """State by parameter, each entry made when it is asked for, from `state` by part. For reading.

    parts, params: the part of each parameter that has one, and back; what is in neither stands for itself. shown: makes an
    entry, of (parameter, part, its state). Keeps none of what it made.
    """

    def __init__(
        self,
        state: Mapping[Any, State],
        parts: Mapping[torch.Tensor, torch.Tensor],
        params: Mapping[torch.Tensor, torch.Tensor],
        shown: Callable[[torch.Tensor, torch.Tensor, State], State],
    ) -> None:
        self._state, self._parts, self._params, self._shown = state, parts, params, shown

    def __contains__(self, param: object) -> bool:
        return self._key(param) is not None

    def __getitem__(self, param: Any) -> State:
        key = self._key(param)
        if key is None:
            raise KeyError(param)
        return self._shown(param, key, self._state[key])

    def __iter__(self) -> Iterator[Any]:
        return iter(dict.fromkeys(self._params.get(key, key) for key in self._state))

    def __len__(self) -> int:
        return len({self._params.get(key, key) for key in self._state})

    def _key(self, param: Any) -> Any:
        """Return by what the state of `param` is known; None if it has none."""
        part = self._parts.get(param, param)
        key = part if part in self._state else param
        return key if key in self._state and param not in self._params else None
