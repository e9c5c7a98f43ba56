"""Loading weights into the layers of a model that one pipeline rank has."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn


class LayersLoaded:
    """A load_state_dict pre-hook: of the state of a whole model a pipeline rank takes its own layers.

    own: keys of this rank's state dict. whole: those of the whole model's. Raises ValueError for a state that has keys of
    other ranks and none of this one: there, `strict=False` would load nothing.
    """

    def __init__(self, own: Iterable[str], whole: Iterable[str]) -> None:
        self._own = frozenset(own)
        self._elsewhere = frozenset(whole) - self._own

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        foreign = [prefix + key for key in self._elsewhere if prefix + key in state_dict]
        if foreign and self._own and not any(prefix + key in state_dict for key in self._own):
            raise ValueError(
                f"this state was saved on another rank of the pipeline: it has {sorted(foreign)[:3]}, which lie there, and "
                f"none of this rank's weights, such as {sorted(self._own)[0]!r}. Save on every rank, in a file each, and load "
                "on the same rank, or load the state of the whole model"
            )
        for key in foreign:
            del state_dict[key]
