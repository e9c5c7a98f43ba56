"""Every schedule against its formula, its limits, and an interrupted run."""

import copy
import io
import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from booster.nn import lr_scheduler
from booster.nn.lr_scheduler import (
    CosineAnnealingLR,
    CosineAnnealingWarmupLR,
    ExponentialLR,
    FlatAnnealingLR,
    FlatAnnealingWarmupLR,
    LambdaLR,
    LinearWarmupLR,
    MultiplicativeLR,
    MultiStepLR,
    MultiStepWarmupLR,
    OneCycleLR,
    PolynomialLR,
    PolynomialWarmupLR,
    StepLR,
)

BASE = 0.8


def halve_on_even_steps(step):
    return 0.5 if step % 2 == 0 else 1.0


# name: (how to make it with 10 steps, the rates of steps 0 to 9 by hand)
SCHEDULES = {
    "cosine": (
        lambda o: CosineAnnealingLR(o, 10, eta_min=0.1),
        [0.1 + 0.7 * (1 + math.cos(math.pi * t / 10)) / 2 for t in range(10)],
    ),
    "cosine warmup": (
        lambda o: CosineAnnealingWarmupLR(o, 10, 4, eta_min=0.2),
        [0.2, 0.4, 0.6, 0.8] + [0.2 + 0.6 * (1 + math.cos(math.pi * t / 6)) / 2 for t in range(6)],
    ),
    "flat": (
        lambda o: FlatAnnealingLR(o, 10, pct_start=0.75),
        [0.8] * 7 + [0.8, 0.8 * (1 + math.cos(math.pi / 3)) / 2, 0.8 * (1 + math.cos(2 * math.pi / 3)) / 2],
    ),
    "flat warmup": (
        lambda o: FlatAnnealingWarmupLR(o, 10, 2, pct_start=0.5, eta_min=0.4),
        [0.4, 0.8] + [0.8] * 4 + [0.4 + 0.4 * (1 + math.cos(math.pi * t / 4)) / 2 for t in range(4)],
    ),
    "linear warmup": (
        lambda o: LinearWarmupLR(o, 10, 3),
        [0.2, 0.4, 0.6] + [0.8 * (10 - t) / 7 for t in range(3, 10)],
    ),
    "multistep": (lambda o: MultiStepLR(o, 10, milestones=[3, 8], gamma=0.5), [0.8] * 3 + [0.4] * 5 + [0.2] * 2),
    "multistep warmup": (
        lambda o: MultiStepWarmupLR(o, 10, 2, milestones=[4, 9], gamma=0.1),
        [0.4, 0.8, 0.8, 0.8] + [0.08] * 5 + [0.008],
    ),
    "polynomial": (
        lambda o: PolynomialLR(o, 10, end_lr=0.3, power=2.0),
        [0.3 + 0.5 * (1 - t / 10) ** 2 for t in range(10)],
    ),
    "polynomial warmup": (
        lambda o: PolynomialWarmupLR(o, 10, 5, end_lr=0.3),
        [0.16, 0.32, 0.48, 0.64, 0.8] + [0.3 + 0.5 * (1 - t / 5) for t in range(5)],
    ),
    "lambda": (lambda o: LambdaLR(o, 10, lambda t: 1 / (1 + t)), [0.8 / (1 + t) for t in range(10)]),
    "multiplicative": (
        lambda o: MultiplicativeLR(o, 10, halve_on_even_steps),
        [0.8 * 0.5 ** (t // 2) for t in range(10)],
    ),
    "step": (lambda o: StepLR(o, 10, step_size=4, gamma=0.5), [0.8] * 4 + [0.4] * 4 + [0.2] * 2),
    "exponential": (lambda o: ExponentialLR(o, 10, gamma=0.9), [0.8 * 0.9**t for t in range(10)]),
    "one cycle": (
        # up from 0.8/4 over steps 0 to 4 (pct_start * 10 - 1), down to 0.8/4/10 over steps 4 to 9
        lambda o: OneCycleLR(o, 10, pct_start=0.5, div_factor=4.0, final_div_factor=10.0),
        [0.2 + 0.6 * (1 - math.cos(math.pi * t / 4)) / 2 for t in range(5)]
        + [0.02 + 0.78 * (1 + math.cos(math.pi * t / 5)) / 2 for t in range(1, 6)],
    ),
}
every_schedule = pytest.mark.parametrize("name", SCHEDULES)


def make_optimizer(lr=BASE):
    parameters = [torch.nn.Parameter(torch.ones(1)) for _ in range(2)]
    groups = [{"params": [parameters[0]], "lr": lr}, {"params": [parameters[1]], "lr": lr / 4}]
    return torch.optim.SGD(groups, lr=1.0, momentum=0.9)


def rates(optimizer):
    return [float(group["lr"]) for group in optimizer.param_groups]


def advance(optimizer, scheduler):
    optimizer.step()
    scheduler.step()


def first_group(optimizer, scheduler, steps):
    seen = []
    for _ in range(steps):
        seen.append(rates(optimizer)[0])
        advance(optimizer, scheduler)
    return seen


def test_every_public_schedule_is_tested_here():
    optimizer = make_optimizer()
    assert {type(make(optimizer)).__name__ for make, _ in SCHEDULES.values()} == set(lr_scheduler.__all__)


@every_schedule
def test_the_rates_are_those_of_the_formula(name):
    make, expected = SCHEDULES[name]
    optimizer = make_optimizer()
    assert first_group(optimizer, make(optimizer), 10) == pytest.approx(expected, rel=1e-12)


@every_schedule
def test_get_last_lr_is_what_the_optimizer_has(name):
    optimizer = make_optimizer()
    scheduler = SCHEDULES[name][0](optimizer)
    for _ in range(12):
        assert scheduler.get_last_lr() == rates(optimizer)
        advance(optimizer, scheduler)


@every_schedule
def test_after_the_last_step_the_rate_stays(name):
    optimizer = make_optimizer()
    scheduler = SCHEDULES[name][0](optimizer)
    first_group(optimizer, scheduler, 10)
    end = rates(optimizer)
    for _ in range(15):
        advance(optimizer, scheduler)
        assert rates(optimizer) == end


@every_schedule
def test_a_run_resumed_at_any_step_has_the_same_rates(name):
    make, _ = SCHEDULES[name]
    whole = make_optimizer()
    scheduler = make(whole)
    saved, seen = [], []
    for _ in range(13):
        saved.append(copy.deepcopy((whole.state_dict(), scheduler.state_dict())))
        seen.append(rates(whole))
        advance(whole, scheduler)
    for step, (optimizer_state, scheduler_state) in enumerate(saved):
        for optimizer_first in (True, False):
            resumed = make_optimizer()
            if optimizer_first:
                resumed.load_state_dict(optimizer_state)
            again = make(resumed)
            again.load_state_dict(scheduler_state)
            resumed.load_state_dict(optimizer_state)
            assert again.state_dict() == scheduler_state
            for expected in seen[step:]:
                assert rates(resumed) == expected
                assert again.get_last_lr() == expected
                advance(resumed, again)


@every_schedule
def test_the_state_is_plain_data(name):
    scheduler = SCHEDULES[name][0](make_optimizer())
    state = scheduler.state_dict()
    assert "optimizer" not in state
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == state


@every_schedule
def test_a_tensor_rate_is_changed_in_place(name):
    tensor = torch.tensor(BASE, dtype=torch.float64)
    optimizer = torch.optim.Adam([torch.nn.Parameter(torch.ones(1))], lr=tensor)
    make, expected = SCHEDULES[name]
    seen = first_group(optimizer, make(optimizer), 10)
    assert optimizer.param_groups[0]["lr"] is tensor
    assert seen == pytest.approx(expected, rel=1e-6)


ABSOLUTE_END = {"cosine", "cosine warmup", "flat warmup", "polynomial", "polynomial warmup"}  # one rate for all groups


@pytest.mark.parametrize("name", sorted(SCHEDULES.keys() - ABSOLUTE_END))
def test_the_groups_keep_their_ratio(name):
    optimizer = make_optimizer()
    scheduler = SCHEDULES[name][0](optimizer)
    for _ in range(10):
        first, second = rates(optimizer)
        assert first == pytest.approx(4 * second, rel=1e-12)
        advance(optimizer, scheduler)


STEPS = st.integers(1, 40).flatmap(lambda total: st.tuples(st.just(total), st.integers(0, total)))


@settings(max_examples=30, deadline=None)
@given(steps=STEPS, low=st.floats(0.0, 0.5), power=st.floats(0.5, 3.0))
@pytest.mark.parametrize("kind", ["cosine", "polynomial", "flat", "linear"])
def test_warmup_climbs_to_the_base_rate_and_then_it_only_falls(kind, steps, low, power):
    total, warmup = steps
    optimizer = make_optimizer()
    scheduler = {
        "cosine": lambda: CosineAnnealingWarmupLR(optimizer, total, warmup, eta_min=low),
        "polynomial": lambda: PolynomialWarmupLR(optimizer, total, warmup, end_lr=low, power=power),
        "flat": lambda: FlatAnnealingWarmupLR(optimizer, total, warmup, pct_start=low, eta_min=low),
        "linear": lambda: LinearWarmupLR(optimizer, total, warmup),
    }[kind]()
    seen = first_group(optimizer, scheduler, total + 1)
    assert all(0 < a < b for a, b in pairwise(seen[:warmup]))
    assert seen[warmup] == pytest.approx(BASE)
    assert all(b <= a + 1e-12 for a, b in pairwise(seen[warmup:]))
    if warmup < total:
        assert seen[total] == pytest.approx(0.0 if kind == "linear" else low, abs=1e-12)


@pytest.mark.parametrize("total", [1, 2, 7])
def test_without_warmup_the_warmup_schedules_equal_the_plain_ones(total):
    for plain, warm in [
        (CosineAnnealingLR, CosineAnnealingWarmupLR),
        (FlatAnnealingLR, FlatAnnealingWarmupLR),
        (PolynomialLR, PolynomialWarmupLR),
    ]:
        a, b = make_optimizer(), make_optimizer()
        assert first_group(a, plain(a, total), total + 2) == pytest.approx(
            first_group(b, warm(b, total), total + 2), abs=1e-12
        )


def test_one_cycle_moves_the_momentum_against_the_rate():
    optimizer = make_optimizer()
    scheduler = OneCycleLR(optimizer, 10, pct_start=0.5)
    momentum = []
    for _ in range(10):
        momentum.append(optimizer.param_groups[0]["momentum"])
        advance(optimizer, scheduler)
    assert momentum[0] == pytest.approx(0.95)
    assert momentum[4] == pytest.approx(0.85)
    assert momentum[9] == pytest.approx(0.95)


def test_one_cycle_keeps_its_peak_when_it_is_rebuilt_on_a_loaded_optimizer():
    whole = make_optimizer()
    scheduler = OneCycleLR(whole, 10)
    advance(whole, scheduler)
    resumed = make_optimizer()
    resumed.load_state_dict(copy.deepcopy(whole.state_dict()))
    again = OneCycleLR(resumed, 10)
    again.load_state_dict(copy.deepcopy(scheduler.state_dict()))
    for _ in range(9):
        advance(whole, scheduler)
        advance(resumed, again)
        assert rates(resumed) == rates(whole)


def test_a_schedule_continues_from_last_epoch():
    whole = make_optimizer()
    scheduler = CosineAnnealingWarmupLR(whole, 10, 3)
    for _ in range(6):
        advance(whole, scheduler)
    rebuilt = CosineAnnealingWarmupLR(whole, 10, 3, last_epoch=scheduler.last_epoch - 1)
    assert rebuilt.get_last_lr() == scheduler.get_last_lr()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda o: PolynomialWarmupLR(o, 10, 11), r"warmup_steps=11 .* from 0 to 10, of total_steps"),
        (lambda o: MultiStepLR(o, 10), r"milestones=None .* the steps at which the rate decays"),
        (lambda o: MultiStepWarmupLR(o, 10, 2), r"milestones=None"),
        (lambda o: MultiStepLR(o, 10, milestones=[]), r"milestones=\[\]"),
        (lambda o: MultiStepLR(o, 10, milestones=[5, 3]), r"milestones=\[5, 3\] .* increasing order"),
        (lambda o: MultiStepLR(o, 10, milestones=[5, 5]), r"increasing order, each once"),
        (lambda o: MultiStepLR(o, 10, milestones=[11]), r"milestones=11 .* from 0 to 10"),
        (lambda o: MultiStepWarmupLR(o, 10, 4, milestones=[3]), r"milestones=3 .* from 4 to 10"),
        (
            lambda o: OneCycleLR(o, 10, anneal_strategy="cosine"),
            r"'cosine' is not legal; choose 'cos' or 'linear'",
        ),
    ],
)
def test_an_illegal_value_is_named_with_what_is_legal(make, message):
    with pytest.raises(ValueError, match=message):
        make(make_optimizer())
