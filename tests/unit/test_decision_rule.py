"""The rule of a decision, by one table: what a host, a device and kernels make of the same gradients, clips and scales.

The rule is described in `booster/update/decision.py`. Kernels run where Triton interprets them (`make kernels`).
"""

import dataclasses
import math
import random

import interpreted
import pytest
import torch
from prescribed import DEVICE, HOST, boost, loss_with, parameters
from torch.optim import SGD

from booster.interface.optimizer import OptimizerWrapper
from booster.loss_scaler import DeviceScale, DynamicScale
from booster.update.application import Application
from booster.update.context import OptimizerState, UpdateContext, UpdateOptions

KERNELS = "kernels"
INF, NAN = math.inf, math.nan
CPU = torch.device("cpu")
executions = pytest.mark.parametrize("execution", [HOST, DEVICE, pytest.param(KERNELS, marks=interpreted.interpreted)])

# Of four gradients of one true value: loss scale or None, value, clips; then norm, weight after a step of lr 1, next scale.
RULE = {
    "as they are": (None, 0.5, [], None, 0.5, None),
    "a scale": (1024.0, 0.5, [], 1.0, 0.5, 2048.0),
    "a clip that is not reached": (1024.0, 0.5, [2.0], 1.0, 0.5, 2048.0),
    "a clip": (1024.0, 2.0, [1.0], 4.0, 1.0 - 2.0 / (4.0 + 1e-6), 2048.0),
    "a clip without a scale": (None, 2.0, [1.0], 4.0, 1.0 - 2.0 / (4.0 + 1e-6), None),
    "two clips": (1024.0, 2.0, [2.0, 1.0], 4.0, 1.0 - 2.0 / (4.0 + 1e-6) * (2.0 / (2.0 + 1e-6)), 2048.0),
    "a clip to nothing": (None, 2.0, [0.0], 4.0, 1.0, None),
    "squares beyond float32": (None, 1e30, [1.0], 2e30, 0.5, None),
    "an overflow": (1024.0, INF, [], INF, 1.0, 512.0),
    "an overflow under a clip": (1024.0, -INF, [1.0], INF, 1.0, 512.0),
    "no number": (1024.0, NAN, [], NAN, 1.0, 512.0),
    "no number under a clip alone": (None, NAN, [1.0], NAN, 1.0, None),
}


def boosted(params, scale, execution):
    scaler = None if scale is None else DynamicScale(init_scale=scale, growth_interval=1)
    if execution != KERNELS:
        return boost(SGD(params, lr=1.0, fused=True), scaler, execution)
    from booster.kernels.kernel_decision import kernel_update
    from booster.kernels.rules import rule_of
    from booster.loss_scaler import NoScale

    optimizer = SGD(params, lr=1.0)
    context = UpdateContext(optimizer=optimizer, scaler=scaler or NoScale(), options=UpdateOptions())
    context = dataclasses.replace(context, scaler=context.scaler.on_device(CPU))
    return OptimizerWrapper(
        context, lambda given: kernel_update(given, rule_of(optimizer), Application(given), OptimizerState(given))
    )


@executions
@pytest.mark.parametrize("name", RULE)
def test_every_execution_decides_and_steps_by_the_table(name, execution):
    scale, value, clips, norm, weight, after = RULE[name]
    params = parameters(4)
    optimizer = boosted(params, scale, execution)
    for _ in range(2):  # the second step is from the weights of the first, or from the same where that was skipped
        before = params[0].detach().clone()
        optimizer.zero_grad()
        optimizer.backward(loss_with(params, [value]))
        for clip in clips:
            optimizer.clip_grad_by_norm(clip)
        result = optimizer.step()
        finite = math.isfinite(value)
        assert result.applied == finite
        assert result.loss_scale == (1.0 if scale is None else scale)
        if norm is None:
            assert result.grad_norm is None
        elif finite:
            assert result.grad_norm == pytest.approx(norm, rel=1e-6)
        else:
            assert not math.isfinite(result.grad_norm)
        torch.testing.assert_close(params[0].detach(), before - (1.0 - weight), rtol=1e-6, atol=1e-6)
        if scale is not None:
            assert optimizer.loss_scale == after
            scale, after = after, after * after / scale


def options(number):
    drawn = random.Random(number)
    bounds = drawn.choice([(None, None), (2.0, 2.0**12), (None, 2.0**10), (2.0**7, None)])
    return {
        "init_scale": drawn.choice([2.0**8, 1000.0]),
        "growth_factor": drawn.choice([2.0, 1.7]),
        "backoff_factor": drawn.choice([0.5, 0.3]),
        "growth_interval": drawn.choice([1, 2, 3]),
        "hysteresis": drawn.choice([1, 2, 3]),
        "min_scale": bounds[0],
        "max_scale": bounds[1],
    }


class OnDevice:
    """`DeviceScale`, of many hosts one after another."""

    def __init__(self, hosts):
        self.scales = [DeviceScale(host, CPU) for host in hosts]

    def step(self, found):
        for scale, each in zip(self.scales, found, strict=True):
            scale.update(torch.full((), float(each)))

    def read(self):
        return [tuple(scale.state_dict().values()) for scale in self.scales]


@pytest.mark.parametrize("execution", [DEVICE, pytest.param(KERNELS, marks=interpreted.interpreted)])
def test_every_execution_moves_the_scale_as_a_host_does_over_random_sequences(execution):
    batches, size = (20, 512) if execution == KERNELS else (4, 64)
    for batch in range(batches):
        hosts = [DynamicScale(**options(batch * size + index)) for index in range(size)]
        if execution == KERNELS:
            from interpreted_scales import Scales as Execution
        else:
            Execution = OnDevice
        drawn, device = random.Random(batch), Execution(hosts)
        for _ in range(12):
            found = [drawn.random() < 0.4 for _ in hosts]
            for host, each in zip(hosts, found, strict=True):
                host.update(each)
            device.step(found)
            assert device.read() == [tuple(host.state_dict().values()) for host in hosts]
