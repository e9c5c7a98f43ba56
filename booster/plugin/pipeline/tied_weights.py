"""Weights that several pipeline stages hold; their gradients are summed over the ranks that hold them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from booster.model.dtensors import dtensor_around, local_shard
from booster.ranks.agreement import gather


class TiedWeights:
    """Copies of a weight on several ranks of a pipeline, such as an embedding that is the output layer too.

    params: this rank's copies by name. ranks: by name, the pipeline ranks that have one, for all tied weights of the model.
    A collective over `group` if there are any. Raises ValueError on all ranks if copies do not have one layout.
    """

    def __init__(
        self,
        params: Mapping[str, torch.Tensor],
        ranks: Mapping[str, tuple[int, ...]],
        *,
        rank: int,
        group: dist.ProcessGroup | None,
    ) -> None:
        self.params = dict(sorted(params.items()))
        self.ranks = dict(ranks)
        self._rank = rank
        self._group = group
        if not ranks:
            return
        shards = {name: local_shard(param) for name, param in self.params.items()}
        layouts = {
            name: (tuple(local.shape), str(local.dtype), str(getattr(self.params[name], "placements", "")))
            for name, local in shards.items()
        }
        everyone = gather(layouts, group or dist.group.WORLD)
        for name in ranks:
            placings = {rank: held[name] for rank, held in enumerate(everyone) if name in held}
            if any(placing != placings[min(placings)] for placing in placings.values()):
                raise ValueError(
                    f"the weight {name} is tied across pipeline stages, and its copies are laid out differently, by rank: "
                    f"{placings}; give both of its modules the same tensor-parallel style"
                )

    @contextmanager
    def summed(self) -> Iterator[None]:
        """Return a context; at its end the gradients of its backward passes are summed over ranks. Earlier ones stay."""
        before = {name: param.grad for name, param in self.params.items()}
        for param in self.params.values():
            param.grad = None  # only what this run adds is summed; earlier gradients were summed already
        try:
            yield
        finally:
            made = {name: param.grad for name, param in self.params.items()}
            for name, param in self.params.items():
                param.grad = before[name]
        parts: dict[str, dict[int, torch.Tensor]] = {}
        operations = []
        for name, param in self.params.items():
            own = _local_gradient(param, made[name])
            parts[name] = {self._rank: own}
            for peer in self.ranks[name]:
                if peer == self._rank or not own.numel():
                    continue
                parts[name][peer] = torch.empty_like(own)
                there = dist.get_global_rank(self._group or dist.group.WORLD, peer)  # type: ignore[arg-type]
                operations.append(dist.P2POp(dist.isend, own, there, self._group))
                operations.append(dist.P2POp(dist.irecv, parts[name][peer], there, self._group))
        for work in dist.batch_isend_irecv(operations) if operations else ():
            work.wait()
        for name, param in self.params.items():
            # Every rank sums in the order of ranks, so that copies stay equal to the bit.
            total = torch.stack([parts[name][rank] for rank in sorted(parts[name])]).sum(0).to(param.dtype)
            summed: Any = dtensor_around(total, param)
            if isinstance(param.grad, DTensor) and param.grad.placements != summed.placements:
                param.grad = param.grad.redistribute(placements=summed.placements) + summed
            elif param.grad is not None:
                param.grad += summed
            else:
                param.grad = summed


def _local_gradient(param: torch.Tensor, gradient: torch.Tensor | None) -> torch.Tensor:
    if gradient is None:
        return torch.zeros_like(local_shard(param))
    if isinstance(gradient, DTensor):
        gradient = gradient.redistribute(placements=param.placements).to_local()  # type: ignore[attr-defined]
    return gradient.contiguous()
