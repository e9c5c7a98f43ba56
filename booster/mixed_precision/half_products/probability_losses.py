"""Losses of probabilities, which half precision refuses: where, and in which code they are looked for.

torch.autocast refuses `binary_cross_entropy` on CUDA. Here regions of a precision do on every device, by a torch function mode,
if code that boost was given names it; others enter no mode for it. The graph of a loss tells what a loop computes outside.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from booster.common.torch_internals.autograd_internals import node_dtypes
from booster.tensors.trees import HALF_DTYPES

UNSAFE = (
    "binary_cross_entropy reads probabilities, and halves round those of a sigmoid to exactly 0 and 1, where training stops; "
    "return logits, without the sigmoid, and take nn.BCEWithLogitsLoss or F.binary_cross_entropy_with_logits, which is "
    "the same loss and safe in half"
)
_NAMES = frozenset({"binary_cross_entropy", "BCELoss"})
_DEPTH = 8  # of what holds or calls one another, from a module to its class, its methods and what these call
_LIBRARIES = frozenset({"torch", "transformers", "booster", "numpy", *sys.stdlib_module_names})  # not looked through
# Nodes of a graph that move and clip numbers: their names begin so.
_MOVES = (
    "ToCopy View UnsafeView Squeeze Unsqueeze Select Slice Index Transpose T Permute Expand Alias Clone Clamp Split Cat"
)


def _refused(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Raise as autocast does on CUDA, whatever the dtype, and amid half weights where probabilities are halves, or were."""
    probabilities = args[0] if args else kwargs["input"]
    if probabilities.dtype in HALF_DTYPES or torch.is_autocast_enabled(probabilities.device.type):
        raise RuntimeError(UNSAFE)
    loss = func(*args, **kwargs)
    if not torch.compiler.is_compiling():  # which knows no graph yet
        check_probabilities(loss)
    return loss


REFUSED = {F.binary_cross_entropy: _refused}  # as `half_sums.FLOAT32_SUMS`


def check_probabilities(loss: torch.Tensor) -> None:
    """Raise RuntimeError where `binary_cross_entropy` in the graph of `loss` read halves, also if they were widened since."""
    waiting, seen = [loss.grad_fn], set()
    # A walk through the whole graph, for one backward pass.
    while waiting:
        if (node := waiting.pop()) is None or node in seen:
            continue
        seen.add(node)
        waiting += [each for each, _ in node.next_functions]
        if not node.name().startswith("BinaryCrossEntropyBackward"):
            continue
        while node is not None:
            if HALF_DTYPES.intersection(node_dtypes(node)):
                raise RuntimeError(UNSAFE)
            # Moves and casts keep the values, so that the rounding happened before them.
            kind = node.name().partition("Backward")[0]
            node = node.next_functions[0][0] if kind in ("BinaryCrossEntropy", *_MOVES.split()) else None


def names_probability_loss(models: Iterable[Any]) -> bool:
    """Whether code of `models`, modules and other callables, or a function that it calls, names a loss of probabilities."""
    found = [part for each in models for part in (each.modules() if isinstance(each, nn.Module) else [each])]
    seen: dict[int, Any] = {}
    for _ in range(_DEPTH):
        deeper = []
        for each in found:
            if id(each) in seen:
                continue
            seen[id(each)] = each
            if each is F.binary_cross_entropy or each is nn.BCELoss or isinstance(each, nn.BCELoss):
                return True
            names, held = _parts(each)
            if names & _NAMES:
                return True
            deeper += held
        found = deeper
    return False


def _parts(found: Any) -> tuple[set[str], list[Any]]:
    """Names in the code of `found`, and what it may call."""
    names: set[str] = set()
    if isinstance(found, ModuleType):  # of which a function names what it calls
        return names, []
    if isinstance(found, functools.partial):
        return names, [found.func, *found.args, *found.keywords.values()]
    if isinstance(found, type):
        own = [value for each in found.__mro__ if not _is_library(each.__module__) for value in vars(each).values()]
        return names, [getattr(each, "fget", None) or getattr(each, "__func__", each) for each in own]
    if not isinstance(found, FunctionType):  # methods, and objects with the callables that they hold
        method = [getattr(found, "__func__", None), getattr(found, "__self__", None)]
        return names, [type(found), *method, *filter(callable, getattr(found, "__dict__", {}).values())]
    codes = [] if _is_library(found.__module__) else [found.__code__]
    for code in codes:  # to which functions inside of it are added
        codes += [each for each in code.co_consts if isinstance(each, CodeType)]
        names |= {*code.co_names, *(each for each in code.co_consts if isinstance(each, str))}
    held = [found.__globals__[name] for name in names & found.__globals__.keys()]
    files = [each for each in held if isinstance(each, ModuleType) and not _is_library(each.__name__)]
    held += [getattr(each, name) for each in files for name in names if hasattr(each, name)]
    return names, held + [each.cell_contents for each in found.__closure__ or () if each != CellType()]


def _is_library(module: str | None) -> bool:
    return str(module).partition(".")[0] in _LIBRARIES
