"""Whose code runs, and guards on the user's own objects, which stay in the user's hands after `boost` and are not to be used
instead of what it returned.

Frames are compared by the names of their modules and functions, so nothing has to be imported to be recognised.
"""

from __future__ import annotations

import functools
import logging
import os
import sys
import weakref
from collections.abc import Container
from types import CodeType, FrameType, TracebackType
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from booster.common.torch_internals.autograd_internals import graph_task

_STANDARD = os.path.dirname(os.__file__) + os.sep
_LIBRARIES = tuple(os.path.dirname(file) + os.sep for file in (str(torch.__file__), os.path.dirname(__file__)))


@functools.lru_cache(maxsize=4096)
def is_users(code: CodeType) -> bool:
    """Return whether `code` is neither torch's nor booster's nor of the standard library."""
    file = code.co_filename
    # site-packages is a folder of the standard library.
    return not file.startswith(("<", *_LIBRARIES)) and (not file.startswith(_STANDARD) or "site-packages" in file)


def first_user_frame(frame: FrameType | None) -> FrameType | None:
    """Return the innermost frame of the user's code among `frame` and its callers."""
    while frame is not None and not is_users(frame.f_code):
        frame = frame.f_back
    return frame


def called_by(functions: Container[tuple[Any, str]], *, through: tuple[str, ...]) -> bool:
    """Return whether one of `functions` is among the callers of the function that asks.

    functions: pairs of the name of a module and of a function in it.
    through: how the names of modules begin that may be between; the search ends at the first caller of another module.
    """
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(through):
        if (frame.f_globals.get("__name__"), frame.f_code.co_name) in functions:
            return True
        frame = frame.f_back
    return False


def called_from(modules: tuple[str, ...], *, through: tuple[str, ...]) -> bool:
    """Return whether the innermost caller of the function that asks, modules `through` left out, is of one of `modules`."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and str(frame.f_globals.get("__name__")).startswith(through):
        frame = frame.f_back
    # Both are beginnings of names.
    return frame is not None and str(frame.f_globals.get("__name__")).startswith(modules)


def raised_in(error: BaseException) -> TracebackType | None:
    """Return the innermost line of the user's code below which `error` was raised; None without one."""
    innermost: TracebackType | None = None
    trace: TracebackType | None = error.__traceback__
    # Only what ran below the frame that caught it counts.
    while trace is not None:
        if is_users(trace.tb_frame.f_code):
            innermost = trace
        trace = trace.tb_next
    return innermost


def where_raised(error: BaseException) -> str:
    """Return "file:line in function" of that line, "" without one."""
    trace = raised_in(error)
    return "" if trace is None else line_of(trace.tb_frame.f_code, trace.tb_lineno)


def line_of(code: CodeType, number: int) -> str:
    """Return "file:line in function", as messages name a line."""
    return f"{code.co_filename}:{number} in {code.co_name}"


_logger = logging.getLogger(__name__)
_CALLS = 100  # of the user's model in training; who calls the wrong one calls it in the first of them
# Of boosted models, not of criteria: models in those are not synchronised.
_COMPUTES = {("booster.interface.model", name) for name in ("_run", "run_method", "_stream")}
_OF_TORCH_CHECKPOINT = ("torch.distributed.checkpoint.state_dict",)
_ASK_FOR_STATES = tuple(f"booster.{room}." for room in ("interface", "update", "masters", "shards", "checkpoint"))
_BETWEEN = ("booster.interface.optimizer", "booster.common.misuse", "torch.optim.", "torch.utils.")


class OwnStepGuard:
    """A pre-hook on the user's optimizer, which raises RuntimeError for a step that its boosted one does not make.

    stepping: the boosted optimizer is stepping. owner: the boosted optimizer; the guard is off when it is gone, when another
    one steps the same optimizer, and in a pickle. update: that of `owner`; where it keeps states elsewhere than by the user's
    parameters, state dicts that the boosted one does not make or load raise too.
    """

    def __init__(self, optimizer: Optimizer, owner: object, update: Any) -> None:
        self.stepping = False
        self._owner: weakref.ref[object] | None = weakref.ref(owner)
        optimizer.register_step_pre_hook(self)
        if update.optimizer_state.has_masters or update.shards.sharded:
            optimizer.register_state_dict_pre_hook(self.check_states)
            optimizer.register_load_state_dict_pre_hook(self.check_states)

    def check_states(self, optimizer: Optimizer, *state_dict: Any) -> None:
        """Raise RuntimeError unless this library makes or loads the state dict of `optimizer`."""
        if self.stepping or self._is_off():
            return
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            if str(frame.f_globals.get("__name__")).startswith(_ASK_FOR_STATES):
                return
            frame = frame.f_back
        raise RuntimeError(
            f"{'load_' * len(state_dict)}state_dict() of the {type(optimizer).__name__} that was given to boost() was "
            "called instead of that of the boosted one, which keeps states by masters or by this rank's shards; "
            "they would get lost. Call it on what boost() returned; b.save and b.load keep a whole run"
        )

    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        # First, because the compiler traces it, and then nothing else.
        if torch.compiler.is_compiling() or self.stepping or self._is_off() or is_called_by_torch_checkpoint():
            return
        name = type(optimizer).__name__
        raise RuntimeError(
            f"this {name} was given to boost(), and its step() was called instead of that of the boosted one: it would take "
            "gradients as they are, under a loss scale thousands of times too large, and miss float32 masters. Keep what "
            "boost() returned, and step that: model, optimizer, *_ = b.boost(model, optimizer). To step this one when "
            "training under the booster is over, take it from b.unwrap(optimizer)"
        )

    def _is_off(self) -> bool:
        return self._owner is None or self._owner() is None

    def remove(self) -> None:
        """Let every step pass from now on."""
        self._owner = None

    def __getstate__(self) -> dict[str, Any]:
        return {"stepping": False, "_owner": None}


class RawCallGuard:
    """A forward pre-hook on the user's model, for calls in training that do not come through what `boost` returned.

    On one device such a call runs without the precision, and one WARNING says so; of several ranks it would leave gradients
    unsynchronised, and raises RuntimeError. It leaves after so many calls that came as they should: from a boosted model,
    which may be another one that holds this model, or from a backward pass that computes it again. Copies and pickles of the
    model are not watched.
    """

    def __init__(self, model: nn.Module, *, precision: str, several_ranks: bool) -> None:
        self._left = _CALLS
        self.precision = precision
        self._several_ranks = several_ranks
        self._handle: Any = model.register_forward_pre_hook(self)

    def __call__(self, module: nn.Module, args: Any) -> None:
        if torch.compiler.is_compiling() or self._handle is None or not torch.is_grad_enabled() or not module.training:
            return
        # As `called_by` does, but without a call: in the first steps every forward pass comes here.
        frame: Any = sys._getframe(1)
        while frame is not None and (frame.f_globals.get("__name__"), frame.f_code.co_name) not in _COMPUTES:
            frame = frame.f_back
        if frame is not None or graph_task() != -1:
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
        if self._handle is not None:
            self._handle.remove()
            self._handle = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_handle": None}


def is_called_by_torch_checkpoint() -> bool:
    """Return whether the caller was called by torch's module that makes states of optimizers by a step of zeros, and keeps
    torch's keys alone."""
    # Schedulers of torch and hooks of steps may be between.
    return called_from(_OF_TORCH_CHECKPOINT, through=_BETWEEN)
