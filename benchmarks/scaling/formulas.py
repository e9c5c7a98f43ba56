"""Bytes that a rank holds: weights, masters, Adam states, gradients, activations.

`benchmarks/scaling/bytes.py` compares them with what small jobs really hold.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.scaling.decoder import Model, Precision, boundary_bytes
from benchmarks.scaling.plan import Plan

ADAM_STATES = 8  # bytes a parameter: two float32 moments
LOGIT = 12  # bytes a logit at the peak: float32 logits, their log-softmax, and its gradient


@dataclass(frozen=True)
class Memory:
    """Bytes on one rank between steps. Weights, masters, states and gradients; buffers of DDP's buckets and of what a
    pipeline receives."""

    weights: float = 0
    masters: float = 0
    states: float = 0
    gradients: float = 0
    buffers: float = 0

    @property
    def held(self) -> float:
        return self.weights + self.masters + self.states + self.gradients + self.buffers


def held_memory(parameters: float, plan: Plan, precision: Precision) -> Memory:
    """What a step leaves of `parameters` on one rank, which `plan` divides further, before gradients are cleared.

    Where DistributedDataParallel averages them, gradients are there twice, in its buckets too; its option
    `gradient_as_bucket_view=True` saves one.
    """
    sharded = plan.engine == "fully_shard"
    weight, master, gradient = (
        (precision.shard_weight, precision.shard_master, precision.shard_gradient)
        if sharded
        else (precision.weight, precision.master, precision.gradient)
    )
    gradients = parameters * gradient / plan.gradient_shards
    in_buckets = not sharded and plan.dp > 1 and (plan.gradient_shards == 1 or plan.keeps_buckets)
    return Memory(
        weights=parameters * weight / plan.weight_shards,
        masters=parameters * master / plan.state_shards,
        states=parameters * ADAM_STATES / plan.state_shards,
        gradients=gradients,
        buffers=parameters * gradient if in_buckets else 0,
    )


def receive_buffers(model: Model, plan: Plan, precision: Precision, tokens: float, stage: int = 0) -> float:
    """Bytes that a pipeline sets aside to receive in, for all `tokens` of a step: torch allocates for every micro-batch."""
    return tokens * boundary_bytes(model, plan, precision, stage) if plan.pp > 1 else 0


def accumulated_bytes(parameters: float, plan: Plan, precision: Precision) -> float:
    """Whole gradients of micro-batches that are added up before they are reduced, where a rank keeps only a part of the sum:
    in the dtype of the reduction (`fully_shard`), or of the weights (ZeRO-2)."""
    if plan.engine == "fully_shard":
        return parameters * precision.reduce
    return parameters * precision.gradient if plan.gradient_shards > 1 else 0


# ---- activations


def layer_activations(
    model: Model,
    precision: Precision,
    tokens: float,
    *,
    tp: int = 1,
    sequence_parallel: bool = False,
    stored_scores: bool = False,
    regather: bool = False,
) -> float:
    """Bytes that one layer keeps for its backward. tokens: sequence times micro-batch.

    Outside the parts that tensor parallelism divides lie the inputs of both norms, the inputs of the first matrices (of which
    autocast keeps a half copy for each matrix), and the dropout masks (1 byte). Sequence parallelism divides norms and masks;
    the inputs of matrices too if they are gathered once more in backward (`regather`), as Megatron-LM does. Inside lie
    queries, keys, values, the attention output and what the feed-forward part holds. stored_scores: softmax, its dropout mask
    and result are kept, as without a fused attention kernel.
    Left out: statistics of norms (16 bytes a token) and of a fused attention kernel (4 bytes a token and head).
    Source: Korthikanti et al. 2022, section 4, which this equals for 2 bytes, ffn = 4 * hidden, dropout and no gate:
    sbh (10 + 24 / tp + 5 a s / (h tp)), and sbh (34 + 5 a s / h) / tp with sequence parallelism and `regather`.
    """
    e, h = precision.element, model.hidden
    norms = 2 * precision.residual * h + 2 * model.dropout * h
    inputs = (sum(model.columns) if precision.copy else 2) * e * h
    inside = e * (2 * h + 2 * model.kv_width) + e * (4 if model.gated else 2) * model.ffn
    if stored_scores:
        inside += model.heads * model.sequence * (e + model.dropout * (e + 1))
    spread = tp if sequence_parallel else 1
    return tokens * (norms / spread + inputs / (spread if regather else 1) + inside / tp)


def activations(
    model: Model,
    plan: Plan,
    precision: Precision,
    micro_batch: int,
    num_micro_batches: int,
    *,
    checkpointed: bool,
    stage: int = 0,
) -> float:
    """Bytes of activations on a rank of pipeline stage `stage`, which holds one micro-batch for each stage after it and its own
    (1F1B); the last one has the logits. checkpointed: only a layer's input is kept, and one layer is computed again at a time.
    """
    tokens = micro_batch * model.sequence
    layer = layer_activations(model, precision, tokens, tp=plan.tp, sequence_parallel=plan.sequence_parallel)
    at_once: float = plan.pp - stage
    if plan.chunks > 1:
        at_once *= 1 + (plan.pp - 1) / (plan.pp * plan.chunks)
    num = model.layers // plan.pp * min(at_once, num_micro_batches)
    spread = plan.tp if plan.sequence_parallel else 1
    kept = num * precision.residual * model.hidden * tokens / spread + layer if checkpointed else num * layer
    return kept + logit_bytes(model, plan, micro_batch, stage)


def logit_bytes(model: Model, plan: Plan, micro_batch: int, stage: int = 0) -> float:
    """Bytes of logits at the loss, which the last stage computes."""
    return LOGIT * micro_batch * model.sequence * model.vocabulary if stage == plan.pp - 1 else 0
