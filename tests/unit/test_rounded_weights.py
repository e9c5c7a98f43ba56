"""Weights of low-precision layers are rounded once for a group of micro-batches, and never with numbers of another time."""

import copy
import pickle
from itertools import product as crossed

import pytest
import torch
from recorded_graph import RecordedGraphs
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from benchmarks.waits import as_on_a_gpu
from booster import Booster
from booster.mixed_precision import (
    BF16MixedPrecision,
    FP8MixedPrecision,
    Int8MixedPrecision,
    MXFP8MixedPrecision,
    NVFP4MixedPrecision,
)
from booster.mixed_precision.low_precision import operands
from booster.mixed_precision.low_precision.linear import LowPrecisionLinear
from booster.mixed_precision.policy import InProcess

PRECISIONS = {
    "fp8": lambda **options: FP8MixedPrecision(emulate=True, keep=(), **options),
    "fp8 rowwise": lambda **options: FP8MixedPrecision("rowwise", emulate=True, keep=(), **options),
    "fp8 rowwise_with_gw_hp": lambda **options: FP8MixedPrecision(
        "rowwise_with_gw_hp", emulate=True, keep=(), **options
    ),
    "mxfp8": lambda **options: MXFP8MixedPrecision(emulate=True, keep=(), **options),
    "nvfp4": lambda **options: NVFP4MixedPrecision(emulate=True, keep=(), **options),
    "int8": lambda **options: Int8MixedPrecision(emulate=True, keep=(), **options),
}
EVERY_PRECISION = pytest.mark.parametrize("name", PRECISIONS)


