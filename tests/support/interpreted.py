"""Tests of Triton kernels without a GPU: interpreted, on CPU tensors, where Triton is installed and TRITON_INTERPRET=1."""

import copy
import os
from importlib.util import find_spec

import pytest
import torch
from prescribed import loss_with
from quick_interpreter import quicken

from booster import Booster
from booster.masters.quantized_state import QuantizedState

quicken()  # also in the processes of ranks
ABSENT = find_spec("triton") is None or os.environ.get("TRITON_INTERPRET") != "1"
interpreted = [
    pytest.mark.skipif(ABSENT, reason="needs Triton, and TRITON_INTERPRET=1; `make kernels` runs it"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning:triton"),  # numpy's, of inf and NaN
    pytest.mark.timeout(600),
]


def pair(make_model, make_optimizer, precision, *, device="cpu", **options):
    """(booster, model, optimizer) stepped as torch steps, and the same stepped by kernels."""
    made = []
    for fused in (False, "triton"):
        torch.manual_seed(0)
        net = make_model()
        booster = Booster(device, precision() if callable(precision) else precision, fused_optimizer=fused, **options)
        model, optimizer, *_ = booster.boost(net, make_optimizer(net.parameters()))
        made.append((booster, model, optimizer))
    return made


def stepping(net, make_optimizer, precision, **options):
    """A function that makes one step of `net` by kernels, backward pass and all, as `of_step` counts it."""
    booster = Booster("cpu", precision, fused_optimizer="triton", clip_grad_norm=1.0, **options)
    model, optimizer, *_ = booster.boost(net, make_optimizer(net.parameters()))
    x = torch.randn(4, next(net.parameters()).shape[1], generator=torch.Generator().manual_seed(0))

    def step():
        booster.backward(model(x).square().sum(), optimizer)
        result = optimizer.step()
        optimizer.zero_grad()
        return result

    return step


def gradients(params, step, bad=None, scale=1e-2):
    """Random gradients of `params`, the same for the same `step`, with `bad` in one of them."""
    generator = torch.Generator().manual_seed(step)
    grads = [torch.randn(p.shape, generator=generator).to(p.device, p.dtype) * scale for p in params]
    if bad is not None:
        next(grad for grad in grads if grad.numel() > 1).view(-1)[1] = bad
    return grads


def step_on(booster, model, optimizer, grads, *, set_to_none=True):
    """Give the model's parameters `grads`, None for none, and step."""
    booster.backward(loss_with(list(model.parameters()), grads), optimizer)
    result = optimizer.step()
    optimizer.zero_grad(set_to_none=set_to_none)
    return result


def follow(first, second):
    """Give the second of a pair weights and states of the first."""
    with torch.no_grad():
        for param, other in zip(first[1].parameters(), second[1].parameters(), strict=True):
            other.copy_(param)
    second[2].load_state_dict(copy.deepcopy(first[2].state_dict()))


def held(optimizer):
    """Float32 weights, and the states of each, by what the optimizer's groups hold."""
    update = optimizer._update
    params = [param for group in optimizer.param_groups for param in group["params"]]
    masters = update.optimizer_state.masters.values() if update.optimizer_state.has_masters else {}
    weights = [masters[p].detach().clone() if p in masters else p.detach().clone() for p in params]
    states = [{k: v.clone() for k, v in optimizer.state.get(p, {}).items() if torch.is_tensor(v)} for p in params]
    return weights, states


def packed(optimizer):
    """What is packed in the optimizer's states, in the order of buckets and names, without what is between pieces."""
    found = []
    for bucket in optimizer._update.optimizer_state.masters.buckets:
        own = optimizer.optimizer.state.get(bucket.handles[0], {})
        for name, value in sorted(own.items()):
            if isinstance(value, QuantizedState):
                codes = value.codes.view(torch.int16 if value.encoding == "bf16" else torch.int8)
                codes = codes if value.encoding != "unsigned" else codes.view(torch.uint8)
                scales = torch.zeros(0) if value.scales is None else value.scales.int() & 0xFFFF
                found.append((name, torch.cat([piece.int() for piece in bucket.pieces_of(codes)]), scales))
    return found
