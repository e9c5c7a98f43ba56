"""Parameters after a run equal those of the hand-written torch.amp loop, for every optimizer, implementation and clip."""

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from prescribed import DEVICE, HOST, boost, loss_with, parameters
from torch import nn

from booster.loss_scaler import DynamicScale

STEPS = 20
OVERFLOWS = {2, 3, 9, 17}
SCALE = {"init_scale": 2.0**12, "growth_interval": 3}

OPTIMIZERS: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "Adam": lambda params, **kw: torch.optim.Adam(params, lr=0.05, weight_decay=0.01, **kw),
    "AdamW": lambda params, **kw: torch.optim.AdamW(params, lr=0.05, amsgrad=True, **kw),
    "SGD": lambda params, **kw: torch.optim.SGD(params, lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01, **kw),
    "Adagrad": lambda params, **kw: torch.optim.Adagrad(params, lr=0.05, lr_decay=0.1, **kw),
    "RMSprop": lambda params, **kw: torch.optim.RMSprop(params, lr=0.05, momentum=0.5, centered=True, **kw),
}
IMPLEMENTATIONS = {
    "default": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},
}
CASES = [
    (name, implementation, decides)
    for name, implementation in itertools.product(OPTIMIZERS, IMPLEMENTATIONS)
    for decides in (HOST, DEVICE)
    if (name != "RMSprop" or implementation != "fused") and (implementation == "fused" or decides == HOST)
]
CLIPS = {"none": [], "norm": [("norm", 1.0)], "value": [("value", 0.05)], "both": [("norm", 1.0), ("value", 0.02)]}


def gradients(shapes: list[tuple[int, ...]]) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(7)
    steps = [
        [torch.randn(shape, generator=generator) * 10.0 ** (step % 5 - 2) for shape in shapes] for step in range(STEPS)
    ]
    for step in OVERFLOWS:
        steps[step][step % len(shapes)].view(-1)[0] = float("nan") if step % 2 else float("inf")
    return steps


def torch_clip(params: list[nn.Parameter], clips: list[tuple[str, float]]) -> None:
    for kind, bound in clips:
        if kind == "norm":
            nn.utils.clip_grad_norm_(params, bound)
        else:
            nn.utils.clip_grad_value_(params, bound)


def our_clip(optimizer: Any, clips: list[tuple[str, float]]) -> None:
    for kind, bound in clips:
        if kind == "norm":
            optimizer.clip_grad_by_norm(bound)
        else:
            optimizer.clip_grad_by_value(bound)


def distance(ours: list[torch.Tensor], theirs: list[torch.Tensor]) -> float:
    largest = max(float(value.detach().abs().max()) for value in theirs)
    return max(float((a.detach() - b.detach()).abs().max()) for a, b in zip(ours, theirs, strict=True)) / largest


@pytest.mark.crossed
@pytest.mark.parametrize("clip", CLIPS)
@pytest.mark.parametrize(("name", "implementation", "decides"), CASES)
def test_identical_gradients_give_the_parameters_of_the_grad_scaler_loop(name, implementation, decides, clip):
    shapes = [(7, 5), (5,), (), (3, 2, 2)]
    theirs, ours = parameters(*shapes), parameters(*shapes)
    optimizer = OPTIMIZERS[name](theirs, **IMPLEMENTATIONS[implementation])
    scaler = torch.amp.GradScaler("cpu", **SCALE)
    boosted = boost(OPTIMIZERS[name](ours, **IMPLEMENTATIONS[implementation]), DynamicScale(**SCALE), decides)
    for step, grads in enumerate(gradients(shapes)):
        optimizer.zero_grad()
        scaler.scale(loss_with(theirs, grads)).backward()
        if clip != "none":
            scaler.unscale_(optimizer)
            torch_clip(theirs, CLIPS[clip])
        scaler.step(optimizer)
        scaler.update()

        boosted.zero_grad()
        boosted.backward(loss_with(ours, grads))
        our_clip(boosted, CLIPS[clip])
        result = boosted.step()
        assert result.applied == (step not in OVERFLOWS)
        if result.applied:
            assert distance([p.grad for p in ours], [p.grad for p in theirs]) <= 1e-6
        assert boosted.loss_scale == scaler.get_scale()
        assert distance(ours, theirs) <= 1e-6, f"step {step}"
    assert boosted.num_skipped == len(OVERFLOWS)


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "RMSprop"])
@pytest.mark.parametrize("decides", [HOST, DEVICE])
def test_without_a_scaler_clipping_folds_into_the_fused_step_with_torchs_result(name, decides):
    shapes = [(7, 5), (5,)]
    theirs, ours = parameters(*shapes), parameters(*shapes)
    optimizer = OPTIMIZERS[name](theirs, fused=True)
    boosted = boost(OPTIMIZERS[name](ours, fused=True), None, decides)
    for step, grads in enumerate(gradients(shapes)):
        if step in OVERFLOWS:
            continue
        optimizer.zero_grad()
        loss_with(theirs, grads).backward()
        norm = nn.utils.clip_grad_norm_(theirs, 1.0)
        optimizer.step()
        boosted.zero_grad()
        boosted.backward(loss_with(ours, grads))
        boosted.clip_grad_by_norm(1.0)
        assert boosted.step().grad_norm == pytest.approx(float(norm), rel=1e-5)
        assert distance(ours, theirs) <= 1e-6
