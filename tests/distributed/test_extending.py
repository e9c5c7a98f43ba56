"""The precision and the loss scale of `examples/extending` train on every placement that applies, like one process."""

import functools

import pytest
import torch
from extending import load
from matrix import BATCH, MAX_NORM, PARALLELISMS, VOCABULARY, Transformer, loss_of

from booster import Booster
from booster.mixed_precision import FP16NaiveMixedPrecision, FP16TorchMixedPrecision

STEPS = 6
PRECISIONS = {
    "fp8": lambda: load("precision").FP8(),
    "fp16, own scale": lambda: FP16TorchMixedPrecision(scale=load("loss_scale").Sawtooth()),
    "fp16_naive, own scale": lambda: FP16NaiveMixedPrecision(scale=load("loss_scale").Sawtooth()),
}
# Ranks scale activations by what they have seen themselves, and fp8 has 3 bits of mantissa.
TOLERANCE = {"fp8": 0.05, "fp16, own scale": 2e-3, "fp16_naive, own scale": 1e-2}
PLACEMENTS = [name for name, column in PARALLELISMS.items() if column.world_size == 2]


def train(precision, placement, steps=STEPS):
    torch.manual_seed(7)
    booster = Booster("cpu", PRECISIONS[precision](), PARALLELISMS[placement].plugin())
    model = Transformer()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, criterion, *_ = booster.boost(model, optimizer, loss_of)
    plugin, data = booster.plugin, torch.Generator().manual_seed(3)
    share = BATCH // plugin.data_parallel_size
    first = plugin.data_parallel_rank * share
    losses, scales = [], []
    for _ in range(steps):
        tokens = torch.randint(VOCABULARY, (BATCH, 8), generator=data)[first : first + share]
        result = booster.execute_pipeline(iter([(tokens, (tokens * 3 + 1) % VOCABULARY)]), model, criterion, optimizer)
        optimizer.clip_grad_by_norm(MAX_NORM)
        assert optimizer.step().applied
        optimizer.zero_grad()
        losses.append(float(booster.reduce(result["loss"])))
        scales.append(optimizer.loss_scale)
    return losses, scales


@functools.cache
def in_one_process(precision):
    return train(precision, "single")


def nn_linear(layer, x):
    return x @ layer.weight.t() + layer.bias


def cell(rank, world_size, precision, placement):
    return train(precision, placement)


@pytest.mark.crossed
@pytest.mark.parametrize("placement", PLACEMENTS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_an_extension_trains_on_every_placement_like_one_process(run_on_ranks, precision, placement):
    traces = run_on_ranks(cell, 2, precision, placement)
    losses, scales = traces[0]
    reference, reference_scales = in_one_process(precision)
    assert all(trace == traces[0] for trace in traces)
    assert scales == reference_scales
    assert losses[-1] < losses[0]
    torch.testing.assert_close(losses, reference, rtol=0, atol=TOLERANCE[precision])


def test_fp8_layers_multiply_in_fp8_and_kept_ones_in_float32():
    precision = load("precision")
    net = Transformer(num_blocks=3)
    model, *_ = Booster("cpu", precision.FP8(keep_fp32=["head", "blocks.0"])).boost(net)
    swapped = {name for name, module in net.named_modules() if isinstance(module, precision.Fp8Linear)}
    assert swapped == {f"blocks.{i}.{n}" for i in (1, 2) for n in ("q", "k", "v", "out", "up", "down")}
    layer = net.blocks[1].q
    x = torch.randn(3, 16)
    layer.largest = torch.tensor(4.0)
    exact = nn_linear(layer, x)
    error = (layer(x) - exact).abs().max() / exact.abs().max()
    assert 1e-3 < error < 0.1
