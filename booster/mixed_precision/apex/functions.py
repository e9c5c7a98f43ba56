"""O1 where autocast is not enough: the rules by which a torch function mode casts arguments, from the lists of apex."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from booster.mixed_precision.apex import lists
from booster.tensors.cast_regions import CastFunctions, Function, Rule, cast_floats, run_engine
from booster.tensors.trees import HALF_DTYPES

Arguments = tuple[Any, ...]
Keywords = dict[str, Any]


def make_table(device_type: str) -> dict[Function, Rule]:
    """The rules for one kind of device."""
    table: dict[Function, Rule] = dict.fromkeys(lists.half(), as_half)
    table |= dict.fromkeys(lists.widest(), as_widest)
    table |= dict.fromkeys(lists.float32(), as_float32)
    table |= dict.fromkeys(lists.like_self(), _as_self)
    table |= {func: _refusing_half(reason) for func, reason in lists.in_place()}
    table[F.binary_cross_entropy] = _binary_cross_entropy
    table[torch.Tensor.backward] = _backward
    table[torch.autograd.backward] = _engine
    if device_type == "cpu":
        table |= dict.fromkeys(lists.recurrent(), _recurrent_on_cpu)
    return table


# ---------------------------------------------------------------------- rules


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
