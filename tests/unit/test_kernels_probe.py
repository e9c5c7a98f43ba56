"""Kernels that are taken by default are tried first: what steps otherwise than torch steps no weights, and is reported."""

import dataclasses

import pytest
import torch
from interpreted import gradients, interpreted, step_on
from torch import nn
from torch.optim import SGD, AdamW, RMSprop

from booster import Booster
from booster.kernels import eligibility as choice
from booster.mixed_precision import BF16NaiveMixedPrecision

pytestmark = interpreted


@pytest.fixture(autouse=True)
def taken_here(monkeypatch):
    from booster.kernels import probe

    monkeypatch.setattr(choice, "TAKEN_BY_TRUE", ("cpu",))
    probe._tried.cache_clear()
    yield probe
    probe._tried.cache_clear()


def boosted(make=lambda params: AdamW(params, lr=1e-2), precision="fp32", fused=True):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 3))
    booster = Booster("cpu", precision, fused_optimizer=fused, clip_grad_norm=0.1)
    model, optimizer, *_ = booster.boost(net, make(net.parameters()))
    return booster, model, optimizer


def by_kernels(optimizer):
    return type(optimizer._update.decision).__name__ == "KernelDecision"


def trained(run):
    params = list(run[1].parameters())
    for number in range(4):
        step_on(*run, gradients(params, number))
    return params


SPLIT = {"precision": BF16NaiveMixedPrecision(master_weights="split", keep_fp32=())}
BF16 = {"precision": BF16NaiveMixedPrecision(states="bf16", keep_fp32=())}


def rule_with(monkeypatch, **changes):
    from booster.kernels import rules

    monkeypatch.setitem(rules._RULES, AdamW, dataclasses.replace(rules._RULES[AdamW], **changes))


def plant(fault, monkeypatch):
    import interpreted_faults as faults

    from booster.kernels import weights
    from booster.masters.formats import SplitBFloat16

    if fault == "rule":
        rule_with(monkeypatch, body=faults.slow_body)
    elif fault == "corrections":
        rule_with(monkeypatch, prepare=faults.no_corrections)
    elif fault == "raises":
        rule_with(monkeypatch, body=faults.raises)
    elif fault == "weights":
        form = dataclasses.replace(weights.FORMS[SplitBFloat16], store=faults.stores_no_rest)
        monkeypatch.setitem(weights.FORMS, SplitBFloat16, form)
    elif fault == "states":
        monkeypatch.setitem(
            weights.ENCODINGS, "bf16", dataclasses.replace(weights.ENCODINGS["bf16"], close=faults.closes_twice)
        )
    elif fault == "skip":
        from booster.kernels.steps import KernelSteps

        monkeypatch.setattr(KernelSteps, "_constants", without_skips(KernelSteps._constants))

    elif fault == "launch":
        from booster.kernels.launch_cache import CompiledKernels

        monkeypatch.setattr(CompiledKernels, "launch", faulting(CompiledKernels.launch))


def faulting(launch):
    def launched(kernels, kernel, *given):
        if kernel.fn.__name__ == "update":
            raise RuntimeError("out of resource: shared memory")
        launch(kernels, kernel, *given)

    return launched


def without_skips(constants):
    return lambda steps, kind, **options: {**constants(steps, kind, **options), "CHECKED": False}


FAULTS = {
    "rule": ({}, "a weight of shape"),
    "corrections": ({}, "a weight of shape"),
    "raises": ({}, "a trial raised"),
    "launch": ({}, "a trial raised RuntimeError: out of resource: shared memory"),
    "weights": (SPLIT, "a weight of shape"),
    "states": (BF16, "the state 'exp_avg'"),
    "skip": ({}, "in step 3 of a trial"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_a_kernel_is_found_told_and_stepped_around(fault, monkeypatch, caplog):
    options, what = FAULTS[fault]
    with monkeypatch.context() as only:
        only.setattr(choice, "TAKEN_BY_TRUE", ())
        expected = trained(boosted(**options))
    plant(fault, monkeypatch)
    run = boosted(**options)
    assert not by_kernels(run[2])
    (said,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert said.startswith("steps of AdamW by Triton kernels on cpu are not like torch's, which makes them:")
    assert what in said
    assert all(map(torch.equal, trained(run), expected))


@pytest.mark.parametrize("options", [{}, SPLIT, BF16], ids=["fp32", "split", "bf16 states"])
def test_without_a_fault_steps_are_those_of_who_asks_in_as_many_launches(options, caplog):
    from booster.kernels.launch_cache import CompiledKernels

    launched = []
    with pytest.MonkeyPatch.context() as patch:
        launch = CompiledKernels.launch
        patch.setattr(
            CompiledKernels,
            "launch",
            lambda self, kernel, *given: launched.append(kernel) or launch(self, kernel, *given),
        )
        runs = [boosted(**options, fused=fused) for fused in (True, "triton")]
        counts, weights = [], []
        for run in runs:
            launched.clear()
            weights.append(trained(run))
            counts.append(len(launched))
    assert all(by_kernels(run[2]) for run in runs)
    assert counts[0] == counts[1] == 12
    assert all(map(torch.equal, *weights))
    assert not [record for record in caplog.records if record.levelname == "WARNING"]


def test_a_trial_is_made_once_for_a_rule_and_its_forms(taken_here):
    for lr in (1e-2, 1e-3):
        for _ in range(2):
            boosted(lambda params, lr=lr: AdamW(params, lr=lr, betas=(0.5, 0.9)))
    assert taken_here._tried.cache_info().misses == 1
    boosted(lambda params: AdamW(params, lr=1e-2, amsgrad=True))
    boosted(lambda params: RMSprop(params, momentum=0.5))
    boosted(**SPLIT)
    assert taken_here._tried.cache_info().misses == 4


def test_a_trial_draws_nothing_and_steps_nothing_of_the_users():
    torch.manual_seed(3)
    net = nn.Linear(6, 12)
    before, random = [param.detach().clone() for param in net.parameters()], torch.get_rng_state()
    optimizer = Booster("cpu", "fp32").boost(net, SGD(net.parameters(), 0.1, momentum=0.9))[1]
    assert by_kernels(optimizer)
    assert not optimizer.state
    assert torch.equal(torch.get_rng_state(), random)
    assert all(map(torch.equal, net.parameters(), before))
