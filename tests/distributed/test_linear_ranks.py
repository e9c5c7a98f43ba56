"""On ranks, too, what is done for every tensor is done once: calls grow as the number of tensors, messages not at all."""

from collections import defaultdict

import pytest
import torch
from counts import Messages, count
from torch import nn
from torch.overrides import TorchFunctionMode

from booster import Booster
from booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin
from booster.tensors.cast_regions import run_engine

FEW, MANY = 16, 64
MOST = 1.15 * MANY / FEW  # times as many calls
PLUGINS = {
    "DDP": TorchDDPPlugin,
    "ZeRO-1": LowLevelZeroPlugin,
    "ZeRO-1 reduce_scatter": lambda: LowLevelZeroPlugin(reduce_scatter=True),
    "ZeRO-2": lambda: LowLevelZeroPlugin(stage=2),
    "FSDP": TorchFSDPPlugin,
    "TP": lambda: HybridParallelPlugin(2, 1, tp_plan={"pairs.*.0": "colwise", "pairs.*.1": "rowwise"}),
}
# Calls for one more tensor; what a call costs is about the same everywhere. "step": clip, step and zero_grad.
MOST_PER_TENSOR = {
    "DDP": {"step": 30},
    "ZeRO-1": {"step": 46, "state_dict": 95},
    "ZeRO-1 reduce_scatter": {"step": 20, "state_dict": 95},
    "ZeRO-2": {"step": 20, "backward": 28, "state_dict": 95},
    "FSDP": {"step": 68},
    "TP": {"step": 52},
}


class Many(nn.Module):
    """So many small vectors."""

    def __init__(self, size):
        super().__init__()
        self.vectors = nn.ParameterList(torch.ones(64) for _ in range(size))

    def forward(self, x):
        return (torch.stack(list(self.vectors)) * x).sum()


class FlatShard(nn.Module):
    """So many small matrices, to be divided in pairs."""

    def __init__(self, size):
        super().__init__()
        made = [nn.Linear(8, 8, bias=False) for _ in range(size)]
        self.pairs = nn.ModuleList(nn.Sequential(*pair) for pair in zip(made[::2], made[1::2], strict=True))

    def forward(self, x):
        return torch.stack([pair(x) for pair in self.pairs]).sum()


def counted(rank, world_size, name, precision):
    """Of FEW and of MANY tensors the calls of each task, and the messages of passes, a step, a state dict and boosting."""
    found, kind, x = [], Many, torch.ones(64)
    if name == "TP":
        kind, x = FlatShard, torch.ones(1, 8)
    for size in (FEW, MANY):
        booster, made, model = Booster("cpu", precision, PLUGINS[name]()), [], kind(size)
        warm = kind(2)  # so that nothing is imported while calls are counted
        booster.boost(warm, torch.optim.AdamW(warm.parameters(), lr=1e-3))

        def boost(booster=booster, made=made, model=model):
            made[:] = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-3))

        with Messages() as of_boost:
            calls = {"boost": count(boost)}
        net, optimizer, *_ = made

        def passes(booster=booster, net=net, optimizer=optimizer):
            booster.backward(net(x).float(), optimizer)

        def step(optimizer=optimizer):
            optimizer.clip_grad_by_norm(1.0)
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(2):
            passes()
            step()
        calls["backward"] = count(passes)
        calls["step"] = count(step)
        with Messages() as of_passes:
            passes()
        with Messages() as of_step:
            step()
        state = optimizer.state_dict()
        with Messages() as of_state:
            optimizer.state_dict()
        calls["state_dict"] = count(optimizer.state_dict)
        plain = {key: value for key, value in state.items() if key != "booster"}
        calls["load_state_dict"] = count(lambda optimizer=optimizer, plain=plain: optimizer.load_state_dict(plain))
        params = [param for group in optimizer.param_groups for param in group["params"]]
        calls["state[p]"] = count(lambda o=optimizer, params=params: [o.state.get(param) for param in params])
        found.append((calls, (of_passes.count, of_step.count, of_state.count, of_boost.count)))
    return found


class Seen(TorchFunctionMode):
    """Counts the torch functions that are called while it is active, in backward too."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += 1
        if func is torch.autograd.backward:
            with self:
                return run_engine(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def seen_in_backward(rank, world_size, name):
    """How many torch functions a mode sees that is active while backward runs, of FEW and of MANY tensors."""
    found = []
    for size in (FEW, MANY):
        booster, model = Booster("cpu", "fp32", PLUGINS[name]()), Many(size)
        net, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
        for _ in range(2):
            loss = net(torch.ones(64))
            with Seen() as seen:
                booster.backward(loss, optimizer)
            optimizer.zero_grad()
        found.append(seen.count)
    return found


@pytest.mark.parametrize("name", ["ZeRO-1 reduce_scatter", "ZeRO-2"])
def test_no_mode_that_is_active_in_backward_sees_what_is_done_for_a_gradient(ranks2, name):
    for few, many in ranks2(seen_in_backward, name):
        assert few == many


@pytest.mark.slow_cases("ZeRO-1 reduce_scatter", "ZeRO-1")
@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *((name, "fp32") for name in PLUGINS),
        ("FSDP", "bf16_naive"),
        *(pytest.param(name, "bf16_naive", marks=pytest.mark.slow) for name in ("DDP", "ZeRO-1", "ZeRO-2")),
    ],
)
def test_calls_grow_as_the_number_of_tensors_and_messages_do_not(ranks2, name, precision):
    for (few, messages), (many, messages_of_many) in ranks2(counted, name, precision):
        grown = {task: many[task] / few[task] for task in few}
        assert {task: ratio for task, ratio in grown.items() if ratio > MOST} == {}
        layers = int(name == "TP")  # its passes send for each
        assert messages[layers:] == messages_of_many[layers:]
        if precision == "fp32" or name == "FSDP":
            each = {task: (many[task] - few[task]) / (MANY - FEW) for task in MOST_PER_TENSOR[name]}
            assert {task: calls for task, calls in each.items() if calls > MOST_PER_TENSOR[name][task]} == {}


class Looked(defaultdict):
    """A dict that counts how often it is gone through."""

    looks = 0

    def __iter__(self):
        self.looks += 1
        return super().__iter__()


def looks_at_states(rank, world_size, num_groups):
    booster, model = Booster("cpu", "fp32", LowLevelZeroPlugin(stage=2)), Many(num_groups)
    made = torch.optim.AdamW([{"params": [vector]} for vector in model.vectors], lr=1e-3)
    made.state = Looked(dict)
    net, optimizer, *_ = booster.boost(model, made)
    for _ in range(2):
        booster.backward(net(torch.ones(64)), optimizer)
        before = made.state.looks
        optimizer.step()
        optimizer.zero_grad()
    return made.state.looks - before


def test_a_step_goes_through_all_states_as_often_for_many_groups_as_for_few(ranks2):
    few, many = ranks2(looks_at_states, 2), ranks2(looks_at_states, 20)
    assert few == many
    assert max(few) > 0
