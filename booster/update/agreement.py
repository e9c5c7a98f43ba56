"""Host numbers that all ranks of a group agree on. Each is one collective of 8 bytes, and a host sync on CUDA."""

from __future__ import annotations

import torch
import torch.distributed as dist

from booster.collectives import communication_device


def largest(value: float, group: dist.ProcessGroup | None) -> float:
    """The largest `value` of all ranks of `group`, none of which may be NaN; None means this rank alone."""
    return _reduce(value, group, dist.ReduceOp.MAX)


def total(value: float, group: dist.ProcessGroup | None) -> float:
    """The sum of `value` over the ranks of `group`, in float64; inf and NaN reach every rank."""
    return _reduce(value, group, dist.ReduceOp.SUM)


def on_overflow(found: bool, finite_loss: bool, group: dist.ProcessGroup | None) -> tuple[bool, bool]:
    """(whether any rank found an inf or NaN in its gradients, whether the losses of those that did were finite)."""
    code = largest(0.0 if not found else 1.0 if finite_loss else 2.0, group)
    return code > 0.0, code < 2.0


def _reduce(value: float, group: dist.ProcessGroup | None, op: dist.ReduceOp.RedOpType) -> float:
    if group is None:
        return value
    tensor = torch.tensor(value, dtype=torch.float64, device=communication_device(torch.device("cpu"), group))
    dist.all_reduce(tensor, op=op, group=group)
    return float(tensor)
