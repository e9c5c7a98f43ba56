"""Records of `fully_shard` that refer to modules weakly, so that a model is freed with the last reference to it."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from operator import methodcaller
from types import FunctionType
from typing import Any

from torch import nn

from booster.common.torch_internals.fsdp_internals import fsdp_groups, fsdp_states, groups_of


def hold_modules_weakly(modules: Sequence[nn.Module]) -> None:
    """Have what `fully_shard`, just applied to `modules` together, notes of them not keep them alive."""
    (state,) = fsdp_states(modules[:1])
    held = _Weakly(weakref.ref(module, functools.partial(_forget, weakref.ref(state))) for module in modules)
    # Torch's records refer to the modules that hold them, and to each other, so that only Python's collector would free a
    # model, which does not know of a GPU's memory.
    state._modules = held
    for group in fsdp_groups(modules[:1]):
        group.modules = held
        group._module_to_pre_save_state_dict_hook_handle = weakref.WeakKeyDictionary()
        group._module_to_pre_load_state_dict_hook_handle = weakref.WeakKeyDictionary()
        for param in group.fsdp_params:
            param._module_info = _Holders(**vars(param._module_info))
    if len(modules) > 1:  # their hooks know which of them are still to run
        hooks = [
            hook for each in modules for hook in (*each._forward_pre_hooks.values(), *each._forward_hooks.values())
        ]
        for cell in _closure_cells(hooks):
            if isinstance(cell.cell_contents, nn.Module):
                cell.cell_contents = _Same(cell.cell_contents)
            elif cell.cell_contents == set(modules):
                cell.cell_contents = weakref.WeakSet(modules)


def _closure_cells(functions: Iterable[Any]) -> Iterator[Any]:
    """Yield what `functions`, and functions in it, close over."""
    for cell in (cell for function in functions for cell in getattr(function, "__closure__", None) or ()):
        yield cell
        if isinstance(cell.cell_contents, FunctionType):
            yield from _closure_cells([cell.cell_contents])


class _Same(weakref.ref[nn.Module]):
    """Finds its module in a set, and does not keep it alive."""

    __hash__ = weakref.ref.__hash__

    def __eq__(self, other: object) -> bool:
        return self() is other


class _Weakly(list[Any]):
    """Modules that it does not keep alive, in the place of a tuple of them."""

    def __iter__(self) -> Iterator[Any]:
        return (reference() for reference in super().__iter__())

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index)()


class _Holders:
    """In the place of torch's `ParamModuleInfo`: which modules hold a parameter, and by which name. It keeps none alive.

    Where a module is replaced by one that has its dict of parameters, as one that computes otherwise is, they are set there.
    """

    module = property(methodcaller("_module"))  # asked without a Python call

    def __init__(self, module: nn.Module, shared_modules: Iterable[nn.Module], **names: Any) -> None:
        replaced = functools.partial(_keep_parameters, weakref.ref(self), module._parameters)
        self._module: Callable[[], nn.Module | None] = weakref.ref(module, replaced)
        self.shared_modules = [_with_parameters(each._parameters) for each in shared_modules]
        self.__dict__.update(names)


def _keep_parameters(holders: weakref.ref[_Holders], parameters: dict[str, Any], module: object) -> None:
    left = holders()
    if left is not None:
        kept = _with_parameters(parameters)
        left._module = lambda: kept


def _with_parameters(parameters: dict[str, Any]) -> nn.Module:
    """Return a module with the dict of parameters of another: what is set in it is set there."""
    module = nn.Module()
    module.__dict__["_parameters"] = parameters
    return module


def _forget(reference: weakref.ref[Any], module: object) -> None:
    """Take out what `fully_shard` keeps of modules that are all gone from what it keeps of all of their model."""
    state = reference()
    if state is None or any(module is not None for module in state._modules):
        return
    if state in state._state_ctx.all_states:
        state._state_ctx.all_states.remove(state)
    groups = groups_of(state)
    order = getattr(state._comm_ctx, "post_forward_order", [])
    order[:] = [group for group in order if group not in groups]
