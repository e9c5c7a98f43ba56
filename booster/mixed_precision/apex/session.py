"""What one `initialize` of apex's own interface began."""

from __future__ import annotations

import logging
import threading
import weakref
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any

import torch
from torch.optim import Optimizer

from booster.cast_regions import both
from booster.interface.optimizer import OptimizerWrapper
from booster.mixed_precision.apex.strategy import FP16ApexMixedPrecision
from booster.mixed_precision.apex.update import ApexUpdate
from booster.mixed_precision.apex.user_functions import Registered
from booster.torch_internals import default_device_mode, function_modes, num_function_modes

_logger = logging.getLogger(__name__)


class Session:
    """What `initialize` began. precision: None as long as nothing was initialised, or with enabled=False."""

    def __init__(self) -> None:
        self.initialized = False
        self.precision: FP16ApexMixedPrecision | None = None
        self.registered = Registered()
        self._seen: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        self._updates: weakref.WeakKeyDictionary[ApexUpdate, None] = weakref.WeakKeyDictionary()
        self._casts = ExitStack()
        self._thread: int | None = None  # which casts, as long as one does
        self._num_modes = 0  # by which it does

    def check_entry(self, precision: FP16ApexMixedPrecision, device_type: str) -> None:
        """Raise RuntimeError where `precision` would begin to cast inside contexts that end before the session does."""
        self._check_thread()
        own = self._thread is not None
        modes = sum(not _is_default_device(mode) for mode in _function_modes()) - own * self._num_modes
        autocast = torch.is_autocast_enabled(device_type) and not own
        if precision.options.patch_torch_functions and (modes > 0 or autocast):
            raise RuntimeError(
                "amp.initialize with opt_level='O1' was called inside another context, such as torch.autocast(...) or "
                "torch.device(...). Its casts last until amp.shutdown(), so they cannot begin there; call it outside"
            )

    def begin(self, precision: FP16ApexMixedPrecision | None) -> None:
        self._close()
        self.initialized = True
        self.precision = precision
        if precision is None:
            return
        precision.use_registered(self.registered)
        self.registered = Registered()
        self._hand_over(precision)

    def cast_from_now_on(self) -> None:
        """Enter O1 for this thread, without autocast's cache: nothing would clear it in time."""
        if self.precision is not None and self.precision.options.patch_torch_functions:
            autocast = torch.autocast(self.precision.device.type, torch.float16, cache_enabled=False)
            before = num_function_modes()
            self._casts.enter_context(both(autocast, self.precision.session_context()))
            self._num_modes = num_function_modes() - before
            self._thread = threading.get_ident()

    def end(self) -> None:
        """Boosted optimizers keep the loss scales that they have."""
        self._close()
        self._updates.clear()

    def claim(self, optimizers: Sequence[Any]) -> None:
        """Raise RuntimeError for an optimizer that was given to `initialize` before."""
        for optimizer in optimizers:
            if isinstance(optimizer, OptimizerWrapper) or optimizer in self._seen:
                raise RuntimeError("A given optimizer should only be passed through amp.initialize once.")
        self._seen.update(optimizers)

    def follow(self, update: ApexUpdate) -> None:
        """Give `update` the loss scales of the next session too, if it has the same options for them."""
        self._updates[update] = None

    def _check_thread(self) -> None:
        if self._thread not in (None, threading.get_ident()):
            raise RuntimeError(
                "the casts of O1 hold in the thread that called amp.initialize, and only that thread can end them; call "
                "amp.initialize and amp.shutdown there"
            )

    def _close(self) -> None:
        self._check_thread()
        self._casts.close()
        self._thread = None
        self.initialized = False
        self.precision = None

    def _hand_over(self, precision: FP16ApexMixedPrecision) -> None:
        others = 0
        for update in list(self._updates):
            if update.scaler.is_alike(precision.scales):
                update.scaler = precision.scales
            else:
                others += 1
        if others:
            _logger.warning(
                "%d optimizer(s) of an earlier amp.initialize keep their own loss scales, because this one has other options "
                "for them. amp.state_dict() holds those of this one; those of the others are in each optimizer's state_dict()",
                others,
            )


def _function_modes() -> list[Any]:
    return function_modes()


def _is_default_device(mode: Any) -> bool:
    # That of torch.set_default_device, which comes and goes below all other modes; `with torch.device` does not.
    return mode is default_device_mode()
