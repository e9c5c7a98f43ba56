"""fp16_naive and bf16_naive on data-parallel ranks: they skip together and never drift apart."""

import pytest
import torch
from comparing import same
from small_job import batch
from torch import nn

from booster import Booster
from booster.mixed_precision import BF16NaiveMixedPrecision, FP16NaiveMixedPrecision
from booster.plugin import TorchDDPPlugin

SCALE = 2.0**10


def strategy(name, **options):
    if name == "fp16":
        return FP16NaiveMixedPrecision(initial_scale=SCALE, growth_interval=25, hysteresis=1, **options)
    return BF16NaiveMixedPrecision(**options)


def net(seed):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def adamw(params):
    return torch.optim.AdamW(params, lr=1e-2)


def train(rank, world_size, name, steps, overflow, options):
    model = net(seed=rank)  # DDP and the masters must take rank 0's weights, in every bit
    booster = Booster("cpu", strategy(name, **options), TorchDDPPlugin())
    model, optimizer, criterion, *_ = booster.boost(model, adamw(model.parameters()), nn.CrossEntropyLoss())
    start = optimizer.state_dict()["booster"]["masters"]["weights"] if options["master_weights"] != "none" else {}
    applied = []
    for step in range(steps):
        x, y = (part.chunk(world_size)[rank] for part in batch(step, rows=8))
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        if step in overflow and rank == world_size - 1:
            loss = loss * float("inf")
        booster.backward(loss, optimizer)
        applied.append(bool(optimizer.step()))
    state = optimizer.state_dict()
    return {
        "weights": [param.detach().clone() for param in model.parameters()],
        "masters": list(state["booster"]["masters"]["weights"].values()),
        "start": list(start.values()),
        "applied": applied,
        "scale": optimizer.loss_scale,
    }


FORMS = [
    ("fp16", {"master_weights": "fp32"}),
    ("fp16", {"master_weights": "split"}),
    ("bf16", {"master_weights": "split"}),
    ("bf16", {"master_weights": "none", "rounding": "stochastic"}),
]


@pytest.mark.parametrize(("name", "options"), FORMS)
def test_weights_and_masters_are_bit_equal_on_both_ranks_after_50_steps_with_overflows(ranks2, name, options):
    overflow = (3, 4, 20)
    first, second = ranks2(train, name, 50, overflow if name == "fp16" else (), options)
    for key in ("weights", "masters", "start"):
        assert same(first[key], second[key]), key
    assert first["applied"] == second["applied"]
    if name == "fp16":
        assert [step for step, done in enumerate(first["applied"]) if not done] == list(overflow)
        assert first["scale"] == second["scale"] == SCALE / 4  # three overflows, and 25 clean steps
    if options["master_weights"] == "fp32":
        assert same(first["start"], [param.detach() for param in net(0).parameters()])
