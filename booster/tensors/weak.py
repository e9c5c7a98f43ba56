"""Weakly typed float32: numbers that keep their bits, and do not widen the half precision that they meet.

Float buffers of a model of half weights, and what modules kept in float32 return, are read so. Torch has the same rule for
tensors without dimensions: they do not decide the dtype of a result.
"""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from booster.ground.torch_internals import without_subclasses
from booster.tensors.cast_regions import halved
from booster.tensors.trees import HALF_DTYPES, map_tensors

_WIDE = frozenset({torch.float32, torch.float64})

_HOLDERS = (torch, torch.Tensor, F)
# Where torch functions differ from the rule: by name, as torch.compile does not trace those of functions.
_NAMES = {
    # A scalar does not widen these, and what has no gradient is averaged by them.
    "arithmetic": "add sub subtract rsub mul multiply div divide true_divide maximum minimum __add__ __radd__ __sub__ __rsub__ "
    "__mul__ __rmul__ __truediv__ __rtruediv__ __rdiv__ __div__",
    # Of these a mixture is looked at in float32: nothing of the result is a floating number that could widen.
    "compared": "lt le gt ge eq ne less less_equal greater greater_equal not_equal isclose allclose equal bucketize "
    "searchsorted __lt__ __le__ __gt__ __ge__ __eq__ __ne__",
    # These write to running statistics, which stay as they are.
    "norm": "batch_norm instance_norm",
    "float": "float",
    "to": "to type",
    "written": " ".join(
        ["__setitem__ __iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ipow__"]
        + [name for holder in _HOLDERS for name in dir(holder) if name.endswith("_") and not name.startswith("_")]
    ),
}
_ROLES: dict[Any, str] = {
    getattr(holder, name): role
    for role, names in _NAMES.items()
    for name in names.split()
    for holder in _HOLDERS
    if hasattr(holder, name)
}


class Weak(torch.Tensor):
    """A float32 tensor that is rounded to half precision where a torch function takes it together with halves.

    What is computed of weak tensors alone, or of them and integers, is weak again; with other float32 tensors, or by
    `.float()`, which asks for it, it is a plain float32 tensor. What is written to keeps its dtype, so that a sum of halves
    in a buffer is one of float32. Halves without dimensions decide nothing, as in torch.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        with without_subclasses():
            half, up, kind = _settle(func, args, kwargs)
            if half is not None:
                args = _cast(args, half, up, func)
                kwargs = {key: _cast(value, half, up, func) for key, value in kwargs.items()}
            output = func(*args, **kwargs)
            if half is not None and _ROLES.get(func) == "norm":
                return output.to(half)
            if kind is None:
                asked = _ROLES.get(func) in ("float", "to") and isinstance(output, Weak)
                return output.view_as(output) if asked else output
            if isinstance(output, torch.Tensor):
                return _as(kind, output)
            return map_tensors(functools.partial(_as, kind), output) if isinstance(output, (tuple, list)) else output

    def __reduce_ex__(self, protocol: Any) -> Any:
        return plain(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> Weak:
        # Still weak, as the copy of a module that holds it, such as a cache of cosines, meets halves too.
        memo[id(self)] = clone = copy.deepcopy(plain(self), memo).as_subclass(type(self))
        return clone


class WeakBuffer(Weak):
    """One that is computed of buffers alone. Finite numbers of it are finite in half precision too, as those of masks."""


class WeakState(WeakBuffer):
    """Of a buffer that a forward pass sets anew, as a running mean: what it is averaged with, and carries no gradient, is
    widened."""


def weakly(tree: Any, half: torch.dtype) -> Any:
    """Return `tree` with plain float32 tensors in it weak, and tensors of other classes, such as DTensor, cast to `half`."""

    def weak(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype is not torch.float32:
            return tensor
        return tensor.as_subclass(Weak) if type(tensor) is torch.Tensor else tensor.to(half)

    return map_tensors(weak, tree)


def plain(tree: Any, dtype: torch.dtype | None = None) -> Any:
    """Return `tree` with plain tensors in place of weak ones, cast to `dtype` where that is given."""

    def strip(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, Weak):
            return tensor
        with without_subclasses():
            if dtype is None or tensor.dtype == dtype:
                return tensor.view_as(tensor)
            return halved(tensor, dtype) if isinstance(tensor, WeakBuffer) else tensor.to(dtype)

    return map_tensors(strip, tree)


def settled(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the arguments of `func` as it takes them, where weak tensors are among them: for modes, which come first."""
    half, up, _ = _settle(func, args, kwargs)
    if half is None:
        return args, kwargs
    with without_subclasses():
        return _cast(args, half, up, func), {key: _cast(value, half, up, func) for key, value in kwargs.items()}


