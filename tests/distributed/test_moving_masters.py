"""Whole state of naive precisions and of O2 moves between layouts with every float32 bit of the weights."""

import copy
from itertools import cycle

import pytest
import torch
from comparing import whole
from test_refused_loads_ranks import Block
from torch import nn

from booster import Booster
from booster.mixed_precision import BF16NaiveMixedPrecision, FP16ApexMixedPrecision, FP16NaiveMixedPrecision
from booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, SingleDevice, TorchDDPPlugin, TorchFSDPPlugin

PRECISIONS = {
    "fp16_naive": lambda: FP16NaiveMixedPrecision(initial_scale=2.0**10, keep_fp32="*.norm"),
    "bf16_naive, split": lambda: BF16NaiveMixedPrecision(keep_fp32="*.norm"),
    "bf16_naive, fp32": lambda: BF16NaiveMixedPrecision(keep_fp32="*.norm", master_weights="fp32"),
    "O2": lambda: FP16ApexMixedPrecision("O2", max_loss_scale=2.0**10, verbosity=0),
}
LAYOUTS = {
    "single": SingleDevice,
    "ddp": TorchDDPPlugin,
    "zero1": LowLevelZeroPlugin,
    "zero2": lambda: LowLevelZeroPlugin(stage=2),
    "fsdp": TorchFSDPPlugin,
    "tp": lambda: HybridParallelPlugin(2, 1, tp_plan={"*.up": "colwise", "*.down": "rowwise"}),
}
SHARDED = ("fsdp",)  # where the float32 shard is the master


QUICK_FIRST = [
    precision if precision == "bf16_naive, split" else pytest.param(precision, marks=pytest.mark.slow)
    for precision in PRECISIONS
]


def built(precision, layout, *, frozen=False):
    torch.manual_seed(7)
    booster = Booster("cpu", PRECISIONS[precision](), LAYOUTS[layout]())
    model = nn.Sequential(Block(), Block())
    model[0].requires_grad_(not frozen)
    made = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)
    model, made, criterion, *_ = booster.boost(model, made, nn.MSELoss())
    return booster, model, made, criterion


def steps(parts, first, last):
    booster, model, made, criterion = parts
    size, rank = booster.plugin.data_parallel_size, booster.plugin.data_parallel_rank
    for step in range(first, last):
        torch.manual_seed(step)
        batch = [tensor.chunk(size)[rank] for tensor in (torch.randn(8, 8), torch.randn(8, 8))]
        booster.execute_pipeline(iter([tuple(batch)]), model, criterion, made)
        assert made.step()
        made.zero_grad()


def saved(parts):
    _, model, made, _ = parts
    return copy.deepcopy((wholes(model.state_dict()), wholes(made.state_dict())))


def wholes(state):
    if isinstance(state, dict):
        return {key: wholes(value) for key, value in state.items()}
    return whole(state) if isinstance(state, torch.Tensor) else state


def masters(parts):
    """Of every parameter, in float32."""
    _, model, made, _ = parts
    kept = wholes(made.state_dict()["booster"]["masters"]["weights"])
    return {name: kept.get(name, whole(param)).detach().clone() for name, param in model.named_parameters()}


def moments(parts):
    return {index: whole(own["momentum_buffer"]) for index, own in parts[2].state_dict()["state"].items()}


def differing(a, b):
    return [key for key in a if not torch.equal(a[key], b[key])]


def moved(rank, world_size, precision, source):
    parts = built(precision, source)
    steps(parts, 0, 2)
    model_state, state = saved(parts)
    before, momenta = masters(parts), moments(parts)
    steps(parts, 2, 3)
    after = masters(parts)
    wrong = []
    orders = cycle((("model", "optimizer"), ("optimizer", "model")))
    for target in LAYOUTS:
        order = next(orders)
        fresh = built(precision, target)
        steps(fresh, 7, 8)
        refused = None
        for what in order:
            try:
                given = (fresh[1], model_state) if what == "model" else (fresh[2], state)
                given[0].load_state_dict(copy.deepcopy(given[1]))
            except ValueError as error:
                refused = str(error)
        if source in SHARDED and target not in SHARDED and order[0] == "optimizer":
            if "float32 weights" not in str(refused):
                wrong.append(f"{target}: optimizer first was not refused: {refused}")
            fresh[2].load_state_dict(copy.deepcopy(state))
        elif refused:
            wrong.append(f"{target}: {refused}")
        if differing(before, masters(fresh)) or differing(momenta, moments(fresh)):
            wrong.append(f"{target}: {differing(before, masters(fresh))} {differing(momenta, moments(fresh))}")
        steps(fresh, 2, 3)
        now = masters(fresh)
        far = {name: float((now[name] - after[name]).abs().max()) for name in after}
        if max(far.values()) > 2e-6:
            wrong.append(f"{target}: the next step differs by {far}")
    return wrong


@pytest.mark.slow_cases("ddp", "single")
@pytest.mark.crossed
@pytest.mark.parametrize("source", LAYOUTS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_whole_state_keeps_the_masters_in_every_layout(ranks2, precision, source):
    assert ranks2(moved, precision, source) == [[], []]


def frozen_at_load(rank, world_size, precision, layout, folder):
    """Where a run goes on otherwise if its first block was frozen while its checkpoint was loaded, from boost on or since."""
    first = built(precision, layout)
    steps(first, 0, 3)
    first[0].save(f"{folder}/first", *first[1:3])
    wrong, shown, others = [], wholes(first[1].state_dict()), {}
    for since in ("boost", "load"):
        others[since] = built(precision, layout, frozen=since == "boost")
        booster, model, made, _ = others[since]
        block = list(booster.unwrap(model)[0].parameters())
        for param in block:
            param.requires_grad_(False)
        booster.load(f"{folder}/first", model, made)
        wrong += [f"{name} is shown" for name in differing(shown, wholes(model.state_dict()))]
        booster.save(f"{folder}/{since}", model, made)
        others[since, "later"] = later = built(precision, layout)
        later[0].load(f"{folder}/{since}", *later[1:3])
        for param in block:
            param.requires_grad_(True)
    if layout in ("ddp", "zero1", "zero2"):  # their ranks must share its gradients from boost on
        with pytest.raises(RuntimeError, match="frozen when"):
            steps(others["boost"], 3, 4)
        del others["boost"]
    for each in (first, *others.values()):
        steps(each, 3, 5)
    for since, each in others.items():
        wrong += [f"{since}: {name}" for name in differing(masters(first), masters(each))]
        wrong += [f"{since}: moment {name}" for name in differing(moments(first), moments(each))]
    return wrong


@pytest.mark.slow_cases("ddp", "zero2")
@pytest.mark.parametrize("layout", [*LAYOUTS][1:])
@pytest.mark.parametrize("precision", QUICK_FIRST)
def test_blocks_that_are_frozen_at_a_load_go_on_to_the_bit_once_they_train(ranks2, tmp_path, precision, layout):
    assert ranks2(frozen_at_load, precision, layout, str(tmp_path)) == [[], []]
