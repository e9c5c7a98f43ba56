"""The boosted scheduler advances with the optimizer: iff a step was applied since its last call."""

from typing import Any

import pytest
import torch
from prescribed import DEVICE, HOST, boost, loss_with, parameters
from torch import nn
from torch.optim import SGD
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR

from booster import Booster
from booster.interface.scheduler import LRSchedulerWrapper
from booster.nn.lr_scheduler import LinearWarmupLR

INF = float("inf")
both = pytest.mark.parametrize("decides", [HOST, DEVICE])


class Loop:
    """An optimizer with lr 1 and a boosted scheduler around `make`; `step(grad)` is one training step."""

    def __init__(self, make: Any, decides: str = HOST, scale: float | None = 2.0**8) -> None:
        self.params = parameters(3)
        inner = SGD(self.params, lr=1.0, fused=True)
        scheduler = make(inner)
        self.optimizer = boost(inner, scale, decides)
        self.scheduler = LRSchedulerWrapper(scheduler, self.optimizer)

    def step(self, grad: float) -> None:
        self.optimizer.zero_grad()
        self.optimizer.backward(loss_with(self.params, [grad]))
        self.optimizer.step()

    @property
    def lr(self) -> float:
        return self.scheduler.get_last_lr()[0]


def halving(optimizer: Any) -> StepLR:
    return StepLR(optimizer, 1, gamma=0.5)


@both
def test_per_step_it_waits_for_skipped_steps(decides):
    loop = Loop(halving, decides)
    rates = []
    for grad in (INF, 0.0, INF, INF, 0.0, 0.0):
        loop.step(grad)
        loop.scheduler.step()
        rates.append(loop.lr)
    assert rates == [1.0, 0.5, 0.5, 0.5, 0.25, 0.125]


@both
def test_each_step_uses_the_rate_of_its_own_place_in_the_schedule_even_if_nobody_reads(decides):
    loop = Loop(halving, decides)
    for grad in (1.0, INF, 1.0, 1.0):
        loop.step(grad)
        loop.scheduler.step()
    assert torch.equal(loop.params[0], torch.full((3,), 1.0 - 1.0 - 0.5 - 0.25))


@both
def test_per_epoch_one_applied_step_is_enough_and_none_is_not(decides):
    loop = Loop(halving, decides)
    rates = []
    for epoch in ([0.0, 0.0, INF], [INF, INF], [INF, 0.0, INF], []):
        for grad in epoch:
            loop.step(grad)
        loop.scheduler.step()
        rates.append(loop.lr)
    assert rates == [0.5, 0.5, 0.25, 0.25]


@both
def test_calling_twice_after_one_step_advances_once(decides):
    loop = Loop(halving, decides)
    loop.step(0.0)
    loop.scheduler.step()
    loop.scheduler.step()
    assert loop.lr == 0.5


@both
@pytest.mark.parametrize("named", [False, True])
def test_reduce_on_plateau_gets_every_metric_whatever_became_of_the_steps(decides, named):
    loop = Loop(lambda optimizer: ReduceLROnPlateau(optimizer, patience=2, factor=0.1), decides)
    plain = ReduceLROnPlateau(SGD([torch.zeros(1)], lr=1.0), patience=2, factor=0.1)
    for grads, metric in (((0.0,), 1.0), ((INF,), 5.0), ((), 4.0), ((0.0, 0.0), 3.0), ((), 0.5), ((0.0,), 0.9)):
        for grad in grads:
            loop.step(grad)
        loop.scheduler.step(metrics=metric) if named else loop.scheduler.step(metric)
        plain.step(metric)
        seen = (loop.scheduler.best, loop.scheduler.num_bad_epochs, loop.scheduler.last_epoch)
        assert seen == (plain.best, plain.num_bad_epochs, plain.last_epoch)
        assert loop.lr == plain.get_last_lr()[0]
    assert plain.get_last_lr() == [0.1]


@both
@pytest.mark.parametrize("named", [False, True])
@pytest.mark.filterwarnings("ignore:.*epoch parameter in `scheduler.step:UserWarning")
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step:UserWarning")
def test_a_step_to_an_epoch_goes_there_also_before_the_first_update(decides, named):
    loop = Loop(halving, decides)
    for grads, epoch in (((), 5), ((INF,), 2), ((0.0,), 7), ((), 1)):
        for grad in grads:
            loop.step(grad)
        loop.scheduler.step(epoch=epoch) if named else loop.scheduler.step(epoch)
        assert loop.scheduler.last_epoch == epoch
        assert loop.lr == 0.5**epoch


