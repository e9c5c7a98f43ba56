"""Casting the floating tensors of nested inputs and outputs, whatever container they come in."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch

from booster.trees import map_tensors

HALF_DTYPES = frozenset({torch.float16, torch.bfloat16})
_CASTABLE = HALF_DTYPES | {torch.float32}
_CASTABLE_OR_DOUBLE = _CASTABLE | {torch.float64}


def cast_floats(
    tree: Any, dtype: torch.dtype | None, *, float64: bool = False, instead: Callable[[Any], Any] | None = None
) -> Any:
    """Cast every float16, bfloat16 and float32 tensor in `tree` to `dtype`; all else stays.

    tree: see `booster.trees`; a container none of whose tensors changes is returned as the same object. dtype: None
    returns `tree` itself. float64: cast those tensors too. instead: see `map_tensors`.
    """
    if dtype is None:
        return tree
    castable = _CASTABLE_OR_DOUBLE if float64 else _CASTABLE
    if instead is None and type(tree) is tuple:  # arguments of a forward pass, which nearly always are tensors
        new = []
        for entry in tree:
            if not isinstance(entry, torch.Tensor):
                break
            own = entry.dtype
            new.append(entry.to(dtype) if own in castable and own != dtype else entry)
        else:
            return tree if all(map(operator.is_, new, tree)) else tuple(new)
    if isinstance(tree, torch.Tensor):
        own = tree.dtype
        return tree.to(dtype) if own in castable and own != dtype else tree

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.dtype in castable and tensor.dtype != dtype else tensor

    return map_tensors(cast, tree, instead=instead)
