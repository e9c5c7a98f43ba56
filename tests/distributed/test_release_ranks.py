"""Gradients that are stepped on within backward where ranks share them: the bits of the step without release."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from booster import Booster
from booster.mixed_precision import BF16NaiveMixedPrecision, FP16NaiveMixedPrecision, FP16TorchMixedPrecision
from booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin

PRECISIONS = {
    "fp32": lambda: "fp32",
    "fp16": lambda: FP16TorchMixedPrecision(init_scale=2.0**12),
    "fp16_naive": lambda: FP16NaiveMixedPrecision(initial_scale=2.0**12, hysteresis=1),
    "bf16_naive": BF16NaiveMixedPrecision,
    "bf16_naive split24 8bit": lambda: BF16NaiveMixedPrecision(master_weights="split24", states="8bit"),
}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(30, 20)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(20, 50), nn.GELU(), nn.Linear(50, 20)) for _ in range(2))
        self.norm = nn.LayerNorm(20)
        self.spoils = False  # the gradient of the first element of norm.weight, which is in the part of rank 0 alone

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = x + block(x)
        weight = self.norm.weight * 1
        if self.spoils:
            weight.register_hook(lambda grad: grad.index_fill(0, torch.zeros(1, dtype=torch.long), math.inf))
        return F.linear(F.layer_norm(x, (20,), weight, self.norm.bias), self.embed.weight)


def trained(rank, release, precision, micro_batches=1, spoil=(), **options):
    """Weights of this rank, states, results, and whether gradients were gone when backward returned.

    spoil: in which steps one rank's part of a gradient has an inf."""
    torch.manual_seed(0)
    net = Net()
    b = Booster("cpu", PRECISIONS[precision](), TorchFSDPPlugin(), release_gradients=release, **options)
    made = torch.optim.AdamW(net.parameters(), lr=1e-2)
    model, optimizer, criterion, *_ = b.boost(net, made, F.cross_entropy)
    data = torch.Generator().manual_seed(rank)
    results, gone = [], True

    def backward():
        net.spoils = step in spoil
        ids = torch.randint(30, (8,), generator=data)
        loss = criterion(model(ids), (ids * 3 + 1) % 30)
        b.backward(loss * (math.inf if (step, rank) == (1, 1) and options else 1.0), optimizer)

    for step in range(4):  # noqa: B007
        if micro_batches == 1:
            backward()
        else:
            with b.accumulate(model, optimizer, micro_batches):
                for _ in range(micro_batches):
                    backward()
        gone = gone and all(param.grad is None for param in model.parameters())
        results.append(repr(optimizer.step()))
        optimizer.zero_grad()
    weights = [param.full_tensor().detach() for param in net.parameters()]
    state = optimizer.state_dict()["state"]
    return weights, [whole(value) for own in state.values() for value in own.values()], results, gone


def whole(value):
    return value.full_tensor() if hasattr(value, "full_tensor") else value


def both(rank, world_size, precision, micro_batches, options):
    released = trained(rank, "exact", precision, micro_batches, **options)
    plain = trained(rank, False, precision, micro_batches, **options)
    same = all(torch.equal(mine, other) for n in (0, 1) for mine, other in zip(released[n], plain[n], strict=True))
    return same, released[2], plain[2], released[3]


@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 0.5}], ids=["plain", "clip"])
@pytest.mark.parametrize(
    "precision",
    [pytest.param(name, marks=[pytest.mark.slow] * (name in ("fp32", "fp16_naive"))) for name in PRECISIONS],
)
def test_fully_sharded_parameters_are_stepped_to_the_same_bits(ranks2, precision, options):
    found = ranks2(both, precision, 1, options)
    for same, released, plain, gone in found:
        assert released == plain
        assert same
        assert gone
    assert ("applied=False" in found[0][1][1]) == bool(options)


def test_an_inf_in_the_part_of_one_rank_makes_all_look_again_and_skip(ranks2):
    for same, released, plain, _ in ranks2(both, "fp32", 1, {"skip_nonfinite": True, "spoil": (2,)}):
        assert released == plain
        assert same
        assert "applied=False" in released[2]
        assert "culprit=('norm.weight',)" in released[2]


def accumulated(rank, world_size):
    plain = both(rank, world_size, "fp32", 2, {})
    with pytest.raises(ValueError, match="the gradients of earlier micro-batches, which fully_shard holds back"):
        trained(rank, "exact", "fp32", 2, clip_grad_norm=0.5)
    return plain


def test_accumulated_gradients_are_released_in_one_pass_and_refused_in_two(ranks2):
    for same, released, plain, gone in ranks2(accumulated):
        assert same
        assert released == plain
        assert gone


def refusals(rank, world_size):
    found = []
    for plugin, mode in (
        (TorchDDPPlugin(), "exact"),
        (LowLevelZeroPlugin(), "exact"),
        (TorchFSDPPlugin(), "previous_norm"),
    ):
        with pytest.raises(ValueError, match="release_gradients=.* is not possible here") as raised:
            Booster("cpu", "bf16", plugin, release_gradients=mode, clip_grad_norm=1.0)
        found.append(str(raised.value))
    return found


def test_other_plugins_are_refused_with_the_reason(ranks2):
    ddp, zero, previous = ranks2(refusals)[0]
    assert "DistributedDataParallel fills gradients at the end of backward" in ddp
    assert "LowLevelZeroPlugin averages gradients in buckets" in zero
    assert "ranks would stop at different parameters" in previous
