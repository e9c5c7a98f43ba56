"""Parameters computed from others, at the root and in layers: registered before boost to the bit, afterwards refused."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

from booster import Booster


class Double(nn.Module):
    def forward(self, weight):
        return weight * 2

    def right_inverse(self, weight):
        return weight / 2


class Rooted(nn.Module):
    """A direct parameter next to a layer."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.head = nn.Linear(4, 4)

    def forward(self, x):
        return self.head(nn.functional.linear(x, self.weight))


KINDS = {
    "parametrize": lambda module: parametrize.register_parametrization(module, "weight", Double()),
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "old spectral_norm": spectral_norm,
    "pruning": lambda module: prune.l1_unstructured(module, "weight", 2),
    "old weight_norm": weight_norm,
}
ORTHOGONAL = {
    f"orthogonal, {name}": lambda module, name=name: parametrizations.orthogonal(module, orthogonal_map=name)
    for name in ("matrix_exp", "cayley", "householder")
}
MODELS = {"root": Rooted, "layer": lambda: nn.Linear(4, 4)}
HALF = {"fp32": None, "bf16": torch.bfloat16}

pytestmark = pytest.mark.filterwarnings("ignore:.*weight_norm.*deprecated:FutureWarning")


def made(model, kind):
    torch.manual_seed(0)
    model = MODELS[model]()
    KINDS[kind](model)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def batches():
    torch.manual_seed(1)
    return torch.randn(3, 2, 4)


