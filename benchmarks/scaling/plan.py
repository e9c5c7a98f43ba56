"""How ranks share the work of a step, as the formulas see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True)
class Plan:
    """How ranks share the work: world size = dp * tp * pp.

    engine: "replicated" keeps weights whole (DDP, ZeRO; hybrid where dp is 1), "fully_shard" does not (FSDP, hybrid).
    shards: ranks over which weights, gradients and states are divided; 1 where they are not. reshard: gathered weights are
    freed after forward. chunks: model chunks a stage (interleaved schedule). keeps_buckets: gradients are divided, but those of
    DistributedDataParallel's buckets stay.
    """

    engine: Literal["replicated", "fully_shard"] = "replicated"
    dp: int = 1
    weight_shards: int = 1
    gradient_shards: int = 1
    state_shards: int = 1
    reshard: bool = False
    tp: int = 1
    pp: int = 1
    sequence_parallel: bool = False
    chunks: int = 1
    keeps_buckets: bool = False

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp


def ddp(n: int) -> Plan:
    return Plan(dp=n)


def zero(n: int, stage: int, *, reduce_scatter: bool = False) -> Plan:
    """reduce_scatter: that option of stage 1."""
    divided = stage == 2 or reduce_scatter
    return Plan(dp=n, gradient_shards=n if divided else 1, state_shards=n, keeps_buckets=reduce_scatter and stage == 1)


def fsdp(n: int, *, reshard: bool = True, replicas: int = 1) -> Plan:
    """replicas: copies of the model, each over n / replicas ranks (HSDP)."""
    size = n // replicas
    return Plan("fully_shard", n, size, size, size, reshard)
