"""The loss scale: torch.amp's trajectory, and what it adds: hysteresis, bounds, a form that lives on a device."""

import io
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from booster.loss_scaler import DynamicScale, NoScale

HYPOTHESIS = settings(max_examples=60, deadline=None, derandomize=True)
PATTERNS = st.lists(st.booleans(), max_size=60)
FACTORS = st.tuples(st.floats(1.01, 16.0), st.floats(0.05, 0.99), st.integers(1, 5), st.floats(1.0, 2.0**20))


def trajectory(scaler: Any, pattern: list[bool]) -> list[float]:
    scales = []
    for overflow in pattern:
        scaler.update(overflow)
        scales.append(scaler.scale)
    return scales


def torch_trajectory(pattern: list[bool], **options: Any) -> list[float]:
    scaler = torch.amp.GradScaler("cpu", **options)
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param], lr=0.0)
    scales = []
    for overflow in pattern:
        scaler.scale(param.sum()).backward()
        param.grad = torch.full_like(param, float("inf") if overflow else 1.0)
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def on_device(scaler: DynamicScale) -> Any:
    device_scale = scaler.on_device(torch.device("cpu"))
    update = device_scale.update
    device_scale.update = lambda overflow: update(torch.tensor(float(overflow)))  # type: ignore[method-assign]
    return device_scale


@HYPOTHESIS
@given(pattern=PATTERNS, factors=FACTORS)
def test_the_trajectory_is_that_of_torch_for_any_overflow_pattern_and_options(pattern, factors):
    growth, backoff, interval, init = factors
    options = {"init_scale": init, "growth_factor": growth, "backoff_factor": backoff, "growth_interval": interval}
    assert trajectory(DynamicScale(**options), pattern) == torch_trajectory(pattern, **options)


@HYPOTHESIS
@given(pattern=PATTERNS, factors=FACTORS, hysteresis=st.integers(1, 3), bounds=st.tuples(st.booleans(), st.booleans()))
def test_the_scale_on_a_device_follows_the_one_on_the_host(pattern, factors, hysteresis, bounds):
    growth, backoff, interval, init = factors
    options = {
        "init_scale": init,
        "growth_factor": growth,
        "backoff_factor": backoff,
        "growth_interval": interval,
        "hysteresis": hysteresis,
        "min_scale": init / 3 if bounds[0] else None,
        "max_scale": init * 3 if bounds[1] else None,
    }
    host, device = DynamicScale(**options), on_device(DynamicScale(**options))
    assert trajectory(device, pattern) == trajectory(host, pattern)
    assert device.state_dict() == host.state_dict()


def test_growth_stops_where_float32_ends_as_in_torch():
    options = {"init_scale": 2.0**125, "growth_interval": 1}
    pattern = [False] * 5 + [True] + [False] * 2
    expected = torch_trajectory(pattern, **options)
    assert trajectory(DynamicScale(**options), pattern) == expected
    assert trajectory(on_device(DynamicScale(**options)), pattern) == expected


@pytest.mark.parametrize("place", [lambda scaler: scaler, on_device], ids=["host", "device"])
def test_backing_off_never_reaches_zero(place):
    scaler = place(DynamicScale(init_scale=1.0))
    scales = trajectory(scaler, [True] * 300)
    assert scales[:126] == [2.0**-n for n in range(1, 127)]
    assert scales[-1] == 2.0**-126  # the smallest scale with an inverse that float32 holds


@pytest.mark.parametrize("place", [lambda scaler: scaler, on_device], ids=["host", "device"])
def test_hysteresis_forgives_overflows_until_the_scale_grows(place):
    pattern = [bool(overflow) for overflow in (1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1)]
    scaler = place(DynamicScale(init_scale=65536.0, hysteresis=2, growth_interval=4))
    thousands = [64, 64, 64, 64, 32, 16, 16, 16, 16, 32, 32, 16]
    assert trajectory(scaler, pattern) == [1024.0 * k for k in thousands]


@pytest.mark.parametrize("place", [lambda scaler: scaler, on_device], ids=["host", "device"])
def test_the_scale_stays_between_its_bounds(place):
    scaler = place(DynamicScale(init_scale=8.0, min_scale=3.0, max_scale=20.0, growth_interval=1))
    assert trajectory(scaler, [True, True, True, False, False, False, False]) == [4, 3, 3, 6, 12, 20, 20]


@pytest.mark.parametrize("place", [lambda scaler: scaler, on_device], ids=["host", "device"])
def test_equal_bounds_make_the_scale_static(place):
    scaler = place(DynamicScale(init_scale=128.0, min_scale=128.0, max_scale=128.0, growth_interval=1))
    assert set(trajectory(scaler, [True, False, True, True, False])) == {128.0}


