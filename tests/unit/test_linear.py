"""What is done for every tensor is done once for every tensor: counts of calls and copies grow as their number."""

from collections.abc import Mapping

import pytest
import torch
from counts import FEW, MANY, MOST, count
from torch import nn

from booster import Booster
from booster.mixed_precision import BF16NaiveMixedPrecision
from booster.model.optimizers import load_states
from booster.model.params import rebind
from booster.shards.zero_buckets import bucketed


def growth(make):
    """How many times as many calls what `make(number of tensors)` returns makes for MANY tensors as for FEW; warm."""
    for size in (FEW, MANY):
        make(size)()
    return count(make(MANY)) / count(make(FEW))


def trained(size, precision="bf16_naive"):
    torch.manual_seed(0)
    model = nn.ParameterList(nn.Parameter(torch.randn(8)) for _ in range(size))
    b = Booster("cpu", precision)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, *_ = b.boost(model, optimizer)
    b.backward(sum(param.float().sum() for param in model.parameters()), optimizer)
    optimizer.step()
    return model, optimizer


PRECISIONS = {
    "fp16": "fp16",
    "bf16_naive": "bf16_naive",
    "no masters": lambda: BF16NaiveMixedPrecision(master_weights="none"),
}


def made(name):
    precision = PRECISIONS[name]
    return precision if isinstance(precision, str) else precision()


@pytest.mark.parametrize("name", PRECISIONS)
def test_reading_the_state_of_every_parameter_is_linear(name):
    def reading(size):
        model, optimizer = trained(size, made(name))
        params = list(model.parameters())

        def read():
            for param in params:
                assert set(optimizer.state[param]) == {"step", "exp_avg", "exp_avg_sq"}

        return read

    assert growth(reading) <= MOST


@pytest.mark.parametrize("name", PRECISIONS)
def test_loading_a_state_is_linear_also_one_without_masters(name):
    def loading(size):
        state = trained(size, "fp32")[1].state_dict()
        optimizer = trained(size, made(name))[1]
        return lambda: optimizer.load_state_dict(state)

    assert growth(loading) <= MOST


@pytest.mark.parametrize("name", PRECISIONS)
def test_boosting_is_linear(name):
    def boosting(size):
        model = nn.ParameterList(nn.Parameter(torch.randn(8)) for _ in range(size))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        return lambda: Booster("cpu", made(name)).boost(model, optimizer)

    assert growth(boosting) <= MOST


class Key(int):
    """A number that counts how often it is compared."""

    compared = 0

    def __eq__(self, other):
        Key.compared += 1
        return int.__eq__(self, other)

    __hash__ = int.__hash__


def test_torch_looks_for_each_parameter_once_in_a_group_that_is_loaded():
    params = [nn.Parameter(torch.ones(2)) for _ in range(60)]
    optimizer = torch.optim.AdamW(params, lr=1e-3)
    for param in params:
        param.grad = torch.ones(2)
    optimizer.step()
    state = optimizer.state_dict()
    state["param_groups"][0]["params"] = [Key(number) for number in range(60)]
    states = {param: dict(own) for param, own in optimizer.state.items()}
    Key.compared = 0
    load_states(optimizer, state)
    assert Key.compared <= 10 * 60  # 60 * 60 / 2 for each of three tensors, were they searched one by one
    assert all(torch.equal(optimizer.state[p][key], own[key]) for p, own in states.items() for key in own)
    assert type(optimizer.param_groups[0]["params"]) is list


@pytest.mark.parametrize("name", PRECISIONS)
def test_a_step_and_what_is_around_it_is_linear(name):
    def stepping(size):
        model, optimizer = trained(size, made(name))

        def run():
            for param in model.parameters():
                param.grad = torch.ones_like(param)
            optimizer._update.gradients.num_backwards = 1
            optimizer.clip_grad_by_norm(1.0)
            optimizer.step()
            optimizer.zero_grad()
            optimizer.state_dict()

        return run

    assert growth(stepping) <= MOST


class Watched(Mapping):
    """A mapping that counts how often all of it is gone through."""

    passes = 0

    def __init__(self, entries):
        self.entries = entries

    def __getitem__(self, key):
        return self.entries[key]

    def __contains__(self, key):
        return key in self.entries

    def __len__(self):
        return len(self.entries)

    def __iter__(self):
        self.passes += 1
        return iter(self.entries)


def test_an_optimizer_is_bound_to_placed_parameters_without_going_through_them_for_each():
    old = {str(i): nn.Parameter(torch.zeros(1)) for i in range(50)}
    new = Watched({name: nn.Parameter(torch.ones(1)) for name in old})
    optimizer = torch.optim.SGD(old.values(), lr=0.1)
    rebind(optimizer, old, new)
    assert all(param is new[name] for param, name in zip(optimizer.param_groups[0]["params"], old, strict=True))
    assert new.passes <= 2


def test_dividing_parameters_into_buckets_is_linear_and_keeps_to_their_size():
    def dividing(size):
        params = [torch.zeros(8) for _ in range(size)]
        return lambda: bucketed(params, 2**20)

    assert growth(dividing) <= MOST
    params = [torch.zeros(size) for size in (4, 9, 3, 3, 3)]
    assert [[len(p) for p in bucket] for bucket in bucketed(params, 24)] == [[3, 3], [3], [9], [4]]


@pytest.mark.parametrize("name", PRECISIONS)
def test_loading_a_state_without_masters_leaves_masters_where_they_are(name):
    model = nn.ParameterList(nn.Parameter(torch.randn(8)) for _ in range(MANY))
    raw = torch.optim.AdamW(model.parameters(), fused=True)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    raw.step()
    state = raw.state_dict()
    optimizer = trained(MANY, made(name))[1]
    before = [(tensor.data_ptr(), tensor.clone()) for tensor in optimizer._update.optimizer_state.master_tensors()]
    optimizer.load_state_dict(state)
    assert all(
        torch.equal(own["exp_avg"], state["state"][i]["exp_avg"]) for i, own in optimizer.state_dict()["state"].items()
    )
    for tensor, (place, values) in zip(optimizer._update.optimizer_state.master_tensors(), before, strict=True):
        assert tensor.data_ptr() == place
        assert torch.equal(tensor, values)


def test_a_state_of_several_histories_divides_the_buckets_that_it_meets():
    optimizer = trained(6)[1]
    state = trained(6, "fp32")[1].state_dict()
    for index in (1, 4):
        state["state"][index]["step"] = torch.tensor(5.0)
    optimizer.load_state_dict(state)
    found = optimizer.state_dict()["state"]
    assert [float(found[index]["step"]) for index in range(6)] == [1, 5, 1, 1, 5, 1]
