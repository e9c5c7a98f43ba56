"""Optimizers as people write them: what one does besides stepping parameters is as in plain torch, wherever its numbers are."""

import collections
import gc
import math
from copy import deepcopy
from types import MethodType

import pytest
import torch
from torch import nn

import booster
from booster import Booster
from booster.interface.optimizer import update_of
from booster.masters.rounding import RoundingRNG
from booster.mixed_precision import BF16NaiveMixedPrecision, FP16NaiveMixedPrecision, FP16TorchMixedPrecision
from booster.shards.dtensor import check_steps_shards
from booster.shards.zero import check_shards

WIDTH, LAYERS, STEPS = 300, 12, 5


class Schedule:
    """What an optimizer keeps in a group, and counts with."""

    def __init__(self):
        self.calls = 0
        self.seen = {"rates": []}


def begin(kind):
    """What counts the steps of an optimizer, in a group."""
    return {
        "number": lambda: 0,
        "tensor": lambda: torch.zeros((), dtype=torch.int32),
        "list": lambda: [0],
        "nested": lambda: {"of": [torch.zeros((), dtype=torch.float64)]},
        "deque": lambda: collections.deque([0]),
        "object": Schedule,
        "attribute": lambda: None,
        "attribute tensor": lambda: None,
        "made by the first step": lambda: None,
        "state": lambda: None,
        "state made by the first step": lambda: None,
    }[kind]()


class Counting(torch.optim.Optimizer):
    """Steps by the sign of the gradient, less in each step; how it counts is its `kind`."""

    def __init__(self, params, kind, lr=0.01):
        self.kind = kind
        self.attribute = torch.zeros((), dtype=torch.int64) if kind == "attribute tensor" else 0
        super().__init__(params, {"lr": lr, "count": begin(kind)})
        for group in self.param_groups[1:]:
            group["count"] = begin(kind)
        if kind == "state":
            self.state["count"] = torch.zeros(1, dtype=torch.int64)

    def count(self, group):
        count = group["count"]
        if self.kind == "number":
            group["count"] = count = count + 1
        elif self.kind == "tensor":
            count.add_(1)
        elif self.kind in ("list", "deque"):
            count[0] += 1
            count = count[0]
        elif self.kind == "nested":
            count["of"][0].add_(1)
            count = count["of"][0]
        elif self.kind == "object":
            count.calls += 1
            count.seen["rates"].append(group["lr"])
            count = len(count.seen["rates"])
        elif self.kind == "made by the first step":
            group["made"] = count = group.get("made", 0) + 1
        elif self.kind.startswith("state"):
            count = self.state["count"]
        else:
            count = self.attribute
        return int(count)

    @torch.no_grad()
    def step(self, closure=None):
        if self.kind.startswith("attribute"):
            self.attribute += 1
        elif self.kind.startswith("state"):
            if "count" not in self.state:
                self.state["count"] = torch.zeros(1, dtype=torch.int64)
            self.state["count"].add_(1)
        for group in self.param_groups:
            rate = group["lr"] / self.count(group)
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    if "last" not in state:
                        state["last"] = torch.zeros_like(param)
                    state["last"].copy_(param.grad)
                    param.add_(param.grad.sign(), alpha=-rate)

    def counts(self):
        """The number of steps by each group."""
        kept = []
        for group in self.param_groups:
            count = group["count"]
            kept.append(
                {
                    "number": lambda count=count: count,
                    "tensor": lambda count=count: int(count),
                    "list": lambda count=count: count[0],
                    "deque": lambda count=count: count[0],
                    "nested": lambda count=count: int(count["of"][0]),
                    "object": lambda count=count: (count.calls + len(count.seen["rates"])) / 2,
                    "attribute": lambda: self.attribute,
                    "attribute tensor": lambda: int(self.attribute),
                    "made by the first step": lambda group=group: group.get("made", 0),
                    "state": lambda: int(self.state["count"]),
                    "state made by the first step": lambda: int(self.state["count"]),
                }[self.kind]()
            )
        return kept


booster.register_elementwise(Counting)

