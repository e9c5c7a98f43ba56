"""Muon on sharded matrices: each matrix has an owner, which orthogonalizes it whole.

Torch steps Muon on DTensors, as `fully_shard` and tensor parallelism make them, operator by operator: the products of five
iterations gather each matrix about thirty times, and all ranks compute most of it. Only the iteration needs the whole matrix;
momentum, decay and step treat every element by itself. So, as in "Muon is Scalable for LLM Training" (arXiv 2502.16982):

    1. each rank    momentum and update of this rank's elements, in float32
    2. all-to-all   updates to the owners, in bfloat16: the iteration runs in it, so nothing is lost
    3. owner        Newton-Schulz iteration; matrices of one shape are one batch
    4. all-to-all   the result, in bfloat16, to the ranks that hold its elements
    5. each rank    decay and step of this rank's elements

An example: 4 matrices that cost 9, 4, 4 and 1, on 2 ranks. Rank 0 owns the first, rank 1 the others. Each sends 2 bytes for
each of its elements that the other owns, and receives as many. States stay DTensors: checkpoints know no owners.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from booster.common.torch_internals.optimizer_internals import adjusted_muon_lr
from booster.model.params import is_dtensor, is_part, local_shard, params_of
from booster.update.in_backward_pass import bare_step

MOST = 2**24
"""Elements that an owner receives at once, where one matrix has no more: the bound of scratch."""


class Matrix(NamedTuple):
    """A sharded matrix as all its ranks know it.

    Attributes:
        shape: of the whole matrix.
        boxes: rows and columns of each rank's shard, as an index, by rank of the group.
        shapes: of each rank's shard.
        owner: the rank that orthogonalizes it.
    """

    shape: tuple[int, int]
    boxes: list[tuple[Any, Any]]
    shapes: list[tuple[int, int]]
    owner: int


class Plan:
    """Which rank owns which of `params`, matrices that the same ranks shard, and in which rounds they travel."""

    def __init__(self, params: Sequence[Any]) -> None:
        self.ranks, self.group = _ranks(params[0])
        self.rank, self.size = self.ranks.index(dist.get_rank()), len(self.ranks)
        shapes = [tuple(param.shape) for param in params]
        self.matrices = [
            Matrix(shape, *_boxes(param, self.ranks), owner)
            for param, shape, owner in zip(params, shapes, _owners(shapes, self.size), strict=True)
        ]
        self.rounds = list(self._rounds())
        self._nothing = torch.empty(0, dtype=torch.bfloat16, device=local_shard(params[0]).device)

    def _rounds(self) -> Iterator[list[list[int]]]:
        """Yield places of matrices by owner: as many as make `MOST` elements, one at least; equal shapes follow each other."""
        order = sorted(range(len(self.matrices)), key=lambda place: sorted(self.matrices[place].shape))
        waiting = [[place for place in order if self.matrices[place].owner == rank] for rank in range(self.size)]
        while any(waiting):
            taken: list[list[int]] = [[] for _ in waiting]
            for own, now in zip(waiting, taken, strict=True):
                while own and (not now or sum(map(self._numel, (*now, own[0]))) <= MOST):
                    now.append(own.pop(0))
            yield taken

    def _numel(self, place: int) -> int:
        return math.prod(self.matrices[place].shape)

    def orthogonalize(
        self, updates: Sequence[torch.Tensor], iterate: Callable[[torch.Tensor], torch.Tensor]
    ) -> list[torch.Tensor]:
        """Return this rank's shards of what `iterate` makes of the whole matrices.

        updates: this rank's shards, bfloat16. iterate: of a batch of matrices that have no more rows than columns.
        """
        results: list[Any] = [None] * len(updates)
        for by_owner in self.rounds:
            mine = [self.matrices[place] for place in by_owner[self.rank]]
            held = [[self.matrices[place].shapes[self.rank] for place in places] for places in by_owner]
            # Every rank knows all shapes, so that no sizes are exchanged.
            owned = [[matrix.shapes[rank] for matrix in mine] for rank in range(self.size)]
            wholes = [updates[0].new_empty(matrix.shape) for matrix in mine]
            sent = [updates[place] for places in by_owner for place in places]
            # Two all-to-alls a round.
            for rank, shards in enumerate(self._exchange(sent, held, owned)):
                for matrix, whole, shard in zip(mine, wholes, shards, strict=True):
                    whole[matrix.boxes[rank]] = shard
            # Matrices of one shape go through the iteration as one batch: small products alone leave a device idle.
            wholes = _batched(wholes, iterate)
            sent = [
                whole[matrix.boxes[rank]]
                for rank in range(self.size)
                for matrix, whole in zip(mine, wholes, strict=True)
            ]
            for places, shards in zip(by_owner, self._exchange(sent, owned, held), strict=True):
                for place, shard in zip(places, shards, strict=True):
                    results[place] = shard
        return results

    def _exchange(
        self,
        sent: Sequence[torch.Tensor],
        sent_shapes: list[list[tuple[int, int]]],
        received_shapes: list[list[tuple[int, int]]],
    ) -> list[list[torch.Tensor]]:
        """Send all of `sent`, for one rank after another; return what each rank sent. Shapes are by rank."""
        message = torch.cat([each.reshape(-1) for each in sent]) if sent else self._nothing
        arriving = [[math.prod(shape) for shape in shapes] for shapes in received_shapes]
        received = message.new_empty(sum(map(sum, arriving)))
        leaving = [sum(map(math.prod, shapes)) for shapes in sent_shapes]
        sizes = [sum(each) for each in arriving]
        if self.group is not None:
            dist.all_to_all_single(received, message, sizes, leaving, group=self.group)
        else:
            self._send_to_each(message.split(leaving), received.split(sizes))
        flat = iter(received.split([size for sizes in arriving for size in sizes]))
        return [[next(flat).view(shape) for shape in shapes] for shapes in received_shapes]

    def _send_to_each(self, leaving: Sequence[torch.Tensor], arriving: Sequence[torch.Tensor]) -> None:
        """An all-to-all in the group of all ranks, most of which take no part: a new group needs the others at its making."""
        arriving[self.rank].copy_(leaving[self.rank])
        messages = [
            dist.P2POp(send, piece, peer)
            for send, pieces in ((dist.isend, leaving), (dist.irecv, arriving))
            for peer, piece in zip(self.ranks, pieces, strict=True)
            if peer != self.ranks[self.rank] and len(piece)
        ]
        for work in dist.batch_isend_irecv(messages) if messages else ():
            work.wait()


class DistributedMuon:
    """A step of `torch.optim.Muon`, without its hooks, of groups with sharded matrices. Torch steps what is not sharded.

    A collective of the ranks that shard a matrix, which have gradients of the same parameters.
    """

    def __init__(self) -> None:
        self._plans: dict[Any, Plan] = {}

    @torch.no_grad()
    def __call__(self, optimizer: Optimizer) -> None:
        groups = optimizer.param_groups
        held = [list(group["params"]) for group in groups]
        try:
            for group, params in zip(groups, held, strict=True):
                sharded = [param for param in params if param.grad is not None and is_part(param)]
                by_ranks: dict[Any, list[Any]] = {}
                for param in sharded:
                    by_ranks.setdefault((param.device_mesh, _sharding_dims(param)), []).append(param)
                for alike in by_ranks.values():
                    self._step(optimizer, group, alike)
                group["params"][:] = [param for param in params if param.grad is None or not is_part(param)]
            bare_step(optimizer)
        finally:
            for group, params in zip(groups, held, strict=True):
                group["params"][:] = params

    def _step(self, optimizer: Optimizer, group: dict[str, Any], params: list[Any]) -> None:
        lr, momentum = group["lr"], group["momentum"]
        lr = lr.squeeze() if isinstance(lr, torch.Tensor) else lr
        for param in params:
            if "momentum_buffer" not in optimizer.state[param]:
                optimizer.state[param]["momentum_buffer"] = torch.zeros_like(param.grad)
        buffers = [local_shard(optimizer.state[param]["momentum_buffer"]) for param in params]
        grads = [local_shard(param.grad) for param in params]
        torch._foreach_lerp_(buffers, grads, 1 - momentum)
        updates = torch._foreach_lerp(grads, buffers, momentum) if group["nesterov"] else buffers

        def iterate(matrices: torch.Tensor) -> torch.Tensor:
            return newton_schulz(matrices, group["ns_coefficients"], group["ns_steps"], group["eps"])

        key = tuple((param.device_mesh, param.placements, param.shape) for param in params)
        if key not in self._plans:
            self._plans[key] = Plan(params)
        shards = self._plans[key].orthogonalize([update.bfloat16() for update in updates], iterate)
        for param, update in zip(params, shards, strict=True):
            weight = local_shard(param)
            weight.mul_(1 - lr * group["weight_decay"])
            weight.add_(update, alpha=-adjusted_muon_lr(lr, group["adjust_lr_fn"], param.shape))


def distributed_muon(optimizer: Optimizer) -> DistributedMuon | None:
    """Return what replaces the `step` of `optimizer`, where that is torch's Muon with DTensors; else None."""
    params = params_of(optimizer)
    return DistributedMuon() if type(optimizer) is torch.optim.Muon and any(map(is_dtensor, params)) else None


