"""Which foreign parameters and blocks the fake tensors of a forward pass come from."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from booster.plugin.pipeline.skeleton import is_fake
from booster.tensors.trees import leaves as leaves_of
from booster.tensors.trees import tensors as tensors_of

NOWHERE: frozenset[str] = frozenset()


class Origins(TorchFunctionMode):
    """While active, follows what lies on other stages through every torch function.

    names_of: the names of what a fake tensor stands for, if it is foreign by itself; none for one's own. `closed`: from
    now on foreign tensors may not meet one's own; what they computed before is to be there in what was received.
    buffers: ids of tensors that may be written to, because nobody reads them afterwards.
    """

    def __init__(self, names_of: Callable[[torch.Tensor], frozenset[str]], buffers: set[int], stage: int) -> None:
        super().__init__()
        self._names_of = names_of
        self._buffers = buffers
        self._stage = stage
        self._tags: dict[int, frozenset[str]] = {}
        self._kept: list[torch.Tensor] = []  # so that no id is used again meanwhile
        self.closed = False

    def of(self, tensor: torch.Tensor) -> frozenset[str]:
        """The names of the foreign parts that `tensor` depends on."""
        return self._tags.get(id(tensor)) or self._names_of(tensor)

    def tag(self, tensors: Iterable[Any], names: frozenset[str]) -> None:
        """Say that those of `tensors` that are fake depend on the parts `names`."""
        for tensor in tensors:
            if names and is_fake(tensor):
                self._tags[id(tensor)] = names
                self._kept.append(tensor)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        tensors = list(tensors_of((args, kwargs)))
        if not any(is_fake(tensor) for tensor in tensors):
            return func(*args, **kwargs)
        written = _written(func, args, kwargs)
        if written is not None and not is_fake(written) and id(written) not in self._buffers:
            raise RuntimeError(
                f"{func.__name__} writes what depends on parameters into a tensor that was made without any, of shape "
                f"{tuple(written.shape)}. On other stages of the pipeline those values are not there; make the tensor from "
                "one that depends on parameters (x.new_zeros, torch.zeros_like), or use torch.where or torch.cat"
            )
        foreign = [self.of(tensor) for tensor in tensors]
        names = NOWHERE.union(*foreign)
        if self.closed and names and not all(foreign):
            raise foreign_use(names, self._stage)
        result = func(*args, **kwargs)
        self.tag(leaves_of(result), names)
        if written is not None:
            self.tag([written], names)
        return result


def foreign_use(names: Iterable[str], stage: int) -> RuntimeError:
    """The error for a forward that uses, on `stage`, what lies on other stages."""
    return RuntimeError(
        f"stage {stage} of the pipeline uses {', '.join(sorted(names))}, or what was computed from it, which is on another "
        "stage; between stages only the arguments of blocks are passed on. Choose other split_points; or register what is "
        "needed before the blocks ahead of them, and what is needed after the blocks behind them, in a module; or pass it to "
        "every block as an argument"
    )


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> torch.Tensor | None:
    """The tensor that `func` changes, if any."""
    if isinstance(kwargs.get("out"), torch.Tensor):
        return kwargs["out"]
    name = getattr(func, "__name__", "")
    in_place = name in ("__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__") or (
        name.endswith("_") and not name.endswith("__")
    )
    return args[0] if in_place and args and isinstance(args[0], torch.Tensor) else None
