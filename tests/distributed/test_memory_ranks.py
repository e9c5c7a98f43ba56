"""Estimates of memory under plugins of ranks, against the allocator's record of a step on each rank."""

from unittest import mock

import pytest
import torch
from torch import nn

from benchmarks.estimates import MODELS, both

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


def found_on(rank, world_size, name, precision, plugin, **options):
    found = both(name, precision, plugin, world_size=world_size, **options)
    return found.estimate.held, found.held, found.estimate.peak, found.peak


@pytest.mark.slow  # the next two are quick: weights that arrive in fp8, and half ones with gradients released
@pytest.mark.parametrize(("name", "precision", "plugin"), CASES)
def test_an_estimate_is_what_the_allocator_of_each_rank_records(ranks2, name, precision, plugin):
    for held, recorded_held, peak, recorded_peak in ranks2(found_on, name, precision, plugin):
        assert held == pytest.approx(recorded_held, rel=0.01)
        assert peak == pytest.approx(recorded_peak, rel=0.03)


def wide():
    """Weights much larger than the batch: what is made of them is the peak."""
    return nn.Sequential(nn.Linear(64, 768), nn.Linear(768, 768), nn.Linear(768, 64))


def wide_on(rank, world_size):
    case = wide, lambda: (torch.randn(4, 64), torch.randn(4, 64)), nn.functional.mse_loss
    with mock.patch.dict(MODELS, {"wide": case}):
        return found_on(rank, world_size, "wide", "fp8, gathered so", "fsdp")


@pytest.mark.slow
def test_weights_that_arrive_in_fp8_are_not_rounded_anew_by_the_estimate(ranks2):
    for held, recorded_held, peak, recorded_peak in ranks2(wide_on):
        assert held == pytest.approx(recorded_held, rel=0.01)
        assert peak == pytest.approx(recorded_peak, rel=0.03)


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
    for held, recorded_held, peak, recorded_peak in ranks2(released_on, name, precision, plugin, clip):
        assert held == pytest.approx(recorded_held, rel=0.01)
        assert peak == pytest.approx(recorded_peak, rel=0.03)
