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

from booster.common.torch_internals.autograd_internals import graph_task, without_subclasses
from booster.common.torch_internals.tensor_internals import base_of, is_fake_kind, written_arguments
from booster.tensors.cast_regions import to_half
from booster.tensors.trees import HALF_DTYPES, map_tensors, tensors

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
        ["__setitem__ __iadd__ __isub__ __imul__ __itruediv__ __idiv__ __ipow__ __ifloordiv__ __imod__"]
        + [name for holder in _HOLDERS for name in dir(holder) if name.endswith("_") and not name.endswith("__")]
    ),
}
_ROLES: dict[Any, str] = {
    getattr(holder, name): role
    for role, names in _NAMES.items()
    for name in names.split()
    for holder in _HOLDERS
    if hasattr(holder, name)
}
_TENSOR: Any = torch.Tensor  # of which mypy takes getters for what they get
_ROLES |= {_TENSOR.data.__set__: "written", base_of: "itself", _TENSOR.grad.__get__: "itself"}


class WeakTensor(torch.Tensor):
    """A float32 tensor that is rounded to half precision where a torch function takes it together with halves.

    What is computed of weak tensors alone, or of them and integers, is weak again; with other float32 tensors, or by
    `.float()`, which asks for it, it is a plain float32 tensor. What is written to keeps its dtype, so that a sum of halves
    in a buffer is one of float32. Halves without dimensions decide nothing, as in torch.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        with without_subclasses():
            half, up, kind = _resolve_dtypes(func, args, kwargs)
            if half is not None:
                args, kwargs = _fitted(func, args, kwargs, half, up)
            output = func(*args, **kwargs)
            if _ROLES.get(func) == "itself":
                return output
            if half is not None and _ROLES.get(func) == "norm":
                return output.to(half)
            if kind is None:
                asked = _ROLES.get(func) in ("float", "to") and isinstance(output, WeakTensor)
                return output.view_as(output) if asked else output
            if isinstance(output, torch.Tensor):
                return _as(kind, output)
            return map_tensors(functools.partial(_as, kind), output) if isinstance(output, (tuple, list)) else output

    def __reduce_ex__(self, protocol: Any) -> Any:
        return strip_weak(self).__reduce_ex__(protocol)

    def __deepcopy__(self, memo: dict[int, Any]) -> WeakTensor:
        # Still weak, as the copy of a module that holds it, such as a cache of cosines, meets halves too.
        memo[id(self)] = clone = copy.deepcopy(strip_weak(self), memo).as_subclass(type(self))
        return clone


class WeakBufferTensor(WeakTensor):
    """One that is computed of buffers alone. Finite numbers of it are finite in half precision too, as those of masks."""


class WeakStateTensor(WeakBufferTensor):
    """Of a buffer that a forward pass sets anew, as a running mean: what it is averaged with, and carries no gradient, is
    widened."""


def as_weak(tree: Any, half: torch.dtype) -> Any:
    """Return `tree` with plain float32 tensors in it weak, and tensors of other classes, such as DTensor, cast to `half`."""

    def weak(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype is not torch.float32:
            return tensor
        return _as(WeakTensor, tensor) if type(tensor) is torch.Tensor else _rounded(tensor, half)

    return map_tensors(weak, tree)


def _rounded(tensor: torch.Tensor, half: torch.dtype) -> torch.Tensor:
    """What is no plain tensor, in `half`: one of another class, such as a DTensor, or one that has no numbers."""
    if torch.compiler.is_exporting() and is_fake_kind(type(tensor)):
        raise RuntimeError(
            "torch.export.export with strict=False, its default, does not see where float32 buffers, and what modules kept in "
            "float32 return, are rounded to the half precision of the weights; pass strict=True"
        )
    return tensor.to(half)


def strip_weak(tree: Any, dtype: torch.dtype | None = None) -> Any:
    """Return `tree` with plain tensors in place of weak ones, cast to `dtype` where that is given."""

    def strip(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, WeakTensor):
            return tensor
        with without_subclasses():
            if dtype is None or tensor.dtype == dtype:
                return tensor.view_as(tensor)
            return to_half(tensor, dtype) if isinstance(tensor, WeakBufferTensor) else tensor.to(dtype)

    return map_tensors(strip, tree)


def cast_weak_args(func: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the arguments of `func` as it takes them, where weak tensors are among them: for modes, which come first."""
    half, up, _ = _resolve_dtypes(func, args, kwargs)
    if half is None:
        return args, kwargs
    with without_subclasses():
        return _fitted(func, args, kwargs, half, up)


