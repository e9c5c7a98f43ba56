"""A load into masters on ranks is to the bit, and has no more in memory twice than a few buckets."""

import pytest
import torch
from bytes_alive import BytesAlive
from comparing import difference, whole
from torch import nn

from booster import Booster
from booster.mixed_precision import BF16NaiveMixedPrecision
from booster.plugin import LowLevelZeroPlugin, SingleDevice, TorchDDPPlugin, TorchFSDPPlugin

PLACEMENTS = {
    "one device": SingleDevice,
    "DDP": TorchDDPPlugin,
    "ZeRO-1": lambda: LowLevelZeroPlugin(stage=1),
    "ZeRO-2": lambda: LowLevelZeroPlugin(stage=2),
    "FSDP": TorchFSDPPlugin,
}
BUCKET = 2**18 * 4  # bytes of one in float32, of as many elements as the smallest has


def boosted(placement, seed):
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 2048), nn.LayerNorm(2048))
    booster = Booster("cpu", BF16NaiveMixedPrecision(master_weights="split"), PLACEMENTS[placement]())
    return booster, *booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-3))[:2]


def step(booster, model, optimizer):
    booster.backward(model(torch.linspace(-1, 1, 2048).view(2, 1024)).float().square().mean(), optimizer)
    optimizer.step()
    optimizer.zero_grad()


def state(model, optimizer):
    """All of it, whole: weights, states, masters."""
    own = optimizer.state_dict()
    wholes = {(key, name): whole(each) for key, of in own["state"].items() for name, each in of.items()}
    masters = {name: whole(each) for name, each in own["booster"]["masters"]["weights"].items()}
    return {name: whole(each) for name, each in model.named_parameters()}, wholes, masters


def saved(rank, world_size, placement, folder):
    parts = boosted(placement, 0)
    step(*parts)
    parts[0].save(folder, *parts[1:])
    return state(*parts[1:])


def loaded(rank, world_size, placement, folder, expected):
    parts = boosted(placement, 1)
    step(*parts)
    with BytesAlive() as memory:
        parts[0].load(folder, *parts[1:])
    return difference(state(*parts[1:]), expected), memory.most - max(memory.before, memory.now)


SLOW = (
    *((("ZeRO-2", 2), ("ZeRO-2", 2)), (("FSDP", 2), ("FSDP", 2)), (("one device", 1), ("FSDP", 2))),
    (("ZeRO-1", 2), ("one device", 1)),
)


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (("DDP", 2), ("ZeRO-1", 2)),
        (("FSDP", 2), ("DDP", 2)),
        *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW),
    ],
)
def test_a_load_into_masters_on_ranks_holds_a_few_buckets_twice(run_on_ranks, tmp_path, before, after):
    expected = run_on_ranks(saved, before[1], before[0], str(tmp_path))[0]
    for wrong, more in run_on_ranks(loaded, after[1], after[0], str(tmp_path), expected):
        assert wrong is None
        assert more < 4 * BUCKET  # of 36 that weights, masters and two moments of 3 million elements take
