"""A rule that a user registers for an optimizer of his own: kernels step it in every form, or say by name why not."""

import logging
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch
from extending import load
from interpreted import gradients, held, interpreted, pair, step_on
from torch import nn
from torch.optim import Optimizer

import booster
from benchmarks.launches import of_step
from booster import Booster
from booster.kernels import eligibility as choice
from booster.mixed_precision import BF16NaiveMixedPrecision, FP16NaiveMixedPrecision

pytestmark = interpreted


class Lion(Optimizer):
    """As lion-pytorch's, which keeps `decoupled_wd` apart from its groups."""

    def __init__(self, params, lr=1e-3, betas=(0.9, 0.99), weight_decay=0.1, decoupled_weight_decay=False, **options):
        self.decoupled_wd = decoupled_weight_decay
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, **options})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is None:
                    continue
                average = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                # Without fused multiply-adds, as kernels do.
                p.add_((average * beta1 + p.grad * (1 - beta1)).sign_(), alpha=-group["lr"])
                average.mul_(beta2).add_(p.grad * (1 - beta2))


def make_model():
    return nn.Sequential(nn.Linear(5, 9), nn.Linear(9, 90))


def lion(params):
    return Lion(params, lr=1e-2)


def signum(params):
    return load("kernel_rule").Signum(params, lr=1e-2)


@pytest.fixture
def registered():
    example = load("kernel_rule")
    booster.register_elementwise(Lion, states={"exp_avg": "signed"}, rule="lion")
    booster.register_elementwise(example.Signum, states={"momentum": "signed"}, rule=example.signum_rule)


ULP, CODE = (
    2e-7,
    0.05,
)  # of a weight, where a clip factor is an ulp off; of the largest state, which codes divide by 127
FORMS = {  # with what weights and states may differ by: a step of the form, where chance rounds what is an ulp off
    "fp32": ("fp32", ULP, 1e-6),
    "fp16": ("fp16", ULP, 1e-6),
    "split": (lambda: BF16NaiveMixedPrecision(master_weights="split"), ULP, 1e-6),
    "split24": (lambda: BF16NaiveMixedPrecision(master_weights="split24"), 2.0**-15, 1e-6),
    "fp16 split": (lambda: FP16NaiveMixedPrecision(master_weights="split"), ULP, 1e-6),
    "8bit": (lambda: BF16NaiveMixedPrecision(states="8bit"), ULP, CODE),
}


@pytest.mark.parametrize("make", [lion, signum])
@pytest.mark.parametrize("form", FORMS)
def test_a_registered_rule_steps_every_form_as_the_optimizer_itself_does(form, make, registered):
    precision, of_weights, of_states = FORMS[form]
    both = pair(make_model, make, precision, clip_grad_norm=0.1)
    for number in range(4):
        bad = float("inf") if number == 2 else None
        results = [step_on(*each, gradients(list(each[1].parameters()), number, bad)) for each in both]
        assert [result.applied for result in results] == [number != 2] * 2
    assert type(both[1][2]._update.decision).__name__ == "KernelDecision"
    (weights, states), (others, theirs) = (held(each[2]) for each in both)
    for own, other in zip(weights, others, strict=True):
        torch.testing.assert_close(own, other, rtol=of_weights, atol=0)
    for own, other in zip(states, theirs, strict=True):
        assert own.keys() == other.keys()
        for name, value in own.items():
            torch.testing.assert_close(other[name], value, rtol=0, atol=float(value.abs().max()) * of_states)


def test_without_a_clip_every_bit_of_weights_and_states_is_that_of_the_optimizer_itself(registered):
    for make in (lion, signum):
        both = pair(make_model, make, "fp32")
        for number in range(4):
            for each in both:
                step_on(*each, gradients(list(each[1].parameters()), number))
        (weights, states), (others, theirs) = (held(each[2]) for each in both)
        assert all(map(torch.equal, weights, others))
        assert all(
            torch.equal(own[name], other[name]) for own, other in zip(states, theirs, strict=True) for name in own
        )


def test_it_takes_three_launches_whatever_there_is_to_step(registered):
    def stepping(depth):
        net = nn.Sequential(*(nn.Linear(8, 8) for _ in range(depth)))
        b = Booster("cpu", "fp32", fused_optimizer="triton", clip_grad_norm=1.0)
        model, optimizer, *_ = b.boost(net, lion(net.parameters()))
        for param in model.parameters():
            param.grad = torch.ones_like(param)
        return optimizer.step

    for depth in (1, 7):
        found = of_step(lambda depth=depth: stepping(depth))
        assert {name: count for name, count in found.found.items() if name.startswith("Triton")} == {
            "Triton: measure": 1,
            "Triton: decide": 1,
            "Triton: update": 1,
        }
        assert found.waits.total() == 0