def newton_schulz(
    matrices: torch.Tensor, coefficients: tuple[float, float, float], steps: int, eps: float
) -> torch.Tensor:
    """Return what the iteration of `torch.optim.Muon` makes of a batch of bfloat16 matrices of no more rows than columns."""
    a, b, c = coefficients
    matrices = matrices / matrices.flatten(1).norm(dim=1).clamp(min=eps)[:, None, None]
    for _ in range(steps):
        gram = matrices @ matrices.mT
        matrices = torch.baddbmm(matrices, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), matrices, beta=a)
    return matrices


def _batched(wholes: list[torch.Tensor], iterate: Callable[[torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    """Return what `iterate` makes of each matrix; a tall one is transposed, and neighbours of one shape are one batch."""
    wide = [whole.mT if whole.shape[0] > whole.shape[1] else whole for whole in wholes]
    made = [
        each for _, alike in groupby(wide, key=lambda whole: whole.shape) for each in iterate(torch.stack([*alike]))
    ]
    return [each if each.shape == whole.shape else each.mT for each, whole in zip(made, wholes, strict=True)]


def _owners(shapes: Sequence[tuple[int, ...]], size: int) -> list[int]:
    """Return an owner for each shape: the costliest first, each to the rank with the least work."""
    costs = [rows * columns * min(rows, columns) for rows, columns in shapes]
    loads, owners = [0] * size, [0] * len(shapes)
    for place in sorted(range(len(shapes)), key=lambda place: -costs[place]):
        owners[place] = min(range(size), key=loads.__getitem__)
        loads[owners[place]] += costs[place]
    return owners


def _sharding_dims(param: Any) -> tuple[int, ...]:
    """Return the dimensions of the mesh over which `param` is sharded."""
    sizes = param.device_mesh.shape
    return tuple(d for d, each in enumerate(param.placements) if sizes[d] > 1 and not each.is_replicate())


def _ranks(param: Any) -> tuple[list[int], dist.ProcessGroup | None]:
    """Return the ranks that shard `param` together, ascending, and the group of just these if there is one."""
    mesh, dims = param.device_mesh, _sharding_dims(param)
    own = mesh.get_coordinate()
    index = tuple(slice(None) if dim in dims else own[dim] for dim in range(mesh.ndim))
    ranks = sorted(mesh.mesh[index].flatten().tolist())
    group = mesh.get_group(dims[0]) if len(dims) == 1 else dist.group.WORLD
    return ranks, group if dist.get_process_group_ranks(group) == ranks else None


def _boxes(param: Any, ranks: Sequence[int]) -> tuple[list[tuple[Any, Any]], list[tuple[int, int]]]:
    """Return rows and columns of each rank's shard of `param`, and its shape, by place in `ranks`."""
    boxes, shapes = [], []
    for rank in ranks:
        there = (param.device_mesh.mesh == rank).nonzero()[0].tolist()
        kept = [torch.arange(size, dtype=torch.int64, device="cpu") for size in param.shape]
        for dim in _sharding_dims(param):
            placement = param.placements[dim]
            # Of a strided placement each of `split_factor` chunks is divided: what FSDP makes of rows that tensor parallelism
            # shards, and tensor parallelism of fused projections.
            chunks = _chunks(kept[placement.dim], getattr(placement, "split_factor", 1))
            kept[placement.dim] = torch.cat(
                [_chunks(each, param.device_mesh.shape[dim])[there[dim]] for each in chunks]
            )
        rows, columns = kept
        shapes.append((len(rows), len(columns)))
        index = _index(rows), _index(columns)
        boxes.append((rows[:, None], columns) if slice not in map(type, index) else index)
    return boxes, shapes


def _index(values: torch.Tensor) -> slice | torch.Tensor:
    """Return `values`, which ascend, as a slice if they are neighbours."""
    first, number = int(values[0]) if len(values) else 0, len(values)
    return slice(first, first + number) if not number or int(values[-1]) == first + number - 1 else values


def _chunks(values: torch.Tensor, number: int) -> list[torch.Tensor]:
    """Return the `number` chunks that `torch.chunk` makes, of which it leaves out empty ones."""
    chunks = list(values.chunk(number))
    return chunks + [values[:0]] * (number - len(chunks))
