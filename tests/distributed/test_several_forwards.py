"""Several forward passes before one backward, with and without accumulation, on every plugin."""

import pytest
import torch
from comparing import weights
from test_two_optimizers import PLUGINS
from torch import nn

from booster import Booster


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(6, 8), nn.Linear(8, 4)

    def forward(self, x):
        return self.second(torch.tanh(self.first(x)))


def trained(rank, world_size, name, num_micro_batches):
    torch.manual_seed(7)
    booster = Booster("cpu", "fp32", PLUGINS[name]())
    model = Net()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    draw = torch.Generator().manual_seed(3)
    size, place = booster.plugin.data_parallel_size, booster.plugin.data_parallel_rank
    for _ in range(3):
        batches = [torch.randn(2, 8, 6, generator=draw) for _ in range(num_micro_batches)]
        shares = [batch.chunk(size, 1)[place] for batch in batches]
        if num_micro_batches == 1:
            backwards(booster, model, optimizer, shares)
        else:
            with booster.accumulate(model, optimizer, num_micro_batches):
                backwards(booster, model, optimizer, shares)
        optimizer.step()
        optimizer.zero_grad()
    return weights(model)


def backwards(booster, model, optimizer, shares):
    """Each of one loss that needs two forward passes, as a contrastive one does."""
    for one, other in shares:
        booster.backward((model(one) - model(other)).square().mean(), optimizer)


@pytest.mark.crossed
@pytest.mark.parametrize("num_micro_batches", [1, 3])
@pytest.mark.parametrize("name", ["ddp", "fsdp", "zero1", "zero2"])
def test_two_forwards_before_one_backward_train_as_in_one_process(ranks2, name, num_micro_batches):
    reference = trained(0, 1, "single", num_micro_batches)
    for found in ranks2(trained, name, num_micro_batches):
        for key, weight in reference.items():
            assert torch.allclose(found[key], weight, atol=1e-5), key