def _resolve_dtypes(
    func: Any, args: Any, kwargs: dict[str, Any]
) -> tuple[torch.dtype | None, bool, type[WeakTensor] | None]:
    """Of a call: the half dtype that weak arguments meet, whether halves are widened to them instead, and what kind of weak
    tensor results; None: a plain one."""
    role = _ROLES.get(func)
    half: torch.dtype | None = None
    scalar: torch.dtype | None = None
    kind: type[WeakTensor] | None = WeakStateTensor
    carries = False
    for value in (*args, *kwargs.values()) if kwargs else args:
        for each in value if isinstance(value, (list, tuple)) else (value,):
            if not isinstance(each, torch.Tensor):
                continue
            if isinstance(each, WeakTensor):
                if kind is not None and not issubclass(type(each), kind):
                    mixes = isinstance(each, WeakBufferTensor) and kind is WeakStateTensor
                    kind = WeakBufferTensor if mixes else WeakTensor
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
    given = (*args, *kwargs.values())
    if role == "float" or (role == "to" and any(isinstance(each, torch.dtype) and each in _WIDE for each in given)):
        return None, False, None  # the user asks for float32: the result is no longer weak
    if half is None:
        return None, False, kind
    written = _written(func)
    if written and any(
        isinstance(each, WeakTensor) for each in tensors([_argument(place, args, kwargs) for place in written])
    ):
        return half, True, kind
    if any(isinstance(each, WeakTensor) for each in tensors(kwargs.get("out"))):
        return half, True, None
    if role in ("compared", "norm"):
        return half, True, None
    if kind is WeakStateTensor and role == "arithmetic" and not (carries and torch.is_grad_enabled()):
        return half, True, WeakStateTensor
    return half, False, None


def _written(func: Any) -> tuple[int | str, ...]:
    """Which arguments `func` writes to, besides `out`, by position or name."""
    if _ROLES.get(func) == "written":
        return (0,)
    return () if func in _ROLES else written_arguments(func)


def _argument(place: int | str, args: Any, kwargs: dict[str, Any]) -> Any:
    if isinstance(place, str):
        return kwargs.get(place)
    return args[place] if place < len(args) else None


def _fitted(func: Any, args: Any, kwargs: dict[str, Any], half: torch.dtype, up: bool) -> tuple[Any, dict[str, Any]]:
    """The arguments of `func` cast, but those of float32 that it writes to, as `out`."""
    left = (*_written(func), "out") if up else ()
    args = tuple([each if place in left else _cast(each, half, up, func) for place, each in enumerate(args)])
    return args, {key: value if key in left else _cast(value, half, up, func) for key, value in kwargs.items()}