def _settle(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[torch.dtype | None, bool, type[Weak] | None]:
    """Of a call: the half dtype that weak arguments meet, whether halves are widened to them instead, and what kind of weak
    tensor results; None: a plain one."""
    role = _ROLES.get(func)
    half: torch.dtype | None = None
    scalar: torch.dtype | None = None
    kind: type[Weak] | None = WeakState
    carries = False
    for value in (*args, *kwargs.values()) if kwargs else args:
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if not isinstance(each, torch.Tensor):
                continue
            if isinstance(each, Weak):
                if kind is not None and not issubclass(type(each), kind):
                    kind = WeakBuffer if isinstance(each, WeakBuffer) and kind is WeakState else Weak
            elif each.dtype in HALF_DTYPES:
                if each.dim():
                    half = each.dtype
                    carries = carries or each.requires_grad
                else:
                    scalar = each.dtype
            elif each.dtype in _WIDE or each.is_complex():
                kind = None
    if half is None and scalar is not None and role != "arithmetic":
        half = scalar
    if role == "float" or (role == "to" and any(_is_wide(each) for each in (*args, *kwargs.values()))):
        return None, False, None
    if half is None:
        return None, False, kind
    target = kwargs.get("out") if kwargs.get("out") is not None else args[0] if role == "written" else None
    if isinstance(target, Weak) or (isinstance(target, tuple) and any(isinstance(each, Weak) for each in target)):
        return half, True, kind if kwargs.get("out") is None else None
    if role in ("compared", "norm"):
        return half, True, None
    if kind is WeakState and role == "arithmetic" and not (carries and torch.is_grad_enabled()):
        return half, True, WeakState
    return half, False, None


def _is_wide(value: Any) -> bool:
    return isinstance(value, torch.dtype) and value in _WIDE


def _cast(value: Any, half: torch.dtype, up: bool, func: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)([_cast(each, half, up, func) for each in value]) if type(value) in (list, tuple) else value
    if not isinstance(value, torch.Tensor):
        return value
    if up:
        return value.float() if value.dtype in HALF_DTYPES else value
    if not isinstance(value, Weak) or (not value.dim() and _ROLES.get(func) == "arithmetic"):
        return value
    return halved(value, half) if isinstance(value, WeakBuffer) else value.to(half)


def _as(kind: type[Weak], tensor: torch.Tensor) -> torch.Tensor:
    return tensor.as_subclass(kind) if type(tensor) is torch.Tensor and tensor.dtype in _WIDE else tensor


class _OfAModule:
    """What a module holds, and holds that module weakly, so that it dies with its last reference."""

    _module: Any = None

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_module": None if self._module is None else self._module()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        module = state["_module"]
        self.__dict__.update(state, _module=None if module is None else weakref.ref(module))


class InPlaceOfForward(_OfAModule):
    """Base of what takes the place of the `forward` of a module, and not of hooks around it."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.__dict__.update(getattr(forward, "__dict__", {}))
        names = (name for name in functools.WRAPPER_ASSIGNMENTS if hasattr(forward, name))
        self.__dict__.update({name: getattr(forward, name) for name in names})
        self._module = None
        self._function: Callable[..., Any] = forward
        if isinstance(forward, MethodType) and isinstance(forward.__self__, nn.Module):
            self._module, self._function = weakref.ref(forward.__self__), forward.__func__

    @property
    def forward(self) -> Callable[..., Any]:
        """What it takes the place of."""
        return self._function if self._module is None else MethodType(self._function, self._module())

    __wrapped__ = forward


class ShownBuffers(_OfAModule):
    """The float buffers of one module, which its forward reads as weak tensors; at rest they are plain ones.

    names: of the buffers, in the module. half: the dtype of the weights around.
    """

    def __init__(self, module: nn.Module, names: Iterable[str], half: torch.dtype) -> None:
        self._module = weakref.ref(module)
        self._names, self._half = tuple(names), half
        self._inside = 0
        # Where a buffer is held, what is shown for it, and the buffer.
        self._shown: dict[str, tuple[dict[str, Any], torch.Tensor, torch.Tensor]] = {}
        self._set_anew: frozenset[str] = frozenset()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        if self._inside:  # a copy that is made inside of forward is at rest
            self._inside = 1
            self.leave()

    def enter(self) -> None:
        self._inside += 1
        module = self._module()
        if self._inside > 1 or module is None:
            return
        for name in self._names:
            # In the skeleton of a pipeline a buffer is an attribute.
            held = module._buffers if name in module._buffers else module.__dict__
            buffer = held.get(name)
            if buffer is None or buffer.dtype not in _WIDE or isinstance(buffer, Weak):
                continue
            if type(buffer) is torch.Tensor and buffer.layout is torch.strided:
                kind = WeakState if name in self._set_anew and module.training else WeakBuffer
                shown = buffer.as_subclass(kind)
            else:  # one without numbers, by which dtypes are found out beforehand, divided among ranks, or sparse
                shown = buffer.to(self._half)
            held[name] = shown
            self._shown[name] = held, shown, buffer

    def leave(self) -> None:
        self._inside -= 1
        if self._inside:
            return
        for name, (held, shown, buffer) in self._shown.items():
            now = held.get(name)
            if now is shown:
                held[name] = buffer
            elif now is not None:
                if now.dtype in HALF_DTYPES:
                    self._set_anew |= {name}
                held[name] = plain(now).to(buffer.dtype)
        self._shown.clear()


class WeakForward(InPlaceOfForward):
    """The forward of a module that shows it float buffers as weak tensors; of a model, also those of modules inside.

    whole: it is that of a model, which returns plain tensors.
    """

    def __init__(self, forward: Callable[..., Any], shown: Iterable[ShownBuffers], *, whole: bool) -> None:
        super().__init__(forward)
        self.shown, self._whole = tuple(shown), whole

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        for each in self.shown:
            each.enter()
        try:
            module = None if self._module is None else self._module()
            output = self._function(*args, **kwargs) if module is None else self._function(module, *args, **kwargs)
        finally:
            for each in self.shown:
                each.leave()
        return plain(output) if self._whole else output


def shown_too(models: Iterable[nn.Module], context: Callable[[], Any]) -> Callable[[], AbstractContextManager[Any]]:
    """Return `context`, of a backward pass, in which `models` read buffers as in their forward, for functions that
    `torch.utils.checkpoint` runs anew there. It is `context` itself where they read none so."""
    forwards = (model.forward for model in models)
    shown = tuple(each for forward in forwards if isinstance(forward, WeakForward) for each in forward.shown)

    return functools.partial(_showing, shown, context) if shown else context


@contextmanager
def _showing(shown: tuple[ShownBuffers, ...], context: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    for each in shown:
        each.enter()
    try:
        with context():
            yield
    finally:
        for each in shown:
            each.leave()


def settle_inputs(half: torch.dtype) -> Callable[[nn.Module, Any, Any], tuple[Any, Any]]:
    """Return a forward pre-hook, `with_kwargs`, that casts weak inputs to `half`, for what hands on inputs as new tensors."""

    def settle(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return plain(args, half), plain(kwargs, half)

    return settle


def read_weakly(model: nn.Module, half: torch.dtype, buffers: Iterable[str], *, returns: bool) -> None:
    """Have forwards of `model` read its `buffers`, by name, as weak tensors, in place; repeating it replaces what was.

    returns: whether modules in it return weak tensors, which the model then does not.
    """
    read_plainly(model)
    owners: dict[str, list[str]] = {}
    for name in buffers:
        owner, _, own = name.rpartition(".")
        owners.setdefault(owner, []).append(own)
    shown = {name: ShownBuffers(model.get_submodule(name), own, half) for name, own in owners.items()}
    for name, each in shown.items():
        if name:
            module = model.get_submodule(name)
            module.forward = WeakForward(module.forward, (each,), whole=False)
    if shown or returns:
        model.forward = WeakForward(model.forward, shown.values(), whole=True)


def read_plainly(model: nn.Module) -> None:
    """Undo `read_weakly`, in place."""
    for module in model.modules():
        wrapped = module.__dict__.get("forward")
        if isinstance(wrapped, WeakForward):
            del module.__dict__["forward"]
            if getattr(wrapped.forward, "__func__", None) is not type(module).forward:  # it had a forward of its own
                module.forward = wrapped.forward
