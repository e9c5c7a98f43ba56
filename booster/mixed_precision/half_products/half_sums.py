"""Sums that torch's CPU kernels make in a half dtype, made in float32 instead, and results rounded once.

A sum of halves stops growing once a term is below half an ulp of it: 4,096 ones add up to 256 in bfloat16. Most of torch's CPU
kernels add in float32 and round at the end. Those here do not: gradients of layer norm's weight and bias, also where these are
float32, and of everything that takes rows or elements by index; what adds into elements by index, sparse tensors among them;
the loss of classes. And norms keep the mean of halves in the dtype of their weights, half where they have none, and subtract
it once more in backward: gradients are off by its rounding, however small they are. Where activations are halves and weights
float32, only what is a half is widened. Forward passes stay torch's own, with what they save, where they are right already; the
backward pass then runs in float32. See docs/design/half_products.md for the table of what torch adds in half.

`FLOAT32_SUMS` says for each function how: a function of it and its arguments; those of every model ask what
they need without Python calls, and cast few numbers. `CONDITIONS` says of some when, by a function of (args, kwargs).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.nn import functional as F

from booster.common.torch_internals.autograd_internals import dual_level, interpreters_around
from booster.mixed_precision.half_products.probability_losses import REFUSED
from booster.model.params import is_dtensor
from booster.tensors.trees import HALF_DTYPES

# Elements of an operand that autograd keeps in float32: to keep the half and widen that again costs more time than such an
# operation, and the bytes that it saves are fewer than those of the gradients that come after.
SMALL = 2**12
_LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
_How = Callable[..., Any]
_When = Callable[[Any, Mapping[str, Any]], bool]


class _Backward32(torch.autograd.Function):
    """`func(source, ...)`, differentiated in float32 with respect to `source`. The gradient does not depend on its values."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, call: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        ctx.call, ctx.shape, ctx.dtype = call, source.shape, source.dtype
        return call(source)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (grad,) = grads
        with torch.enable_grad():
            # The gradient of taking elements depends on their places alone, so a tensor without memory takes the place of
            # the values.
            empty = torch.zeros((), dtype=torch.float32, device=grad.device).expand(ctx.shape).requires_grad_()
            out = ctx.call(empty)
        (wide,) = torch.autograd.grad(out, empty, grad.float(), create_graph=torch.is_grad_enabled())
        return wide.to(ctx.dtype), None


class _Embedding(torch.autograd.Function):
    """Rows of a half table, whose gradients are added up in float32."""

    @staticmethod
    def forward(ctx: Any, table: torch.Tensor, index: torch.Tensor, padding: int | None, by_frequency: bool) -> Any:
        ctx.save_for_backward(index)
        ctx.how = len(table), -1 if padding is None else padding % len(table), by_frequency
        return F.embedding(index, table, padding, scale_grad_by_freq=by_frequency)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # autograd casts gradients to the dtypes of what they are of
        (index,) = ctx.saved_tensors
        return torch.ops.aten.embedding_dense_backward(grads[0].float(), index, *ctx.how), None, None, None


class _LayerNorm(torch.autograd.Function):
    """Layer norm of halves: forward as torch has it, with weight and bias in float32, backward in float32."""

    @staticmethod
    def forward(
        ctx: Any, source: torch.Tensor, shape: Sequence[int], weight: Any, bias: Any, eps: float
    ) -> torch.Tensor:
        # torch's forward adds in float32 already; only its backward sums weight and bias gradients in half.
        weight, bias = weight if weight is None else weight.float(), bias if bias is None else bias.float()
        out, mean, rstd = torch.native_layer_norm(source, shape, weight, bias, eps)
        ctx.shape = shape
        ctx.save_for_backward(source, mean, rstd, weight, bias)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:  # autograd casts gradients to the dtypes of what they are of
        source, mean, rstd, weight, bias = ctx.saved_tensors
        needs = ctx.needs_input_grad
        wide, of_weight, of_bias = torch.ops.aten.native_layer_norm_backward(
            grads[0].float(), source.float(), ctx.shape, mean, rstd, weight, bias, (needs[0], needs[2], needs[3])
        )
        return wide, None, of_weight, of_bias, None


