"""Penalties on gradients where ranks share the batch: what one device computes of all of it, or an error."""

import pytest
import torch
import torch.distributed as dist
from torch import nn

from booster import Booster
from booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin

SHARED = {
    "DDP": TorchDDPPlugin,
    "ZeRO-1": LowLevelZeroPlugin,
    "ZeRO-1 reduce_scatter": lambda: LowLevelZeroPlugin(reduce_scatter=True),
    "ZeRO-2": lambda: LowLevelZeroPlugin(stage=2),
}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3)).double()


def batch():
    return torch.randn(8, 6, generator=torch.Generator().manual_seed(1)).double()


def penalised(model, x):
    """The mean over samples of a loss and of the squared norm of its gradient by the sample, as critics are trained."""
    x = x.clone().requires_grad_()
    out = model(x)
    (grad,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
    return out.square().mean() + grad.square().sum(1).mean()


def check_shared(rank, world_size, name):
    alone, model = net(), net()
    reference = torch.optim.SGD(alone.parameters(), lr=0.01)
    booster = Booster("cpu", "fp32", SHARED[name]())
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.01))
    for _ in range(3):
        penalised(alone, batch()).backward()
        booster.backward(penalised(model, batch().chunk(world_size)[rank]), optimizer)
        for each in (reference, optimizer):
            each.step()
            each.zero_grad()
    for expected, param in zip(alone.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(param.detach(), expected.detach(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("name", SHARED)
def test_a_penalty_on_gradients_is_that_of_the_whole_batch(ranks2, name):
    ranks2(check_shared, name)


def check_sharded(rank, world_size):
    model = net()
    booster = Booster("cpu", "fp32", TorchFSDPPlugin())
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.01))
    with pytest.raises(RuntimeError, match="storage of size 0"):
        booster.backward(penalised(model, batch()), optimizer)
    dist.barrier()


def test_fully_shard_which_has_freed_the_weights_raises(ranks2):
    """torch's own error; docs/faq.md#troubleshooting says what to do."""
    ranks2(check_sharded)
