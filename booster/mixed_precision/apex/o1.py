"""The casts of O1 as one strategy has them: its registrations, its tables of rules, and its regions."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from booster.cast_regions import CastFunctions, Table, active_casts, both, disable_casts, holds_casts
from booster.mixed_precision.apex.functions import make_table
from booster.mixed_precision.apex.user_functions import Kind, Registered
from booster.mixed_precision.half_products import HalfProducts


class O1Casts:
    """The contexts of one strategy."""

    def __init__(self) -> None:
        self._registered = Registered()
        self._tables: dict[str, Table] = {}
        self._disabled = 0

    def register(self, module: Any, name: str, kind: Kind) -> None:
        """See `Registered.add`."""
        self._registered.add(module, name, kind)
        self._tables = {}

    @property
    def registers(self) -> bool:
        """Whether any function is registered."""
        return not self._registered.is_empty

    def use(self, registered: Registered) -> None:
        """Cast by these registrations instead of those made so far."""
        self._registered = registered
        self._tables = {}

    def forward_context(self, device_type: str, products: HalfProducts) -> AbstractContextManager[Any]:
        """A new context for one forward pass."""
        if self._disabled:
            return nullcontext()
        # In a session, which no forward pass ends, autocast's cache of half weights would outlive them.
        autocast = torch.autocast(device_type, torch.float16, cache_enabled=not holds_casts())
        wide, mode = products.forward_context(device_type), self.mode(device_type)
        return both(autocast, mode if wide is None else both(wide, mode))

    def backward_context(self, device_type: str, products: HalfProducts) -> AbstractContextManager[Any]:
        """A new context for one backward pass, where activations may be recomputed."""
        modes = active_casts()
        if self._disabled or (modes and modes[-1].owner is self._registered):
            return nullcontext()
        return both(products.backward_context(device_type), self.mode(device_type))

    @contextmanager
    def disable(self) -> Iterator[None]:
        """Inside, torch functions run without casts, and so do the contexts of this object."""
        self._disabled += 1
        try:
            with disable_casts():
                yield
        finally:
            self._disabled -= 1

    def mode(self, device_type: str) -> CastFunctions:
        """A new mode, to be entered inside autocast."""
        if device_type not in self._tables:
            self._tables[device_type] = make_table(device_type) | self._registered.rules()
        return CastFunctions(self._tables[device_type], device_type, self._registered)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tables": {}}  # made of torch's functions, which do not pickle
