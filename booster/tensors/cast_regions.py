"""Regions of one thread in which torch casts: what a precision enters, and how it leaves those that surround it.

Two things cast: `torch.autocast`, and torch function modes of this library, which are thread-local too. What else a context
changes, such as what products read, it says by `surrounding`. A model computes in its own precision wherever it is called:
inside another model, a criterion, `b.autocast()` or a session of `apex_amp`. So whoever calls a precision's contexts
does it through `region`, and a precision need not know that there are others.

What goes in and comes out there is cast by `cast_floats`, whatever container it comes in.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch.overrides import TorchFunctionMode

from booster.common.torch_internals.autograd_internals import engine_backward, function_modes, num_function_modes
from booster.tensors.trees import HALF_DTYPES, Writes, map_tensors

Function = Callable[..., Any]
Rule = Callable[["CastFunctions", Function, tuple[Any, ...], dict[str, Any]], Any]
Table = Mapping[Function, Rule]

_CASTABLE = HALF_DTYPES | {torch.float32}
_CASTABLE_OR_DOUBLE = _CASTABLE | {torch.float64}
_DEVICE_TYPES = ("cpu", "cuda")

Tensors = torch.Tensor | Sequence[torch.Tensor]
Leave = Callable[[], AbstractContextManager[Any]]
_LEAVES: ContextVar[tuple[Leave, ...]] = ContextVar("what leaves the regions around, outermost first", default=())
_SHARED: ContextVar[bool] = ContextVar(
    "whether regions here go on with the half copies of weights around", default=False
)


class CastMode(TorchFunctionMode):
    """Base of the torch function modes that change the dtype in which functions run. enabled: while False it does nothing.

    Thread-local, as every torch function mode is; make a new one for every region.
    """

    enabled = True


class CastFunctions(CastMode):
    """While active, torch functions of `table` are called as their rules say; enter it inside `torch.autocast`.

    Out of its reach is what Python composites such as `F.multi_head_attention_forward` call inside; there autocast alone
    decides. owner: what tells the modes of one strategy from those of another.
    """

    def __init__(self, table: Table, device_type: str, owner: Any) -> None:
        super().__init__()
        self.table = table
        self.device_type = device_type
        self.owner = owner

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        rule = self.table.get(func)
        if rule is None or not self.enabled:
            return func(*args, **(kwargs or {}))
        return rule(self, func, args, kwargs or {})


_MAKE_FLOATS = {
    torch.bartlett_window,
    torch.blackman_window,
    torch.empty,
    torch.empty_permuted,
    torch.empty_strided,
    torch.eye,
    torch.fft.fftfreq,
    torch.fft.rfftfreq,
    torch.hamming_window,
    torch.hann_window,
    torch.kaiser_window,
    torch.linspace,
    torch.logspace,
    torch.ones,
    torch.rand,
    torch.randn,
    torch.zeros,
}
_MAKE_BY_VALUE = {torch.arange, torch.as_tensor, torch.asarray, torch.full, torch.scalar_tensor, torch.tensor}


class NewTensors(CastMode):
    """While active, torch functions that make tensors make them in `dtype` where torch would make float32 by default.

    What `torch.set_default_dtype` does, for one thread. Integers, and copies of arrays and tensors, keep their dtype. It stays
    active in `torch.autograd.backward`, for activations that are recomputed.
    """

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self._dtype = dtype

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.autograd.backward:  # which a mode otherwise leaves
            with self:
                return run_engine(*args, **kwargs)
        if self.enabled and (func in _MAKE_FLOATS or func in _MAKE_BY_VALUE) and self._is_open(func, args, kwargs):
            kwargs = {**kwargs, "dtype": self._dtype}
        return func(*args, **kwargs)

    def _is_open(self, func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        """Whether the call leaves the dtype to torch, which would take float32."""
        given = kwargs.get("dtype") is not None or kwargs.get("out") is not None
        if given or torch.get_default_dtype() != torch.float32:
            return False
        if func in _MAKE_FLOATS:
            return True
        values = [*args, *(kwargs.get(name) for name in ("data", "obj", "start", "end", "step", "fill_value", "s"))]
        return not any(hasattr(value, "dtype") for value in values) and func(*args, **kwargs).dtype == torch.float32


def region(make_context: Callable[[], AbstractContextManager[Any]]) -> AbstractContextManager[Any]:
    """A context for one forward or backward pass under the context that is made inside it, and under nothing that surrounds
    it. make_context: `forward_context` or `backward_context` of a precision."""
    compiling = torch.compiler.is_compiling()
    if not compiling and not _SHARED.get():
        # Torch drops the half copies of weights when the outermost autocast ends, which may be the user's around a loop; the
        # weights may have been written to since. Without one there are none to drop.
        torch.clear_autocast_cache()
    surrounded = torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda")
    # The common case costs two flags and no context.
    if surrounded or (num_function_modes() and _active(CastMode)):
        return _left(make_context)
    if not compiling and _LEAVES.get():
        return _left(make_context)
    return make_context()  # as it is, because torch.compile traces it


@contextmanager
def nest_contexts(outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> Iterator[None]:
    """Both contexts, as one."""
    # A generator, because torch.compile traces it; it does not trace an __enter__ that calls autocast's.
    with outer, inner:
        yield


@contextmanager
def sharing_weights() -> Iterator[None]:
    """Inside, regions share the half copies of weights that autocast made around them, which must not be written meanwhile."""
    before = _SHARED.set(True)
    try:
        yield
    finally:
        _SHARED.reset(before)


@contextmanager
def surrounding(leave: Leave) -> Iterator[None]:
    """Note, for as long as a precision's context changes anything but casts, what makes a context in which it does not."""
    if torch.compiler.is_compiling():  # the compiler knows no context variables
        yield
        return
    before = _LEAVES.set((*_LEAVES.get(), leave))
    try:
        yield
    finally:
        _LEAVES.reset(before)


