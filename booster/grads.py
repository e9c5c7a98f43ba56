"""Reading gradients: their values, their norms, and whether they are finite."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
import torch.distributed as dist

from booster.shards import is_dtensor

_HALF = (torch.float16, torch.bfloat16)


def gradient_values(params: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """The tensors that hold the gradients of `params`, none of which may lack one; writing to them writes `.grad`.

    A sparse gradient is coalesced in place and gives its values, a DTensor this rank's part of it.
    """
    values = []
    for param in params:
        grad = param.grad
        if grad.is_sparse:  # type: ignore[union-attr]
            param.grad = grad.coalesce()  # type: ignore[union-attr]
            grad = param.grad._values()
        elif is_dtensor(grad):
            grad = grad.to_local()  # type: ignore[union-attr]
        values.append(grad)
    return values  # type: ignore[return-value]


def tensor_norms(values: Sequence[torch.Tensor], norm_type: float, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Norm of each tensor of `values` (at least one), stacked on the device of the first; shape (len(values),).

    dtype: what to sum in; None means each tensor's own, and float32 for half tensors, whose squares would overflow. An empty
    tensor, as a rank's part of a short one can be, has the norm 0.
    """
    if norm_type == math.inf:  # which torch does not define for them
        values = [value if value.numel() else value.new_zeros(1) for value in values]
    if dtype is None and any(value.dtype in _HALF for value in values):
        dtype = torch.float64 if any(value.dtype == torch.float64 for value in values) else torch.float32
    norms = torch._foreach_norm(values, norm_type, dtype=dtype)  # type: ignore[arg-type]
    device = norms[0].device
    return torch.stack([norm if norm.device == device else norm.to(device) for norm in norms])


def nonfinite_indices(values: Sequence[torch.Tensor], norms: torch.Tensor) -> list[int]:
    """Which of `values` hold an inf or NaN, exactly; waits for the device. `norms`: their norms, to read few of them.

    The norm of finite values can overflow, so each tensor with a non-finite norm is looked at once more.
    """
    suspects = [index for index, finite in enumerate(norms.isfinite().tolist()) if not finite]
    return [index for index in suspects if not values[index].isfinite().all()]


def clamp_values(values: Sequence[torch.Tensor], bound: float) -> None:
    """Clamp each of `values`, which are finite or NaN, to [-bound, bound] in place; no bound binds beyond its dtype."""
    by_dtype: dict[torch.dtype, list[torch.Tensor]] = {}
    for value in values:
        by_dtype.setdefault(value.dtype, []).append(value)
    for dtype, members in by_dtype.items():
        limit = min(bound, torch.finfo(dtype).max)
        torch._foreach_clamp_min_(members, -limit)
        torch._foreach_clamp_max_(members, limit)


def unscale_values(values: Sequence[torch.Tensor], inverse_scale: float, *, check: bool) -> bool:
    """Multiply each of `values` in place; returns whether any held an inf or NaN before, False without `check`.

    Checking waits for the device. One read and one write of the values either way.
    """
    if not check:
        if values and inverse_scale != 1.0:
            torch._foreach_mul_(list(values), inverse_scale)
        return False
    by_device: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for value in values:
        by_device.setdefault((value.device, value.dtype), []).append(value)
    found = []
    for (device, _), members in by_device.items():
        flag = torch.zeros((), dtype=torch.float32, device=device)
        ratio = torch.full((), inverse_scale, dtype=torch.float32, device=device)
        torch._amp_foreach_non_finite_check_and_unscale_(members, flag, ratio)
        found.append(flag)
    return any(bool(flag) for flag in found)


def agree_on(found_inf: torch.Tensor, group: dist.ProcessGroup | None) -> torch.Tensor:
    """Make every rank of `group` know if any of them found an inf: one MAX all-reduce of a 0-dim float, in place."""
    if group is not None:
        dist.all_reduce(found_inf, op=dist.ReduceOp.MAX, group=group)
    return found_inf
