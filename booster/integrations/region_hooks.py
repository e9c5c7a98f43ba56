"""Calls of the user's own model, run under the precision that it was boosted in."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import nn

from booster.interface.model import ModelWrapper, precision_of
from booster.tensors.cast_regions import region


class RegionHooks:
    """Hooks on the user's model that run each of its calls as those of `boosted` are, but without a plugin's wrapper.

    Trainers evaluate, generate and take log-probabilities through the model that they were given, and not through what was
    made of it. Inside a call of `boosted` they enter the same region again, which changes no number. A compiled model is
    traced without them, inside the region of `boosted`.
    """

    def __init__(self, model: nn.Module, boosted: ModelWrapper) -> None:
        self._boosted = boosted
        self._open: list[AbstractContextManager[Any]] = []
        model.register_forward_pre_hook(self._enter, with_kwargs=True)
        model.register_forward_hook(self._leave, always_call=True)

    def _enter(self, module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        if torch.compiler.is_compiling():
            return None
        context = region(precision_of(self._boosted).forward_context)
        context.__enter__()
        self._open.append(context)
        return self._boosted.cast_inputs(args), self._boosted.cast_inputs(kwargs)

    def _leave(self, module: nn.Module, args: Any, output: Any) -> Any:
        if torch.compiler.is_compiling() or not self._open:
            return None
        self._open.pop().__exit__(None, None, None)
        return self._boosted.cast_outputs(output)
