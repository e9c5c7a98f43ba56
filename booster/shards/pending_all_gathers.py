"""Weights that are on their way to this rank, and who waits for them."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from booster.common.torch_internals.autograd_internals import is_compiled
from booster.common.torch_internals.tensor_internals import storage_key


class PendingAllGathers:
    """Flat stretches of weights that other ranks are sending, each with the works to wait for.

    Whoever reads a weight outside of `in_forward` calls `wait` first; it costs nothing where nothing is on its way.
    """

    def __init__(self) -> None:
        self._works: dict[int, list[Any]] = {}  # by memory
        self._in_forward = False

    def add(self, data: torch.Tensor, works: list[Any]) -> None:
        """Note that `works` write to the memory of `data`."""
        self._works.setdefault(storage_key(data), []).extend(works)

    def wait(self) -> None:
        """Wait until everything is there."""
        while self._works:
            self._wait_for(next(iter(self._works)))

    @contextmanager
    def in_forward(self, module: nn.Module) -> Iterator[None]:
        """Inside, every torch function waits for the weights that it is given, and for no others; afterwards all are there.

        A compiled module's graph calls no functions, so that all are waited for at its beginning.
        """
        # A function mode is slow, and a compiled graph calls no functions that it could see.
        if not self._works or any(map(is_compiled, module.modules())):
            self.wait()
            yield
            return
        self._in_forward = True
        try:
            with _Waiting(self):
                yield
        # What runs outside of forward knows nothing of weights on their way.
        finally:
            self._in_forward = False
            self.wait()

    def wait_unless_in_forward(self) -> None:
        """`wait`, unless called from within `in_forward`."""
        if not self._in_forward:
            self.wait()

    def wait_for_args(self, tree: Any) -> None:
        """Wait for what tensors in `tree`, arguments of a torch function, share memory with."""
        for value in tree:
            if isinstance(value, torch.Tensor):
                if type(value) in (torch.Tensor, nn.Parameter) and value.layout is torch.strided:
                    self._wait_for(storage_key(value))
            elif isinstance(value, (list, tuple)):
                self.wait_for_args(value)
            elif isinstance(value, dict):
                self.wait_for_args(value.values())

    def __bool__(self) -> bool:
        return bool(self._works)

    def _wait_for(self, key: int) -> None:
        for work in self._works.pop(key, ()):
            work.wait()


class _Waiting(TorchFunctionMode):
    def __init__(self, pending_all_gathers: PendingAllGathers) -> None:
        super().__init__()
        self._arriving = pending_all_gathers

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._arriving:
            self._arriving.wait_for_args(args)
            if kwargs:
                self._arriving.wait_for_args(kwargs.values())
        return func(*args, **kwargs)


class AllGatherHook:
    """A hook of the user's own module, for calls that do not come through the boosted one. Copies of it wait for nothing."""

    def __init__(self, pending_all_gathers: PendingAllGathers | None = None) -> None:
        self._arriving = None if pending_all_gathers is None else weakref.ref(pending_all_gathers)

    def __call__(self, *_: Any, **__: Any) -> None:
        pending_all_gathers = None if self._arriving is None else self._arriving()
        if pending_all_gathers is not None:
            pending_all_gathers.wait_unless_in_forward()

    def __reduce__(self) -> Any:
        return AllGatherHook, ()

    def register(self, module: nn.Module) -> list[Any]:
        """Be called before the forward of `module`, and before its state dict is made or loaded; returns what has `remove`."""
        return [
            module.register_forward_pre_hook(self),
            module.register_state_dict_pre_hook(self),
            module.register_load_state_dict_pre_hook(self),
        ]