@both
def test_a_step_with_nothing_but_none_waits_as_one_without_arguments_does(decides):
    loop = Loop(halving, decides)
    loop.step(INF)
    loop.scheduler.step(None)
    loop.scheduler.step(epoch=None)
    assert loop.lr == 1.0
    loop.step(0.0)
    loop.scheduler.step(epoch=None)
    assert loop.lr == 0.5


@both
def test_one_cycle_never_runs_past_its_end(decides):
    loop = Loop(lambda optimizer: OneCycleLR(optimizer, 1.0, total_steps=4), decides)
    for grad in (INF, 0.0, INF, 0.0, INF, 0.0):
        loop.step(grad)
        loop.scheduler.step()
    assert loop.scheduler.last_epoch == 3


@both
def test_without_a_loss_scale_it_advances_every_step(decides):
    loop = Loop(halving, decides, scale=None)
    for _ in range(3):
        loop.step(0.0)
        loop.scheduler.step()
    assert loop.lr == 0.125


@both
def test_schedulers_of_other_packages_get_their_own_arguments(decides):
    class Theirs:
        def __init__(self) -> None:
            self.calls: list[Any] = []

        def step(self, epoch: int, metric: float | None = None) -> None:
            self.calls.append((epoch, metric))

    loop = Loop(lambda optimizer: Theirs(), decides)
    loop.step(0.0)
    loop.scheduler.step(1, metric=0.5)
    loop.step(INF)
    loop.scheduler.step(2)
    loop.step(0.0)
    loop.scheduler.step(epoch=3)
    assert loop.scheduler.calls == [(1, 0.5), (2, None), (3, None)]


def test_on_a_device_the_call_waits_for_the_next_step_or_the_first_read():
    class Watched(StepLR):
        moves = 0

        def step(self, *args: Any) -> None:
            Watched.moves += 1
            super().step(*args)

    loop = Loop(lambda optimizer: Watched(optimizer, 1, gamma=0.5), DEVICE)
    before = Watched.moves
    loop.step(1.0)
    loop.scheduler.step()
    assert Watched.moves == before
    loop.step(1.0)  # settles the first step before it reads the rate
    assert Watched.moves == before + 1
    assert torch.equal(loop.params[0], torch.full((3,), -0.5))
    loop.scheduler.step()
    assert loop.scheduler.get_last_lr() == [0.25]
    assert Watched.moves == before + 2


def test_on_a_device_saving_settles_what_waits():
    loop = Loop(halving, DEVICE)
    loop.step(0.0)
    loop.scheduler.step()
    assert loop.optimizer.state_dict()["param_groups"][0]["lr"] == 0.5
    loop.step(0.0)
    loop.scheduler.step()
    assert loop.scheduler.state_dict()["last_epoch"] == 2


@both
@pytest.mark.parametrize("order", ["optimizer first", "scheduler first"])
@pytest.mark.parametrize("saved_after_skip", [True, False])
def test_after_loading_it_goes_on_where_it_stopped(decides, order, saved_after_skip):
    first = Loop(halving, decides)
    for grad in (0.0, INF) if saved_after_skip else (INF, 0.0):
        first.step(grad)
        first.scheduler.step()
    second = Loop(halving, decides)
    load_optimizer = lambda: second.optimizer.load_state_dict(first.optimizer.state_dict())  # noqa: E731
    load_scheduler = lambda: second.scheduler.load_state_dict(first.scheduler.state_dict())  # noqa: E731
    for load in (load_optimizer, load_scheduler) if order == "optimizer first" else (load_scheduler, load_optimizer):
        load()
    second.scheduler.step()
    assert second.lr == 0.5  # no step yet
    second.step(INF)
    second.scheduler.step()
    assert second.lr == 0.5
    second.step(0.0)
    second.scheduler.step()
    assert second.lr == 0.25
    assert second.optimizer.param_groups[0]["lr"] == 0.25


# ---------------------------------------------------------------------- through boost()


def train(booster: Booster, model: Any, optimizer: Any, grad: float) -> None:
    optimizer.zero_grad()
    params = list(model.parameters())
    booster.backward(loss_with(params, [grad] * len(params)), optimizer)
    optimizer.step()


