"""Results of all data-parallel ranks together: gathering rows and reducing numbers."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch.utils.data import IterableDataset

from booster.common import arguments
from booster.common.torch_internals.tensor_internals import pytree
from booster.data import DataLoaderWrapper, YieldedRows
from booster.ranks import agreement
from booster.ranks.agreement import communication_device, size_of

Op = Literal["mean", "sum", "max", "min"]
_OPS = ("mean", "sum", "max", "min")
_Shape = tuple[int, ...]


def gather(
    tensor: Any, *, group: dist.ProcessGroup | None = None, padding_from: DataLoaderWrapper | None = None
) -> Any:
    """Concatenate the rows (dim 0) that all ranks of `group` have, on every rank.

    tensor: a tensor, a number, or a container of them (each is gathered; numbers and 0-dim tensors are one row); any
    dtype, on any device; shapes may differ in dim 0 alone. group: None means no collective. The result is detached.

    padding_from: the boosted loader that the rows were computed from, for one batch or for the epoch so far. Then rows
    come in the order of the dataset (of the shuffled one if the loader shuffles), without the samples that its
    DistributedSampler repeated to divide the dataset. Without a loader, or over an IterableDataset, which has no order,
    rows come in the order of the ranks.

    Cost: two small collectives and one of the data per tensor. Raises on every rank: ValueError if ranks differ in
    container, dtype or trailing shape, or if row counts do not fit the loader; TypeError for other objects.
    """
    leaves, spec = pytree.tree_flatten(tensor)
    tensors: list[torch.Tensor] = []
    share: YieldedRows | None = None
    problem: Exception | None = None
    try:
        share = _share_of(padding_from, size_of(group))
        tensors = [torch.atleast_1d(_as_tensor(leaf)) for leaf in leaves]
        legal = frozenset() if share is None else share.rows
        for value in tensors:
            if legal and len(value) not in legal:
                raise ValueError(
                    f"got {len(value)} rows, but the dataloader's last batch and its epoch so far have {sorted(legal)} "
                    "rows on this rank; pass one row per sample, or gather without the dataloader"
                )
    except (TypeError, ValueError, RuntimeError) as error:
        problem = error  # raised once the others know
    shapes = _agree(tensors, f"gather {spec}", problem, group, first_dim=share is not None)
    results = []
    for index, value in enumerate(tensors):
        parts = _all_gather(value, [shape[index] for shape in shapes], group)
        if share is None:
            results.append(torch.cat(parts))
        else:
            rows = torch.stack(parts, dim=1).flatten(0, 1)  # the sampler deals index p to rank p % world_size
            results.append(rows[: len(rows) - share.num_padded])
    return pytree.tree_unflatten(results, spec)


def reduce(tensor: Any, op: Op = "mean", *, group: dist.ProcessGroup | None = None) -> Any:
    """Reduce elementwise over the ranks of `group`, on every rank; the input is left as it is.

    tensor: a tensor, a number, or a container of them; numbers stay numbers. group: None means a world of one.
    Labels in a container (strings, bytes, None) stay what they are on this rank.
    Half dtypes are reduced in float32 and rounded once. A mean of integers or bools is float32 (of numbers: float), a sum
    of them int64 (of numbers: int); max and min keep the dtype. The result is detached.

    Raises on every rank: ValueError for another `op`, or if ranks differ in container, dtype or shape; TypeError for
    other objects, and for max or min of complex numbers.
    """
    leaves, spec = pytree.tree_flatten(tensor)
    labels = [place for place, leaf in enumerate(leaves) if _is_label(leaf, tensor)]
    numbers = [place for place in range(len(leaves)) if place not in labels]
    tensors: list[torch.Tensor] = []
    problem: Exception | None = None
    try:
        arguments.choice("op", op, _OPS)
        tensors = [_as_tensor(leaves[place]) for place in numbers]
        if op in ("max", "min") and any(value.is_complex() for value in tensors):
            raise TypeError(f"reduce with op={op!r} got complex numbers, which have no order; use 'mean' or 'sum'")
    except (TypeError, ValueError) as error:
        problem = error  # raised once the others know
    _agree(tensors, f"{op} {spec}{f' with labels at {labels}' if labels else ''}", problem, group, first_dim=True)
    for place, value in zip(numbers, tensors, strict=True):
        if isinstance(leaves[place], torch.Tensor):
            leaves[place] = _reduce_one(value, op, group)
        else:
            # A mean of ints in double precision, as Python's numbers have it.
            leaves[place] = _reduce_one(value.double() if op == "mean" else value, op, group).item()
    return pytree.tree_unflatten(leaves, spec)


def _reduce_one(value: torch.Tensor, op: Op, group: dist.ProcessGroup | None) -> torch.Tensor:
    value = value.detach()
    whole = not (value.is_floating_point() or value.is_complex())  # integers and bools
    result_dtype = value.dtype
    if whole:
        work = value.to(torch.int64, copy=True)
        result_dtype = {"mean": torch.float32, "sum": torch.int64}.get(op, value.dtype)
    elif value.dtype.itemsize < 4:
        work = value.to(torch.float32)
    else:
        work = value.clone()
    if group is not None and work.numel():
        sent = work.to(communication_device(value.device, group)).contiguous()
        if op in ("max", "min"):
            sent = _extreme(sent, op, group)
        else:
            dist.all_reduce(torch.view_as_real(sent) if sent.is_complex() else sent, group=group)
        work = sent.to(value.device)
    if op == "mean":
        work = (work.double() if whole else work) / size_of(group)
    return work.to(result_dtype)


def _extreme(values: torch.Tensor, op: Op, group: dist.ProcessGroup) -> torch.Tensor:
    """The largest or smallest of what each rank brings; NaN where any has one, which a backend's own may lose."""
    if not values.is_floating_point():
        dist.all_reduce(values, dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.MIN, group=group)
        return values
    if op == "min":
        return -_extreme(-values, "max", group)
    kind = torch.int32 if values.dtype == torch.float32 else torch.int64
    most = torch.iinfo(kind).max
    # Read as whole numbers, positive floats keep their order, with NaN above inf, and negative ones come in the reverse.
    bits = values.where(~values.isnan(), torch.nan).view(kind)
    ordered = bits.where(bits >= 0, bits ^ most)
    dist.all_reduce(ordered, dist.ReduceOp.MAX, group=group)
    return ordered.where(ordered >= 0, ordered ^ most).view(values.dtype)


