"""Whether a step happens, what it reports, and what it leaves behind."""

import math
from typing import Any

import pytest
import torch
from prescribed import DEVICE, HOST, boost, loss_with, parameters, sgd, step_on, values_of
from torch.optim import SGD, Adagrad, Adam, AdamW

from booster import Booster, LossScaleError
from booster.loss_scaler import DynamicScale

INF, NAN = float("inf"), float("nan")
FUSED = {
    "Adam": lambda params, **kw: Adam(params, lr=0.1, **kw),
    "AdamW": lambda params, **kw: AdamW(params, lr=0.1, **kw),
    "SGD": lambda params, **kw: SGD(params, lr=0.1, **kw),
    "SGD momentum": lambda params, **kw: SGD(params, lr=0.1, momentum=0.9, **kw),
    "SGD dampening": lambda params, **kw: SGD(params, lr=0.1, momentum=0.9, dampening=0.5, **kw),
    "Adagrad": lambda params, **kw: Adagrad(params, lr=0.1, **kw),
}


both = pytest.mark.parametrize("decides", [HOST, DEVICE])


# ---------------------------------------------------------------------- the decision
@both
@pytest.mark.parametrize("name", [name for name in FUSED if name != "SGD dampening"])
def test_a_parameter_that_gets_its_first_gradient_late_is_stepped_as_in_torch(decides, name):
    reference, params = parameters(4, 3), parameters(4, 3)
    plain = FUSED[name](reference, foreach=False)
    optimizer = boost(FUSED[name](params, fused=True), 2.0**8, decides)
    for grads in ([1.0, None], [1.0, 2.0], [None, 2.0]):
        plain.zero_grad()
        loss_with(reference, grads).backward()
        plain.step()
        assert step_on(optimizer, params, *grads)
    for param, other in zip(params, reference, strict=True):
        assert torch.allclose(param, other, atol=1e-6)


@both
@pytest.mark.parametrize("name", FUSED)
def test_a_skip_changes_neither_parameters_nor_state_nor_step_count(decides, name):
    params = parameters(4, 3)
    optimizer = boost(FUSED[name](params, fused=True), 2.0**8, decides)
    step_on(optimizer, params, 1.0, 2.0)
    before = values_of(params)
    state = {
        (index, key): value.clone()
        for index, param in enumerate(params)
        for key, value in optimizer.state[param].items()
        if isinstance(value, torch.Tensor)
    }
    optimizer.zero_grad()
    optimizer.backward(loss_with(params, [1.0, NAN]))
    optimizer.clip_grad_by_norm(1.0)
    assert not optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(params, before, strict=True))
    for (index, key), value in state.items():
        assert torch.equal(optimizer.state[params[index]][key], value), key


@both
def test_a_skip_says_why_and_names_the_parameters(decides):
    params = parameters(4, 3, 2)
    optimizer = sgd(params, decides, 2.0**8)
    good = step_on(optimizer, params, 1.0, 1.0, 1.0)
    assert (good.applied, bool(good), good.skipped_reason, good.culprit) == (True, True, None, ())
    result = step_on(optimizer, params, INF, 1.0, NAN)
    assert (result.applied, bool(result)) == (False, False)
    assert result.skipped_reason == "nonfinite_grad"
    assert result.culprit == ("p0", "p2")
    assert result.loss_scale == 256.0
    assert optimizer.loss_scale == 128.0
    assert not math.isfinite(result.grad_norm)
    loss = step_on(optimizer, params, NAN, NAN, NAN, value=NAN)
    assert loss.skipped_reason == "nonfinite_loss"
    assert loss.culprit == ("p0", "p1", "p2")
    assert "nonfinite_loss" in repr(loss)


@both
def test_a_skip_after_clipping_by_value_names_the_parameters_too(decides):
    params = parameters(4, 3)
    optimizer = sgd(params, decides, 2.0**8)
    optimizer.backward(loss_with(params, [1.0, INF]))
    optimizer.clip_grad_by_value(0.5)
    result = optimizer.step()
    assert not result
    assert result.culprit == ("p1",)


