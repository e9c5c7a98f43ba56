"""Bytes that a rank has in memory at the moments of a step that can be its highest."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from benchmarks.scaling.decoder import Model, Precision, stage_parameters
from benchmarks.scaling.formulas import (
    accumulated_bytes,
    activations,
    held_memory,
    layer_activations,
    logit_bytes,
    receive_buffers,
)
from benchmarks.scaling.plan import Plan
from booster.plugin.ddp.gradient_reducer import MOST_IN_FLIGHT
from booster.tensors.flat import bucket_size

BUCKET = 25 * 2**20  # bytes, what plugins send together unless told otherwise


@dataclass(frozen=True)
class Load:
    """What one data-parallel rank is given in a step: micro-batches of `micro_batch` sequences.

    accumulates: gradients are reduced once, by the last micro-batch, rather than by every one. bucket_bytes: of gradients
    that ZeRO sends together. device: type of the device, on which the size of the scratch for masters depends.
    """

    micro_batch: int
    num_micro_batches: int = 1
    checkpointed: bool = False
    accumulates: bool = True
    bucket_bytes: float = BUCKET
    device: str = "cuda"


@dataclass(frozen=True)
class Moments:
    """Bytes on one rank when the last backward pass of a step begins, at its highest point where weights are gathered, at
    that where gradients are reduced, when it ends, and in the update."""

    begins: float
    gathers: float
    reduces: float
    ends: float
    update: float

    @property
    def peak(self) -> float:
        return max(self.begins, self.gathers, self.reduces, self.ends, self.update)


def step_moments(model: Model, plan: Plan, precision: Precision, load: Load, stage: int = 0) -> Moments:
    """The moments of a step on a rank of pipeline stage `stage`, with Adam, which leaves its gradients until the next step.

    Activations go and gradients come layer by layer, so that what is replicated is highest at one end of backward, or when
    the first buckets are under way; where `fully_shard` cuts the weights every layer has its own moment. Left out: what a
    single operation takes for itself.
    """
    parameters = stage_parameters(model, plan, stage)
    held = held_memory(parameters, plan, precision)
    several = load.num_micro_batches > 1
    tokens = load.num_micro_batches * load.micro_batch * model.sequence
    still = held.held - held.gradients + receive_buffers(model, plan, precision, tokens, stage)
    active = activations(
        model, plan, precision, load.micro_batch, load.num_micro_batches, checkpointed=load.checkpointed, stage=stage
    )
    # What one layer alone takes, at a time, and what is kept of every layer until its backward.
    layer = model.layer_matrices / plan.tp + 2 * model.hidden
    at_once = load.micro_batch * model.sequence  # tokens
    one = layer_activations(model, precision, at_once, tp=plan.tp, sequence_parallel=plan.sequence_parallel)
    # Autocast's copies serve all micro-batches of a pipeline, so that the half gradients of one are widened at its end.
    copies = parameters * precision.copy * (2 if plan.pp > 1 and several else 1)
    waiting = accumulated_bytes(parameters, plan, precision) if several and load.accumulates else 0
    done = held.gradients if several and not waiting else 0
    # Where there are no logits, the widest of what a layer passes back instead.
    logits = logit_bytes(model, plan, load.micro_batch, stage)
    active += 0 if logits else at_once * 2 * model.ffn * precision.element / plan.tp
    begins = still + active + copies + waiting + done - (one if load.checkpointed else 0)
    update = still + held.gradients + _scratch(parameters, plan, precision, load)
    again = one + layer * precision.copy if load.checkpointed else 0
    goes = active - logits
    goes += -one if load.checkpointed else copies
    if plan.engine == "replicated":
        under_way, there = _under_way(model, parameters, plan, precision, load)
        share = max(0, 1 - under_way / (parameters * precision.gradient))
        reduces = still + again + goes * share + max(under_way + done, waiting)
        ends = still + max(under_way + (done or there), waiting)
        return Moments(begins, begins, reduces, ends, update)
    walk = _Walk(model, plan, precision, parameters, goes, done)
    if plan.pp > 1:
        waiting = accumulated_bytes(parameters, plan, precision)  # also of a single micro-batch, until its pass is over
    layers = [walk.at(left, waiting, several) for left in range(walk.layers, 0, -1)]
    gathers, reduces = (still + again + max(moment) for moment in zip(*layers, strict=True))
    begins += walk.whole(walk.layers) * precision.gather
    return Moments(begins, gathers, reduces, still + walk.at_the_end(), update)


class _Walk:
    """A backward pass through the layers of one stage, which `fully_shard` gathers and reduces one after another.

    goes: bytes of activations and copies that go with their layers. done: of gradients that earlier micro-batches reduced.
    """

    def __init__(
        self, model: Model, plan: Plan, precision: Precision, parameters: float, goes: float, done: float
    ) -> None:
        self.layers = model.layers // plan.pp
        self._plan, self._precision, self._goes, self._done = plan, precision, goes, done
        self._layer = model.layer_matrices / plan.tp + 2 * model.hidden
        self._parameters = parameters
        self._outside = parameters - self.layers * self._layer
        # The output layer's gradients come first, and are reduced last, with all that lies outside of the layers.
        head = model.vocabulary * model.hidden / plan.tp if plan.pp == 1 else 0
        self._head = head * precision.gather
        arrived = self._layer * precision.reduce / plan.weight_shards
        self._shard = 0 if done else self._layer * precision.shard_gradient / plan.gradient_shards
        if plan.weight_shards < plan.dp and (done or precision.shard_gradient != precision.reduce):
            self._shard += arrived  # what was summed over copies stays until backward ends
        self._arrived = arrived if done else 0
        # Where nothing is divided, gradients are sent from where they stay, and weights are let go of afterwards.
        self._sent = self._layer * precision.reduce if plan.weight_shards > 1 else 0

    def whole(self, left: int) -> float:
        """Parameters that are whole because they lie outside of all layers, or are kept from forward, of `left` layers."""
        return self._outside + (0 if self._plan.reshard else left * self._layer)

    def at(self, left: int, waiting: float, several: bool) -> tuple[float, float]:
        """What is there besides what always is, in the backward of the layer after which `left - 1` are left: while its
        gradients come and the next layer is gathered, and while they are reduced. waiting: whole gradients that are to be
        reduced, by the last of `several` micro-batches."""
        precision, layer, share = self._precision, self._layer, left / self.layers
        reduced = self.layers - left
        came = layer * precision.gather
        kept = self.whole(left - 1 if self._plan.weight_shards > 1 else left)
        waits = waiting * (self._outside + left * layer) / self._parameters
        if self._plan.pp > 1:  # reduced when all micro-batches are through
            first = 0 if precision.copy and several else came  # half gradients wait
            gathers = self.whole(self.layers) * precision.gather + first + self._goes + (waiting if several else 0)
            return gathers, kept * precision.gather + self._sent + waits + (reduced + 1) * self._shard
        following = layer if self._plan.reshard and left > 1 else 0
        here = layer if self._plan.reshard else 0
        always = self._head + self._done + waits
        gathers = (
            always
            + (self.whole(left) + here + following) * precision.gather
            + came
            + self._goes * share
            + reduced * self._shard
            + (self._sent if reduced else 0)  # of the layer before, until this one's are sent
        )
        reduces = (
            always
            + (kept + following) * precision.gather
            + (0 if waiting else came)
            + self._goes * (share - 1 / self.layers)
            + (reduced + 1) * self._shard
            + self._arrived
            + self._sent
        )
        return gathers, reduces

    def at_the_end(self) -> float:
        """What is there besides what always is when all but what lies outside of the layers is reduced."""
        sent = self._precision.reduce if self._plan.weight_shards > 1 else 0
        outside = self._outside * (2 * self._precision.gather + sent)
        return self._done + self.layers * self._shard + outside


def _scratch(parameters: float, plan: Plan, precision: Precision, load: Load) -> float:
    """Float32 values and gradients of one bucket of masters, which are stepped one after another."""
    elements = bucket_size(int(parameters / plan.state_shards), torch.device(load.device))
    return elements * (precision.shard_scratch if plan.engine == "fully_shard" else precision.scratch)


def _under_way(model: Model, parameters: float, plan: Plan, precision: Precision, load: Load) -> tuple[float, float]:
    """Gradients of buckets that are being filled or reduced, and those that are done when backward ends."""
    whole = parameters * precision.gradient
    kept = whole / plan.gradient_shards
    if plan.gradient_shards == 1:
        return 0, kept
    # No parameter is divided among buckets. One is filled from whole gradients, unless they are in buckets that stay anyway.
    bucket = max(load.bucket_bytes, model.largest * precision.gradient)
    most = MOST_IN_FLIGHT + (not plan.keeps_buckets)
    under_way = min(most * bucket, whole * (1 if plan.keeps_buckets else 2))
    return under_way, kept * max(0, 1 - under_way / whole)
