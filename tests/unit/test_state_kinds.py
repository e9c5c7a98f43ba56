"""What a state holds in options and schedules is of the kinds that are there: it loads and steps, or is refused."""

import copy

import pytest
import torch
from refusals import fingerprint
from torch import nn
from torch.optim import lr_scheduler as schedules

from booster import Booster

OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.1),
    "Adafactor": lambda params: torch.optim.Adafactor(params),
    "Rprop": lambda params: torch.optim.Rprop(params),
    "NAdam": lambda params: torch.optim.NAdam(params),
    "ASGD": lambda params: torch.optim.ASGD(params),
}
SCHEDULES = {
    "StepLR": lambda o: schedules.StepLR(o, 3),
    "MultiStepLR": lambda o: schedules.MultiStepLR(o, [2, 3]),
    "OneCycleLR": lambda o: schedules.OneCycleLR(o, 0.1, 100),
    "CyclicLR": lambda o: schedules.CyclicLR(o, 0.1, 0.2),
    "ReduceLROnPlateau": lambda o: schedules.ReduceLROnPlateau(o),
    "LambdaLR": lambda o: schedules.LambdaLR(o, lambda epoch: 0.9**epoch),
    "CosineAnnealingLR": lambda o: schedules.CosineAnnealingLR(o, 10),
    "CosineAnnealingWarmRestarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 3),
    "SequentialLR": lambda o: schedules.SequentialLR(o, [schedules.ConstantLR(o), schedules.StepLR(o, 3)], [3]),
    "PolynomialLR": lambda o: schedules.PolynomialLR(o),
}
WRONG = [None, "high", "", [], {}, [1, 2, 3, 4], ["x", "x"], {"a": 1}, torch.zeros(3), (None, 0.9), object()]


class Job:
    def __init__(self, optimizer, schedule, steps=2):
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        made = OPTIMIZERS[optimizer](model.parameters())
        self.booster = Booster("cpu")
        self.model, self.optimizer, _, _, self.schedule = self.booster.boost(
            model, made, lr_scheduler=SCHEDULES[schedule](made)
        )
        self.takes_metric = schedule == "ReduceLROnPlateau"
        for _ in range(steps):
            self.step()

    def step(self):
        self.booster.backward(self.model(torch.ones(2, 3)).square().mean(), self.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.schedule.step(*[1.0] * self.takes_metric)


def check(make, part, path, values):
    """Whatever is at `path` of the state of `part`: it is refused with nothing changed, or the next steps work."""
    wrong, job = [], make()
    for value in values:
        target = getattr(job, part)
        state = copy.deepcopy(target.state_dict())
        holder = state
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = value
        before = fingerprint(job.optimizer, job.schedule, job.model)
        try:
            target.load_state_dict(state)
        except (ValueError, TypeError) as error:
            wrong += [f"{path} = {value!r}: {error} changed something"] * (
                fingerprint(job.optimizer, job.schedule, job.model) != before
            )
            continue
        try:
            for _ in range(4):
                job.step()
        except Exception as error:
            wrong.append(f"{path} = {value!r}: {type(error).__name__}: {error}")
        job = make()
    return wrong


@pytest.mark.slow_cases("NAdam", "ASGD", "Adagrad")
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_option_of_another_kind_is_refused(optimizer):
    def make():
        return Job(optimizer, "StepLR")

    options = [key for key in make().optimizer.param_groups[0] if key != "params"]
    wrong = [line for key in options for line in check(make, "optimizer", ("param_groups", 0, key), WRONG)]
    assert not wrong, "\n".join(wrong)


@pytest.mark.slow_cases("CosineAnnealingWarmRestarts", "StepLR", "PolynomialLR", "CosineAnnealingLR")
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_value_of_another_kind_or_in_a_methods_place_is_refused(schedule):
    def make():
        return Job("SGD", schedule)

    keys = [*make().schedule.state_dict(), "step", "optimizer", "get_last_lr"]
    wrong = [line for key in keys for line in check(make, "schedule", (key,), WRONG)]
    assert not wrong, "\n".join(wrong)


def test_the_state_of_another_class_of_schedule_is_refused():
    for one in SCHEDULES:
        for other in SCHEDULES:
            state = Job("SGD", other).schedule.state_dict()
            target = Job("SGD", one).schedule
            if one == other:
                target.load_state_dict(state)
                continue
            with pytest.raises(ValueError, match="the state of"):
                target.load_state_dict(state)


def test_names_that_another_version_of_torch_has_or_lacks_do_no_harm():
    job = Job("SGD", "StepLR")
    state = {**job.schedule.state_dict(), "_news": 1, "verbose": False}
    del state["_is_initial"]
    job.schedule.load_state_dict(state)
    job.step()


def test_numbers_of_one_kind_are_one_kind():
    job = Job("AdamW", "StepLR")
    state = job.optimizer.state_dict()
    state["param_groups"][0] |= {"lr": torch.tensor(0.5), "betas": [0, 0.5], "eps": 1}
    job.optimizer.load_state_dict(state)
    job.step()


@pytest.mark.parametrize("schedule", ["StepLR", "CyclicLR", "ReduceLROnPlateau", "CosineAnnealingLR"])
def test_a_group_that_came_after_the_schedule_needs_no_rate_in_its_state(schedule):
    state = Job("SGD", schedule).schedule.state_dict()
    params = [nn.Parameter(torch.zeros(2)) for _ in range(2)]
    made = OPTIMIZERS["SGD"]([{"params": [param]} for param in params])
    *_, scheduler = Booster("cpu").boost(nn.ParameterList(params), made, lr_scheduler=SCHEDULES[schedule](made))
    scheduler.load_state_dict(state)
    assert len(scheduler.state_dict()["_last_lr"]) == 1
    for rates in ([], [0.1, 0.1, 0.1]):
        with pytest.raises(ValueError, match="_last_lr"):
            scheduler.load_state_dict({**state, "_last_lr": rates})
