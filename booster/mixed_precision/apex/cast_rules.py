"""Which functions O1 runs in which dtype where `torch.autocast` alone would decide otherwise, and the rules that cast.

autocast casts matrix products and convolutions to half on every device. On a CPU it leaves most of apex's float32 functions in
half, and nowhere does it bring the operands of a few to one dtype. The names are those of apex's lists; a rule is called by a
torch function mode, `CastFunctions`, with the function and its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.nn import functional as F

from booster.tensors.cast_regions import CastFunctions, Function, Rule, cast_floats, run_engine
from booster.tensors.trees import HALF_DTYPES

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