@both
def test_an_overflow_stays_one_when_a_backward_follows_a_clip_by_value(decides):
    params = parameters(4, 3)
    optimizer = sgd(params, decides, 2.0**8)
    optimizer.backward(loss_with(params, [INF, 1.0]))
    optimizer.clip_grad_by_value(0.5)
    optimizer.backward(loss_with(params, [0.1, 0.1]))
    result = optimizer.step()
    assert not result
    assert result.culprit == ("p0",)
    assert torch.equal(params[0], torch.ones(4))


@both
def test_the_reason_concerns_the_losses_since_the_gradients_were_zeroed(decides):
    params = parameters(4)
    optimizer = sgd(params, decides, 2.0**8)
    optimizer.backward(loss_with(params, [NAN], NAN))
    optimizer.zero_grad()  # the user saw the NaN and starts over
    optimizer.backward(loss_with(params, [INF]))
    assert optimizer.step().skipped_reason == "nonfinite_grad"


@both
def test_one_bad_micro_batch_skips_the_step_and_its_loss_is_the_reason(decides):
    params = parameters(4)
    optimizer = sgd(params, decides, 2.0**8)
    optimizer.backward(loss_with(params, [NAN], NAN))
    optimizer.backward(loss_with(params, [1.0]))
    assert optimizer.step().skipped_reason == "nonfinite_loss"


@both
def test_counters_tell_applied_skipped_and_consecutive(decides):
    params = parameters(4)
    optimizer = sgd(params, decides, 2.0**8)
    assert not optimizer.step_was_skipped
    seen = []
    for grad in (1.0, INF, INF, 1.0, INF):
        step_on(optimizer, params, grad)
        seen.append((optimizer.step_was_skipped, optimizer.num_skipped, optimizer.num_consecutive_skips))
    assert seen == [(False, 0, 0), (True, 1, 1), (True, 2, 2), (False, 2, 0), (True, 3, 1)]
    assert optimizer.num_applied == 2


@both
def test_without_a_scale_clipping_makes_a_nan_gradient_a_skip(decides):
    params = parameters(4)
    optimizer = sgd(params, decides)
    optimizer.backward(loss_with(params, [NAN]))
    optimizer.clip_grad_by_norm(1.0)
    result = optimizer.step()
    assert (result.applied, result.loss_scale, result.culprit) == (False, 1.0, ("p0",))
    assert torch.equal(params[0], torch.ones(4))


@both
def test_without_a_scale_skip_nonfinite_makes_a_nan_gradient_a_skip(decides):
    params = parameters(4)
    optimizer = sgd(params, decides, skip_nonfinite=True)
    result = step_on(optimizer, params, NAN)
    assert (result.applied, result.skipped_reason, result.culprit) == (False, "nonfinite_grad", ("p0",))
    assert torch.equal(params[0], torch.ones(4))
    assert step_on(optimizer, params, 1.0)


@both
def test_without_a_scale_a_nan_gradient_goes_in_as_in_torch(decides):
    params = parameters(4)
    optimizer = sgd(params, decides)
    assert step_on(optimizer, params, NAN)
    assert params[0].isnan().all()


@both
def test_too_many_skips_in_a_row_raise_and_tell_what_is_needed(decides):
    params = parameters(4, 3)
    optimizer = sgd(params, decides, 2.0**8, max_consecutive_skips=3)
    step_on(optimizer, params, 1.0, 1.0)
    step_on(optimizer, params, INF, 1.0)
    step_on(optimizer, params, INF, 1.0)
    with pytest.raises(LossScaleError) as caught:
        step_on(optimizer, params, 1.0, NAN)
        step_on(optimizer, params, 1.0, 1.0)  # what stays on a device is settled here at the latest
    message = str(caught.value)
    assert "3 optimizer steps in a row were skipped, up to step 4; the last finite one was step 1" in message
    assert "not finite: p1; loss scale 32." in message
    assert "max_consecutive_skips" in message


