"""Sums that torch's CPU kernels make in a half dtype, made in float32 instead, and results rounded once.

A sum of halves stands still once a term is below half an ulp of it: 4,096 ones add up to 256 in bfloat16. Most of torch's CPU
kernels add in float32 and round at the end. Those here do not: gradients of layer norm's weight and bias, also where these are
float32, and of everything that takes rows or elements by index; the loss of classes. Where activations are halves and weights
float32, only what is a half is widened. Forward passes stay torch's own, with what they save, where they are right already;
the backward pass then runs in float32. See docs/design/half_products.md for the table of what torch adds in half.

`SUMS` says for each function how: a function of (function, args, kwargs) that returns the result.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from booster.ground.torch_internals import interpreters_around
from booster.model.dtensors import is_dtensor
from booster.tensors.trees import HALF_DTYPES


class _Backward32(torch.autograd.Function):
    """`func(source, ...)`, differentiated in float32 with respect to `source`, on whose values the gradient does not depend."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, call: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        ctx.call, ctx.shape, ctx.dtype = call, source.shape, source.dtype
        return call(source)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        with torch.enable_grad():
            empty = torch.zeros((), dtype=torch.float32, device=grad.device).expand(ctx.shape).requires_grad_()
            out = ctx.call(empty)
        (wide,) = torch.autograd.grad(out, empty, grad.float(), create_graph=torch.is_grad_enabled())
        return wide.to(ctx.dtype), None


class _LayerNorm(torch.autograd.Function):
    """Layer norm of halves with float32 weight and bias, or none: forward as torch has it, backward in float32."""

    @staticmethod
    def forward(
        ctx: Any,
        source: torch.Tensor,
        shape: Sequence[int],
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
    ) -> torch.Tensor:
        out, mean, rstd = torch.native_layer_norm(source, shape, weight, bias, eps)
        ctx.shape, ctx.needs = shape, (ctx.needs_input_grad[0], ctx.needs_input_grad[2], ctx.needs_input_grad[3])
        ctx.save_for_backward(source, mean, rstd, weight, bias)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        source, mean, rstd, weight, bias = ctx.saved_tensors
        wide, of_weight, of_bias = torch.ops.aten.native_layer_norm_backward(
            grads[0].float(), source.float(), ctx.shape, mean.float(), rstd.float(), weight, bias, ctx.needs
        )
        return (None if wide is None else wide.to(source.dtype)), None, of_weight, of_bias, None


def is_half(value: Any) -> bool:
    """Whether `value` holds halves on a CPU, all of them: DTensors are left to torch, which knows how to divide a function."""
    return (
        isinstance(value, torch.Tensor)
        and value.dtype in HALF_DTYPES
        and value.device.type == "cpu"
        and not is_dtensor(value)
    )


def _wide(value: Any) -> Any:
    return value.float() if is_half(value) else value


def _whole(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """All of `func` in float32, forward too."""
    with torch.autocast("cpu", enabled=False):
        return func(*map(_wide, args), **{key: _wide(value) for key, value in kwargs.items()})


def _rounded(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    half = next((each.dtype for each in (*args, *kwargs.values()) if is_half(each)), None)
    return func(*args, **kwargs) if half is None else _whole(func, args, kwargs).to(half)


def _loss(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """A loss stays float32, as autocast has it on CUDA: a sum over rows is beyond what float16 holds."""
    scores = args[0] if args else kwargs["input"]
    return _whole(func, args, kwargs) if scores.dtype in HALF_DTYPES else func(*args, **kwargs)


def _is_recorded(*tensors: Any) -> bool:
    """Whether a backward pass will differentiate with respect to one of `tensors`."""
    return torch.is_grad_enabled() and any(isinstance(t, torch.Tensor) and t.requires_grad for t in tensors)


def _is_eager() -> bool:
    """Whether autograd functions run as written: torch.compile and torch.func differentiate operations instead."""
    return not torch.compiler.is_compiling() and interpreters_around() is None


def _layer_norm(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    def plain(
        input: torch.Tensor,  # noqa: A002 - as torch calls it
        normalized_shape: Any,
        weight: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        eps: float = 1e-5,
        cudnn_enable: bool = True,
    ) -> Any:
        if not is_half(input) or not _is_recorded(weight, bias):
            return func(*args, **kwargs)
        if not _is_eager():
            return _rounded(func, args, kwargs)
        shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
        return _LayerNorm.apply(input, shape, _wide(weight), _wide(bias), eps)

    return plain(*args, **kwargs)


def _taken(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """What `func` takes out of a half tensor, its first argument, by indices."""
    source, *rest = args
    if not is_half(source) or not _is_recorded(source):
        return func(*args, **kwargs)
    if not _is_eager():
        return func(source.float(), *rest, **kwargs).to(source.dtype)
    return _Backward32.apply(source, lambda each: func(each, *rest, **kwargs))


def _by_index(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    index = args[1]
    several = index if isinstance(index, tuple) else (index,)
    # Of masks no element is taken twice, and of slices and numbers neither.
    repeats = any(
        isinstance(each, list) or (isinstance(each, torch.Tensor) and each.dtype != torch.bool) for each in several
    )
    return _taken(func, args, kwargs) if repeats else func(*args, **kwargs)


def _embedding(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    def plain(
        input: torch.Tensor,  # noqa: A002 - as torch calls it
        weight: torch.Tensor,
        padding_idx: int | None = None,
        max_norm: float | None = None,
        norm_type: float = 2.0,
        scale_grad_by_freq: bool = False,
        sparse: bool = False,
    ) -> Any:
        if not is_half(weight) or not _is_recorded(weight) or sparse or max_norm is not None:
            return func(*args, **kwargs)

        def of(table: torch.Tensor) -> torch.Tensor:
            return F.embedding(input, table, padding_idx, scale_grad_by_freq=scale_grad_by_freq)

        return _Backward32.apply(weight, of) if _is_eager() else of(weight.float()).to(weight.dtype)

    return plain(*args, **kwargs)


def _refused(func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    raise RuntimeError(UNSAFE)


UNSAFE = (
    "binary_cross_entropy reads probabilities, and halves round those of a sigmoid to exactly 0 and 1, where training stands "
    "still; return logits, without the sigmoid, and take nn.BCEWithLogitsLoss or F.binary_cross_entropy_with_logits, which is "
    "the same loss and safe in half"
)
_How = Callable[[Any, Any, Mapping[str, Any]], Any]
SUMS: Mapping[Any, _How] = {
    F.layer_norm: _layer_norm,
    torch.layer_norm: _layer_norm,
    F.embedding: _embedding,
    F.embedding_bag: _rounded,
    torch.Tensor.__getitem__: _by_index,
    torch.take: _taken,
    torch.Tensor.take: _taken,
    torch.index_select: _taken,
    torch.Tensor.index_select: _taken,
    torch.index_add: _rounded,
    torch.Tensor.index_add: _rounded,
    torch.index_put: _rounded,
    torch.Tensor.index_put: _rounded,
    torch.index_reduce: _rounded,
    torch.Tensor.index_reduce: _rounded,
    torch.segment_reduce: _rounded,
    F.grid_sample: _rounded,
    F.nll_loss: _loss,
    F.cross_entropy: _loss,
    torch.matrix_exp: _rounded,
    torch.linalg.matrix_exp: _rounded,
    torch.Tensor.matrix_exp: _rounded,
    F.binary_cross_entropy: _refused,
}