@HYPOTHESIS
@given(before=PATTERNS, after=PATTERNS, interval=st.integers(1, 6), hysteresis=st.integers(1, 3))
def test_saving_and_loading_in_between_changes_nothing(before, after, interval, hysteresis):
    def make() -> DynamicScale:
        return DynamicScale(growth_interval=interval, hysteresis=hysteresis)

    whole, first, second = make(), make(), make()
    trajectory(first, before)
    second.load_state_dict(first.state_dict())
    assert trajectory(second, after) == trajectory(whole, before + after)[len(before) :]


def test_host_and_device_read_each_others_state():
    host = DynamicScale(growth_interval=5, hysteresis=3)
    trajectory(host, [True, False, False])
    device = DynamicScale(growth_interval=5, hysteresis=3).on_device(torch.device("cpu"))
    device.load_state_dict(host.state_dict())
    assert device.state_dict() == host.state_dict()
    back = DynamicScale(growth_interval=5, hysteresis=3)
    back.load_state_dict(device.state_dict())
    assert trajectory(back, [True, False, False]) == trajectory(host, [True, False, False])


@HYPOTHESIS
@given(before=PATTERNS.filter(len), after=PATTERNS)
def test_the_state_of_a_grad_scaler_carries_on_where_torch_stopped(before, after):
    theirs = torch.amp.GradScaler("cpu", growth_interval=4)
    param = torch.nn.Parameter(torch.zeros(1))
    optimizer = torch.optim.SGD([param], lr=0.0)
    for overflow in before:
        theirs.scale(param.sum()).backward()
        param.grad = torch.full_like(param, float("inf") if overflow else 1.0)
        theirs.step(optimizer)
        theirs.update()
    ours = DynamicScale(growth_interval=4)
    ours.load_state_dict(theirs.state_dict())
    assert trajectory(ours, after) == torch_trajectory(before + after, growth_interval=4)[len(before) :]


@pytest.mark.parametrize("place", [lambda scaler: scaler, on_device], ids=["host", "device"])
def test_a_counter_beyond_a_shorter_growth_interval_still_lets_the_scale_grow(place):
    scaler = place(DynamicScale(init_scale=4.0, growth_interval=10))
    scaler.load_state_dict({"scale": 4.0, "growth_tracker": 50, "hysteresis_tracker": 0})
    assert trajectory(scaler, [False, False]) == [8.0, 8.0]


@pytest.mark.parametrize(
    "state",
    [
        {},
        {"growth_tracker": 3},
        {"scale": 0.0},
        {"scale": float("nan")},
        {"scale": 1e39},
        {"scale": None},
        {"scale": "large"},
        {"scale": 2.0, "growth_tracker": -1},
        {"scale": 2.0, "growth_tracker": "many"},
        {"scale": 2.0, "hysteresis_tracker": -1},
    ],
)
@pytest.mark.parametrize("place", [lambda scaler: scaler, on_device], ids=["host", "device"])
def test_a_state_out_of_range_is_refused_and_nothing_changes(place, state):
    scaler = place(DynamicScale(init_scale=16.0))
    trajectory(scaler, [True, False, False])
    before = scaler.state_dict()
    with pytest.raises(ValueError, match="loss-scaler state"):
        scaler.load_state_dict(state)
    assert scaler.state_dict() == before


def test_the_state_survives_torch_save_with_weights_only():
    scaler = DynamicScale().on_device(torch.device("cpu"))
    file = io.BytesIO()
    torch.save(scaler.state_dict(), file)
    file.seek(0)
    assert torch.load(file, weights_only=True) == scaler.state_dict()


def test_a_reference_to_the_scale_on_a_device_keeps_the_value_that_backward_used():
    scaler = DynamicScale(init_scale=8.0).on_device(torch.device("cpu"))
    used = scaler.tensor
    scaler.update(torch.tensor(1.0))
    assert (float(used), scaler.scale) == (8.0, 4.0)


def test_no_scale_keeps_one_and_refuses_the_state_of_a_scale():
    scaler = NoScale()
    scaler.update(True)
    assert scaler.scale == 1.0
    assert scaler.state_dict() == {}
    scaler.load_state_dict({})
    with pytest.raises(ValueError, match="no loss scaler; resume with the precision that wrote it"):
        scaler.load_state_dict(DynamicScale().state_dict())


@pytest.mark.parametrize("on_device", [False, True])
def test_a_loaded_scale_below_the_minimum_is_not_raised_by_an_overflow(on_device):
    scaler = DynamicScale(min_scale=16.0)
    scaler.load_state_dict({"scale": 4.0, "growth_tracker": 0, "hysteresis_tracker": 0})
    scaler = scaler.on_device(torch.device("cpu")) if on_device else scaler
    scaler.update(torch.ones(()) if on_device else True)
    assert float(scaler.scale) == 4.0
