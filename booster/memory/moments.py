"""Bytes that a rank has in memory at the moments of a step that can be its highest."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from booster.flat import bucket_size
from booster.memory.decoder import Model, Plan, Precision, stage_parameters
from booster.memory.formulas import accumulated_bytes, activations, held_memory, logit_bytes, receive_buffers

BUCKET = 25 * 2**20  # bytes, what plugins send together unless told otherwise
IN_FLIGHT = 2  # buckets of ZeRO-2 that are being reduced at one time; the next is being filled meanwhile


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

    Activations go and gradients come layer by layer, so that what is replicated is highest at one end of backward; where
    `fully_shard` cuts the weights every layer is a moment of its own. Left out: what a single operation takes for itself.
    """
    parameters = stage_parameters(model, plan, stage)
    held = held_memory(parameters, plan, precision)
    tokens = load.num_micro_batches * load.micro_batch * model.sequence
    still = held.held - held.gradients + receive_buffers(model, plan, precision, tokens, stage)
    active = activations(
        model, plan, precision, load.micro_batch, load.num_micro_batches, checkpointed=load.checkpointed
    )
    # Half gradients of weights wait for the last micro-batch where autocast's copies serve all of them.
    copies = parameters * precision.copy * (2 if plan.pp > 1 else 1)
    waiting = done = 0.0
    if load.num_micro_batches > 1:
        waiting = accumulated_bytes(parameters, plan, precision) if load.accumulates else 0
        done = 0 if waiting else held.gradients
    begins = still + active + copies + waiting + done
    update = still + held.gradients + _scratch(parameters, plan, precision, load)
    if plan.engine == "replicated":
        under_way, there = _under_way(parameters, plan, precision, load)
        ends = still + max(under_way + (done or there), waiting)
        return Moments(begins, begins, ends, ends, update)
    walk = _Walk(model, plan, precision, parameters, active - logit_bytes(model, plan, load.micro_batch) + copies)
    layers = [walk.at(left, waiting, done) for left in range(walk.layers, 0, -1)]
    gathers, reduces = (still + max(moment) for moment in zip(*layers, strict=True))
    return Moments(
        begins + walk.whole(walk.layers) * precision.gather, gathers, reduces, still + held.gradients, update
    )


class _Walk:
    """A backward pass through the layers of one stage, which `fully_shard` gathers and reduces one after another.

    goes: bytes of activations and copies that go with their layers.
    """

    def __init__(self, model: Model, plan: Plan, precision: Precision, parameters: float, goes: float) -> None:
        self.layers = model.layers // plan.pp
        self._plan, self._precision, self._goes = plan, precision, goes
        self._layer = model.layer_matrices / plan.tp + 2 * model.hidden
        self._parameters = parameters
        self._outside = parameters - self.layers * self._layer
        self._shard = self._layer * precision.shard_gradient / plan.gradient_shards
        # Where nothing is divided, gradients are sent from where they stay, and weights are let go of afterwards.
        self._sent = self._layer * precision.reduce if plan.weight_shards > 1 else 0
        if plan.weight_shards < plan.dp and precision.shard_gradient != precision.reduce:
            self._shard += (
                self._layer * precision.reduce / plan.weight_shards
            )  # summed over copies, until backward ends

    def whole(self, left: int) -> float:
        """Parameters that are whole because they lie outside of all layers, or are kept from forward, of `left` layers."""
        return self._outside + (0 if self._plan.reshard else left * self._layer)

    def at(self, left: int, waiting: float, done: float) -> tuple[float, float]:
        """What is there besides what always is, in the backward of the layer after which `left - 1` are left: while its
        gradients come and the next layer is gathered, and while they are reduced. waiting, done: gradients of earlier
        micro-batches, whole ones that are to be reduced, and reduced ones."""
        precision, layer, share = self._precision, self._layer, left / self.layers
        reduced = self.layers - left
        came = layer * precision.gather
        if self._plan.pp > 1:
            return self._at_layer_of_a_pipeline(left, waiting, came)
        following = layer if self._plan.reshard and left > 1 else 0
        here = layer if self._plan.reshard else 0
        kept = left - 1 if self._plan.weight_shards > 1 else left
        gathers = (
            (self.whole(left) + here + following) * precision.gather
            + came
            + self._goes * share
            + waiting * (self._outside + left * layer) / self._parameters
            + (done or reduced * self._shard)
            + (self._sent if reduced else 0)  # of the layer before, until this one's are sent
        )
        reduces = (
            (self.whole(kept) + following) * precision.gather
            + (0 if waiting else came)
            + self._goes * (share - 1 / self.layers)
            + waiting * (self._outside + left * layer) / self._parameters
            + ((done + self._shard) if done else (reduced + 1) * self._shard)
            + self._sent
        )
        return gathers, reduces

    def _at_layer_of_a_pipeline(self, left: int, waiting: float, came: float) -> tuple[float, float]:
        """As `at`; gradients are reduced when all micro-batches are through."""
        precision, layer = self._precision, self._layer
        if precision.copy:
            came = 0  # half gradients wait, and float32 ones come when activations are gone
        gathers = self.whole(self.layers) * precision.gather + came + self._goes + waiting
        kept = left - 1 if self._plan.weight_shards > 1 else left
        reduces = self.whole(kept) * precision.gather + self._sent
        reduces += waiting * (self._outside + left * layer) / self._parameters + (self.layers - left + 1) * self._shard
        return gathers, reduces


def _scratch(parameters: float, plan: Plan, precision: Precision, load: Load) -> float:
    """Float32 values and gradients of one bucket of masters, which are stepped one after another."""
    elements = bucket_size(int(parameters / plan.state_shards), torch.device(load.device))
    cut = plan.engine == "fully_shard"
    return elements * (precision.shard_scratch if cut else precision.scratch)


def _under_way(parameters: float, plan: Plan, precision: Precision, load: Load) -> tuple[float, float]:
    """Gradients of buckets that are being filled or reduced when backward ends, and those that are done."""
    whole = parameters * precision.gradient
    kept = whole / plan.gradient_shards
    if plan.gradient_shards == 1:
        return 0, kept
    # A bucket is filled from whole gradients, unless they are in buckets that stay anyway.
    most = IN_FLIGHT + (not plan.keeps_buckets)
    under_way = min(most * load.bucket_bytes, whole * (1 if plan.keeps_buckets else 2))
    return under_way, kept * max(0, 1 - under_way / whole)