@both
def test_the_limit_of_skips_counts_consecutive_ones_and_none_disables_it(decides):
    params = parameters(4)
    limited = sgd(params, decides, 2.0**8, max_consecutive_skips=2)
    for grad in (INF, 0.0, INF, 0.0, INF, 0.0):
        step_on(limited, params, grad)
    assert limited.num_skipped == 3
    unlimited = sgd(params, decides, 2.0**8, max_consecutive_skips=None)
    for _ in range(60):
        step_on(unlimited, params, INF)
    assert unlimited.num_consecutive_skips == 60


def test_a_scale_at_its_minimum_is_mentioned_but_does_not_decide():
    params = parameters(4)
    optimizer = sgd(params, HOST, DynamicScale(init_scale=4.0, min_scale=2.0), max_consecutive_skips=4)
    for _ in range(3):
        step_on(optimizer, params, INF)
    with pytest.raises(LossScaleError, match=r"none was finite.*loss scale 2 \(its minimum\)"):
        step_on(optimizer, params, INF)


@both
def test_a_scale_that_fell_hundreds_of_times_does_not_poison_the_parameters(decides):
    params = parameters(4)
    optimizer = sgd(params, decides, 1.0, max_consecutive_skips=None)
    for _ in range(200):
        step_on(optimizer, params, INF)
    assert step_on(optimizer, params, 0.5)
    assert torch.isfinite(params[0]).all()


# ---------------------------------------------------------------------- hooks and traces
@both
@pytest.mark.parametrize("fused", [True, False])
def test_step_hooks_see_unscaled_clipped_gradients_once_and_never_on_a_skip(decides, fused):
    if decides == DEVICE and not fused:
        return
    params = parameters(4)
    optimizer = boost(SGD(params, lr=1.0, fused=fused), 2.0**8, decides)
    seen: list[Any] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append(("before", float(params[0].grad[0]))))
    optimizer.register_step_post_hook(lambda *_: seen.append(("after", float(params[0].grad[0]))))
    optimizer.backward(loss_with(params, [3.0]))
    optimizer.clip_grad_by_norm(1.0)
    assert optimizer.step()
    assert [name for name, _ in seen] == ["before", "after"]
    assert [value for _, value in seen] == pytest.approx([0.5, 0.5], rel=1e-5)
    seen.clear()
    assert not step_on(optimizer, params, INF)
    assert seen == []
    assert optimizer.loss_scale == 128.0


@both
def test_a_post_hook_alone_does_not_fire_on_a_skip_either(decides):
    params = parameters(4)
    optimizer = sgd(params, decides, 2.0**8)
    calls: list[int] = []
    optimizer.unwrap().register_step_post_hook(lambda *_: calls.append(1))
    assert not step_on(optimizer, params, INF)
    assert step_on(optimizer, params, 0.5)
    assert calls == [1]
    assert torch.equal(params[0], torch.full((4,), 0.5))


@both
@pytest.mark.parametrize("grad", [1.0, INF])
def test_no_trace_of_scale_or_decision_stays_on_the_optimizer(decides, grad):
    params = parameters(4)
    optimizer = sgd(params, decides, 2.0**8)
    step_on(optimizer, params, grad)
    assert not hasattr(optimizer.unwrap(), "grad_scale")
    assert not hasattr(optimizer.unwrap(), "found_inf")


@both
def test_a_failing_step_leaves_no_trace_and_can_be_repeated(decides):
    params = parameters(4)
    optimizer = sgd(params, decides, 2.0**8)

    def fail(*_: Any) -> None:
        raise OSError("disk full")

    handle = optimizer.register_step_pre_hook(fail)
    optimizer.backward(loss_with(params, [0.5]))
    with pytest.raises(OSError, match="disk full"):
        optimizer.step()
    handle.remove()
    assert not hasattr(optimizer.unwrap(), "grad_scale")
    assert not hasattr(optimizer.unwrap(), "found_inf")
    assert optimizer.step()
    assert torch.equal(params[0], torch.full((4,), 0.5))


def test_the_result_reports_the_scale_of_backward_also_after_unscaling():
    model = torch.nn.Linear(2, 1)
    booster = Booster("cpu", "fp16")
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), 0.1))
    booster.backward(model(torch.ones(1, 2)).sum() / 4, optimizer)
    optimizer.unscale_grads()
    assert optimizer.step().loss_scale == 65536.0
