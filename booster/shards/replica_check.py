"""Whether ranks that step alike still hold the same: learning rates, and weights that none of them divides."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
import torch.distributed as dist
from torch.optim import Optimizer

from booster.common import arguments
from booster.common.devices import HostCopy
from booster.common.text import listed
from booster.model.dtensors import local_shard
from booster.ranks.agreement import all_names, gather
from booster.ranks.messages import reduced
from booster.tensors.grads import tensor_norms
from booster.tensors.trees import HALF_DTYPES

if TYPE_CHECKING:
    from booster.shards.base import Shards

# Ranks are compared after the first backward pass that all of them make, after this one, and after one of so many.
EARLY, EVERY = 10, 100
# Relative, of weights to their norm: kernels of unlike devices round in unlike ways, and a bit of a half weight is 2**-8 of it.
_RATE, _WEIGHT = 1e-6, {False: 1e-3, True: 1e-2}
_DTYPES = frozenset((*HALF_DTYPES, torch.float32, torch.float64, torch.complex64, torch.complex128))
_NONE = -1e300  # in place of a NaN, which no backend compares
DRIFTED = (
    "{found}, although all ranks step alike: they have drifted apart. Give every rank the same learning rates, as by "
    "scheduler.step(b.reduce(metric)), and write to weights, and load them, on all ranks alike, or before boost(), which "
    "gives all ranks the weights of rank 0"
)


class _Measured(NamedTuple):
    """What some ranks hold alike. names: of each number. allowed: by how much of its size it may differ. rows: each number, and
    its size."""

    ranks: dist.ProcessGroup
    names: list[str]
    allowed: list[float]
    rows: torch.Tensor


class ReplicaCheck:
    """Compares, now and then, the numbers of param_groups and `Shards.replicated_params` among the ranks that hold them.

    Two norms of each weight are read, and three numbers of all of them are sent, which a device does without a wait: they are
    read after the next pass. Only where they differ is more sent, to name what does. Backward passes that reduce gradients are
    counted, and no steps: a rank may skip a step by its own decision, but makes such passes with the others.
    """

    def __init__(self) -> None:
        self.num_passes = 0
        self.due = 1  # the pass after which `check` is to be called
        self._sent: tuple[list[_Measured], HostCopy] | None = None

    @torch.no_grad()
    def check(self, shards: Shards) -> None:
        """Send what is to be compared, or, after the pass behind that, raise RuntimeError, on all ranks, if ranks differed. A
        collective."""
        sent, self._sent = self._sent, None
        if sent is None:
            shards.wait_for_weights()
            replicated = shards.replicated_params()
            parts = [_measured(shards, *each, rates=not place) for place, each in enumerate(replicated)]
            # Read one pass later: then nothing waits for the device.
            self._sent = parts, HostCopy(_compare(parts))
            self.due += 1
            return
        # The first, the tenth, then one in a hundred: a comparison reads all weights.
        self.due = EARLY if self.due <= EARLY else (self.due // EVERY + 1) * EVERY
        parts, copy = sent
        most, least, apart = copy.tensor().tolist()
        if most != -least or apart:
            found = all_names(tuple(text for part in parts if (text := _describe_difference(part))), parts[0].ranks)
            if found:
                raise RuntimeError(DRIFTED.format(found=listed(found, 3)))


def trained(optimizer: Optimizer) -> list[torch.Tensor]:
    """Return the parameters of `optimizer` that train and that norms can be taken of."""
    held = (param for group in optimizer.param_groups for param in group["params"] if param.requires_grad)
    return [param for param in held if param.dtype in _DTYPES and type(local_shard(param.detach())) is torch.Tensor]


def _measured(shards: Shards, ranks: dist.ProcessGroup, params: Sequence[torch.Tensor], *, rates: bool) -> _Measured:
    """Return norms of orders 1 and 2 of each of `params`, where those are, behind the numbers of groups if `rates`."""
    named = list(_rates(shards.optimizer)) if rates else []
    values = [local_shard(param.detach()) for param in params]
    known = torch.tensor(
        [0.0 if isinstance(rate, torch.Tensor) else float(rate) for _, rate in named], dtype=torch.float64
    )
    norms = known.new_empty(0, 2)
    if values:
        norms = torch.stack([tensor_norms(values, order, torch.float64) for order in (1.0, 2.0)], dim=1)
        known = known.to(norms.device, non_blocking=True)
    for place, (_, rate) in enumerate(named):
        if isinstance(rate, torch.Tensor):
            known[place].copy_(rate.reshape(()))
    rows = torch.cat([torch.stack([known, known], dim=1), norms])
    return _Measured(
        ranks,
        [name for name, _ in named] + list(map(shards.name_of, params)),
        [_RATE] * len(named) + [_WEIGHT[param.dtype in HALF_DTYPES] for param in params],
        rows.nan_to_num(nan=_NONE, posinf=-_NONE, neginf=_NONE),
    )


def _rates(optimizer: Optimizer) -> Iterator[tuple[str, Any]]:
    """Return the numbers that `optimizer` goes by, as its groups have them, each with its name."""
    for index, group in enumerate(optimizer.param_groups):
        for name in optimizer.defaults:
            value = group.get(name)
            for number in value if isinstance(value, (tuple, list)) else (value,):
                is_scalar = isinstance(number, torch.Tensor) and number.numel() == 1 and not number.is_complex()
                if is_scalar or arguments.is_number(number):
                    yield f"{name} of param_groups[{index}]", number


def _compare(parts: Sequence[_Measured]) -> torch.Tensor:
    """Return the largest number that a rank makes of the first part."""
    first, *others = parts
    # One MAX gives the largest number and, by the negative, the smallest: ranks agree where they are equal.
    ends = _checksums(first.rows)
    for part in others:
        found = reduced(_checksums(part.rows), dist.ReduceOp.MAX, part.ranks)
        ends[2:] += (found[0] != -found[1]).to(ends.device)
    return reduced(ends, dist.ReduceOp.MAX, first.ranks)


def _checksums(rows: torch.Tensor) -> torch.Tensor:
    number = rows.flatten() @ torch.arange(1, rows.numel() + 1, dtype=rows.dtype, device=rows.device)
    return torch.stack([number, -number, torch.zeros_like(number)])


def _describe_difference(part: _Measured) -> str:
    """Say what first differs among the ranks of `part`, if anything does. Small collectives."""
    allowed = torch.tensor(part.allowed, dtype=torch.float64)
    rows_of_ranks = gather(part.rows.tolist(), part.ranks)
    first, *others = [torch.tensor(rows, dtype=torch.float64).view(-1, 2) for rows in rows_of_ranks]
    root = dist.get_global_rank(part.ranks, 0)
    for index, other in enumerate(others, 1):
        rank = dist.get_global_rank(part.ranks, index)
        if len(other) != len(first):
            return f"the optimizers of rank {root} and rank {rank} do not train the same number of parameters"
        sizes = torch.minimum(first[:, 1].abs(), other[:, 1].abs())
        apart = ((first - other).abs() > (allowed * sizes)[:, None]).any(dim=1).nonzero().flatten().tolist()
        if not apart:
            continue
        name, (one, two) = part.names[apart[0]], (rows[apart[0], 0] for rows in (first, other))
        if part.allowed[apart[0]] == _RATE:
            return f"{name} is {one:g} on rank {root} and {two:g} on rank {rank}"
        return f"the weight {name!r} is not the same on rank {root} and rank {rank}"
    return ""