KINDS = (
    "number",
    "tensor",
    "list",
    "deque",
    "nested",
    "object",
    "attribute",
    "attribute tensor",
    "made by the first step",
    "state",
    "state made by the first step",
)
WAYS = {
    "fp32": ("fp32", {}),
    "bf16": ("bf16", {}),
    "masters": ("bf16_naive", {}),
    "float32 masters": (lambda: BF16NaiveMixedPrecision(master_weights="fp32"), {}),
    "8-bit states": ("bf16", {"states": "8bit"}),
    "half weights, 16-bit states": ("bf16_naive", {"states": "bf16"}),
    "released": ("bf16", {"release_gradients": "exact"}),
    "released masters": ("bf16_naive", {"release_gradients": "exact"}),
}


def layers():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)), nn.Linear(WIDTH, 4))


def trained(precision, options, kind):
    model = layers()
    last = list(model[-1].parameters())
    frozen = nn.Parameter(torch.zeros(3))  # of a group with a step that is counted although it never has a gradient
    params = [{"params": list(model[:-1].parameters())}, {"params": last}, {"params": [frozen]}]
    optimizer = Counting(params, kind)
    b = Booster("cpu", precision() if callable(precision) else precision, **options)
    model.register_parameter("frozen", frozen)
    model, optimizer, *_ = b.boost(model, optimizer)
    for step in range(STEPS):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        b.backward(model(x).float().square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return b.unwrap(optimizer).counts()


@pytest.mark.crossed
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_counts_each_step_once_however_it_counts_and_however_it_is_stepped(kind, way):
    assert trained(*WAYS[way], kind) == [STEPS] * 3


@pytest.mark.parametrize("kind", ["tensor", "number"])
def test_a_compiled_step_counts_each_step_once(kind):
    assert trained("bf16_naive", {"fused_optimizer": "compile"}, kind) == [STEPS] * 3


@pytest.mark.parametrize("kind", ["number", "tensor", "list", "nested", "attribute"])
def test_trial_steps_for_states_and_for_memory_leave_the_count_of_a_group(kind):
    model = layers()
    optimizer = Counting(model.parameters(), kind)
    b = Booster("cpu", "bf16", states="8bit")
    b.estimate_memory(model, optimizer, (torch.randn(8, WIDTH), torch.randn(8, 4)), nn.MSELoss())
    assert optimizer.counts() == [0]
    model, optimizer, *_ = b.boost(model, optimizer)
    assert b.unwrap(optimizer).counts() == [0]


# ---- methods besides step ----

FORMS = {
    "fp32": ("fp32", {}),
    "bf16": ("bf16", {}),
    "fp16": ("fp16", {}),
    "8-bit states": ("bf16", {"states": "8bit"}),
    "float32 masters, fp16": ("fp16_naive", {}),
    "float32 masters": (lambda: BF16NaiveMixedPrecision(master_weights="fp32"), {}),
    "split": ("bf16_naive", {}),
    "split24": (lambda: BF16NaiveMixedPrecision(master_weights="split24"), {}),
    "kahan": (lambda: BF16NaiveMixedPrecision(master_weights="none", rounding="kahan"), {}),
    "stochastic": (lambda: BF16NaiveMixedPrecision(master_weights="none", rounding="stochastic"), {}),
    "packed masters": (lambda: BF16NaiveMixedPrecision(states="8bit"), {}),
    "compiled": ("bf16_naive", {"fused_optimizer": "compile"}),
}
WHOLE_FORMS = ("fp32", "bf16", "fp16", "float32 masters, fp16", "float32 masters")


class Averaging(torch.optim.Optimizer):
    """SGD that keeps a mean of the weights, and exchanges the two by methods, as schedule-free optimizers do."""

    def __init__(self, params, lr=1e-3):
        super().__init__(params, {"lr": lr})
        self.averaged = False

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.sub_(param.grad, alpha=group["lr"])
                    state = self.state[param]
                    if "mean" not in state:
                        state["mean"] = param.clone()
                    state["mean"].lerp_(param, 0.1)

    @torch.no_grad()
    def exchange(self, factor=1.0, *, by_data=False):
        moved = 0
        for group in self.param_groups:
            for param in group["params"]:
                if param in self.state:
                    mean = self.state[param]["mean"]
                    weights = param.clone()
                    if by_data:
                        param.data = mean * factor
                    else:
                        param.copy_(mean * factor)
                    mean.copy_(weights)
                    moved += 1
        self.averaged = not self.averaged
        return moved

    def look(self):
        return [float(self.state[p]["mean"].sum()) for group in self.param_groups for p in group["params"]]


class AveragingByElement(Averaging):
    """The same, declared to be elementwise."""


booster.register_elementwise(AveragingByElement, states={"mean": "fp32"})


def wide():
    """A parameter that is in several buckets, small ones that share one, one without dimensions."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(600, 500), nn.Linear(500, 4, bias=False))
    model[0].scale = nn.Parameter(torch.tensor(1.0))
    model[0].forward = lambda x, own=model[0]: nn.functional.linear(x, own.weight, own.bias) * own.scale
    return model


def averaged(form, cls, steps=4):
    precision, options = FORMS[form]
    model = wide()
    b = Booster("cpu", precision() if callable(precision) else precision, **options)
    model, optimizer, *_ = b.boost(model, cls(model.parameters()))
    for step in range(steps):
        one_pass(b, model, optimizer, step)
        assert optimizer.step().applied
        optimizer.zero_grad()
    return b, model, optimizer


def one_pass(b, model, optimizer, step):
    x = torch.randn(8, 600, generator=torch.Generator().manual_seed(step))
    b.backward(1e-2 * model(x).float().square().mean(), optimizer)


METHODS = [(form, AveragingByElement) for form in FORMS] + [(form, Averaging) for form in WHOLE_FORMS]


@pytest.mark.crossed
@pytest.mark.parametrize("by_data", [False, True], ids=["in place", "by .data"])
@pytest.mark.parametrize(("form", "cls"), METHODS)
def test_what_a_method_of_an_optimizer_writes_is_what_the_model_computes_with(form, cls, by_data):
    b, model, optimizer = averaged(form, cls)
    means = {name: optimizer.state[p]["mean"].float().clone() for name, p in model.named_parameters()}
    masters = optimizer.state_dict()["booster"].get("masters", {}).get("weights", {})
    before = {name: masters.get(name, p).detach().float().clone() for name, p in model.named_parameters()}
    assert optimizer.exchange(2.0, by_data=by_data) == 4
    assert b.unwrap(optimizer).averaged
    for name, param in model.named_parameters():
        half = torch.finfo(param.dtype).eps
        assert not torch.equal(param.float(), before[name])
        assert torch.allclose(param.float(), 2.0 * means[name], rtol=half, atol=1e-7), name
        assert torch.allclose(optimizer.state[param]["mean"].float(), before[name], rtol=2.0**-15, atol=1e-7), name
    one_pass(b, model, optimizer, 9)
    assert optimizer.step().applied


@pytest.mark.parametrize(("form", "cls"), METHODS)
def test_a_method_that_only_reads_changes_no_bit_and_no_later_step(form, cls):
    runs = averaged(form, cls), averaged(form, cls)
    runs[0][2].look()
    one_pass(*runs[0], 4)
    runs[0][2].look()
    one_pass(*runs[1], 4)
    for _, _, optimizer in runs:
        assert optimizer.step().applied
    for first, second in zip(runs[0][1].parameters(), runs[1][1].parameters(), strict=True):
        assert torch.equal(first, second)
        assert torch.equal(runs[0][2].state[first]["mean"], runs[1][2].state[second]["mean"])


@pytest.mark.parametrize("masters", ["split", "split24"])
def test_between_steps_no_random_bits_are_held(masters):
    @torch.no_grad()
    def double(optimizer):
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.mul_(2.0)

    def held():
        return [own for each in gc.get_objects() if type(each) is RoundingRNG and each.asked for own in each.drawn]

    model = wide()
    made = torch.optim.AdamW(model.parameters())
    made.double = MethodType(double, made)
    b = Booster("cpu", BF16NaiveMixedPrecision(master_weights=masters, states="8bit"))
    model, optimizer, *_ = b.boost(model, made)
    one_pass(b, model, optimizer, 0)
    assert optimizer.step().applied
    assert update_of(optimizer).optimizer_state.masters.rng.asked
    assert not held()
    optimizer.double()
    assert not held()


class SharpnessAware(torch.optim.Optimizer):
    """Two half steps around a base optimizer, as people write it: up the gradient, and back before the base steps."""

    def __init__(self, params, rho=0.05, lr=1e-4, one_state=True):
        super().__init__(params, {"rho": rho, "lr": lr, **({"one_state": True} if one_state else {})})
        self.base = torch.optim.SGD(self.param_groups, lr=lr, momentum=0.9)
        self.param_groups = self.base.param_groups
        if one_state:
            self.state = self.base.state

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self.base.param_groups = self.param_groups
        if "one_state" in self.defaults:
            self.base.state = self.state

    @torch.no_grad()
    def first_step(self, zero_grad=False):
        held = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        norm = torch.stack([p.grad.norm() for p in held]).norm()
        for param in held:
            self.state[param]["old"] = param.data.clone()
            param.add_(param.grad * (self.param_groups[0]["rho"] / (norm + 1e-12)))
        if zero_grad:
            self.zero_grad()

    @torch.no_grad()
    def second_step(self, zero_grad=False):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data = self.state[param]["old"]
        self.base.step()
        if zero_grad:
            self.zero_grad()


def sharpness_aware(precision, steps=30, scale=None):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    start = [p.detach().clone() for p in model.parameters()]
    b = Booster("cpu", precision() if callable(precision) else precision)
    made = SharpnessAware(model.parameters())
    schedule = torch.optim.lr_scheduler.StepLR(made, 10, gamma=0.9)
    model, optimizer, _, _, schedule = b.boost(model, made, lr_scheduler=schedule)
    for step in range(steps):
        for half in (optimizer.first_step, optimizer.second_step):
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step))
            b.backward((model(x).float() - 1).square().mean(), optimizer)
            half(zero_grad=True)
            assert all(p.grad is None for p in model.parameters())
        schedule.step()
    masters = optimizer.state_dict()["booster"].get("masters", {}).get("weights", {})
    ends = [masters.get(name, p).detach().float() for name, p in model.named_parameters()]
    way = torch.cat([(end - begin).flatten() for end, begin in zip(ends, start, strict=True)])
    return way, b.unwrap(optimizer).param_groups[0]["lr"]


@pytest.mark.filterwarnings("ignore:Detected call of")  # torch's, which says so of such an optimizer without us too
@pytest.mark.parametrize("precision", ["bf16", "bf16_naive", "fp16 small scale", "fp16_naive small scale"])
def test_an_optimizer_of_two_half_steps_trains_as_in_float32_and_its_schedule_goes_on(precision):
    small = {"fp16 small scale": fp16, "fp16_naive small scale": fp16_naive}
    way, rate = sharpness_aware(small.get(precision, precision))
    wanted, wanted_rate = sharpness_aware("fp32")
    # Half activations make gradients differ by some of their roundings, 2**-8 each, and the weights move along them.
    assert (way - wanted).norm() <= 2.0**-5 * wanted.norm()
    assert rate == wanted_rate == pytest.approx(1e-4 * 0.9**3)


def fp16():
    return FP16TorchMixedPrecision(init_scale=2.0**7)


def fp16_naive():
    return FP16NaiveMixedPrecision(initial_scale=2.0**7)


def fp16_naive_norms_wide():
    return FP16NaiveMixedPrecision(initial_scale=2.0**7, keep_fp32=[nn.LayerNorm])


@pytest.mark.parametrize("precision", [fp16, fp16_naive, fp16_naive_norms_wide])
def test_a_method_that_writes_by_gradients_that_overflowed_is_refused_and_the_weights_are_put_back(precision):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.LayerNorm(32), nn.Linear(32, 4))
    b = Booster("cpu", precision())
    model, optimizer, *_ = b.boost(model, SharpnessAware(model.parameters()))
    before = [p.detach().clone() for p in model.parameters()]
    b.backward(1e38 * model(torch.ones(2, 16)).float().square().sum(), optimizer)
    with pytest.raises(
        RuntimeError, match=r"first_step\(\) of SharpnessAware changed weights by gradients .* put back"
    ):
        optimizer.first_step()
    assert all(map(torch.equal, model.parameters(), before))
    assert not math.isfinite(optimizer.clip_grad_by_norm(math.inf))
    assert not optimizer.step().applied
    optimizer.zero_grad()


class ByData(torch.optim.Optimizer):
    """Puts new tensors in the place of weights."""

    def __init__(self, params, lr=0.1):
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.data = param.data - group["lr"] * param.grad.sign()


@pytest.mark.parametrize("form", ["fp32", "bf16", "8-bit states", "float32 masters", "split", "kahan"])
def test_a_step_may_put_new_tensors_in_the_place_of_weights(form):
    booster.register_elementwise(ByData)
    precision, options = FORMS[form]
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Linear(32, 4))
    before = [p.detach().clone() for p in model.parameters()]
    b = Booster("cpu", precision() if callable(precision) else precision, **options)
    model, optimizer, *_ = b.boost(model, ByData(model.parameters()))
    b.backward(model(torch.ones(2, 16)).float().square().sum(), optimizer)
    signs = [p.grad.float().sign() for p in model.parameters()]
    optimizer.step()
    for param, old, sign in zip(model.parameters(), before, signs, strict=True):
        assert torch.allclose(param.float(), old - 0.1 * sign, rtol=2.0**-7, atol=2.0**-9)


# ---- writes into optimizer.state ----

STATE_FORMS = ["split", "float32 masters", "8-bit states", "packed masters", "fp32"]


def with_moments(form):
    """A parameter that is in several buckets, and small ones that share one; every parameter with moments."""
    precision, options = FORMS[form]
    model = wide()
    b = Booster("cpu", precision() if callable(precision) else precision, **options)
    model, optimizer, *_ = b.boost(model, torch.optim.Adam(model.parameters(), lr=1e-3))
    for step in range(2):
        one_pass(b, model, optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
    return b, model, optimizer


WRITES = {
    "zero_": lambda m: m.zero_(),
    "setitem": lambda m: m.__setitem__(slice(None), 0.0),
    "rows": lambda m: [rows.zero_() for rows in m.chunk(3)],
    "data": lambda m: m.data.mul_(0.0),
    "foreach": lambda m: torch._foreach_mul_([m], 0.0),
    "copy_": lambda m: m.copy_(torch.zeros_like(m)),
    "out": lambda m: torch.mul(m, 0.0, out=m),
    "init": lambda m: nn.init.zeros_(m),
}


@pytest.mark.crossed
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("form", STATE_FORMS)
def test_a_write_into_a_state_is_kept_at_every_size_and_leaves_those_beside_it(form, write):
    b, model, optimizer = with_moments(form)
    params = dict(model.named_parameters())
    before = {name: optimizer.state[p]["exp_avg"].clone() for name, p in params.items()}
    assert all(type(value) is torch.Tensor and value.any() for value in before.values())
    for name in ("0.weight", "0.bias"):
        with torch.no_grad():
            WRITES[write](optimizer.state[params[name]]["exp_avg"])
    places = {name: index for index, name in enumerate(params)}
    saved = optimizer.state_dict()["state"]
    for name, param in params.items():
        wanted = torch.zeros_like(before[name]) if name in ("0.weight", "0.bias") else before[name]
        assert torch.equal(optimizer.state[param]["exp_avg"], wanted), name
        assert torch.equal(saved[places[name]]["exp_avg"], wanted), name
        assert optimizer.state[param]["exp_avg_sq"].any()
    one_pass(b, model, optimizer, 5)
    grads = {name: p.grad.float().clone() for name, p in params.items()}
    optimizer.step()
    found = optimizer.state[params["0.bias"]]["exp_avg"]
    assert torch.allclose(found, 0.1 * grads["0.bias"], rtol=2.0**-4, atol=1e-6 + 0.02 * float(found.abs().max()))


@pytest.mark.parametrize("form", STATE_FORMS)
def test_a_state_can_be_set_whole_and_deleted_and_the_parameter_begins_anew(form):
    b, model, optimizer = with_moments(form)
    params = dict(model.named_parameters())
    weight, bias, other = params["0.weight"], params["0.bias"], params["1.weight"]
    before = optimizer.state[other]["exp_avg"].clone()
    optimizer.state[weight] = {
        "step": torch.tensor(7.0),
        "exp_avg": torch.ones(weight.shape),
        "exp_avg_sq": torch.ones(weight.shape),
    }
    del optimizer.state[bias]
    assert bias not in optimizer.state
    assert float(optimizer.state[weight]["step"]) == 7.0
    assert torch.equal(optimizer.state[weight]["exp_avg"], torch.ones(weight.shape))
    assert torch.equal(optimizer.state[other]["exp_avg"], before)
    one_pass(b, model, optimizer, 5)
    assert optimizer.step().applied
    steps = [float(optimizer.state[p]["step"]) for p in (weight, bias, other)]
    assert steps == [8.0, 1.0, 3.0]
    with pytest.raises(KeyError):
        del optimizer.state[nn.Parameter(torch.zeros(2))]


@pytest.mark.parametrize("form", ["split", "8-bit states"])
def test_a_copy_of_a_state_from_before_a_step_takes_no_writes(form):
    b, model, optimizer = with_moments(form)
    moments = optimizer.state[model[0].weight]["exp_avg"]
    one_pass(b, model, optimizer, 5)
    optimizer.step()
    with pytest.raises(RuntimeError, match="is a copy of before it; ask optimizer.state"):
        moments[0] = 0.0


def test_a_state_of_another_shape_is_refused():
    _, model, optimizer = with_moments("split")
    with pytest.raises(ValueError, match=r"was given tensors of shapes \{'exp_avg': \(3,\)\}"):
        optimizer.state[model[0].weight] = {"exp_avg": torch.zeros(3)}


class OnParameters(torch.optim.Optimizer):
    """Steps by the sign of the gradient, as far as a number says that it keeps on each parameter."""

    def __init__(self, params, lr=0.01, when="made"):
        super().__init__(params, {"lr": lr})
        self.when = when
        if when == "made":
            for param in self.of_groups():
                param.reach = 1.0

    def of_groups(self):
        return (param for group in self.param_groups for param in group["params"])

    @torch.no_grad()
    def step(self, closure=None):
        for param in self.of_groups():
            reach = getattr(param, "reach", 1.0) if self.when == "asked" else param.reach
            param.sub_(param.grad.sign(), alpha=self.param_groups[0]["lr"] * reach)


def boosted_on_parameters(precision, when, **set_by_user):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    model.weight.note = "of the model"  # which the optimizer does not know
    vars(model.weight).update(set_by_user)
    b = Booster("cpu", precision)
    model, optimizer, *_ = b.boost(model, OnParameters(model.parameters(), when=when))
    before = [param.detach().float().clone() for param in model.parameters()]
    b.backward(model(torch.ones(3, 4)).float().square().mean(), optimizer)
    return optimizer, lambda: [
        float((old - new.detach().float()).abs().amax()) for old, new in zip(before, model.parameters(), strict=True)
    ]


@pytest.mark.parametrize("precision", ["bf16_naive", "fp16_naive"])
@pytest.mark.parametrize(("when", "set_by_user"), [("made", {}), ("asked", {"reach": 3.0})])
def test_attributes_that_an_optimizer_keeps_or_reads_on_half_parameters_are_refused_by_name(
    precision, when, set_by_user
):
    with pytest.raises(
        ValueError, match=r"OnParameters works with \['reach'\], attributes of its parameters, and would"
    ):
        boosted_on_parameters(precision, when, **set_by_user)


def test_an_attribute_that_a_step_misses_on_half_parameters_is_named():
    optimizer, _ = boosted_on_parameters("bf16_naive", "never")
    with pytest.raises(RuntimeError, match="OnParameters reads 'reach' of a parameter; here it steps float32 tensors"):
        optimizer.step()


@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16"])
def test_attributes_on_parameters_stay_where_weights_are_float32(precision):
    optimizer, moved = boosted_on_parameters(precision, "asked", reach=3.0)
    assert optimizer.step().applied
    assert moved() == pytest.approx([0.03, 0.01], rel=1e-4)


def test_attributes_that_the_optimizer_does_not_know_are_no_reason():
    optimizer, moved = boosted_on_parameters("bf16_naive", "asked")
    assert optimizer.step().applied
    assert min(moved()) > 0.005  # rounded to 8 bits


@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("precision", ["bf16_naive", "fp16_naive"])
def test_sparse_gradients_of_half_weights_are_refused_by_name_in_every_micro_batch(precision, passes):
    model = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 2))
    b = Booster("cpu", precision)
    model, optimizer, *_ = b.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def step():
        for _ in range(passes):
            b.backward(model(torch.tensor([1, 2])).float().square().mean(), optimizer)
        optimizer.step()

    with pytest.raises(
        RuntimeError, match=r"^0.weight, torch.\w+, has a sparse gradient, .* sparse=False, or keep it in"
    ):
        step()


@pytest.mark.parametrize("passes", [0, 1])
@pytest.mark.parametrize(
    "precision",
    [
        lambda: "bf16",
        lambda: FP16TorchMixedPrecision(init_scale=2.0**8),
        lambda: FP16NaiveMixedPrecision(initial_scale=2.0**8),
    ],
    ids=["bf16", "fp16", "fp16_naive"],
)
def test_a_step_in_a_hook_within_backward_runs_or_is_told_why_not(precision, passes):
    model = nn.Linear(4, 2)
    b = Booster("cpu", precision())
    model, optimizer, *_ = b.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def run():
        b.backward(model(torch.ones(3, 4)).float().square().mean(), optimizer)

    def hook(param):
        optimizer.step()

    for _ in range(passes):
        run()
    hooks = [param.register_post_accumulate_grad_hook(hook) for param in model.parameters()]
    if b.precision.make_scaler().enabled:
        with pytest.raises(RuntimeError, match=r"within b.backward\(loss, optimizer\), as by a hook"):
            run()
        for each in hooks:
            each.remove()
        optimizer.zero_grad()
        run()
        optimizer.step()
    else:
        run()
    assert optimizer.last_step.applied


@pytest.mark.parametrize("check", [check_shards, check_steps_shards])
def test_attributes_on_parameters_are_refused_where_ranks_step_parts_of_them(check):
    class Registered(OnParameters):
        pass

    booster.register_elementwise(Registered)
    assert check(Registered([nn.Parameter(torch.ones(2))], when="never"))
    with pytest.raises(
        ValueError, match=r"Registered works with \['reach'\], attributes of its parameters, and would be"
    ):
        check(Registered([nn.Parameter(torch.ones(2))]))


class Looking(torch.optim.Optimizer):
    """Lookahead, as people write it: `form` says where it has its states, and what it writes."""

    def __init__(self, params, form):
        self.base, self.form, self.count = torch.optim.AdamW(params, lr=1e-2), form, 0
        super().__init__(self.base.param_groups, {})
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure=None):
        self.base.step()
        self.count += 1
        state = self.base.state if self.form == "of the base" else self.state
        for param in self.param_groups[0]["params"]:
            slow = state[param].setdefault("slow", param.clone())
            if self.count % 2 == 0:
                param.copy_(slow.lerp_(param, 0.5))

    def state_dict(self):
        if self.form == "apart":  # as torch's: without the states of the base
            return {**super().state_dict(), "count": self.count}
        slow = {(0, index): own for index, own in enumerate(self.state.values())}
        base = self.base.state_dict()
        return base if self.form == "of the base" else {"slow": slow, "base": base, "count": self.count}

    def load_state_dict(self, state):
        self.count = state.get("count", 4)
        if self.form == "apart":
            super().load_state_dict({"state": state["state"], "param_groups": state["param_groups"]})
            return
        self.base.load_state_dict(state.get("base", state))
        for index, param in enumerate(self.base.param_groups[0]["params"]):
            if "slow" in state:
                self.state[param] = dict(state["slow"][0, index])
        self.param_groups = self.base.param_groups


def looking(form, precision, steps):
    torch.manual_seed(0)
    model, b = nn.Linear(4, 3), Booster("cpu", precision)
    model, optimizer, *_ = b.boost(model, Looking(model.parameters(), form))
    for step in range(steps):
        one_step(b, model, optimizer, step)
    return b, model, optimizer


def one_step(b, model, optimizer, step):
    b.backward(model(torch.randn(8, 4, generator=torch.Generator().manual_seed(step))).square().mean(), optimizer)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("form", ["of the base", "in its own form", "apart"])
def test_an_optimizer_around_another_is_saved_with_the_states_of_both(tmp_path, form):
    b, model, optimizer = first = looking(form, "fp32", 4)
    b.save(tmp_path, model, optimizer)
    again = looking(form, "fp32", 1)
    again[0].load(tmp_path, *again[1:])
    for step in range(4, 8):
        for each in (first, again):
            one_step(*each, step)
    assert all(map(torch.equal, model.parameters(), again[1].parameters()))


@pytest.mark.parametrize("form", ["of the base", "in its own form", "apart"])
def test_an_optimizer_around_another_that_no_checkpoint_could_hold_is_refused_at_boost(form):
    with pytest.raises(
        ValueError, match=r"Looking would be stepped on float32 tensors .* around another optimizer, AdamW"
    ):
        looking(form, "bf16_naive", 0)
    model = nn.Linear(4, 3)
    b, made = Booster("cpu", "bf16_naive"), SharpnessAware(model.parameters(), one_state=False)
    with pytest.raises(ValueError, match=r"have both share one dict \(self.state = self.base.state\)"):
        b.boost(model, made)


class AroundWithoutGroups(torch.optim.Optimizer):
    """Keeps its own masters, and groups in the optimizer that it is put around alone."""

    def __init__(self, optimizer):
        self.optimizer = optimizer


def test_an_optimizer_without_groups_is_refused_with_the_one_that_it_is_put_around():
    model = nn.Linear(4, 3)
    made = AroundWithoutGroups(torch.optim.SGD(model.parameters(), lr=0.1))
    with pytest.raises(TypeError, match=r"AroundWithoutGroups has no param_groups.* the SGD that it is put around"):
        Booster("cpu", "fp32").boost(model, made)


@booster.register_elementwise
class Keeping(torch.optim.SGD):
    """Keeps something in its state or its group, in the first step."""

    def __init__(self, params, kept, where="state"):
        super().__init__(params, lr=0.1)
        self.kept, self.where = kept, where

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            if self.where == "group":
                group["kept"] = self.kept
            for param in group["params"]:
                self.state[param]["kept"] = self.kept if self.where == "state" else 1


@pytest.mark.parametrize(
    ("kept", "where", "precision", "said"),
    [
        (Schedule(), "state", "fp32", "its state 'kept' is a Schedule, which a checkpoint does not hold"),
        (Schedule(), "group", "bf16_naive", "its group/kept is a Schedule"),
        ([torch.zeros(2)], "state", "bf16_naive", "its state 'kept' is a container of tensors"),
        ([torch.zeros(2)], "state", "fp32", None),
        ({"a": [1, "b"]}, "state", "bf16_naive", None),
    ],
)
def test_what_no_checkpoint_could_hold_is_told_after_the_first_applied_step(
    tmp_path, caplog, kept, where, precision, said
):
    model = nn.Linear(4, 3)
    b = Booster("cpu", precision, skip_nonfinite=True)
    model, optimizer, *_ = b.boost(model, Keeping(model.parameters(), kept, where))
    heard = lambda: [line for line in caplog.messages if "saving it will raise" in line]  # noqa: E731
    for factor in (math.inf, 1.0, 1.0):
        b.backward(factor * model(torch.ones(2, 4)).float().sum(), optimizer)
        assert optimizer.step().applied is (factor == 1.0)
        optimizer.zero_grad()
        assert len(heard()) == (said is not None and optimizer.num_applied > 0)
    assert all(line.startswith("Keeping trains, but") and said in line for line in heard())
    if said is None:
        b.save(tmp_path / "checkpoint", model, optimizer)
    else:
        with pytest.raises((TypeError, booster.checkpoint.CheckpointError), match="Keeping|container"):
            b.save(tmp_path / "checkpoint", model, optimizer)


@pytest.mark.parametrize("precision", ["fp32", "bf16_naive"])
def test_a_step_without_a_gradient_is_told_once_where_others_of_its_model_have_one(caplog, precision):
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    b = Booster("cpu", precision)
    boosted, optimizer, *_ = b.boost(model, torch.optim.SGD(model[0].parameters(), lr=0.1))
    optimizer.step()  # where nothing has a gradient there is nothing to tell
    for frozen in (False, True):
        assert not caplog.messages
        model[0].requires_grad_(not frozen)
        b.backward(boosted(torch.ones(2, 4)).float().sum(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.step()  # what the second layer has is there still
    (said,) = caplog.messages
    assert "a step of SGD changed nothing" in said
    assert "others of its model have: 1.weight, 1.bias" in said


@pytest.mark.parametrize("states", ["fp32", "8bit"])
def test_entries_of_a_state_can_be_replaced_added_and_deleted(states):
    model = nn.Linear(40, 30)
    b = Booster("cpu", "bf16_naive", states=states)
    model, optimizer, *_ = b.boost(model, torch.optim.AdamW(model.parameters()))
    param = next(model.parameters())
    loss = lambda: model(torch.ones(2, 40)).float().square().mean()  # noqa: E731
    b.backward(loss(), optimizer)
    optimizer.step()
    before = optimizer.state[param]
    optimizer.state[param]["step"] = torch.tensor(100.0)
    halved = optimizer.state[param]["exp_avg"] * 0.5
    optimizer.state[param].update(exp_avg=halved)
    assert set(deepcopy(optimizer.state[param])) == {"step", "exp_avg", "exp_avg_sq"}
    assert float(optimizer.state[param]["step"]) == 100
    assert float((optimizer.state[param]["exp_avg"] - halved).norm() / halved.norm()) < 0.02  # rounded to 8 bits
    b.backward(loss(), optimizer)
    optimizer.step()
    assert float(optimizer.state[param]["step"]) == 101
    with pytest.raises(RuntimeError, match="written to after another step"):
        before["step"] = torch.tensor(3.0)