def _cast(value: Any, half: torch.dtype, up: bool, func: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return type(value)([_cast(each, half, up, func) for each in value]) if type(value) in (list, tuple) else value
    if not isinstance(value, torch.Tensor):
        return value
    if up:
        return value.float() if value.dtype in HALF_DTYPES else value
    if not isinstance(value, WeakTensor) or (not value.dim() and _ROLES.get(func) == "arithmetic"):
        return value
    return to_half(value, half) if isinstance(value, WeakBufferTensor) else value.to(half)


def _as(kind: type[WeakTensor], tensor: torch.Tensor) -> torch.Tensor:
    if type(tensor) is not torch.Tensor or tensor.dtype not in _WIDE:
        return tensor
    # torch.compile takes a subclass of a tensor for that tensor itself, and a container of it for one that did not change.
    return (tensor.view_as(tensor) if torch.compiler.is_compiling() else tensor).as_subclass(kind)


class ModuleReference:
    """Base of objects that a module holds and that refer to it weakly, so that it dies with its last reference."""

    def __getstate__(self) -> tuple[dict[str, Any], dict[str, Any]]:
        held = dict(self.__dict__)
        referents = {name: held.pop(name)() for name, value in self.__dict__.items() if isinstance(value, weakref.ref)}
        return held, referents

    def __setstate__(self, state: tuple[dict[str, Any], dict[str, Any]]) -> None:
        held, referents = state
        self.__dict__.update(held)
        for name, value in referents.items():
            self.__dict__[name] = None if value is None else weakref.ref(value)


class ForwardProxy(ModuleReference):
    """Base of proxies for the `forward` of a module, which run inside of its hooks.

    depth: whether a model runs that reads weakly; None where this forward returns no weak tensor.
    owner: the module, for proxies that look at it.
    """

    depth: ForwardDepth | None = None
    _module: Any  # of a method, of which `_function` is the function; else None
    _function: Callable[..., Any]

    def __init__(self, forward: Callable[..., Any], owner: nn.Module | None = None) -> None:
        self.__dict__.update(getattr(forward, "__dict__", {}))
        names = (name for name in functools.WRAPPER_ASSIGNMENTS if hasattr(forward, name))
        self.__dict__.update({name: getattr(forward, name) for name in names})
        self._owner: Any = None if owner is None else weakref.ref(owner)
        self.put_around(forward)

    def put_around(self, forward: Callable[..., Any]) -> None:
        """Be the proxy of `forward` from now on."""
        self._module, self._function = None, forward
        if isinstance(forward, MethodType) and isinstance(forward.__self__, nn.Module):
            self._module, self._function = weakref.ref(forward.__self__), forward.__func__

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """Call the forward of the module."""
        module = None if self._module is None else self._module()
        return self._function(*args, **kwargs) if module is None else self._function(module, *args, **kwargs)

    def belong_to(self, module: nn.Module) -> None:
        """Be the proxy of the forward of `module` from now on."""
        self._owner = self._owner and weakref.ref(module)

    @property
    def forward(self) -> Callable[..., Any]:
        """The forward of the module."""
        return self._function if self._module is None else MethodType(self._function, self._module())

    __wrapped__ = forward

    @property
    def __code__(self) -> Any:  # by which torch.export names inputs
        return self._function.__code__

    @property
    def __globals__(self) -> Any:  # by which torch.jit.script compiles the source of a forward, without what is here
        raise AttributeError(
            f"torch.jit.script compiles the source of {getattr(self, '__qualname__', 'forward')}, which does not say what the "
            "precision computes in float32; use torch.export.export, or script the model before boost"
        )


class ForwardDepth:
    """How many forwards run, one inside another, of a model that reads weakly: its modules return weak tensors there alone.

    Models that share modules share it.
    """

    def __init__(self) -> None:
        self.count = 0

    def __deepcopy__(self, memo: dict[int, Any]) -> ForwardDepth:
        memo[id(self)] = clone = ForwardDepth()  # a copy that is made inside of forward is at rest
        return clone

    def __reduce__(self) -> Any:
        return ForwardDepth, ()

    def runs(self) -> bool:
        # A backward pass runs checkpointed modules again, where they return what they did.
        return self.count > 0 or (not torch.compiler.is_compiling() and graph_task() != -1)


class WeakBuffers(ModuleReference):
    """The float buffers of one module, which its forward reads as weak tensors; at rest they are plain ones.

    names: of the buffers, in the module. half: the dtype of the weights around.
    """

    def __init__(self, module: nn.Module, names: Iterable[str], half: torch.dtype) -> None:
        self._module: Any = weakref.ref(module)
        self._names, self._half = tuple(names), half
        self._inside = 0
        # Where a buffer is held, what is shown for it, and the buffer.
        self._shown: dict[str, tuple[dict[str, Any], torch.Tensor, torch.Tensor]] = {}
        self._set_anew: frozenset[str] = frozenset()

    def __setstate__(self, state: tuple[dict[str, Any], dict[str, Any]]) -> None:
        super().__setstate__(state)
        if self._inside:  # a copy that is made inside of forward is at rest
            self._inside = 1
            self.exit()

    def enter(self) -> None:
        self._inside += 1
        module = self._module()
        # Only the outermost forward shows and restores: an inner one, as of a recomputed block, finds weak tensors there.
        if self._inside > 1 or module is None:
            return
        for name in self._names:
            # In the skeleton of a pipeline a buffer is an attribute.
            held = module._buffers if name in module._buffers else module.__dict__
            buffer = held.get(name)
            if buffer is None or buffer.dtype not in _WIDE or isinstance(buffer, WeakTensor):
                continue
            if type(buffer) is torch.Tensor and buffer.layout is torch.strided:
                kind = WeakStateTensor if name in self._set_anew and module.training else WeakBufferTensor
                shown: torch.Tensor = buffer.as_subclass(kind)
            else:  # one without numbers, by which dtypes are found out beforehand, divided among ranks, or sparse
                shown = _rounded(buffer, self._half)
            held[name] = shown
            self._shown[name] = held, shown, buffer

    def exit(self) -> None:
        self._inside -= 1
        if self._inside:
            return
        for name, (held, shown, buffer) in self._shown.items():
            now = held.get(name)
            if now is shown:
                held[name] = buffer
            elif now is not None:
                # A forward that sets the buffer anew, as a running mean, averaged it with halves: next time halves are
                # widened for it.
                plain = strip_weak(now)  # torch.compile asks the class of a weak tensor for its dtype, without an end
                if plain.dtype in HALF_DTYPES:
                    self._set_anew |= {name}
                held[name] = plain.to(buffer.dtype)
        self._shown.clear()


class WeakForward(ForwardProxy):
    """The forward of a module that reads float buffers as weak tensors, or has such modules in it, or those that return weak
    tensors. It returns plain ones, but inside of another.

    shown: what is read. whole: it is that of a model.
    """

    depth: ForwardDepth

    def __init__(
        self, forward: Callable[..., Any], shown: Iterable[WeakBuffers], depth: ForwardDepth, *, whole: bool
    ) -> None:
        super().__init__(forward)
        self.shown, self.depth, self._whole = tuple(shown), depth, whole

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = None if self._module is None else self._module()
        if not self._whole and self.depth.count:
            return self._function(*args, **kwargs) if module is None else self._function(module, *args, **kwargs)
        again = not self._whole and self.depth.runs()  # where a backward pass runs it again
        self.enter()
        try:
            output = self._function(*args, **kwargs) if module is None else self._function(module, *args, **kwargs)
        finally:
            self.exit()
        return output if again else strip_weak(output)

    def enter(self) -> None:
        self.depth.count += 1
        for place, each in enumerate(self.shown):
            try:
                each.enter()
            except BaseException:
                self.exit(place + 1)
                raise

    def exit(self, count: int | None = None) -> None:
        for each in self.shown[:count]:
            each.exit()
        self.depth.count -= 1


def reading_weakly(
    models: Iterable[nn.Module], context: Callable[[], AbstractContextManager[Any]]
) -> Callable[[], AbstractContextManager[Any]]:
    """Return `context` in which `models` read as in their forward, for what runs outside of it: backward passes, in which
    `torch.utils.checkpoint` runs functions anew, and other methods."""
    forwards = [model.forward for model in models if isinstance(model.forward, WeakForward)]
    # It is `context` itself where they read nothing weakly.
    return functools.partial(_reading, forwards, context) if forwards else context


def hooks_read_weakly(model: nn.Module) -> bool:
    """Return whether hooks run before the forward of `model`, which shows its own buffers as weak tensors."""
    forward = model.forward if model._forward_pre_hooks else None
    return isinstance(forward, WeakForward) and any(each._module() is model for each in forward.shown)


@contextmanager
def _reading(forwards: list[WeakForward], context: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    for each in forwards:
        each.enter()
    try:
        with context():
            yield
    finally:
        for each in forwards:
            each.exit()


def cast_weak_inputs(half: torch.dtype) -> Callable[[nn.Module, Any, Any], tuple[Any, Any]]:
    """Return a forward pre-hook, `with_kwargs`, that casts weak inputs to `half`, for what hands on inputs as new tensors."""

    def cast_inputs(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return strip_weak(args, half), strip_weak(kwargs, half)

    return cast_inputs


def forward_depth_of(model: nn.Module) -> ForwardDepth:
    """Return the `ForwardDepth` of `model`: that of a model that reads weakly and shares a module with it, or a new one."""
    for module in model.modules():
        forward = module.__dict__.get("forward")
        if isinstance(forward, ForwardProxy) and forward.depth is not None:
            return forward.depth
    return ForwardDepth()


def install_weak_buffers(
    model: nn.Module, half: torch.dtype, buffers: Iterable[str], depth: ForwardDepth, *, returning: Iterable[str]
) -> None:
    """Have forwards of `model` read its `buffers`, by name, as weak tensors, in place; `remove_weak_buffers` comes before.

    returning: names of the modules in it that return weak tensors.
    """
    owners: dict[str, list[str]] = {}
    for name in buffers:
        owner, _, own = name.rpartition(".")
        owners.setdefault(owner, []).append(own)
    shown = {name: WeakBuffers(model.get_submodule(name), own, half) for name, own in owners.items()}
    returning = frozenset(returning)
    for name, module in list(model.named_modules()):
        within = f"{name}." if name else ""
        read = [each for key, each in shown.items() if key == name or key.startswith(within)]
        holds = read or any(key.startswith(within) for key in returning)
        is_list = getattr(module.forward, "__func__", None) is nn.Module.forward
        if holds and name not in returning and not is_list:
            module.forward = WeakForward(module.forward, read, depth, whole=not name)


def remove_weak_buffers(model: nn.Module) -> None:
    """Undo `install_weak_buffers`, in place."""
    for module in model.modules():
        remove_forward(module, WeakForward)


def remove_forward(module: nn.Module, kind: type[ForwardProxy]) -> None:
    """Take a forward of the class `kind`, if `module` has one, off it; what was inside is there again."""
    wrapped = module.__dict__.get("forward")
    if isinstance(wrapped, kind):
        del module.__dict__["forward"]
        if getattr(wrapped.forward, "__func__", None) is not type(module).forward:  # the user had replaced its forward
            module.forward = wrapped.forward
