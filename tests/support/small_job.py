"""A job of a few lines: a small model, a batch, and the two boosted."""

import torch
from torch import nn
from torch.nn import functional as F

from booster import Booster


def net():
    """A small model, always the same."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 4))


def batch(seed=1, rows=16):
    """Inputs and classes."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, 8, generator=generator), torch.randint(0, 4, (rows,), generator=generator)


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def boost(precision, make=sgd, plugin=None, **options):
    """Return a Booster, the model and the optimizer that it boosted."""
    booster, model = Booster("cpu", precision, plugin, **options), net()
    model, optimizer, *_ = booster.boost(model, make(model.parameters()))
    return booster, model, optimizer


def backward(booster, model, optimizer, seed=1, rows=16):
    """A forward and a backward pass; return the loss as a number."""
    x, y = batch(seed, rows)
    loss = F.cross_entropy(model(x), y)
    booster.backward(loss, optimizer)
    return loss.item()


def train(booster, model, optimizer, steps=3, first=1):
    """Return the losses of so many steps."""
    losses = []
    for seed in range(first, first + steps):
        losses.append(backward(booster, model, optimizer, seed))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def flat_grads(model):
    """All gradients, in float32."""
    return torch.cat([p.grad.float().flatten() for p in model.parameters()])


def spoil(model, value=float("inf")):
    """Put `value` into one gradient."""
    next(model.parameters()).grad.view(-1)[3] = value
