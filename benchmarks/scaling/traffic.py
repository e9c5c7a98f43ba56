"""Bytes that a rank sends in one optimizer step, and the time that sending and computing take.

`bytes.py` compares the bytes with what small jobs really send; nobody measured the times.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from benchmarks.scaling.decoder import Axis, Model, Precision, axis_shape, boundary_bytes
from benchmarks.scaling.plan import Plan

Kind = Literal["all_reduce", "all_gather", "reduce_scatter", "send"]


@dataclass(frozen=True)
class Message:
    """Collectives, or sends, of one kind among `ranks` ranks. size: bytes of the whole tensor (of what an all-gather makes, of
    what a reduce-scatter begins with), summed over all of them."""

    kind: Kind
    axis: Axis
    ranks: int
    size: float

    @property
    def sent(self) -> float:
        """Bytes that each rank sends, in a ring."""
        return sent_bytes(self.kind, self.ranks, self.size)


def sent_bytes(kind: str, ranks: int, size: float) -> float:
    """Bytes that each rank sends for a tensor of `size` bytes; on a ring every one of `ranks` ranks sends the same.

    all_reduce: 2 (n-1)/n. all_gather, reduce_scatter: (n-1)/n. send: all of it. Source: Patarasuk and Yuan 2009.
    """
    factor = {"all_reduce": 2.0, "all_gather": 1.0, "reduce_scatter": 1.0, "send": 1.0}[kind]
    return size * factor * (1.0 if kind == "send" else (ranks - 1) / ranks)


def data_parallel_messages(
    plan: Plan,
    precision: Precision,
    parameters: float,
    outside: float,
    num_micro_batches: int,
    *,
    accumulate: bool = True,
) -> list[Message]:
    """What averaging the gradients of `parameters` on one rank, and gathering its weights, takes in one step.

    outside: how many of them lie outside the layers, whose weights are gathered once a micro-batch even with resharding.
    accumulate: gradients of micro-batches are added up before they are reduced, once.
    """
    if plan.dp == 1:
        return []
    reductions = 1 if accumulate else num_micro_batches
    if plan.engine == "replicated":
        gradients = parameters * precision.gradient * (reductions if plan.gradient_shards > 1 else 1)
        weights = Message("all_gather", "dp", plan.dp, parameters * precision.weight)
        if plan.gradient_shards > 1:
            return [Message("reduce_scatter", "dp", plan.dp, gradients), weights]
        reduced = Message("all_reduce", "dp", plan.dp, gradients)
        return [reduced, weights] if plan.state_shards > 1 else [reduced]
    messages = []
    reduced_bytes = parameters * precision.reduce * reductions
    if plan.weight_shards > 1:
        gathers = parameters + (parameters - outside if plan.reshard else 0)
        messages = [
            Message("all_gather", "dp", plan.weight_shards, gathers * precision.gather * num_micro_batches),
            Message("reduce_scatter", "dp", plan.weight_shards, reduced_bytes),
        ]
    replicas = plan.dp // plan.weight_shards
    if replicas > 1:
        messages.append(Message("all_reduce", "replicate", replicas, reduced_bytes / plan.weight_shards))
    return messages


def tensor_parallel_messages(
    model: Model,
    plan: Plan,
    precision: Precision,
    tokens: float,
    *,
    stage: int = 0,
    accumulated: bool = False,
    checkpointed: bool = False,
    vocabulary_parallel: bool = True,
) -> list[Message]:
    """What dividing the layers of pipeline stage `stage` takes, for `tokens` in one step.

    Without sequence parallelism forward sums the outputs of both branches, and backward the gradients of their inputs, once
    for all linear layers that read one, as Megatron-LM does. With it, each of the four sums becomes a reduce-scatter on one
    way and an all-gather on the other; the first and the last layer divide and join the sequence, and the gradients of norms
    are summed: once a step, in float32, without data parallelism; otherwise where `fully_shard` takes them, in the dtype of the
    reduction where micro-batches were `accumulated`. checkpointed: forward runs again up to
    the last tensor that backward needs, which is the input of the second sum. vocabulary_parallel: the embedding's output is
    summed, logits are gathered, and the gradient of their input is summed.
    """
    if plan.tp == 1:
        return []
    # A branch reads what the norm gives, and its last matrix writes in the dtype of matrix products.
    read, written = (tokens * model.hidden * size for size in (precision.residual, precision.element))
    layers, again = model.layers // plan.pp, int(checkpointed)
    first, last = stage == 0, stage == plan.pp - 1
    messages = []
    if plan.sequence_parallel:
        gathered = layers * ((2 + 2 * again) * read + 2 * written) + (first + last) * read
        scattered = layers * (2 * read + (2 + again) * written)
        norms = 2 * layers * model.hidden * (precision.reduce if accumulated or plan.dp == 1 else precision.gather)
        messages.append(Message("all_gather", "tp", plan.tp, gathered))
        messages.append(Message("reduce_scatter", "tp", plan.tp, scattered))
        messages.append(Message("all_reduce", "tp", plan.tp, norms))
    else:
        messages.append(Message("all_reduce", "tp", plan.tp, layers * ((2 + again) * written + 2 * read)))
    if vocabulary_parallel:
        logits = tokens * model.vocabulary * precision.element
        messages.append(Message("all_reduce", "tp", plan.tp, (first + last) * read))
        messages.append(Message("all_gather", "tp", plan.tp, last * logits))
    return messages


def pipeline_messages(model: Model, plan: Plan, precision: Precision, tokens: float, stage: int = 0) -> list[Message]:
    """What pipeline rank `stage` sends, for `tokens` in one step: activations onward, their gradients back.

    Each of its `chunks` sends both ways, but for the first of all, which has nothing before it, and the last. Ranks of one
    tensor-parallel group send the same tensor each, except with sequence parallelism, where each has its part of it.
    """
    if plan.pp == 1:
        return []
    return [Message("send", "pp", plan.pp, tokens * boundary_bytes(model, plan, precision, stage))]


def bubble(stages: int, num_micro_batches: int, chunks: int = 1) -> float:
    """Share of a step in which a stage of a pipeline waits (GPipe, 1F1B): (p-1)/(m+p-1); interleaving divides the wait by
    `chunks`. Sources: Huang et al. 2019; Narayanan et al. 2021, section 2.2."""
    wait = (stages - 1) / chunks
    return wait / (num_micro_batches + wait)


# ---- time


@dataclass(frozen=True)
class Machine:
    """memory: bytes of a GPU. peak: FLOP/s by bytes of an element. mfu: the share of it that compute reaches.
    nvlink, network: bytes/s that one GPU sends inside a node of `gpus_per_node`, and between nodes. efficiency: share of
    both that collectives reach."""

    memory: float = 80e9
    peak_half: float = 989e12
    peak_float: float = 67e12
    mfu: float = 0.5
    gpus_per_node: int = 8
    nvlink: float = 450e9
    network: float = 50e9
    efficiency: float = 0.8


H100 = Machine()


def compute_seconds(
    model: Model, tokens: float, world_size: int, element: int, machine: Machine, *, checkpointed: bool
) -> float:
    """6 FLOP a parameter and token, 8 if activations are computed again. Attention's own products, which grow with the
    sequence, and the table of embeddings, which does none, are left as they are in that rule. Source: Kaplan et al. 2020."""
    peak = machine.peak_half if element == 2 else machine.peak_float
    return (8 if checkpointed else 6) * model.parameters * tokens / (world_size * peak * machine.mfu)


def bandwidth(ranks: int, stride: int, machine: Machine) -> float:
    """Bytes/s at which each of `ranks` ranks, `stride` apart, sends in a ring.

    Within a node: NVLink. Across nodes, a ring enters and leaves each node once, and with g members in a node g rings run
    at once, each over another network card: g times the network, but no more than NVLink.
    """
    members = max(1, min(ranks, machine.gpus_per_node // stride))
    inside = (ranks - 1) * stride < machine.gpus_per_node
    raw = machine.nvlink if inside else min(machine.nvlink, members * machine.network)
    return raw * machine.efficiency


def message_seconds(message: Message, plan: Plan, machine: Machine) -> float:
    """Bytes over bandwidth; the time that a message takes however short it is, is left out."""
    _, stride = axis_shape(plan, message.axis)
    return message.sent / bandwidth(message.ranks, stride, machine)
