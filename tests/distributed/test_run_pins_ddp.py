"""`keep_fp32="auto"` on two ranks: all pin the same module after the same step, though one rank alone overflows."""

import torch
from torch import nn

from booster import Booster
from booster.mixed_precision import FP16TorchMixedPrecision
from booster.plugin import TorchDDPPlugin


class Block(nn.Module):
    """Its own product; by a factor of 1000 it is too large for float16 where an input is 100."""

    def __init__(self, factor):
        super().__init__()
        self.mix, self.factor = nn.Parameter(torch.eye(4) * factor), factor

    def forward(self, x):
        return x + torch.matmul(x, self.mix) / self.factor


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList([Block(1.0), Block(1e3), Block(1.0)]), nn.Linear(4, 2)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class Run:
    def __init__(self, rank):
        torch.manual_seed(0)
        self.booster = Booster("cpu", FP16TorchMixedPrecision(init_scale=16.0, keep_fp32="auto"), TorchDDPPlugin())
        model = Model()
        self.model, self.optimizer, *_ = self.booster.boost(model, torch.optim.SGD(model.parameters(), lr=1e-4))
        self.x = torch.randn(8, 4, generator=torch.Generator().manual_seed(rank))

    def step(self, x):
        self.booster.backward(self.model(x).square().mean(), self.optimizer)
        applied = self.optimizer.step().applied
        self.optimizer.zero_grad()
        return applied

    def pinned_state(self):
        pins = self.model._extras.pins.state_dict()
        return pins, [param.detach().clone() for param in self.model.parameters()], len(self.booster.diagnoses)


def _one_rank_overflows(rank, world_size, folder):
    run = Run(rank)
    large = run.x.clone()
    if rank == 1:
        large[0, 0] = 100.0
    applied = [run.step(run.x), run.step(large), run.step(run.x)]
    run.booster.save(folder, run.model, run.optimizer)
    applied += [run.step(large), run.step(large), run.step(run.x)]
    again = Run(rank)
    again.booster.load(folder, again.model, again.optimizer)
    resumed = [again.step(large), again.step(large), again.step(run.x)]
    return applied, run.pinned_state(), resumed, again.pinned_state()


def test_ranks_pin_alike_and_a_checkpoint_goes_on_to_the_bit(ranks2, tmp_path):
    first, second = ranks2(_one_rank_overflows, str(tmp_path))
    for applied, (pins, _, diagnosed), resumed, (pins_again, _, _) in (first, second):
        assert applied == [True, False, True, False, True, True]
        assert pins == pins_again == {"names": ["blocks.1"], "skips": {}}
        assert diagnosed == 2
        assert resumed == applied[3:]
    weights = [report[1] for each in (first, second) for report in (each[1], each[3])]
    for other in weights[1:]:
        assert all(torch.equal(a, b) for a, b in zip(weights[0], other, strict=True))


def _ranks_disagree(rank, world_size):
    run = Run(rank)
    run.booster._watcher._diagnose = lambda passes, scale: _diagnosis(f"blocks.{rank}")
    for _ in range(3):
        run.step(run.x * 1e3)
    return run.pinned_state()[0]


def _diagnosis(name):
    from booster.numerics import Diagnosis

    return Diagnosis(kind="overflow", module=name, modules=("Model", name), direction="forward")


def test_where_ranks_name_different_modules_none_is_pinned(ranks2):
    assert ranks2(_ranks_disagree) == [{"names": [], "skips": {}}] * 2
