"""What `optimizer.load_state_dict` refuses before anything is loaded: states of other shapes, in every precision."""

import copy
import re

import pytest
import torch
from torch import nn

from booster import Booster, register_elementwise
from booster.mixed_precision import FP16ApexMixedPrecision
from booster.model.optimizers import makes_missing_states


@register_elementwise
class Registered(torch.optim.Optimizer):
    """Momentum of the user's own, stepped on flat buckets under masters."""

    def __init__(self, params):
        super().__init__(params, {"lr": 0.1})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in (p for p in group["params"] if p.grad is not None):
                velocity = self.state[param].setdefault("velocity", torch.zeros_like(param))
                param.sub_(velocity.mul_(0.9).add_(param.grad), alpha=group["lr"])


class Derived(torch.optim.AdamW):
    """A subclass, which no kernel is switched for."""


OPTIMIZERS = {
    "Adam": torch.optim.Adam,
    "AdamW amsgrad": lambda params: torch.optim.AdamW(params, amsgrad=True),
    "AdamW fused": lambda params: torch.optim.AdamW(params, fused=True),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "Adagrad": torch.optim.Adagrad,
    "RMSprop": lambda params: torch.optim.RMSprop(params, momentum=0.9, centered=True),
    "Adadelta": torch.optim.Adadelta,
    "Adamax": torch.optim.Adamax,
    "NAdam": torch.optim.NAdam,
    "RAdam": torch.optim.RAdam,
    "ASGD": torch.optim.ASGD,
    "Rprop": torch.optim.Rprop,
    "Adafactor": torch.optim.Adafactor,
    "registered": Registered,
    "derived": Derived,
    "derived, fused": lambda params: Derived(params, fused=True),
}
PRECISIONS = {
    "fp32": lambda: "fp32",
    "fp16": lambda: "fp16",
    "bf16": lambda: "bf16",
    "fp16_naive": lambda: "fp16_naive",
    "bf16_naive": lambda: "bf16_naive",
    "O2": lambda: FP16ApexMixedPrecision("O2", verbosity=0),
    "O3": lambda: FP16ApexMixedPrecision("O3", verbosity=0),
}


def trained(make, precision, size, steps=1):
    torch.manual_seed(size)
    booster = Booster("cpu", precision())
    model = nn.Linear(size, size)
    model, optimizer, *_ = booster.boost(model, make(model.parameters()))
    for _ in range(steps):
        booster.backward(model(torch.randn(2, size)).float().square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


SIZES = {"smaller": (4, 12), "larger": (12, 4), "of one element": (1, 12)}
CASES = [(precision, "smaller") for precision in PRECISIONS] + [
    (precision, size) for precision in ("fp32", "fp16_naive") for size in ("larger", "of one element")
]


@pytest.mark.crossed
@pytest.mark.parametrize(("precision", "size"), CASES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_of_other_shapes_is_refused_and_changes_nothing(name, precision, size):
    there, here = SIZES[size]
    make = OPTIMIZERS[name]
    _, other = trained(make, PRECISIONS[precision], there)
    model, optimizer = trained(make, PRECISIONS[precision], here, steps=2)
    before = copy.deepcopy((optimizer.state_dict(), model.state_dict()))
    state = other.state_dict()
    state.get("booster", {}).pop("masters", None)  # their shapes are checked by themselves
    with pytest.raises(ValueError, match=rf"of weight, a parameter of shape \({here}, {here}\)"):
        optimizer.load_state_dict(state)
    assert str(before) == str((optimizer.state_dict(), model.state_dict()))


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if not name.startswith("derived")])
def test_state_of_other_shapes_is_refused_before_the_first_step(name):
    make = OPTIMIZERS[name]
    _, other = trained(make, PRECISIONS["fp32"], 4)
    _, optimizer = trained(make, PRECISIONS["fp32"], 12, steps=0)
    with pytest.raises(ValueError, match="Nothing was loaded"):
        optimizer.load_state_dict(other.state_dict())


@pytest.mark.crossed
@pytest.mark.parametrize("precision", ["fp32", "fp16_naive", "O2"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_state_of_the_same_shapes_is_loaded(name, precision):
    make = OPTIMIZERS[name]
    _, other = trained(make, PRECISIONS[precision], 12)
    _, optimizer = trained(make, PRECISIONS[precision], 12, steps=0)
    optimizer.load_state_dict(other.state_dict())
    shapes = [
        {key: {name: torch.as_tensor(value).shape for name, value in own.items()} for key, own in state.items()}
        for state in (optimizer.state_dict()["state"], other.state_dict()["state"])
    ]
    assert shapes[0] == shapes[1]
    assert shapes[0]


def test_names_the_entry_of_the_parameter_that_differs():
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    _, optimizer, *_ = Booster("cpu").boost(model, torch.optim.AdamW(model.parameters()))
    state = {key: {"step": 1.0, "exp_avg": torch.zeros_like(p)} for key, p in enumerate(model.parameters())}
    state[2]["exp_avg"] = torch.zeros(4, 5)
    message = "'exp_avg' of 1.weight, a parameter of shape (5, 4), would be of shape (5, 4), and is (4, 5)"
    with pytest.raises(ValueError, match=re.escape(message)):
        optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})


