"""Reading gradients: their values, their norms, and whether they are finite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import torch

from booster.common.torch_internals.optimizer_internals import multiply_and_check_
from booster.common.torch_internals.tensor_internals import sparse_values
from booster.model.params import dtensor_types, is_dtensor

_HALF = (torch.float16, torch.bfloat16)
_COMPLEX = frozenset((torch.complex32, torch.complex64, torch.complex128))
_CPU, _NUMEL = torch.device("cpu"), torch.Tensor.numel
PIECE = 2**17  # elements of a half gradient on CPU that are widened at a time for its norm
_Kind = tuple[torch.device, torch.dtype]


def gradient_values(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that hold the gradients of `params`, none of which may lack one; writing to them writes `.grad`.

    A sparse gradient is coalesced in place and gives its values, a DTensor this rank's part of it.
    """
    values: list[torch.Tensor] = []
    dtensors: tuple[type, ...] | None = None
    for param in params:
        grad: Any = param.grad
        if grad.is_sparse:
            param.grad = grad.coalesce()
            grad = sparse_values(param.grad)
        elif type(grad) is not torch.Tensor:
            dtensors = dtensor_types() if dtensors is None else dtensors
            grad = grad.to_local() if isinstance(grad, dtensors) else grad  # type: ignore[attr-defined]
        values.append(grad)
    return values


