"""The casts of O1: which functions run in which dtype, those that the user registers or decorates, and where O1 casts at all.

autocast casts matrix products and convolutions to half on every device. On a CPU it leaves most of apex's float32 functions in
half, and nowhere does it bring the operands of a few to one dtype. The names are those of apex's lists; a rule is called by a
torch function mode, `CastFunctions`, with the function and its arguments. A mode does not see every function of torch by the
name that was called, so `dispatched` says which one it sees. Functions of other modules are replaced, once, by one that casts
as the innermost O1 region at the call says.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import ModuleType
from typing import Any, Literal, TypeVar

import torch
from torch.nn import functional as F
from torch.overrides import get_testing_overrides

from booster.common import arguments
from booster.mixed_precision.half_products.product_choice import HalfProducts
from booster.tensors.cast_regions import (
    CastFunctions,
    Function,
    Rule,
    Table,
    active_casts,
    cast_floats,
    disable_casts,
    holds_casts,
    nest_contexts,
    run_engine,
)
from booster.tensors.trees import HALF_DTYPES, tensors

Arguments = tuple[Any, ...]
Keywords = dict[str, Any]


def _names(text: str) -> list[str]:
    return text.split()


FLOAT32_FUNCTIONAL = _names(
    "interpolate grid_sample softplus softmin log_softmax softmax gelu layer_norm group_norm local_response_norm normalize "
    "cosine_similarity poisson_nll_loss cosine_embedding_loss cross_entropy hinge_embedding_loss kl_div l1_loss mse_loss "
    "margin_ranking_loss multilabel_margin_loss multilabel_soft_margin_loss multi_margin_loss nll_loss "
    "binary_cross_entropy_with_logits smooth_l1_loss soft_margin_loss triplet_margin_loss ctc_loss gaussian_nll_loss"
)
FLOAT32_TORCH = _names(
    "acos asin cosh erfinv exp expm1 log log10 log2 reciprocal rsqrt sinh tan pow cumprod cumsum dist norm prod std sum var "
    "renorm"
)
FLOAT32_TENSOR = _names("__pow__ __ipow__ __rpow__ cpu")
# autocast leaves these alone on a CPU, or everywhere.
HALF_TORCH = _names("_grouped_mm mv addmv addr rnn_tanh_cell rnn_relu_cell lstm_cell gru_cell")
# These want operands of one dtype: float32 if any is.
WIDEST_TORCH = _names("addcdiv addcmul atan2 bilinear cross dot equal")
# Their other arguments are cast to the dtype of the first, which they write to.
IN_PLACE = _names("addmm_ addmv_ addr_ addbmm_ baddbmm_ addcdiv_ addcmul_ atan2_")
# Whole recurrent layers have no half kernel on a CPU.
RECURRENT_TORCH = _names("rnn_tanh rnn_relu lstm gru")


def make_table(device_type: str) -> dict[Function, Rule]:
    """The rules for one kind of device."""
    float32 = [getattr(F, name) for name in FLOAT32_FUNCTIONAL]
    float32 += [getattr(torch.Tensor, name) for name in FLOAT32_TENSOR]
    table: dict[Function, Rule] = dict.fromkeys(_torch_and_tensor(HALF_TORCH), as_half)
    table |= dict.fromkeys([*_torch_and_tensor(WIDEST_TORCH), F.bilinear], as_widest)
    table |= dict.fromkeys([*float32, *_torch_and_tensor(FLOAT32_TORCH)], as_float32)
    table |= dict.fromkeys(_torch_and_tensor(IN_PLACE), _as_self)
    for name in FLOAT32_TORCH:
        if (method := getattr(torch.Tensor, f"{name}_", None)) is not None:
            table[method] = _refusing_half(f"Cannot call in-place method {name}_ on fp16 Tensors.")
        if (function := getattr(torch, f"{name}_", None)) is not None:
            table[function] = _refusing_half(f"Cannot call in-place function {name}_ with fp16 arguments.")
    table[F.binary_cross_entropy] = _binary_cross_entropy
    table[torch.Tensor.backward] = _backward
    table[torch.autograd.backward] = _engine
    if device_type == "cpu":
        table |= dict.fromkeys([getattr(torch, name) for name in RECURRENT_TORCH], _recurrent_on_cpu)
    return table


def _torch_and_tensor(names: Iterable[str]) -> Iterator[Callable[..., Any]]:
    for name in names:
        for holder in (torch, torch.Tensor):
            if hasattr(holder, name):
                yield getattr(holder, name)


def as_float32(mode: Any, func: Function, args: Arguments, kwargs: Keywords) -> Any:
    """Half arguments become float32."""
    wide = [arg.float() if isinstance(arg, torch.Tensor) and arg.dtype in HALF_DTYPES else arg for arg in args]
    if kwargs:
        kwargs = {key: value.float() if _is_half(value) else value for key, value in kwargs.items()}
    return func(*wide, **kwargs)


def as_half(mode: Any, func: Function, args: Arguments, kwargs: Keywords) -> Any:
    """Float32 arguments become float16, also in tuples and lists."""
    return func(*cast_floats(args, torch.float16), **cast_floats(kwargs, torch.float16))


def as_widest(mode: Any, func: Function, args: Arguments, kwargs: Keywords) -> Any:
    """Half arguments become float32 if another argument is."""
    dtypes = {value.dtype for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)}
    if torch.float32 in dtypes and dtypes & HALF_DTYPES:
        return as_float32(mode, func, args, kwargs)
    return func(*args, **kwargs)


def _as_self(mode: CastFunctions, func: Function, args: Arguments, kwargs: Keywords) -> Any:
    dtype = args[0].dtype if args and isinstance(args[0], torch.Tensor) and args[0].is_floating_point() else None
    with torch.autocast(mode.device_type, enabled=False):
        return func(*cast_floats(args, dtype), **cast_floats(kwargs, dtype))


def _refusing_half(reason: str) -> Rule:
    def rule(mode: CastFunctions, func: Function, args: Arguments, kwargs: Keywords) -> Any:
        if args and isinstance(args[0], torch.Tensor) and args[0].dtype == torch.float16:
            raise NotImplementedError(
                f"{reason} It would have to run in float32; use the form that returns a new tensor"
            )
        return func(*args, **kwargs)

    return rule


def _binary_cross_entropy(mode: CastFunctions, func: Function, args: Arguments, kwargs: Keywords) -> Any:
    if any(_is_half(value) for value in (*args, *kwargs.values())):
        raise NotImplementedError(
            "amp does not work out-of-the-box with `F.binary_cross_entropy` or `torch.nn.BCELoss.` It requires that the "
            "output of the previous function be already a FloatTensor. Leave out the sigmoid and use "
            "`binary_cross_entropy_with_logits` or `torch.nn.BCEWithLogitsLoss`, which run in float32 by themselves"
        )
    with torch.autocast(mode.device_type, enabled=False):  # CUDA autocast refuses float32 too
        return func(*args, **kwargs)


def _recurrent_on_cpu(mode: CastFunctions, func: Function, args: Arguments, kwargs: Keywords) -> Any:
    with torch.autocast("cpu", enabled=False):
        return func(*cast_floats(args, torch.float32), **cast_floats(kwargs, torch.float32))


def _engine(mode: CastFunctions, func: Function, args: Arguments, kwargs: Keywords) -> Any:
    """`torch.autograd.backward`, with the casts on for activations that are recomputed."""
    with mode:
        return run_engine(*args, **kwargs)


def _backward(mode: CastFunctions, func: Function, args: Arguments, kwargs: Keywords) -> Any:
    """`loss.backward()`, likewise."""

    def run(
        loss: torch.Tensor,
        gradient: torch.Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: Any = None,
    ) -> None:
        with mode:
            torch.autograd.backward(loss, gradient, retain_graph, create_graph, inputs=inputs)

    return run(*args, **kwargs)


def _is_half(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype in HALF_DTYPES


# Python functions and operators that call another function before anything is dispatched.
_CALLS: dict[Any, tuple[Callable[..., Any], ...]] = {
    F.sigmoid: (torch.Tensor.sigmoid,),
    F.tanh: (torch.Tensor.tanh,),
    F.upsample: (F.interpolate,),
}
_OPERATORS = {
    **{f"__{name}__": name for name in ("add", "mul", "sub", "div", "matmul", "ge", "gt", "le", "lt", "ne")},
    **{f"__i{name}__": f"{name}_" for name in ("add", "mul", "sub", "div")},
    "__radd__": "add",
    "__rmul__": "mul",
    "__truediv__": "div",
    "__mod__": "remainder",
    "__itruediv__": "div_",
    "__ifloordiv__": "floor_divide_",
    "__imod__": "remainder_",
}


def dispatched(module: Any, name: str) -> tuple[Callable[..., Any], ...]:
    """What a mode is given where `module.name` of torch is called."""
    function = getattr(module, name)
    if module is torch.Tensor and name in _OPERATORS:
        return (getattr(torch.Tensor, _OPERATORS[name]),)
    if function in _CALLS:
        return _CALLS[function]
    holds_functions = module is torch.Tensor or isinstance(module, ModuleType)
    # A Python function of torch gives way to a mode where it says so in its first lines, or where torch overrides it.
    dispatches = not inspect.isfunction(function) or (
        "handle_torch_function" in function.__code__.co_names or function in get_testing_overrides()
    )
    if not holds_functions or inspect.isclass(function) or not callable(function) or not dispatches:
        # No mode sees Python functions of torch that only call others, nor classes of torch.
        raise ValueError(
            f"{getattr(module, '__name__', module)}.{name} cannot be registered: torch does not dispatch it, so its "
            "arguments are never seen. Register the function of torch that it calls, or a function of your own that "
            "calls it"
        )
    with_indices = getattr(module, f"{name}_with_indices", None)
    return (function,) if with_indices is None else (function, with_indices)


CastKind = Literal["half", "float", "promote"]
Name = tuple[str, str]  # of a module or class, and of what is in it
Decorated = TypeVar("Decorated", bound=Callable[..., Any])

_RULES: dict[CastKind, Rule] = {"half": as_half, "float": as_float32, "promote": as_widest}


def half_function(function: Decorated) -> Decorated:
    """Decorate `function`: where O1 casts, floating arguments become float16; elsewhere nothing changes."""
    return _cast_arguments(function, "half")


def float_function(function: Decorated) -> Decorated:
    """Decorate `function`: where O1 casts, half arguments become float32; matrix products inside still run in half."""
    return _cast_arguments(function, "float")


def promote_function(function: Decorated) -> Decorated:
    """Decorate `function`: where O1 casts, half arguments become float32 if another argument is."""
    return _cast_arguments(function, "promote")


class Registered:
    """The functions that were registered with one strategy, by name."""

    def __init__(self) -> None:
        self._torch_functions: dict[Name, CastKind] = {}
        self._others: dict[Name, CastKind] = {}

    def add(self, module: Any, name: str, kind: CastKind) -> None:
        """Give `module.name` the rule `kind`.

        Raises ValueError if there is no such function, or if it is a Python function of torch that no rule can reach.
        """
        arguments.text("name", name, "the name of a function of the module")
        if not hasattr(module, name):
            holder = getattr(module, "__name__", module)
            raise ValueError(f"No function named {name} in module {holder}; register functions that exist, by name")
        if not callable(getattr(module, name)):
            raise TypeError(f"name={name!r} is not legal; it must be the name of a function of the module")
        path = _path(module)
        if path.partition(".")[0] == "torch":
            dispatched(module, name)
            # A function of torch is only noted, and nothing is replaced.
            self._torch_functions[path, name] = kind
            return
        self._others[path, name] = kind
        # In another module or class `name` is replaced, once, by a function that casts as the innermost O1 region at the call
        # has it registered, and passes through elsewhere.
        _replace(module, name, (path, name))

    @property
    def is_empty(self) -> bool:
        """Whether nothing was registered."""
        return not self._torch_functions and not self._others

    def kind_of(self, function: Name) -> CastKind | None:
        """The rule of a function that was replaced, by its module and name."""
        return self._others.get(function)

    def rules(self) -> dict[Callable[..., Any], Rule]:
        """What to add to a table of rules."""
        return {
            function: _instead_of_autocast(_RULES[kind])
            for (path, name), kind in self._torch_functions.items()
            for function in dispatched(torch.Tensor if path == "torch.Tensor" else sys.modules[path], name)
        }


def _cast_arguments(function: Any, kind: CastKind) -> Any:
    arguments.function("function", function)

    @functools.wraps(function)
    def cast(*args: Any, **kwargs: Any) -> Any:
        return _call(function, kind if active_casts() else None, args, kwargs)

    return cast


def _replace(holder: Any, name: str, key: Name) -> None:
    here = vars(holder).get(name)
    static = here if here is not None else inspect.getattr_static(holder, name)
    kind = type(static) if isinstance(static, (staticmethod, classmethod)) else None
    function = static.__func__ if kind is not None else getattr(holder, name)
    if here is not None and getattr(function, "__booster_key__", None) == key:
        return

    @functools.wraps(function)
    def cast(*args: Any, **kwargs: Any) -> Any:
        modes = active_casts()
        registered = modes[-1].owner if modes else None
        return _call(function, registered.kind_of(key) if isinstance(registered, Registered) else None, args, kwargs)

    cast.__booster_key__ = key  # type: ignore[attr-defined]
    setattr(holder, name, cast if kind is None else kind(cast))


def _call(function: Any, kind: CastKind | None, args: Any, kwargs: Any) -> Any:
    dtype = None
    if kind == "half":
        dtype = torch.float16
    elif kind == "float" or (kind and any(tensor.dtype == torch.float32 for tensor in tensors((args, kwargs)))):
        dtype = torch.float32
    return function(*cast_floats(args, dtype), **cast_floats(kwargs, dtype))


def _instead_of_autocast(rule: Rule) -> Rule:
    def alone(mode: Any, function: Any, args: Any, kwargs: Any) -> Any:
        with torch.autocast(mode.device_type, enabled=False):
            return rule(mode, function, args, kwargs)

    return alone


def _path(module: Any) -> str:
    if module is torch.Tensor:
        return "torch.Tensor"
    if isinstance(module, ModuleType):
        return module.__name__
    return f"{getattr(module, '__module__', None)}.{getattr(module, '__qualname__', repr(module))}"


class O1Casts:
    """The contexts of one strategy."""

    def __init__(self) -> None:
        self._registered = Registered()
        self._tables: dict[str, Table] = {}
        self._disabled = 0

    def register(self, module: Any, name: str, kind: CastKind) -> None:
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
        return nest_contexts(autocast, mode if wide is None else nest_contexts(wide, mode))

    def backward_context(self, device_type: str, products: HalfProducts) -> AbstractContextManager[Any]:
        """A new context for one backward pass, where activations may be recomputed."""
        modes = active_casts()
        if self._disabled or (modes and modes[-1].owner is self._registered):
            return nullcontext()
        return nest_contexts(products.backward_context(device_type), self.mode(device_type))

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