class Net(nn.Module):
    """Four layers, two of which share a weight, and one with recomputed activations."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.first, self.one, self.two = nn.Linear(32, 64), nn.Linear(64, 64, bias=False), nn.Linear(64, 64)
        self.two.weight = self.one.weight
        self.last = nn.Linear(64, 32)

    def forward(self, x):
        x = self.one(self.first(x).relu())
        return self.last(self.two(checkpoint(torch.relu, x, use_reentrant=False)))


def layers(model):
    return [module for module in model.modules() if isinstance(module, LowPrecisionLinear)]


def boosted(precision, *, keeps=True, model=None, make=lambda params: torch.optim.AdamW(params, lr=1e-2), **options):
    booster = Booster("cpu", precision, **options)
    model = Net() if model is None else model
    model, optimizer, *_ = booster.boost(model, make(model.parameters()))
    if not keeps:
        for layer in layers(model):
            layer.weights = None
    return booster, model, optimizer


def batch(step, micro=0, size=16):
    return torch.randn(size, 32, generator=torch.Generator().manual_seed(100 * step + micro))


def train(run, micro=1, steps=3, between=lambda model, step, micro: None):
    booster, model, optimizer = run
    losses = []
    for step in range(steps):
        with booster.accumulate(model, optimizer, micro):
            for number in range(micro):
                between(model, step, number)
                loss = (model(x := batch(step, number)) - x).square().mean()
                booster.backward(loss, optimizer)
                losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    return losses


def weights(run):
    return [param.detach().clone() for param in run[1].parameters()]


def same(one, other):
    return all(torch.equal(a, b) for a, b in zip(weights(one), weights(other), strict=True))


def kept(run):
    """What is kept now of weights."""
    return list(run[0].precision.conversion._weights._kept.values())


@pytest.fixture
def quantized(monkeypatch):
    """The shapes of weights that were rounded, when they were: layers that keep them ask `operands` for it."""
    seen, right = [], operands.quantized
    monkeypatch.setattr(operands, "quantized", lambda x, *how: seen.append(tuple(x.shape)) or right(x, *how))
    return seen


def of_weight(shape):
    return 16 not in shape


# ---- once a group ----


@pytest.mark.slow_cases("int8-1", "fp8 rowwise_with_gw_hp-3")
@pytest.mark.crossed
@pytest.mark.parametrize("micro", [1, 2, 3, 4])
@EVERY_PRECISION
def test_a_run_is_to_the_bit_that_of_weights_that_are_rounded_in_every_pass(name, micro):
    one, other = boosted(PRECISIONS[name]()), boosted(PRECISIONS[name](), keeps=False)
    assert train(one, micro) == train(other, micro)
    assert same(one, other)


@pytest.mark.crossed
@pytest.mark.parametrize(
    "options",
    [
        {"release_gradients": "exact"},
        {"release_gradients": "previous_norm", "clip_grad_norm": 0.1},
        {"clip_grad_norm": 0.1},
        {"fused_optimizer": False},
        {"offload_states": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("half", ["fp32", "bf16"])
def test_whatever_steps_the_weights(options, half):
    one, other = (boosted(PRECISIONS["fp8"](weights=half), keeps=each, **options) for each in (True, False))
    assert train(one) == train(other)
    assert same(one, other)


def test_a_closure_that_is_called_again_and_again_sees_the_weights_of_its_time():
    found = []
    for keeps in (True, False):
        run = booster, model, optimizer = boosted(
            PRECISIONS["fp8"](), keeps=keeps, make=lambda params: torch.optim.LBFGS(params, lr=0.1, max_iter=4)
        )
        x = batch(0)

        def closure(booster=booster, model=model, optimizer=optimizer, x=x):
            optimizer.zero_grad()
            loss = (model(x) - x).square().mean()
            booster.backward(loss, optimizer)
            return loss

        for _ in range(2):
            optimizer.step(closure)
            assert kept(run) == []
        found.append(weights(run))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.crossed
@pytest.mark.parametrize("micro", [1, 2, 3, 4])
def test_a_weight_is_rounded_once_for_each_group_also_where_layers_share_it(micro, quantized):
    run = boosted(PRECISIONS["fp8"]())
    quantized.clear()
    train(run, micro, steps=2)
    # In both steps, for forward and backward, which reads the transpose: of the weight that two layers share as well.
    assert sorted(filter(of_weight, quantized)) == sorted([(64, 32), (64, 64), (32, 64)] * 2)


def test_rows_are_rounded_once_along_each_dimension(quantized):
    run = boosted(PRECISIONS["fp8 rowwise"]())
    quantized.clear()
    train(run, 3, steps=1)
    # The input of the first layer needs no gradient.
    assert sorted(filter(of_weight, quantized)) == sorted([(64, 32), (64, 64), (32, 64), (64, 64), (64, 32)])


# ---- from the first forward pass with gradients to the step ----


def test_what_is_kept_is_a_byte_a_number_each_way_and_is_gone_after_the_step():
    run = booster, model, optimizer = boosted(PRECISIONS["fp8"]())
    x = batch(0)
    loss = model(x).square().mean()
    sizes = [sum(made.values.nbytes for made in each._made.values()) for each in kept(run)]
    assert sizes == [64 * 32, 64 * 64, 32 * 64]
    booster.backward(loss, optimizer)
    sizes = [sum(made.values.nbytes for made in each._made.values()) for each in kept(run)]
    assert sizes == [64 * 32, 2 * 64 * 64, 2 * 32 * 64]
    optimizer.step()
    assert kept(run) == []


def test_numbers_without_a_byte_are_not_kept(quantized):
    run = boosted(PRECISIONS["nvfp4"]())
    train(run, 2, steps=1)
    _ = run[1](batch(0))
    assert all(each._made == {} for each in kept(run))


def test_evaluation_neither_fills_nor_uses_it():
    run = booster, model, optimizer = boosted(PRECISIONS["fp8"]())
    with torch.no_grad():
        model(batch(0))
    assert kept(run) == []
    model.eval()(batch(0))  # with gradients, as somebody forgot
    assert kept(run) == []
    booster.backward(model.train()(batch(0)).square().mean(), optimizer)
    before = {id(each): len(each._made) for each in kept(run)}
    with torch.no_grad():
        for param in model.parameters():
            param.data.mul_(2)  # leaves no trace
        twice = model(batch(0))
        for param in model.parameters():
            param.data.div_(2)
    assert {id(each): len(each._made) for each in kept(run)} == before
    assert not torch.allclose(twice, model(batch(0)).detach(), rtol=0.1)


@pytest.mark.parametrize("way", ["data", "copy_"])
def test_averaged_weights_are_swapped_in_evaluated_and_swapped_back(way):
    """An exponential moving average, as people write it: through `.data`, of which torch keeps no record."""

    def swap(model, others):
        own = [param.detach().clone() for param in model.parameters()]
        with torch.no_grad():
            for param, other in zip(model.parameters(), others, strict=True):
                (param.data if way == "data" else param).copy_(other)
        return own

    found = []
    for keeps in (True, False):
        booster, model, optimizer = boosted(PRECISIONS["fp8"](), keeps=keeps)
        mean, seen = [param.detach().clone() for param in model.parameters()], []
        for step in range(4):
            train((booster, model, optimizer), micro=2, steps=1)
            for average, param in zip(mean, model.parameters(), strict=True):
                average.lerp_(param.detach(), 0.5)
            own = swap(model, mean)
            for grads in (False, True):
                with torch.set_grad_enabled(grads):
                    seen.append(model.eval()(batch(step)).detach())
            swap(model, own)
            model.train()
        found.append([*seen, *weights((booster, model, optimizer))])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def in_place(param):
    with torch.no_grad():
        param.mul_(1.5)


def other_memory(param):
    param.data = param.data * 1.5


@pytest.mark.slow_cases("in_place-mxfp8", "in_place-int8")
@pytest.mark.crossed
@EVERY_PRECISION
@pytest.mark.parametrize("write", [in_place, other_memory])
def test_a_foreign_write_between_two_micro_batches_is_seen(name, write):
    def between(model, step, micro):
        if micro == 1:
            for param in model.parameters():
                write(param)

    one, other = boosted(PRECISIONS[name]()), boosted(PRECISIONS[name](), keeps=False)
    assert train(one, 3, between=between) == train(other, 3, between=between)
    assert same(one, other)
    assert train(boosted(PRECISIONS[name]()), 3) != train(one, 3)


def test_a_checkpoint_loaded_between_two_micro_batches_is_seen(tmp_path):
    found = []
    for keeps in (True, False):
        run = booster, model, optimizer = boosted(PRECISIONS["fp8"](), keeps=keeps)
        booster.save(tmp_path / str(keeps), model=model, optimizer=optimizer)
        train(run, steps=1)
        booster.backward(model(batch(7)).square().mean(), optimizer)
        booster.load(tmp_path / str(keeps), model=model, optimizer=optimizer)
        found.append(model(batch(8)).detach())
    assert torch.equal(*found)


# ---- where nothing is kept ----


def test_what_steps_no_weights_or_shards_them_keeps_nothing():
    class Shards(InProcess):
        stores_float32 = True

    booster = Booster("cpu", PRECISIONS["fp8"]())
    model, *_ = booster.boost(Net())
    assert all(layer.weights is None for layer in layers(model))
    precision, net = PRECISIONS["fp8"](), Net()
    model, *_ = precision.configure(net, torch.optim.SGD(net.parameters()), placement=Shards())
    assert all(layer.weights is None for layer in layers(model))


def test_a_weight_that_is_computed_in_every_pass_is_rounded_in_every_pass():
    def net():
        model = Net()
        prune.l1_unstructured(model.first, "weight", 0.5)
        return model

    one, other = (boosted(PRECISIONS["fp8"](), keeps=keeps, model=net()) for keeps in (True, False))
    assert train(one, 2) == train(other, 2)
    _ = one[1](batch(0))
    assert len(kept(one)) == 2


def test_copies_and_pickles_keep_nothing_and_a_switch_lets_go():
    run = booster, model, optimizer = boosted(PRECISIONS["fp8"]())
    loss = model(batch(0)).square().mean()
    twin, _ = copy.deepcopy((model, optimizer))
    assert all(layer.weights is None for layer in layers(twin))
    assert layers(pickle.loads(pickle.dumps(layers(model)[0])))[0].weights is None  # noqa: S301 - made here
    booster.backward(loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    booster.switch(BF16MixedPrecision())
    assert layers(model) == []
    assert all("weights" not in vars(module) for module in model.modules())
    train(run)


def test_two_models_of_one_strategy_step_by_turns():
    precision, found = PRECISIONS["fp8"](), []
    for keeps in (True, False):
        precision = PRECISIONS["fp8"]()
        booster = Booster("cpu", precision)
        pair = []
        for _ in range(2):
            net = Net()
            model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
            for layer in layers(model):
                layer.weights = layer.weights if keeps else None
            pair.append((model, optimizer))
        (maker, its), (judge, own) = pair
        for step in range(3):
            booster.backward(judge(maker(batch(step)).detach()).square().mean(), own)
            own.step()
            own.zero_grad()
            booster.backward(judge(maker(batch(step))).square().mean(), its)
            its.step()
            its.zero_grad()
            own.zero_grad()
        found.append([p.detach() for model, _ in pair for p in model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.slow_cases("int8-False")
@pytest.mark.crossed
@pytest.mark.parametrize(("name", "whole"), [*crossed(["fp8 rowwise", "int8"], [True, False])])
def test_captured_steps_round_in_the_graph_and_eager_ones_between_them_see_the_weights_of_now(name, whole):
    """A recorder of operations on a CPU acts as the graph. A batch of another size has no graph when it is first seen.

    Not tensorwise: its emulation on a CPU reads scales on the host."""

    def trained(captured):
        run = booster, model, optimizer = boosted(PRECISIONS[name]())

        def micro_step(x):
            loss = (model(x) - x).square().mean()
            booster.backward(loss, optimizer)
            return loss

        def step(*batches):
            losses = []
            with booster.accumulate(model, optimizer, len(batches)):
                losses = [inner(each) for each in batches]
            optimizer.step()
            optimizer.zero_grad()
            return torch.stack(losses)

        inner, graphs = micro_step, RecordedGraphs()
        if captured and whole:
            step = booster._captured(step, (batch(0), batch(0)), graphs, 8)
        elif captured:
            inner = booster._captured(micro_step, (batch(0),), graphs, 8)
        losses = []
        for number in range(10):
            if number in (4, 7):  # by hand, so that what is kept is filled outside of graphs
                booster.backward(model(batch(number)).square().mean() * 0, optimizer)
                optimizer.zero_grad()
            size = 32 if number % 3 == 2 else 16
            losses.append(step(batch(number, 0, size), batch(number, 1, 16)).detach().clone())
        assert not captured or graphs.num_replays > 3
        return [*losses, *weights(run)]

    with as_on_a_gpu():
        found = trained(True), trained(False)
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
