"""Optimizers as people write them, on ranks: what one counts, and what it does beside `step`, is as on one device."""

import pytest
import torch
from torch import nn

import booster
from booster import Booster
from booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin

PLACES = {
    "ddp": TorchDDPPlugin,
    "zero 1": lambda: LowLevelZeroPlugin(stage=1, bucket_cap_mb=1e-3),
    "zero 2": lambda: LowLevelZeroPlugin(stage=2, bucket_cap_mb=1e-3),
    "fsdp": TorchFSDPPlugin,
}


@booster.register_elementwise
class Counted(torch.optim.Optimizer):
    """Counts in a tensor of its group, in place, as all of torch-optimi do."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})
        for group in self.param_groups:
            group["step"] = torch.zeros((), dtype=torch.int32)

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            group["step"].add_(1)
            for param in group["params"]:
                if param.grad is not None:
                    param.add_(param.grad.sign(), alpha=-group["lr"] / int(group["step"]))


def counts(rank, world_size, place, precision):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))
    optimizer = Counted(
        [{"params": model[:-1].parameters()}, {"params": [model[-1].weight]}, {"params": [model[-1].bias]}]
    )
    b = Booster("cpu", precision, PLACES[place]())
    model, optimizer, *_ = b.boost(model, optimizer)
    for step in range(4):
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(10 * step + rank))
        b.backward(model(x).float().square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return [int(group["step"]) for group in optimizer.param_groups]


@pytest.mark.parametrize("precision", ["fp32", "bf16_naive"])
@pytest.mark.parametrize("place", PLACES)
def test_every_rank_counts_each_step_once_in_each_group(run_on_ranks, place, precision):
    assert run_on_ranks(counts, 2, place, precision) == [[4, 4, 4]] * 2