@pytest.mark.skipif(find_spec("lion_pytorch") is None, reason="needs lion-pytorch; `make integrations` has it")
def test_lion_of_lion_pytorch_is_stepped_as_by_itself():
    from lion_pytorch import Lion as Theirs

    booster.register_elementwise(Theirs, states={"exp_avg": "signed"}, rule="lion")
    both = pair(make_model, lambda p: Theirs(p, lr=1e-2, weight_decay=0.1), "bf16_naive")
    for number in range(4):
        for each in both:
            assert step_on(*each, gradients(list(each[1].parameters()), number)).applied
    for own, other in zip(*(held(each[2])[0] for each in both), strict=True):
        torch.testing.assert_close(own, other, rtol=2e-7, atol=0)


def test_true_takes_it_where_a_trial_is_like_its_own_step(registered, monkeypatch, caplog):
    monkeypatch.setattr(choice, "TAKEN_BY_TRUE", ("cpu",))
    caplog.set_level(logging.INFO)
    for make in (lion, signum):
        optimizer = Booster("cpu", "fp32").boost(net := make_model(), make(net.parameters()))[1]
        assert type(optimizer._update.decision).__name__ == "KernelDecision"
    assert "Signum is stepped by Triton kernels on cpu" in caplog.text


def test_without_a_rule_it_is_refused_by_name_and_true_calls_its_own_step(monkeypatch, caplog):
    class Quiet(Lion):
        pass

    net = make_model()
    booster.register_elementwise(Quiet, rule="lion")
    booster.register_elementwise(Quiet)  # the last call counts
    with pytest.raises(
        ValueError,
        match=r"cannot step this Quiet by kernels: its class has no rule among them, unless "
        r"booster.register_elementwise\(Quiet, rule=...\) gives it one; leave fused_optimizer True",
    ):
        Booster("cpu", "bf16_naive", fused_optimizer="triton").boost(net, Quiet(net.parameters()))
    monkeypatch.setattr(choice, "TAKEN_BY_TRUE", ("cpu",))
    caplog.set_level(logging.INFO)
    optimizer = Booster("cpu", "bf16_naive").boost(net, Quiet(net.parameters()))[1]
    assert type(optimizer._update.decision).__name__ != "KernelDecision"
    assert "Quiet is stepped by torch, and not by Triton kernels: its class has no rule" in caplog.text


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"decoupled_weight_decay": True}, r"its decay is divided by the first lr \(decoupled_weight_decay=True\)"),
        ({"maximize": True}, "it was built with maximize=True, which the rule of Lion does not know"),
    ],
)
def test_an_option_that_a_rule_does_not_know_is_refused_by_name(options, reason, registered):
    net = make_model()
    with pytest.raises(ValueError, match=f"cannot step this Lion by kernels: {reason}"):
        Booster("cpu", "fp32", fused_optimizer="triton").boost(net, Lion(net.parameters(), **options))


def test_groups_without_what_the_rule_reads_are_refused_by_name():
    class Other(Optimizer):
        def __init__(self, params):
            super().__init__(params, {"lr": 0.1, "beta": 0.9})

    booster.register_elementwise(Other, rule="lion")
    net = make_model()
    with pytest.raises(ValueError, match="its groups have no betas, which the rule of Lion reads"):
        Booster("cpu", "fp32", fused_optimizer="triton").boost(net, Other(net.parameters()))


WRONG = {
    "returns a NoneType; it returns a booster.kernels.rule.Rule": lambda rule: None,
    "returns the rule of SGD; make it": lambda rule: replace(rule, optimizer=torch.optim.SGD),
    "its rule makes 9 numbers of a group": lambda rule: replace(rule, numbers=lambda group: (0.1,) * 9),
    "its rule names 4 states, a, b, c, d, and can have 3": lambda rule: replace(
        rule, states=lambda group: tuple("abcd")
    ),
}


@pytest.mark.parametrize("message", WRONG)
def test_a_function_that_makes_no_rule_for_the_class_is_refused_by_name(message):
    example = load("kernel_rule")

    class Own(example.Signum):
        pass

    booster.register_elementwise(Own, rule=lambda kind: WRONG[message](example.signum_rule(kind)))
    net = make_model()
    with pytest.raises((ValueError, TypeError), match=message):
        Booster("cpu", "fp32", fused_optimizer="triton").boost(net, Own(net.parameters()))