def test_a_schedule_that_was_made_with_other_options_goes_on_with_those_loaded_says_so_and_takes_its_own_when_told(
    caplog,
):
    loops = [Loop(lambda optimizer, total=total: LinearWarmupLR(optimizer, total)) for total in (10, 20, 20)]
    for loop in loops:
        for _ in range(4):
            loop.step(0.0)
            loop.scheduler.step()
    saved, resumed, whole = loops
    resumed.scheduler.load_state_dict(whole.scheduler.state_dict())
    assert caplog.text == ""
    resumed.scheduler.load_state_dict(saved.scheduler.state_dict())
    assert (
        "LinearWarmupLR was made with total_steps=20, and goes on with total_steps=10 of the state that was loaded, until it "
        "is set on b.unwrap(lr_scheduler)"
    ) in caplog.text
    resumed.scheduler.unwrap().total_steps = 20
    for loop in (resumed, whole):
        loop.step(0.0)
        loop.scheduler.step()
    assert resumed.lr == whole.lr


def test_a_scheduler_built_on_the_raw_optimizer_before_boosting_keeps_working():
    model = nn.Linear(2, 2)
    inner = SGD(model.parameters(), lr=1.0)
    booster = Booster("cpu", "fp16")
    model, optimizer, _, _, scheduler = booster.boost(model, inner, lr_scheduler=halving(inner))
    for grad in (0.0, INF, 0.0):
        train(booster, model, optimizer, grad)
        scheduler.step()
    assert scheduler.get_last_lr() == [0.25]
    assert optimizer.param_groups[0]["lr"] == 0.25


def test_a_scheduler_built_on_the_boosted_optimizer_works_bare():
    model = nn.Linear(2, 2)
    booster = Booster("cpu", "fp16")
    model, optimizer, *_ = booster.boost(model, SGD(model.parameters(), lr=1.0))
    assert isinstance(optimizer, torch.optim.Optimizer)
    scheduler = LambdaLR(optimizer, lambda epoch: 0.5**epoch)
    for grad in (0.0, 0.0):
        train(booster, model, optimizer, grad)
        scheduler.step()
    assert optimizer.param_groups[0]["lr"] == 0.25
    assert optimizer.unwrap().param_groups[0]["lr"] == 0.25


def test_a_scheduler_built_on_the_boosted_optimizer_can_be_boosted_with_another_model():
    booster = Booster("cpu", "fp16")
    first = nn.Linear(2, 2)
    first, optimizer, *_ = booster.boost(first, SGD(first.parameters(), lr=1.0))
    second = nn.Linear(2, 2)
    *_, scheduler = booster.boost(second, SGD(second.parameters(), lr=1.0), lr_scheduler=halving(optimizer))
    train(booster, first, optimizer, INF)
    scheduler.step()
    assert scheduler.get_last_lr() == [1.0]
    train(booster, first, optimizer, 0.0)
    scheduler.step()
    assert scheduler.get_last_lr() == [0.5]


def test_a_skipped_first_step_gives_no_warning_about_the_order_of_calls():
    model = nn.Linear(2, 2)
    inner = SGD(model.parameters(), lr=1.0)
    booster = Booster("cpu", "fp16")
    model, optimizer, _, _, scheduler = booster.boost(model, inner, lr_scheduler=halving(inner))
    train(booster, model, optimizer, INF)
    scheduler.step()
    train(booster, model, optimizer, 0.0)
    scheduler.step()
    assert scheduler.last_epoch == 1


def test_a_timm_scheduler_keeps_its_interface(timm):
    from timm.scheduler import CosineLRScheduler

    model = nn.Linear(2, 2)
    inner = SGD(model.parameters(), lr=1.0)
    theirs = CosineLRScheduler(inner, t_initial=4, warmup_t=2, warmup_lr_init=0.1)
    booster = Booster("cpu", "fp16")
    model, optimizer, _, _, scheduler = booster.boost(model, inner, lr_scheduler=theirs)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.1)
    train(booster, model, optimizer, 0.0)
    scheduler.step(1)
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.55)
    train(booster, model, optimizer, INF)
    scheduler.step_update(7)
    scheduler.step(2)
    assert optimizer.param_groups[0]["lr"] == theirs._get_lr(2)[0]
    assert scheduler.warmup_t == 2