@contextmanager
def outside() -> Iterator[None]:
    """Inside, torch functions run as if no precision surrounded them, in this thread."""
    with ExitStack() as left:
        if not torch.compiler.is_compiling():
            leaves = _LEAVES.get()
            before = _LEAVES.set(())
            left.callback(_LEAVES.reset, before)
            for leave in reversed(leaves):
                left.enter_context(leave())
        left.enter_context(_disabled(_active(CastMode)))
        yield


@contextmanager
def disable_casts() -> Iterator[None]:
    """Inside, torch functions run without `CastFunctions`, and without autocast where there were any, in this thread."""
    modes = active_casts()
    if not modes:
        yield
        return
    with _disabled(modes):
        yield


def casts_as_now() -> Callable[[], AbstractContextManager[None]]:
    """What makes a context, for use inside `disable_casts`, in which functions are cast as they are now."""
    modes = active_casts()

    @contextmanager
    def cast_again() -> Iterator[None]:
        for mode in modes:
            mode.enabled = True
        try:
            if modes:
                with torch.autocast(modes[-1].device_type, torch.float16):
                    yield
            else:
                yield
        finally:
            for mode in modes:
                mode.enabled = False

    return cast_again


def active_casts() -> list[CastFunctions]:
    """The `CastFunctions` of this thread that cast at present, outermost first."""
    return _active(CastFunctions)


def holds_casts() -> bool:
    """Whether this thread is inside the region of some `CastFunctions`, casting at present or not."""
    return any(isinstance(mode, CastFunctions) for mode in function_modes())


def disabled(kind: type[CastMode]) -> AbstractContextManager[Any]:
    """A context in which the modes of `kind` of this thread do nothing."""
    modes = _active(kind)
    return _switched_off(modes) if modes else nullcontext()


def run_engine(
    tensors: Tensors,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: None = None,
    inputs: Any = None,
) -> None:
    """`torch.autograd.backward`, which takes torch function modes off before it starts the engine; this does not."""
    roots = (tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors)
    given = (grad_tensors,) if grad_tensors is None or isinstance(grad_tensors, torch.Tensor) else tuple(grad_tensors)
    given = given if len(given) == len(roots) else (None,) * len(roots)
    if inputs is not None:
        inputs = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
        if not inputs:
            raise ValueError("inputs is empty; name the tensors to accumulate gradients into, or pass None for all")
    grads = tuple(
        torch.ones_like(root, requires_grad=False) if grad is None and root.requires_grad else grad
        for root, grad in zip(roots, given, strict=True)
    )
    # Activation checkpointing then recomputes under the modes that the forward pass had.
    engine_backward(
        roots,
        grads,
        create_graph if retain_graph is None else retain_graph,
        create_graph,
        inputs or (),
        allow_unreachable=True,
        accumulate_grad=True,
    )


