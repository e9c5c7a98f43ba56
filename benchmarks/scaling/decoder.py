"""What the formulas of scaling are about: a model, what a precision stores, and how ranks share the work.

"Parameters" are elements, everything else is in bytes, of one rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from benchmarks.scaling.plan import Plan

Axis = Literal["dp", "replicate", "tp", "pp"]


@dataclass(frozen=True)
class Model:
    """A decoder. gated: three feed-forward matrices (SwiGLU) instead of two. dropout: after softmax and both branches.

    Norms have a weight and no bias, linear layers no bias; embedding and output layer are separate.
    """

    hidden: int
    layers: int
    heads: int
    ffn: int
    vocabulary: int
    sequence: int
    kv_heads: int = 0  # 0: as many as heads
    gated: bool = True
    dropout: bool = False

    @property
    def kv_width(self) -> int:
        """Width of keys, and of values."""
        return self.hidden // self.heads * (self.kv_heads or self.heads)

    @property
    def columns(self) -> tuple[int, int]:
        """Linear layers that read the same input: of attention, of the feed-forward part."""
        return 3, 2 if self.gated else 1

    @property
    def layer_matrices(self) -> int:
        """Parameters of one layer that tensor parallelism divides."""
        attention = 2 * self.hidden * (self.hidden + self.kv_width)
        return attention + (3 if self.gated else 2) * self.hidden * self.ffn

    @property
    def layer(self) -> int:
        """Parameters of one layer."""
        return self.layer_matrices + 2 * self.hidden

    @property
    def largest(self) -> int:
        """Elements of the largest matrix."""
        return self.hidden * max(self.hidden, self.ffn, self.vocabulary)

    @property
    def outside(self) -> int:
        """Parameters of embedding, output layer and last norm."""
        return 2 * self.vocabulary * self.hidden + self.hidden

    @property
    def parameters(self) -> int:
        return self.layers * self.layer + self.outside


LLAMA_7B = Model(hidden=4096, layers=32, heads=32, ffn=11008, vocabulary=32000, sequence=4096)
LLAMA_70B = Model(hidden=8192, layers=80, heads=64, kv_heads=8, ffn=28672, vocabulary=32000, sequence=4096)


# ---- precisions


@dataclass(frozen=True)
class Precision:
    """Bytes a parameter: weight at rest, master beside it, gradient; shard_* the same where `fully_shard` cuts weights.

    gather, reduce: dtype in which `fully_shard` gathers weights and averages gradients. copy: of weights that autocast makes.
    element: bytes of a number that a matrix product reads or writes; residual: of one between the branches of a layer.
    scratch, shard_scratch: for each element of the bucket of masters that is being stepped: float32 gradients, and values if no
    master has them.
    """

    weight: int
    master: int
    gradient: int
    shard_weight: int
    shard_master: int
    shard_gradient: int
    gather: int
    reduce: int = 4
    copy: int = 0
    element: int = 2
    residual: int = 2
    scratch: int = 0
    shard_scratch: int = 0


PRECISIONS = {
    "fp32": Precision(4, 0, 4, 4, 0, 4, gather=4, element=4, residual=4),
    "autocast": Precision(4, 0, 4, 4, 0, 4, gather=4, copy=2, residual=4),
    "naive, fp32 masters": Precision(2, 4, 2, 4, 0, 4, gather=2, scratch=4),
    "naive, split": Precision(2, 2, 2, 2, 2, 2, gather=2, scratch=8, shard_scratch=8),
    "naive, no masters": Precision(2, 0, 2, 2, 0, 2, gather=2, scratch=8, shard_scratch=8),
}


# ---- parallelism


def hybrid(
    n: int, *, tp: int = 1, pp: int = 1, zero_stage: int = 0, sequence_parallel: bool = False, chunks: int = 1
) -> Plan:
    dp = n // (tp * pp)
    size = dp if zero_stage else 1
    engine: Literal["replicated", "fully_shard"] = "fully_shard" if dp > 1 else "replicated"
    return Plan(engine, dp, size, size, size, False, tp, pp, sequence_parallel, chunks)


def axis_shape(plan: Plan, axis: Axis) -> tuple[int, int]:
    """Ranks in a group of `axis`, and the distance between neighbours, for ranks ordered (pp, replicate, dp, tp), the last
    the fastest. "dp" are the ranks that divide weights or states, or all that share gradients where nothing is divided."""
    shards = plan.dp if plan.engine == "replicated" else plan.weight_shards
    return {
        "tp": (plan.tp, 1),
        "dp": (shards, plan.tp),
        "replicate": (plan.dp // shards, plan.tp * shards),
        "pp": (plan.pp, plan.tp * plan.dp),
    }[axis]


def layer_parameters(model: Model, plan: Plan) -> int:
    """Parameters of the layers of one pipeline stage on one rank; norms stay whole under tensor parallelism."""
    return model.layers // plan.pp * (model.layer_matrices // plan.tp + 2 * model.hidden)


def stage_parameters(model: Model, plan: Plan, stage: int = 0, vocabulary_parallel: bool = True) -> int:
    """Parameters that lie on one rank of pipeline stage `stage` before data parallelism divides them.

    vocabulary_parallel: embedding and output layer are divided by it too.
    """
    layers = layer_parameters(model, plan)
    table = model.vocabulary * model.hidden // (plan.tp if vocabulary_parallel else 1)
    first, last = stage == 0, stage == plan.pp - 1
    return layers + first * table + last * (table + model.hidden)


def boundary_bytes(model: Model, plan: Plan, precision: Precision, stage: int) -> float:
    """What crosses between pipeline rank `stage` and its neighbours in each direction, for a token."""
    times = 2 * plan.chunks - (stage == 0) - (stage == plan.pp - 1)
    return times * model.hidden * precision.residual / (plan.tp if plan.sequence_parallel else 1)