def _agree(
    tensors: list[torch.Tensor],
    call: str,
    problem: Exception | None,
    group: dist.ProcessGroup | None,
    *,
    first_dim: bool,
) -> list[list[_Shape]]:
    """Return the shapes that each rank brings; raise on every rank if one has a `problem`, or if they do not fit."""
    # Without this a rank that raises, or that brings another number of bytes, would leave the others waiting.
    own = [[str(value.dtype), list(value.shape)] for value in tensors]
    reports = agreement.gather([problem is not None, call, own], group)
    # Only now do all know of it, so that none waits for this rank.
    if problem is not None:
        raise problem
    failed = [rank for rank, (failed, _, _) in enumerate(reports) if failed]
    if failed:
        raise ValueError(f"ranks {failed} of the group could not take part in this collective; their errors say why")
    counts = [len(each) for _, _, each in reports]
    # Ranks in different collectives would wait for each other.
    if any(other != call for _, other, _ in reports) or len(set(counts)) > 1:
        raise ValueError(
            f"ranks called different collectives, or passed different containers; this rank's: {call}, with {len(tensors)} "
            f"tensors (by rank: {counts})"
        )
    for index in range(len(tensors)):
        given = [each[index] for _, _, each in reports]
        fixed = [(dtype, len(shape), shape if first_dim else shape[1:]) for dtype, shape in given]
        if any(entry != fixed[0] for entry in fixed):
            listed = ", ".join(f"{dtype} {shape}" for dtype, shape in given)
            legal = "shapes" if first_dim else "shapes after the first dimension"
            raise ValueError(f"all ranks must pass equal dtypes and {legal}, got by rank: {listed}")
    return [[tuple(shape) for _, shape in each] for _, _, each in reports]


def _all_gather(value: torch.Tensor, shapes: list[_Shape], group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """`value` of each rank, on this rank's device; `shapes` says how large they are."""
    value = value.detach()
    if group is None:
        return [value]
    sizes = [math.prod(shape) * value.dtype.itemsize for shape in shapes]
    if max(sizes) == 0:
        return [value.new_empty(shape) for shape in shapes]
    # As bytes: backends do not know every dtype, and moving them needs none.
    mine = torch.zeros(max(sizes), dtype=torch.uint8, device=communication_device(value.device, group))
    mine[: value.nbytes] = value.contiguous().view(-1).view(torch.uint8)
    everyone = [torch.empty_like(mine) for _ in shapes]
    dist.all_gather(everyone, mine, group=group)
    parts = (part[:size].to(value.device) for part, size in zip(everyone, sizes, strict=True))
    return [part.view(value.dtype).view(shape) for part, shape in zip(parts, shapes, strict=True)]


def _is_label(leaf: Any, tree: Any) -> bool:
    return leaf is not tree and (leaf is None or isinstance(leaf, (str, bytes)))


def _as_tensor(leaf: Any) -> torch.Tensor:
    if isinstance(leaf, (bool, int, float)):
        # Whole numbers travel as int64.
        if isinstance(leaf, int) and not -(2**63) <= leaf < 2**63:
            raise ValueError(f"tensor holds {leaf}, and gather and reduce take whole numbers of 64 bits; pass a float")
        return torch.tensor(leaf, dtype=torch.float64 if isinstance(leaf, float) else None)
    if not isinstance(leaf, torch.Tensor) or leaf.layout != torch.strided:
        what = f"a {leaf.layout} tensor" if isinstance(leaf, torch.Tensor) else arguments.described(leaf)
        raise TypeError(
            f"tensor is not legal: gather and reduce take dense tensors, numbers and containers of them, got {what}"
        )
    return leaf


def _share_of(loader: DataLoaderWrapper | None, world_size: int) -> YieldedRows | None:
    if loader is None:
        return None
    if not isinstance(loader, DataLoaderWrapper):
        raise TypeError(f"gather needs the dataloader that boost() returned, got {arguments.described(loader)}")
    share = loader.share
    if share is None:
        # An iterable dataset deals to ranks by itself: it has no order, and no sampler repeats samples of it.
        if world_size == 1 or isinstance(getattr(loader.unwrap(), "dataset", None), IterableDataset):
            return None
        raise ValueError(
            "the order of this dataloader's samples over ranks is not known, because its sampler is not a torch "
            "DistributedSampler; gather without the dataloader, or make it with b.prepare_dataloader"
        )
    if share.num_replicas != world_size:
        raise ValueError(f"the dataloader deals to {share.num_replicas} ranks, but this gathers over {world_size}")
    return share
