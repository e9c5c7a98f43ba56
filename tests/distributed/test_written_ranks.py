"""Parameters that forward itself writes to: every placement keeps what is written, as one process does, or names them."""

from functools import partial

import pytest
import torch
from comparing import whole
from torch import nn

from booster import Booster
from booster.mixed_precision import BF16NaiveMixedPrecision
from booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin

WIDTH, STEPS = 6, 7
TP = {"block.*.*": "colwise_gather_output"}
PLUGINS = {
    "ddp": TorchDDPPlugin,
    "zero2": lambda: LowLevelZeroPlugin(stage=2),
    "fsdp": TorchFSDPPlugin,
    "fsdp blocks": lambda: TorchFSDPPlugin(wrap_policy=["block", "other"]),
    "fsdp halves": lambda: TorchFSDPPlugin(wrap_policy="block.*.*"),
    "hybrid": lambda: HybridParallelPlugin(tp_size=1, pp_size=1, zero_stage=1),
    "tp": lambda: HybridParallelPlugin(tp_size=2, pp_size=1, zero_stage=0, tp_plan=TP),
    "tp and hybrid": lambda: HybridParallelPlugin(tp_size=2, pp_size=1, zero_stage=1, tp_plan=TP),
    "hsdp": lambda: TorchFSDPPlugin(replicate_size=2),
}


@torch.no_grad()
def write(param, value, how):
    if how == "in place":
        param.copy_(value)
    elif how == "by data":
        param.data.copy_(value)
    else:
        param.data = value.detach()


class Writer(nn.Module):
    """Writes to its weights in `forward`, from the pass `first` on: once in `every` passes."""

    def __init__(self, how, first=0, every=1):
        super().__init__()
        self.how, self.first, self.every, self.passes = how, first, every, 0

    def forward(self, x):
        if self.passes >= self.first and self.passes % self.every == 0:
            self.change(x)
        self.passes += 1
        return self.compute(x)


class Momentum(Writer):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.q = nn.Linear(WIDTH, WIDTH)
        self.k = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def change(self, x):
        for q, k in zip(self.q.parameters(), self.k.parameters(), strict=True):
            write(k, k.detach() * 0.75 + q.detach() * 0.25, self.how)

    def compute(self, x):
        return self.q(x) - self.k(x).detach()


class Clamped(Writer):
    def __init__(self, *args, **options):
        super().__init__(*args, **options)
        self.layer = nn.Linear(WIDTH, WIDTH)

    def change(self, x):
        write(self.layer.weight, self.layer.weight.detach().clamp(-0.125, 0.125), self.how)

    def compute(self, x):
        return self.layer(x)


class Centres(Momentum):
    """Follows the batch of its rank."""

    def change(self, x):
        write(self.k.bias, self.k.bias.detach() + x.detach().float().mean(0), self.how)


class Net(nn.Module):
    def __init__(self, writer):
        super().__init__()
        torch.manual_seed(0)
        self.inp, self.block, self.other = (
            nn.Linear(WIDTH, WIDTH),
            nn.Sequential(writer()),
            nn.Sequential(nn.Linear(WIDTH, WIDTH)),
        )

    def forward(self, x):
        return self.other(self.block(self.inp(x)))


def changes(writer, precision="fp32", plugin=None, rows=None, steps=STEPS):
    """The change of every weight of the block in some steps."""
    model = Net(writer)
    before = {name: param.detach().clone() for name, param in model.block.named_parameters()}
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.125)
    booster = Booster("cpu", precision, plugin)
    model, optimizer, *_ = booster.boost(model, optimizer)
    data = torch.randn(steps, 4, WIDTH, generator=torch.Generator().manual_seed(1))[
        :, slice(None) if rows is None else rows
    ]
    for x in data:
        booster.backward(model(x).float().square().mean(), optimizer)
        assert optimizer.step().applied
        optimizer.zero_grad()
    return {name: whole(param).float() - before[name] for name, param in booster.unwrap(model).block.named_parameters()}


def kept(rank, world_size, plugins, precisions):
    """What is wrong: the errors of changes against those of one process, where they are larger than rounding makes them."""
    wrong = {}
    for kind in (Momentum, Clamped):
        for how in ("in place", "by data", "assigned"):
            # Seldom, so that no pass of the first ones but one has it; late, where it leaves a trace.
            for options in ({}, {"every": 6}, *([{"first": 5}] if how == "in place" else [])):
                writer = partial(kind, how, **options)
                right = changes(writer)
                size = max(float(change.norm()) for change in right.values())
                for plugin in plugins:
                    for precision in precisions:
                        unit = {"fp32": 2.0**-23, "bf16": 2.0**-8}[precision]
                        if how == "assigned" and ("halves" in plugin or "tp" in plugin):
                            with pytest.raises(
                                RuntimeError, match=r"into block\.0\..*by `\.data = \.\.\.`: of a param"
                            ):
                                changes(writer, precision, PLUGINS[plugin]())
                            continue
                        found = changes(writer, precision, PLUGINS[plugin]())
                        # Each of some ten operations of every step rounds.
                        error = max(float((found[name] - change).norm()) for name, change in right.items())
                        if not error <= 10 * STEPS * unit * size:
                            wrong[kind.__name__, how, str(options), plugin, precision] = error / size
    return wrong


def test_what_forward_writes_to_a_weight_stays_as_in_one_process(ranks2):
    assert ranks2(kept, ["fsdp halves"], ["fp32"])[0] == {}


@pytest.mark.slow
def test_what_forward_writes_to_a_weight_stays_on_every_placement_as_in_one_process(ranks2):
    assert ranks2(kept, ["ddp", "zero2", "fsdp", "fsdp blocks", "hybrid", "tp"], ["fp32", "bf16"])[0] == {}


@pytest.mark.slow
def test_four_ranks_keep_what_forward_writes_where_copies_hold_other_copies_parts(ranks4):
    assert ranks4(kept, ["hsdp", "tp and hybrid"], ["fp32", "bf16"])[0] == {}


def refused(rank, world_size):
    fsdp, own = PLUGINS["fsdp"], slice(2 * rank, 2 * rank + 2)
    with pytest.raises(RuntimeError, match=r"through \.data, and did not in the first passes"):
        changes(partial(Momentum, "by data", first=6), plugin=fsdp(), steps=10)
    for how in ("in place", "by data"):
        with pytest.raises(RuntimeError, match=r"writes to block\.0\.k\.weight, block\.0\.k\.bias, frozen and float32"):
            changes(partial(Momentum, how), "bf16_naive", fsdp())
        with pytest.raises(RuntimeError, match=r"writes other numbers to block\.0\.k\.bias on each rank"):
            changes(partial(Centres, how), plugin=fsdp(), rows=own)
    # As the message says: in float32 it is kept.
    writer, pinned = partial(Momentum, "by data"), BF16NaiveMixedPrecision(keep_fp32=["block"])
    right, found = changes(writer), changes(writer, pinned, fsdp())
    return max(float((found[name] - change).norm() / change.norm()) for name, change in right.items())


def test_what_a_copy_cannot_take_over_is_refused_by_name_on_all_ranks(ranks2):
    assert max(ranks2(refused)) < 10 * STEPS * 2.0**-8