def tensor_norms(values: Sequence[torch.Tensor], norm_type: float, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Norm of each tensor of `values` (at least one), stacked on the device of the first; shape (len(values),).

    dtype: what to sum in; None means each tensor's own, and float32 for half tensors, as their squares would overflow.
    """
    if norm_type == math.inf:  # which torch does not define for them
        # An empty tensor, as a rank's part of a short one can be, has the norm 0.
        values = [value if value.numel() else value.new_zeros(1) for value in values]
    dtypes, devices = set(), set()
    for value in values:
        dtypes.add(value.dtype)
        devices.add(value.device)
    if not _COMPLEX.isdisjoint(dtypes):
        return tensor_norms([_sizes(v, norm_type) if v.is_complex() else v for v in values], norm_type, dtype)
    if dtype is None and not dtypes.isdisjoint(_HALF):
        dtype = torch.float64 if torch.float64 in dtypes else torch.float32
    on_cpu = len(devices) == 1 and _CPU in devices
    if dtype is not None and on_cpu and max(map(_NUMEL, values)) > PIECE and not torch.compiler.is_compiling():
        # As `_foreach_norm`, without wide copies of more than a piece.
        split = [value.view(-1).split(PIECE) if value.is_contiguous() else (value,) for value in values]
        of_pieces = [[torch.linalg.vector_norm(piece, norm_type, dtype=dtype) for piece in each] for each in split]
        norms = [
            own[0] if len(own) == 1 else torch.linalg.vector_norm(torch.stack(own), norm_type) for own in of_pieces
        ]
    else:
        norms = list(torch._foreach_norm(values, norm_type, dtype=dtype))  # type: ignore[arg-type]
    if len(devices) > 1:
        return torch.stack([norm.to(norms[0].device) for norm in norms])
    return torch.stack(norms)


def _sizes(value: torch.Tensor, norm_type: float) -> torch.Tensor:
    """Return real numbers of the same norm as the complex `value`."""
    return torch.view_as_real(value.detach()) if norm_type == 2.0 and not value.is_conj() else value.detach().abs()


def nonfinite_indices(values: Sequence[torch.Tensor], norms: torch.Tensor) -> list[int]:
    """Return which of `values` hold an inf or NaN, exactly; waits for the device. `norms`: their norms, to read few of them."""
    # One copy of all norms to the host; most are finite, and then no gradient is read again.
    suspects = [index for index, finite in enumerate(norms.isfinite().tolist()) if not finite]
    # The norm of finite values can overflow, so each tensor with a non-finite norm is looked at once more.
    return [index for index in suspects if not values[index].isfinite().all()]


def own_memory(params: Iterable[torch.Tensor]) -> None:
    """Give gradients that are to be written a memory of their own for each element, which expanded ones lack."""
    for param in params:
        grad: Any = param.grad
        if grad.is_contiguous() or grad.is_sparse or is_dtensor(grad):
            continue
        if any(stride == 0 and length > 1 for stride, length in zip(grad.stride(), grad.shape, strict=True)):
            param.grad = torch.empty_like(param, dtype=grad.dtype, requires_grad=False).copy_(grad.detach())


@torch.no_grad()
def scale_values(values: Iterable[torch.Tensor], ratio: float | torch.Tensor) -> None:
    """Multiply each of `values` in place by `ratio`, a number or 0-dim tensor, which is not rounded to half for half ones."""
    for (device, dtype), members in _by_kind(values).items():
        wide = isinstance(ratio, torch.Tensor) or device.type == "cpu"  # on CUDA a number stays one of float32
        if dtype not in _HALF or not wide:
            torch._foreach_mul_(members, ratio)
        elif dtype == torch.float16 or device.type == "cpu":
            factor = torch.as_tensor(ratio, dtype=torch.float32, device=device)
            multiply_and_check_(members, factor.new_zeros(()), factor)
        else:  # of which torch has no kernel for bfloat16
            for value in members:
                value.copy_(value.float() * ratio)


def scale_in_graph(values: Iterable[torch.Tensor], ratio: float | torch.Tensor) -> None:
    """As `scale_values`, differentiably, for values that are part of a graph which has not saved them."""
    with torch.enable_grad():
        for value in values:
            value.copy_((value.float() if value.dtype in _HALF else value) * ratio)


def clamp_values(values: Sequence[torch.Tensor], bound: float) -> None:
    """Clamp each of `values`, which are finite or NaN, to [-bound, bound] in place; no bound binds beyond its dtype.

    Raises TypeError for complex ones, with nothing changed.
    """
    kinds = _by_kind(values)
    if not _COMPLEX.isdisjoint(dtype for _, dtype in kinds):
        raise TypeError(
            "complex gradients have no order, so they cannot be clamped to an interval; clip them by clip_grad_by_norm, which "
            "takes their absolute values"
        )
    for (_, dtype), members in kinds.items():
        limit = min(bound, torch.finfo(dtype).max)
        torch._foreach_clamp_min_(members, -limit)
        torch._foreach_clamp_max_(members, limit)


def unscale_values(values: Sequence[torch.Tensor], inverse_scale: float, *, check: bool) -> bool:
    """Multiply each of `values` in place; returns whether any held an inf or NaN before, False without `check`."""
    if any(value.requires_grad for value in values):
        # One read and one write of the values either way, but for values that are part of a graph, through which the product is
        # differentiable.
        graph = [value for value in values if value.requires_grad]
        found_in_graph = check and not all(bool(value.isfinite().all()) for value in graph)
        scale_in_graph(graph, inverse_scale)
        rest = [value for value in values if not value.requires_grad]
        return unscale_values(rest, inverse_scale, check=check) or found_in_graph
    if not check:
        if inverse_scale != 1.0:
            scale_values(values, inverse_scale)
        return False
    # Checking waits for the device.
    flags = []
    for (device, dtype), members in _by_kind(values).items():
        if dtype == torch.float64:  # of which the kernel takes the scale in float32
            flags += [value.isfinite().all().logical_not() for value in members]
            scale_values(members, inverse_scale)
            continue
        flag = torch.zeros((), dtype=torch.float32, device=device)
        ratio = torch.full((), inverse_scale, dtype=torch.float32, device=device)
        multiply_and_check_(members, flag, ratio)
        flags.append(flag)
    return any(map(bool, flags))


def _by_kind(values: Iterable[torch.Tensor]) -> dict[_Kind, list[torch.Tensor]]:
    kinds: dict[_Kind, list[torch.Tensor]] = {}
    for value in values:
        kinds.setdefault((value.device, value.dtype), []).append(value)
    return kinds