@pytest.mark.crossed
@pytest.mark.parametrize("precision", HALF)
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_was_registered_before_boost_trains_to_the_bit_as_in_a_loop_by_hand(kind, model, precision):
    raw, plain = made(model, kind)
    for x in batches():
        with torch.autocast("cpu", HALF[precision], enabled=HALF[precision] is not None):
            loss = raw(x).float().square().mean()
        loss.backward()
        plain.step()
        plain.zero_grad()
    booster = Booster("cpu", precision, half_products="native")
    boosted, optimizer, *_ = booster.boost(*made(model, kind))
    for x in batches():
        booster.backward(boosted(x).float().square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    assert boosted.state_dict().keys() == raw.state_dict().keys()
    for name, value in raw.state_dict().items():
        assert torch.equal(boosted.state_dict()[name], value), name


@pytest.mark.crossed
@pytest.mark.parametrize("precision", ["fp32", "bf16_naive", "fp16_apex"])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_registered_on_the_boosted_model_is_refused_by_name_and_changes_nothing(kind, model, precision):
    torch.manual_seed(0)
    own = MODELS[model]()
    booster = Booster("cpu", precision)
    boosted, optimizer, *_ = booster.boost(own, torch.optim.SGD(own.parameters(), lr=0.1))
    before, cls, hooks = copy.deepcopy(boosted.state_dict()), type(boosted), len(own._forward_pre_hooks)
    params = list(own.named_parameters())
    with pytest.raises(
        RuntimeError, match=r"a boosted model was given to .* before its optimizer is made and before boost"
    ):
        KINDS[kind](boosted)
    assert type(boosted) is cls
    assert len(own._forward_pre_hooks) == hooks
    assert [name for name, _ in own.named_parameters()] == [name for name, _ in params]
    assert all(one is two for (_, one), (_, two) in zip(own.named_parameters(), params, strict=True))
    assert all(torch.equal(value, before[name]) for name, value in boosted.state_dict().items())
    booster.backward(boosted(torch.ones(2, 4)).float().sum(), optimizer)
    assert optimizer.step() is not None


def test_one_more_parametrization_of_a_parametrized_root_and_its_removal_are_refused_too():
    model, optimizer = made("root", "parametrize")
    boosted, *_ = Booster("cpu", "fp32").boost(model, optimizer)
    for change in (
        lambda: KINDS["parametrize"](boosted),
        lambda: parametrize.remove_parametrizations(boosted, "weight"),
    ):
        with pytest.raises(RuntimeError, match="a boosted model was given to"):
            change()
    assert len(model.parametrizations.weight) == 1


def test_asking_whether_a_boosted_model_is_parametrized_is_no_change_of_it():
    model, optimizer = made("root", "parametrize")
    boosted, *_ = Booster("cpu", "fp32").boost(model, optimizer)
    assert parametrize.is_parametrized(boosted)
    plain, *_ = Booster("cpu", "fp32").boost(nn.Linear(2, 2))
    assert not parametrize.is_parametrized(plain)


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_naive"])
def test_functional_call_replaces_what_a_parameter_of_the_root_is_computed_from(precision):
    model, optimizer = made("root", "parametrize")
    boosted, *_ = Booster("cpu", precision).boost(model, optimizer)
    x = torch.ones(2, 4)
    before = boosted(x)
    given = {name: torch.full_like(value, 0.5) for name, value in boosted.state_dict().items()}
    found = torch.func.functional_call(boosted, given, (x,))
    assert torch.equal(found.float(), torch.full((2, 4), 4 * (4 * 0.5 * 2) * 0.5 + 0.5))
    assert torch.equal(boosted(x), before)


@pytest.mark.parametrize("half_products", ["float32", "native"])
@pytest.mark.parametrize("precision", ["bf16_naive", "fp16_naive"])
@pytest.mark.parametrize("kind", ["weight_norm", "spectral_norm", *ORTHOGONAL])
def test_a_half_weight_that_is_computed_is_float32_rounded_once_wherever_it_is_read(kind, precision, half_products):
    def made():
        torch.manual_seed(0)
        return (KINDS | ORTHOGONAL)[kind](nn.Linear(16, 8))

    net, eps = made(), 2.0**-8 if precision == "bf16_naive" else 2.0**-11
    booster = Booster("cpu", precision, half_products=half_products)
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    read = []
    model.register_forward_hook(lambda module, args, out: read.append(net.weight))
    for _ in range(3):
        loss = model(torch.ones(2, 16)).square().mean() + 1e-3 * net.weight.float().square().sum()
        booster.backward(loss, optimizer)
        assert optimizer.step() or precision == "fp16_naive"
        optimizer.zero_grad()
    model.eval()
    model(torch.ones(2, 16))
    wide = made().double().eval()
    wide.load_state_dict(model.state_dict())
    for found in (net.weight, read[-1]):
        assert found.dtype == net.bias.dtype == booster.precision.dtype
        # One rounding, of float32 that is off by far less.
        assert (found - wide.weight).norm() <= eps * wide.weight.norm()


@pytest.mark.parametrize("half_products", ["float32", "native"])
@pytest.mark.parametrize("precision", ["bf16_naive", "fp16_naive"])
@pytest.mark.parametrize("kind", ["old spectral_norm", "old weight_norm", "pruning"])
@pytest.mark.parametrize("layer", [lambda: nn.Linear(16, 8), lambda: nn.Conv1d(16, 8, 1)], ids=["Linear", "Conv1d"])
def test_hooks_of_a_root_that_compute_its_weight_by_buffers_give_what_they_give_in_a_layer(
    layer, kind, precision, half_products
):
    def trained(wrap):
        torch.manual_seed(0)
        net = wrap(KINDS[kind](layer()))
        booster = Booster("cpu", precision, half_products=half_products)
        model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
        x = torch.randn(4, 16, 1) if isinstance(layer(), nn.Conv1d) else torch.randn(4, 16)
        for _ in range(3):
            booster.backward(model(x).square().mean(), optimizer)
            assert optimizer.step() or precision == "fp16_naive"
            optimizer.zero_grad()
        return {name.removeprefix("0."): value for name, value in model.state_dict().items()}

    root, inside = trained(lambda each: each), trained(nn.Sequential)
    assert root.keys() == inside.keys()
    assert all(torch.equal(root[name], inside[name]) and root[name].dtype == inside[name].dtype for name in root)