# ---------------------------------------------------------------------- inside

_Mode = TypeVar("_Mode", bound=CastMode)


@contextmanager
def _left(make_context: Callable[[], AbstractContextManager[Any]]) -> Iterator[None]:
    with outside(), make_context():
        yield


def _active(kind: type[_Mode]) -> list[_Mode]:
    return [mode for mode in function_modes() if isinstance(mode, kind) and mode.enabled]


@contextmanager
def _disabled(modes: Sequence[CastMode]) -> Iterator[None]:
    with ExitStack() as off:
        for device_type in _DEVICE_TYPES:
            if torch.is_autocast_enabled(device_type):
                off.enter_context(torch.autocast(device_type, enabled=False))
        off.enter_context(_switched_off(modes))
        yield


@contextmanager
def _switched_off(modes: Sequence[CastMode]) -> Iterator[None]:
    for mode in modes:
        mode.enabled = False
    try:
        yield
    finally:
        for mode in modes:
            mode.enabled = True


def to_half(tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return `tensor` in the half `dtype`. Finite numbers stay finite, such as `finfo.min` in a mask."""
    if tensor.dtype is dtype or tensor.dtype is torch.float16:  # bfloat16 holds its largest numbers
        return tensor.to(dtype)
    most = torch.finfo(dtype).max
    return torch.where(tensor.isinf(), tensor, tensor.clamp(-most, most)).to(dtype)


def cast_inputs(tree: Any, dtype: torch.dtype | None) -> Any:
    """As `cast_floats`, for what a user gives: to a half `dtype` by `to_half`."""
    if dtype not in HALF_DTYPES:
        return cast_floats(tree, dtype)
    if type(tree) is tuple and len(tree) == 1 and isinstance(tree[0], torch.Tensor):  # as arguments nearly always are
        own = tree[0].dtype
        if own == dtype or own not in _CASTABLE:
            return tree
        if own is torch.float32:  # as in `to_half`, which would be one more call in every forward pass
            most, wide = torch.finfo(dtype).max, tree[0]
            return (torch.where(wide.isinf(), wide, wide.clamp(-most, most)).to(dtype),)

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return to_half(tensor, dtype) if tensor.dtype in _CASTABLE and tensor.dtype != dtype else tensor

    return map_tensors(cast, tree)


def cast_noting_writes(cast: Callable[[Any], Any], args: Any, kwargs: Any) -> tuple[Any, Any, Writes | None]:
    """Return arguments of a function as `cast` makes them, and what brings its writes to them back; None: nothing to bring."""
    if torch.compiler.is_compiling():  # which traces no count of writes
        return cast(args), cast(kwargs), None
    # Inference tensors count no writes.
    with torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext():
        new = cast(args), cast(kwargs)
    return *new, None if new[0] is args and new[1] is kwargs else Writes((args, kwargs), new)


def cast_floats(
    tree: Any, dtype: torch.dtype | None, *, float64: bool = False, instead: Callable[[Any], Any] | None = None
) -> Any:
    """Cast every float16, bfloat16 and float32 tensor in `tree` to `dtype`; all else stays.

    tree: see `booster.tensors.trees`. dtype: None returns `tree` itself. float64: cast those tensors too. instead: see
    `map_tensors`.
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
            # A container in which no tensor changes is returned as the same object.
            return tree if all(map(operator.is_, new, tree)) else tuple(new)
    if isinstance(tree, torch.Tensor):
        own = tree.dtype
        return tree.to(dtype) if own in castable and own != dtype else tree

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.dtype in castable and tensor.dtype != dtype else tensor

    return map_tensors(cast, tree, instead=instead)
