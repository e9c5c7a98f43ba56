"""Delayed scaling on ranks: one message a step makes all scales, which are those of the largest magnitude anywhere."""

import pytest
import torch
import torch.nn.functional as F
from comparing import same, weights
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from booster import Booster
from booster.interface.model import extras_of
from booster.mixed_precision import DelayedScaling, FP8MixedPrecision
from booster.mixed_precision.low_precision.linear import LowPrecisionLinear
from booster.plugin import HybridParallelPlugin, TorchDDPPlugin, TorchFSDPPlugin

LARGEST = torch.tensor([448.0, 448.0, 57344.0])
PLUGINS = {
    "ddp": TorchDDPPlugin,
    "fsdp": TorchFSDPPlugin,
    "tensor parallel": lambda: HybridParallelPlugin(
        pp_size=1, tp_size=2, tp_plan={"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
    ),
}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(8, 16), nn.Linear(16, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x):
        x = self.first(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Reduced(TorchDispatchMode):
    """Counts all-reduces."""

    count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.count += func.overloadpacket.__name__ == "allreduce_"
        return func(*args, **(kwargs or {}))


def boosted(name, delayed=True):
    torch.manual_seed(3)
    plan = DelayedScaling(amax_history_len=3) if delayed else False
    booster = Booster("cpu", FP8MixedPrecision(delayed_scaling=plan, emulate=True), PLUGINS[name]())
    raw = Net()
    model, optimizer, *_ = booster.boost(raw, torch.optim.SGD(raw.parameters(), lr=0.05, momentum=0.9))
    return booster, model, optimizer


def look(model):
    """Have watchers note the largest magnitudes on this rank; returns where, by layer."""
    seen = {}
    for name, layer in model.unwrap().named_modules():
        if isinstance(layer, LowPrecisionLinear):
            rows = seen.setdefault(name, torch.zeros(3))

            def watch(role, a, b, how, y, rows=rows):
                for place, matrix in {"forward": [(0, a), (1, b)], "input_grad": [(2, a)], "weight_grad": []}[role]:
                    rows[place] = max(rows[place], matrix.detach().abs().max().float())

            layer.watchers = (watch,)
    return seen


def step(run, number):
    booster, model, optimizer = run
    plugin = booster.plugin
    x = torch.randn(16, 8, generator=torch.Generator().manual_seed(number)) * (1 + number % 3)
    x = x.chunk(plugin.data_parallel_size)[plugin.data_parallel_rank] * (1 + plugin.data_parallel_rank)
    booster.backward(model(x).square().mean(), optimizer)
    with Reduced() as reduced:
        optimizer.step()
    optimizer.zero_grad()
    return reduced.count


def agrees(rank, world_size, name):
    """All-reduces of a step, with and without; and of each step the largest magnitudes on this rank, and the scales."""
    run, plain = boosted(name), boosted(name, delayed=False)
    seen, found = look(run[1]), []
    for number in range(5):
        counts = step(run, number), step(plain, number)
        found.append((torch.stack([*seen.values()]), extras_of(run[1]).histories._scale.clone()))
        for rows in seen.values():
            rows.zero_()
    return counts[0] - counts[1], list(seen) == extras_of(run[1]).histories.state_dict()["names"], found


def resumes(rank, world_size, name, folder):
    run = boosted(name)
    for number in range(4):
        step(run, number)
    run[0].save(folder, run[1], run[2])
    again = boosted(name)
    again[0].load(folder, again[1], again[2])
    scales = [extras_of(each[1]).histories._scale for each in (run, again)]
    assert torch.equal(*scales)
    assert (scales[0] > 0).all()
    for number in range(4, 7):
        step(run, number), step(again, number)
    return same(weights(run[1]), weights(again[1]))


def check(results):
    assert [result[0] for result in results] == [1, 1], "one message for all layers"
    assert all(result[1] for result in results)
    history = []
    for here, there in zip(results[0][2], results[1][2], strict=True):
        history.insert(0, torch.maximum(here[0], there[0]))
        expected = torch.stack(history[:3]).amax(0) / LARGEST
        for _, scales in (here, there):
            torch.testing.assert_close(scales, expected, rtol=1e-6, atol=0)


def test_one_message_a_step_makes_the_scales_of_all_layers(ranks2):
    for name in PLUGINS:
        check(ranks2(agrees, name))


@pytest.mark.slow
def test_a_run_on_ranks_resumes_to_the_bit(ranks2, tmp_path):
    for name in PLUGINS:
        assert all(ranks2(resumes, name, str(tmp_path / name))), name