@pytest.mark.crossed
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize(
    "name", [name for name in OPTIMIZERS if hasattr(torch.optim, name.split()[0]) and name not in ("SGD", "Adafactor")]
)
def test_refuses_none_for_a_tensor_that_the_step_reads(name, precision):
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    booster = Booster("cpu", PRECISIONS[precision]())
    model, optimizer, *_ = booster.boost(model, OPTIMIZERS[name](model.parameters()))
    booster.backward(model(torch.ones(2, 3)).float().sum() * 1e-3, optimizer)
    assert optimizer.step().applied
    state = copy.deepcopy(optimizer.state_dict())
    entry = next(key for key, value in state["state"][3].items() if isinstance(value, torch.Tensor) and value.dim())
    state["state"][3][entry] = None
    with pytest.raises(ValueError, match=f"holds '{entry}' of 1.bias as None"):
        optimizer.load_state_dict(state)


# Entries of the other two come when they are needed.
@pytest.mark.parametrize("precision", ["fp32", "bf16_naive"])
@pytest.mark.parametrize(
    "name", [name for name in OPTIMIZERS if hasattr(torch.optim, name.split()[0]) and name not in ("SGD", "Adafactor")]
)
def test_refuses_a_part_of_what_the_step_reads(name, precision):
    booster = Booster("cpu", precision)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    model, optimizer, *_ = booster.boost(model, OPTIMIZERS[name](model.parameters()))

    def step():
        booster.backward(model(torch.ones(2, 3)).float().sum() * 1e-3, optimizer)
        assert optimizer.step().applied

    step()
    given = copy.deepcopy(optimizer.state_dict())
    for entry in given["state"][3]:
        state = copy.deepcopy(given)
        del state["state"][3][entry]
        with pytest.raises(ValueError, match=rf"of 1.bias lacks \['{entry}'\]"):
            optimizer.load_state_dict(state)
    del given["state"][3]  # which begins anew
    if not makes_missing_states(torch.optim.Adagrad) and name == "Adagrad":
        with pytest.raises(ValueError, match=r"of 1.bias lacks \['step', 'sum'\]"):
            optimizer.load_state_dict(given)
    else:
        optimizer.load_state_dict(given)
    step()


def test_momentum_of_sgd_may_not_have_begun():
    model = nn.Linear(3, 4)
    _, optimizer, *_ = Booster("cpu").boost(model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9))
    state = {0: {"momentum_buffer": torch.ones(4, 3)}, 1: {"momentum_buffer": None}}
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    assert optimizer.state[model.bias]["momentum_buffer"] is None


def test_flat_state_of_lbfgs_is_held_to_the_number_of_elements():
    def stepped(size):
        model = nn.Linear(size, 2)
        booster = Booster("cpu")
        model, optimizer, *_ = booster.boost(model, torch.optim.LBFGS(model.parameters(), max_iter=3))

        def closure():
            optimizer.zero_grad()
            loss = model(torch.ones(3, size)).square().mean() + model.weight.square().sum()
            booster.backward(loss, optimizer)
            return loss

        optimizer.step(closure)
        return optimizer

    with pytest.raises(ValueError, match=r"would be of shape \(8,\), and is \(14,\)"):
        stepped(3).load_state_dict(stepped(6).state_dict())
    stepped(3).load_state_dict(stepped(3).state_dict())


def test_state_of_an_unknown_optimizer_may_have_any_shape():
    class Factored(torch.optim.Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1})

        @torch.no_grad()
        def step(self, closure=None):
            for param in self.param_groups[0]["params"]:
                state = self.state[param]
                state["exp_avg"] = torch.cat([state.get("exp_avg", torch.zeros(0)), param.grad.norm()[None]])

    _, other = trained(Factored, PRECISIONS["fp32"], 4, steps=3)
    _, optimizer = trained(Factored, PRECISIONS["fp32"], 4, steps=1)
    optimizer.load_state_dict(other.state_dict())
    assert optimizer.state_dict()["state"][0]["exp_avg"].numel() == 3