class _LogSoftmax(torch.autograd.Function):
    """`log_softmax` of halves along `dim`: forward as torch has it, backward in float32 of what went in."""

    @staticmethod
    def forward(ctx: Any, source: torch.Tensor, dim: int) -> torch.Tensor:
        ctx.dim = dim
        ctx.save_for_backward(source)
        return torch.log_softmax(source, dim)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (source,), grad = ctx.saved_tensors, grads[0].float()
        shares = torch.softmax(source.float(), ctx.dim)
        return (grad - shares * grad.sum(ctx.dim, keepdim=True)).to(source.dtype), None


def is_half(value: Any) -> bool:
    """Whether `value` is a half-precision tensor on a CPU. DTensors are left to torch, which knows how to shard a function."""
    halves = isinstance(value, torch.Tensor) and value.dtype in HALF_DTYPES and value.is_cpu
    return halves and (type(value) is torch.Tensor or not is_dtensor(value))


def without_autocast(device_type: str, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
    """`func(*args, **kwargs)` where autocast is on, or not, run without it."""
    if torch.compiler.is_compiling():  # which traces no other way
        with torch.autocast(device_type, enabled=False):
            return func(*args, **kwargs)
    before = torch.is_autocast_enabled(device_type)
    torch.set_autocast_enabled(device_type, False)  # a context costs as much as a small product
    try:
        return func(*args, **kwargs)
    finally:
        torch.set_autocast_enabled(device_type, before)


def _whole(func: Any, *args: Any, **kwargs: Any) -> Any:
    """All of `func` in float32, forward too."""
    wide = [each.float() if isinstance(each, torch.Tensor) and is_half(each) else each for each in args]
    kwargs = {name: each.float() if is_half(each) else each for name, each in kwargs.items()}
    return without_autocast("cpu", func, wide, kwargs)


def rounded(func: Any, *args: Any, **kwargs: Any) -> Any:
    """All of `func` in float32, and results rounded to the half dtype of its arguments; in the `dtype` that is asked for."""
    for each in (*args, *kwargs.values()):
        if isinstance(each, torch.Tensor) and is_half(each) and kwargs.get("dtype") is None:
            if (into := kwargs.pop("out", None)) is not None:
                wide = _whole(func, *args, **kwargs)
                return (into if into.shape == wide.shape else into.resize_(wide.shape)).copy_(wide)
            wide, half = _whole(func, *args, **kwargs), each.dtype
            if isinstance(wide, tuple):  # with indices, or the edges of bins
                return type(wide)([out.to(half) if out.is_floating_point() else out for out in wide])
            return wide.to(half)
    return func(*args, **kwargs)


def _first(args: Any, kwargs: Mapping[str, Any]) -> Any:
    return args[0] if args else kwargs["input"]


def _in_place(instead: Any) -> _How:
    """How a function adds into its first argument, by `instead`, which returns the sum."""

    def how(func: Any, *args: Any, **kwargs: Any) -> Any:
        target = _first(args, kwargs)
        return target.copy_(_whole(instead, *args, **kwargs)) if is_half(target) else func(*args, **kwargs)

    return how


def _argument(args: Any, kwargs: Mapping[str, Any], place: int, name: str) -> Any:
    return args[place] if len(args) > place else kwargs.get(name)


def _given(place: int, name: str, value: Any = True) -> _When:
    """Whether the argument at `place`, or of that `name`, is `value`."""
    return lambda args, kwargs: bool(_argument(args, kwargs, place, name) == value)


def _overlap(place: int) -> _When:
    """Whether windows, their size at `place`, take an element more than twice along a dimension, or average 2**16 elements of
    float16, whose gradient is zero in float16."""

    def condition(args: Any, kwargs: Mapping[str, Any]) -> bool:
        source, size = _first(args, kwargs), _argument(args, kwargs, place, "kernel_size")
        pair = size, _argument(args, kwargs, place + 1, "stride") or size
        sizes = zip(*(each if isinstance(each, (tuple, list)) else (each,) * 3 for each in pair), strict=False)
        mean_is_zero = source.dtype is torch.float16 and source.numel() >= 2**16
        return mean_is_zero or any(one > 2 * stride for one, stride in sizes)

    return condition


def _enlarges(args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether the output of adaptive pooling is larger than its input, and takes its elements many times."""
    source, size = _first(args, kwargs), _argument(args, kwargs, 1, "output_size")
    largest = max(each or 0 for each in size) if isinstance(size, (tuple, list)) else size
    return largest > min(source.shape[-3:])


def _log_softmax(func: Any, *args: Any, **kwargs: Any) -> Any:
    source = _first(args, kwargs)
    if not is_half(source) or not _is_recorded(source) or kwargs.get("dtype") is not None or len(args) > 2:
        return func(*args, **kwargs)
    dim = args[1] if len(args) > 1 else kwargs.get("dim")
    if dim is None or _is_cast(source):
        return func(*args, **kwargs) if dim is None else rounded(func, *args, **kwargs)
    return _LogSoftmax.apply(source, dim)


def _loss(func: Any, *args: Any, **kwargs: Any) -> Any:
    """A loss stays float32, as autocast has it on CUDA: a sum over rows is beyond what float16 holds."""
    scores: Any = args[0] if args else kwargs.get("input", next(iter(kwargs.values())))
    return _whole(func, *args, **kwargs) if scores.dtype in HALF_DTYPES else func(*args, **kwargs)


def _is_recorded(*tensors: Any) -> bool:
    """Whether a backward pass will differentiate with respect to one of `tensors`."""
    return torch.is_grad_enabled() and any(isinstance(each, torch.Tensor) and each.requires_grad for each in tensors)


def _is_cast(source: torch.Tensor) -> bool:
    """Whether casts take the place of autograd functions: where these do not run as written, as torch.compile, torch.func and
    forward mode differentiate operations, and of few numbers."""
    eager = not torch.compiler.is_compiling() and interpreters_around() is None and dual_level() < 0
    return not eager or source.numel() <= SMALL


def _layer_norm(
    func: Any,
    input: Any,  # noqa: A002 - as torch calls it
    normalized_shape: Any,
    weight: Any = None,
    bias: Any = None,
    eps: Any = 1e-5,
    *rest: Any,
    **named: Any,
) -> Any:
    trains = (weight is not None and weight.requires_grad) or (bias is not None and bias.requires_grad)
    records = torch.is_grad_enabled() and (trains or input.requires_grad)
    sharded = type(input) is not torch.Tensor and is_dtensor(input)
    if not records or not input.is_cpu or input.dtype not in HALF_DTYPES or (sharded and not trains):
        return func(input, normalized_shape, weight, bias, eps, *rest, **named)
    if not trains:
        size = input.shape[-1:] if isinstance(normalized_shape, int) else normalized_shape
        return func(input, normalized_shape, *_wide_affine(input, size, weight, bias), eps)
    # As in `_is_cast`, without the call. And torch knows how to shard casts, not autograd functions of ours.
    cast = sharded or torch.compiler.is_compiling() or interpreters_around() is not None or dual_level() >= 0
    if not cast and input.numel() > SMALL:
        shape = [normalized_shape] if isinstance(normalized_shape, int) else list(normalized_shape)
        return _LayerNorm.apply(input, shape, weight, bias, eps)
    weight, bias = weight if weight is None else weight.float(), bias if bias is None else bias.float()
    return func(input.float(), normalized_shape, weight, bias, eps).to(input.dtype)


def _wide_affine(source: torch.Tensor, shape: Any, weight: Any, bias: Any) -> tuple[torch.Tensor, Any]:
    """Return `weight`, ones for None, and `bias` in float32: torch then keeps mean and deviation in float32 for backward."""
    ones = torch.ones(tuple(shape), dtype=torch.float32, device=source.device) if weight is None else weight.float()
    return ones, bias if bias is None else bias.float()


def _norm(place: int) -> _How:
    """How a norm over space keeps statistics in float32. place: of its weight, before the bias, among arguments."""

    def how(func: Any, *args: Any, **kwargs: Any) -> Any:
        source, rest = _first(args, kwargs), dict(kwargs)
        if source.dtype not in HALF_DTYPES:
            return func(*args, **kwargs)
        given = [*args[place : place + 2], None, None][:2]
        given = [rest.pop(name, each) for name, each in zip(("weight", "bias"), given, strict=True)]
        running = [*args[1:place], *args[place + 2 :], *rest.values()]
        if not is_half(source) or not _is_recorded(source, *given) or any(map(is_half, running)):
            return func(*args, **kwargs)
        weight, bias = _wide_affine(source, source.shape[1:2], *given)
        if len(args) > place:
            out = func(*args[:place], weight, bias, *args[place + 2 :], **rest)
        else:
            out = func(*args, weight=weight, bias=bias, **rest)
        if not (torch.compiler.is_compiling() or interpreters_around() is not None or dual_level() >= 0):
            # Where a gradient has another memory order, torch's kernel rounds its mean.
            format = _LAST.get(source.dim(), torch.contiguous_format)
            format = format if source.is_contiguous(memory_format=format) else torch.contiguous_format
            out.register_hook(lambda grad: grad.contiguous(memory_format=format))
        return out

    return how


def _taken(func: Any, *args: Any, **kwargs: Any) -> Any:
    """What `func` takes out of a half tensor, its first argument, by indices."""
    source, *rest = args or (kwargs.pop("input"),)
    if not is_half(source) or not _is_recorded(source):
        return func(source, *rest, **kwargs)
    if _is_cast(source):
        return func(source.float(), *rest, **kwargs).to(source.dtype)
    return _Backward32.apply(source, lambda each: func(each, *rest, **kwargs))


def _windows(func: Any, source: Any, size: Any, stride: Any, storage_offset: Any = None) -> Any:
    """Views that hold elements several times; those of memory around `source` are left to torch."""
    start = 0 if storage_offset is None else storage_offset - source.storage_offset()
    reach = 1 + sum((length - 1) * step for length, step in zip(size, stride, strict=True))
    if not source.is_contiguous() or math.prod(size) <= reach or not 0 <= start <= source.numel() - reach:
        return func(source, size, stride, storage_offset)

    return _taken(lambda each: func(dense := each.contiguous(), size, stride, dense.storage_offset() + start), source)


def _repeats(args: Any, kwargs: Mapping[str, Any]) -> bool:
    """Whether an index may take an element twice: not by masks, slices and numbers."""
    for each in args[1] if isinstance(args[1], tuple) else (args[1],):  # a generator would cost a call for each
        if isinstance(each, list) or (isinstance(each, torch.Tensor) and each.dtype != torch.bool):
            return True
    return False


def _embedding(
    func: Any,
    input: Any,  # noqa: A002 - as torch calls it
    weight: Any,
    padding_idx: Any = None,
    max_norm: Any = None,
    norm_type: Any = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    torchs = sparse or not weight.requires_grad or not torch.is_grad_enabled()
    if torchs or weight.dtype not in HALF_DTYPES or not weight.is_cpu:
        return func(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    if max_norm is not None:
        torch.embedding_renorm_(weight.detach(), input.contiguous(), max_norm, norm_type)
    cast = torch.compiler.is_compiling() or interpreters_around() is not None or dual_level() >= 0
    few = not cast and weight.numel() <= SMALL and input.numel() * weight.shape[1] <= SMALL
    if cast or few or is_dtensor(weight):
        return func(input, weight.float(), padding_idx, None, norm_type, scale_grad_by_freq).to(weight.dtype)
    return _Embedding.apply(weight, input, padding_idx, scale_grad_by_freq)


def _named(how: Any, names: str, *holders: Any) -> dict[Any, Any]:
    holders = holders or (torch, torch.Tensor)
    return {getattr(holder, name): how for name in names.split() for holder in holders if hasattr(holder, name)}


_LOSSES = (
    "binary_cross_entropy_with_logits cosine_embedding_loss cross_entropy ctc_loss gaussian_nll_loss hinge_embedding_loss "
    "huber_loss kl_div l1_loss margin_ranking_loss mse_loss multi_margin_loss multilabel_margin_loss nll_loss poisson_nll_loss "
    "multilabel_soft_margin_loss smooth_l1_loss soft_margin_loss triplet_margin_loss triplet_margin_with_distance_loss"
)
_IN_PLACE = ("index_add", "index_put", "index_reduce", "put", "scatter_reduce")
# Maxima of overlapping windows: an element may be that of many.
_SLIDING = " ".join(f"max_pool{n}d max_pool{n}d_with_indices" for n in (1, 2, 3))
_ADAPTIVE = " ".join(f"adaptive_max_pool{n}d adaptive_max_pool{n}d_with_indices" for n in (1, 2, 3))
_FRACTIONAL = " ".join(f"fractional_max_pool{n}d fractional_max_pool{n}d_with_indices" for n in (2, 3))
FLOAT32_SUMS: Mapping[Any, _How] = {
    **_named(_layer_norm, "layer_norm", F, torch),
    **_named(_norm(3), "batch_norm instance_norm", F),
    **_named(_norm(2), "group_norm", F, torch),
    **_named(_norm(1), "batch_norm instance_norm", torch),
    **_named(_log_softmax, "log_softmax", F, torch, torch.Tensor),
    F.embedding: _embedding,
    **_named(_windows, "as_strided"),
    **_named(_taken, "take index_select repeat_interleave embedding"),
    **_named(_taken, "avg_pool1d avg_pool2d adaptive_avg_pool1d adaptive_avg_pool2d pad unfold", F),
    **_named(_taken, "__getitem__ unfold", torch.Tensor),
    **_named(rounded, f"{_SLIDING} {_ADAPTIVE} {_FRACTIONAL}", F, torch),
    **_named(rounded, "index_add index_put index_reduce segment_reduce put nanmean scatter_reduce"),
    **_named(rounded, "embedding_bag grid_sampler grid_sampler_2d grid_sampler_3d", torch),
    **_named(rounded, "embedding_bag grid_sample adaptive_avg_pool3d lp_pool1d lp_pool2d fold normalize", F),
    **_named(rounded, "coalesce to_dense", torch.Tensor),
    **{getattr(torch.Tensor, f"{name}_"): _in_place(getattr(torch, name)) for name in _IN_PLACE},
    torch.index_put_: _in_place(torch.index_put),
    **_named(rounded, "mm addmm", torch.sparse),
    **_named(_loss, _LOSSES, F, torch),
    # Of which torch has no half kernel on a CPU, or none of use.
    **_named(rounded, "matrix_exp", torch, torch.linalg, torch.Tensor),
    **_named(rounded, "cdist prod logsumexp cov corrcoef histc histogram _sparse_sum"),
    **_named(rounded, "pdist avg_pool3d interpolate cosine_similarity", F, torch),
    **REFUSED,
}
CONDITIONS: Mapping[Any, _When] = {
    torch.Tensor.__getitem__: _repeats,
    # Else values take the place of what is there, and are no sum.
    **_named(_given(3, "accumulate"), "put put_ index_put_"),
    # A count of terms from 2**16 on is infinite in float16.
    **_named(lambda args, named: _first(args, named).dtype is torch.float16, "nanmean scatter_reduce scatter_reduce_"),
    **_named(_overlap(1), f"avg_pool1d avg_pool2d {_SLIDING}", F, torch),
    **_named(_overlap(2), "lp_pool1d lp_pool2d", F),
    **_named(_enlarges, f"adaptive_avg_pool1d adaptive_avg_pool2d {_ADAPTIVE}", F, torch),
    # By a tensor torch does it by index.
    **_named(lambda args, kwargs: not isinstance(_argument(args, kwargs, 1, "repeats"), int), "repeat_interleave"),
    # But where it writes to its table, or gradients are sparse, which are no sums.
    F.embedding_bag: lambda args, of: not (_argument(args, of, 3, "max_norm") or _argument(args, of, 7, "sparse")),
    torch.embedding_bag: lambda args, named: not _argument(args, named, 5, "sparse"),
    F.pad: _given(2, "mode", "replicate"),
    # "area" is adaptive pooling, and antialiasing has weights that no half kernel of a CPU takes.
    F.interpolate: lambda args, named: (
        _argument(args, named, 3, "mode") == "area" or _argument(args, named, 6, "antialias")
    ),
    F.normalize: _given(1, "p", 1.0),  # of float16 its derivative is subnormal on the way
    # Sparse tensors hold an element several times until they are summed.
    **_named(lambda args, named: _first(args, named).layout is not torch.strided, "coalesce to_dense", torch.Tensor),
}
