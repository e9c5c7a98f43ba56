"""Guards on the user's own objects, which stay in the user's hands after `boost` and are not to be used instead of what it
returned."""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from booster.common.frames import called_from

_logger = logging.getLogger(__name__)
_CALLS = 100  # of the user's model in training; who calls the wrong one calls it in the first of them
# Of boosted models, not of criteria: models in those are not synchronised.
_COMPUTES = {("booster.interface.model", name) for name in ("_run", "run_method", "_stream")}
_OF_TORCH_CHECKPOINT = ("torch.distributed.checkpoint.state_dict",)
_BETWEEN = ("booster.interface.optimizer", "booster.common.misuse", "torch.optim.", "torch.utils.")


class OwnStepGuard:
    """A pre-hook on the user's optimizer, which raises RuntimeError for a step that its boosted one does not make.

    stepping: the boosted optimizer is stepping. owner: the boosted optimizer; the guard is off when it is gone, when another
    one steps the same optimizer, and in a pickle.
    """

    def __init__(self, optimizer: Optimizer, owner: object) -> None:
        self.stepping = False
        self._owner: weakref.ref[object] | None = weakref.ref(owner)
        optimizer.register_step_pre_hook(self)

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # First, because the compiler traces it, and then nothing else.
        if torch.compiler.is_compiling() or self.stepping or self._owner is None or self._owner() is None:
            return
        if is_called_by_torch_checkpoint():
            return
        name = type(optimizer).__name__
        raise RuntimeError(
            f"this {name} was given to boost(), and its step() was called instead of that of the boosted one: it would take "
            "gradients as they are, under a loss scale thousands of times too large, and miss float32 masters. Keep what "
            "boost() returned, and step that: model, optimizer, *_ = b.boost(model, optimizer). To step this one when "
            "training under the booster is over, take it from b.unwrap(optimizer)"
        )

    def remove(self) -> None:
        """Let every step pass from now on."""
        self._owner = None

    def __getstate__(self) -> dict[str, Any]:
        return {"stepping": False, "_owner": None}


class RawCallGuard:
    """A forward pre-hook on the user's model, for calls in training that do not come through what `boost` returned.

    On one device such a call runs without the precision, and one WARNING says so; of several ranks it would leave gradients
    unsynchronised, and raises RuntimeError. It leaves after so many calls that came as they should: from a boosted model,
    which may be another one that holds this model, or from a backward pass that computes it again. backward: the number of the
    backward pass that runs in this thread, or -1. Copies and pickles of the model are not watched.
    """

    def __init__(self, model: nn.Module, *, precision: str, several_ranks: bool, backward: Callable[[], int]) -> None:
        self._backward = backward
        self._watched = True
        self._left = _CALLS
        self.precision = precision
        self._several_ranks = several_ranks
        self._handle: Any = model.register_forward_pre_hook(self)

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or not self._watched or not torch.is_grad_enabled() or not module.training:
            return
        # As `called_by` does, but without a call: in the first steps every forward pass comes here.
        frame: Any = sys._getframe(1)
        while frame is not None and (frame.f_globals.get("__name__"), frame.f_code.co_name) not in _COMPUTES:
            frame = frame.f_back
        if frame is not None or self._backward() != -1:
            self._left -= 1
            if not self._left:
                self.remove()
            return
        if not any(param.requires_grad for param in module.parameters()):
            return
        name = type(module).__name__
        what = f"the {name} that was given to boost() was called in training, instead of what boost() returned"
        fix = "call the boosted one: model, optimizer, *_ = b.boost(model, optimizer)"
        if self._several_ranks:
            raise RuntimeError(
                f"{what}: its gradients would not be synchronised among ranks, and their weights would drift apart; {fix}"
            )
        self.remove()
        _logger.warning("%s: it runs without %s, in the dtype of its weights; %s", what, self.precision, fix)

    def remove(self) -> None:
        """Watch no longer."""
        self._watched = False
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_watched": False, "_handle": None}


def is_called_by_torch_checkpoint() -> bool:
    """Return whether the caller was called by torch's module that makes states of optimizers by a step of zeros, and keeps
    torch's keys alone."""
    # Schedulers of torch and hooks of steps may be between.
    return called_from(_OF_TORCH_CHECKPOINT, through=_BETWEEN)
