"""Estimates of memory under plugins of ranks, against the allocator's record of a step on each rank."""

from unittest import mock

import pytest
import torch
from experts import EXPERTS, TOP_K, WIDTH, Block
from torch import nn

from benchmarks.estimates import MODELS, both, high_level
from booster import Booster
from booster.memory import measure
from booster.plugin import TorchFSDPPlugin

CASES = [
    *(
        (model, precision, plugin)
        for model in ("vit", "gpt", "cnn", "resnet10t")
        for plugin in ("ddp", "zero1", "zero2", "fsdp")
        for precision in ("fp32", "bf16", "bf16_naive", "seven bytes")
    ),
    *(
        (model, precision, "fsdp")
        for model in ("vit", "gpt")
        for precision in ("fp8", "fp8, gathered so", "fp8, bf16 weights gathered so")
    ),
]


def assert_close(found):
    """Estimates of each rank are what its allocator recorded."""
    for held, recorded_held, peak, recorded_peak in found:
        assert held == pytest.approx(recorded_held, rel=0.01)
        assert peak == pytest.approx(recorded_peak, rel=0.03)


def found_on(rank, world_size, name, precision, plugin, **options):
    found = both(name, precision, plugin, world_size=world_size, **options)
    return found.estimate.held, found.held, found.estimate.peak, found.peak


@pytest.mark.slow  # the next two are quick: weights that arrive in fp8, and half ones with gradients released
@pytest.mark.parametrize(("name", "precision", "plugin"), CASES)
def test_an_estimate_is_what_the_allocator_of_each_rank_records(ranks2, name, precision, plugin):
    assert_close(ranks2(found_on, name, precision, plugin))


def wide():
    """Weights much larger than the batch: what is made of them is the peak."""
    return nn.Sequential(nn.Linear(64, 768), nn.Linear(768, 768), nn.Linear(768, 64))


def wide_on(rank, world_size):
    case = wide, lambda: (torch.randn(4, 64), torch.randn(4, 64)), nn.functional.mse_loss
    with mock.patch.dict(MODELS, {"wide": case}):
        return found_on(rank, world_size, "wide", "fp8, gathered so", "fsdp")


@pytest.mark.slow
def test_weights_that_arrive_in_fp8_are_not_rounded_anew_by_the_estimate(ranks2):
    assert_close(ranks2(wide_on))


def released_on(rank, world_size, name, precision, plugin, clip):
    return found_on(rank, world_size, name, precision, plugin, release="exact", clip=clip)


QUICK_RELEASED = [("gpt", "bf16_naive", "zero2", 0.0)]
RELEASED = [
    pytest.param(*case, marks=[] if case in QUICK_RELEASED else [pytest.mark.slow])
    for case in [
        (model, precision, plugin, clip)
        for model in ("vit", "gpt")
        for plugin in ("ddp", "zero1", "zero2", "fsdp")
        for precision in ("fp32", "bf16_naive", "seven bytes")
        for clip in (0.0, 1.0)
    ]
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "precision", "plugin", "clip"), RELEASED)
def test_an_estimate_follows_released_gradients_on_ranks(ranks2, name, precision, plugin, clip):
    assert_close(ranks2(released_on, name, precision, plugin, clip))


class Sharer(nn.Module):
    """Attention, or experts, between layers wide enough for activations to be what counts."""

    def __init__(self, experts):
        super().__init__()
        self.inp, self.out = nn.Linear(WIDTH, 512), nn.Linear(512, WIDTH)
        self.blocks = nn.ModuleList([Block(True, range(EXPERTS), False, EXPERTS, TOP_K) for _ in range(2 * experts)])
        self.heads = nn.Linear(WIDTH, 4 * 96)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        q, k, v = self.heads(x).unflatten(-1, (3, 4, 32)).permute(2, 0, 3, 1, 4)
        if not self.blocks:
            q = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(self.inp(x).relu()) + q.sum((1, 3), keepdim=True)[:, 0]


def shared_on(rank, world_size, sizes):
    def parts():
        torch.manual_seed(0)
        model = Sharer("ep_size" in sizes)
        return model, torch.optim.AdamW(model.parameters()), (torch.randn(4, 256, WIDTH), torch.randn(4, 256, WIDTH))

    def mean(output, target):
        losses = (output - target).square().mean(-1)
        return booster.token_mean(losses, None) if "sp_size" in sizes else losses.mean()

    ways = {"sequence_parallelism_mode": "all_to_all"} if "sp_size" in sizes else {}
    booster = Booster("cpu", "fp32", TorchFSDPPlugin(**sizes, **ways))
    model, optimizer, batch = parts()
    expected = booster.estimate_memory(
        model, optimizer, batch, lambda output, target: (output - target).square().mean()
    )
    kept = []

    def step():
        x, y = kept[2]
        booster.backward(mean(kept[0](x), y), kept[1])
        kept[1].step()

    def begin():
        model, optimizer, batch = parts()
        kept.extend([*booster.boost(model, optimizer)[:2], booster.shard_sequence(batch)])
        for _ in range(4):
            step()
            kept[1].zero_grad()
        step()

    _, held = high_level(begin, [])
    measured = measure(kept[0], kept[1])
    _, freed = high_level(kept[1].zero_grad, [])
    highest, _ = high_level(step, [])
    return expected, measured, held, held + freed + highest


@pytest.mark.parametrize("sizes", [{"sp_size": 2}, {"ep_size": 2}])
def test_an_estimate_knows_ranks_that_share_sequences_or_experts(ranks2, sizes):
    for expected, measured, held, peak in ranks2(shared_on, sizes):
        assert (expected.states, expected.gradients) == (measured.states, measured.gradients)
        # Ranks that share sequences keep two states of the random generator, which are 5 kB each whatever the model.
        assert expected.held == pytest.approx(held, rel=0.001, abs=10_240)
        assert expected.peak == pytest.approx(peak, rel=0.03)
