"""Models with blocks that pass each other containers of every kind train as in one process, in every placement."""

from unittest import mock

import pytest
import torch
from containers import CONTAINERS
from torch import nn

from booster import Booster
from booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, SingleDevice, TorchDDPPlugin, TorchFSDPPlugin
from booster.plugin.pipeline import pipeline
from booster.tensors.trees import tensors

DIM = 4
PLACEMENTS = {
    "DDP": TorchDDPPlugin,
    "FSDP": TorchFSDPPlugin,
    "ZeRO-1": lambda: LowLevelZeroPlugin(stage=1),
    "ZeRO-2": lambda: LowLevelZeroPlugin(stage=2),
    "PP": lambda: HybridParallelPlugin(tp_size=1, pp_size=2, num_microbatches=2, pp_style="1f1b"),
}
ORDERED = [kind for kind in CONTAINERS if kind not in ("set", "frozen set")]
# torch's fully_shard, of which pipelines make use too, has its own walker, which knows these.
KNOWN_TO_TORCH = ["tensor", "tuple", "list", "named tuple", "named tuple of torch", "dict", "ordered dict"]
KINDS = {
    "DDP": ORDERED,
    "FSDP": [*KNOWN_TO_TORCH, "tuple, subclass", "list, subclass", "frozen dataclass", "slotted dataclass"],
    "ZeRO-1": ORDERED,
    "ZeRO-2": ORDERED,
    "PP": ORDERED,
}


class Block(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.linear, self.kind = nn.Linear(DIM, DIM), kind

    def forward(self, tree):
        x = next(tensors(tree))
        return CONTAINERS[self.kind](x + torch.tanh(self.linear(x)).view_as(x))


class Net(nn.Module):
    def __init__(self, kind):
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block(kind) for _ in range(2))
        self.kind = kind

    def forward(self, tree):
        tree = CONTAINERS[self.kind](self.first(next(tensors(tree))))
        for block in self.blocks:
            tree = block(tree)
        return tree


def criterion(output, target):
    return (next(tensors(output)) - target).square().mean()


def train(kind, precision, plugin):
    booster = Booster("cpu", precision, plugin)
    net = Net(kind)
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.5))
    rows = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(2):
        x = torch.randn(8, DIM, generator=rows)
        share = 8 // booster.plugin.data_parallel_size
        x = x[booster.plugin.data_parallel_rank * share :][:share]
        batch = (CONTAINERS[kind](x), x.flip(-1))
        loss = booster.execute_pipeline(iter([batch]), model, criterion, optimizer)["loss"]
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(booster.reduce(loss)))
    return losses


def train_all(rank, world_size, placement, precision):
    kinds = KINDS["FSDP"] if placement == "PP" and precision == "bf16_naive" else KINDS[placement]
    return {kind: train(kind, precision, PLACEMENTS[placement]()) for kind in kinds}


@pytest.mark.slow_cases("DDP", "ZeRO-1")
@pytest.mark.crossed
@pytest.mark.parametrize("precision", ["fp32", "bf16_naive"])
@pytest.mark.parametrize("placement", PLACEMENTS)
def test_blocks_pass_each_other_containers(ranks2, placement, precision):
    wanted = train("tensor", precision, SingleDevice())
    for found in ranks2(train_all, placement, precision):
        for kind, losses in found.items():
            assert losses == pytest.approx(wanted, rel=1e-5 if precision == "fp32" else 0.05), kind


def inferences(rank, world_size):
    """By kind of container: how often a pipeline works out, for two batches of one shape, what crosses its stages."""
    counts = {}
    for kind in ORDERED:
        with mock.patch.object(pipeline, "infer_shapes", wraps=pipeline.infer_shapes) as infer:
            train(kind, "fp32", PLACEMENTS["PP"]())
        counts[kind] = infer.call_count
    return counts


@pytest.mark.slow
def test_batches_of_one_shape_are_inferred_once_whatever_they_come_in(ranks2):
    assert ranks2(inferences) == [dict.fromkeys(ORDERED, 1)] * 2
