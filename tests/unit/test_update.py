"""One optimizer step: which gradients it uses, whether it happens, and what it reports."""

import math
from typing import Any

import pytest
import torch
from prescribed import DEVICE, HOST, boost, loss_with, parameters, values_of
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW

from booster import LossScaleError
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


def sgd(params: list[nn.Parameter], decides: str, scale: Any = None, lr: float = 1.0, **options: Any) -> Any:
    return boost(SGD(params, lr=lr, fused=True), scale, decides, **options)


def step_on(optimizer: Any, params: list[nn.Parameter], *grads: Any, value: float = 1.0) -> Any:
    optimizer.zero_grad()
    optimizer.backward(loss_with(params, grads, value))
    return optimizer.step()


# ---------------------------------------------------------------------- norms and clips


@both
def test_a_finite_gradient_whose_squares_overflow_float32_is_not_skipped(decides):
    params = parameters(3, 1)
    optimizer = sgd(params, decides, 2.0**10, lr=1e-25)
    result = step_on(optimizer, params, 1e25, 1e25)
    assert result.applied
    assert result.grad_norm == pytest.approx(2e25, rel=1e-6)
    assert torch.allclose(params[0], torch.zeros(3), atol=1e-6)


@both
@pytest.mark.parametrize("scale", [None, 2.0**10])
def test_clipping_a_gradient_whose_squares_overflow_float32_gives_the_norm_asked_for(decides, scale):
    params = parameters(3, 1)
    optimizer = sgd(params, decides, scale)
    optimizer.backward(loss_with(params, [1e25, 1e25]))
    norm = optimizer.clip_grad_by_norm(1.0)
    assert float(norm) == pytest.approx(2e25, rel=1e-6)
    assert optimizer.step()
    assert torch.allclose(params[0], torch.full((3,), 0.5))


@pytest.mark.parametrize("fused", [True, False])
def test_a_norm_beyond_float32_still_clips(fused):
    params = parameters(4)
    optimizer = boost(SGD(params, lr=1.0, fused=fused))
    optimizer.backward(loss_with(params, [3e38]))
    optimizer.clip_grad_by_norm(1.0, error_if_nonfinite=True)
    assert optimizer.step().grad_norm == pytest.approx(6e38)
    assert torch.allclose(params[0], torch.full((4,), 0.5), atol=1e-5)


@both
@pytest.mark.parametrize("norm_type", [1.0, 2, 3.0, INF, "inf"])
@pytest.mark.parametrize("max_norm", [0.1, 1e6, 0.0])
def test_every_norm_type_clips_as_torch_does(decides, norm_type, max_norm):
    theirs, ours = parameters((3, 4), 5), parameters((3, 4), 5)
    grads = [torch.randn(3, 4), torch.randn(5) * 3]
    loss_with(theirs, grads).backward()
    expected = nn.utils.clip_grad_norm_(theirs, max_norm, norm_type=float(norm_type))
    optimizer = sgd(ours, decides, 2.0**8)
    optimizer.backward(loss_with(ours, grads))
    norm = optimizer.clip_grad_by_norm(max_norm, norm_type=norm_type)
    assert isinstance(norm, torch.Tensor)
    assert norm.shape == ()
    assert float(norm) == pytest.approx(float(expected), rel=1e-6)
    result = optimizer.step()
    assert result
    assert result.grad_norm == pytest.approx(float(expected), rel=1e-6)
    for param, other in zip(ours, theirs, strict=True):
        assert torch.allclose(param, 1.0 - other.grad, rtol=1e-6, atol=1e-7)


@both
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("norm_type", [1, 2, 3, INF])
def test_every_norm_type_sees_inf_and_nan(decides, norm_type, bad):
    params = parameters(4, 4)
    optimizer = sgd(params, decides)
    optimizer.backward(loss_with(params, [1.0, torch.tensor([0.0, bad, 0.0, 1.0])]))
    assert not math.isfinite(optimizer.clip_grad_by_norm(1.0, norm_type))
    result = optimizer.step()
    assert not result
    assert result.culprit == ("p1",)
    assert torch.equal(params[0], torch.ones(4))


CLIPS = {
    "norm twice": [("norm", 1.0), ("norm", 0.3)],
    "two norm types": [("norm", 1.0, 2.0), ("norm", 0.5, INF), ("norm", 0.7, 1.0)],
    "norm then value": [("norm", 1.0), ("value", 0.3)],
    "value then norm": [("value", 0.3), ("norm", 0.2)],
    "value twice": [("value", 0.3), ("value", 0.1)],
    "norm zero then value": [("norm", 0.0), ("value", 0.1)],
    "all": [("norm", 2.0), ("value", 0.5), ("norm", 0.6), ("value", 0.2), ("norm", 0.1)],
}


@both
@pytest.mark.parametrize("clips", CLIPS)
@pytest.mark.parametrize("scale", [None, 2.0**12])
def test_clips_in_any_order_and_number_are_torchs_in_that_order(decides, clips, scale):
    theirs, ours = parameters((3, 4), 5), parameters((3, 4), 5)
    grads = [torch.randn(3, 4), torch.randn(5) * 3]
    loss_with(theirs, grads).backward()
    optimizer = sgd(ours, decides, scale)
    optimizer.backward(loss_with(ours, grads))
    for kind, *arguments in CLIPS[clips]:
        if kind == "norm":
            expected = nn.utils.clip_grad_norm_(theirs, *arguments)
            assert float(optimizer.clip_grad_by_norm(*arguments)) == pytest.approx(float(expected), rel=1e-6)
        else:
            nn.utils.clip_grad_value_(theirs, *arguments)
            optimizer.clip_grad_by_value(*arguments)
    assert optimizer.step()
    for param, other in zip(ours, theirs, strict=True):
        assert torch.allclose(param, 1.0 - other.grad, rtol=1e-6, atol=1e-7)


@both
def test_a_value_below_zero_or_a_nan_is_no_bound(decides):
    optimizer = sgd(parameters(2), decides)
    for call in (optimizer.clip_grad_by_norm, optimizer.clip_grad_by_value):
        for bound in (-1.0, NAN):
            with pytest.raises(ValueError, match="must be a number of at least 0"):
                call(bound)
    with pytest.raises(ValueError, match="norm_type=0.0"):
        optimizer.clip_grad_by_norm(1.0, 0)


@both
@pytest.mark.parametrize("scale", [None, 2.0**12])
def test_a_backward_after_a_clip_adds_to_the_clipped_gradients(decides, scale):
    params = parameters(4)
    optimizer = sgd(params, decides, scale)
    optimizer.backward(loss_with(params, [3.0]))  # norm 6, clipped to 1
    optimizer.clip_grad_by_norm(1.0)
    optimizer.backward(loss_with(params, [0.25]))  # 0.5 each, plus 0.25
    result = optimizer.step()
    assert torch.allclose(params[0], torch.full((4,), 0.25))
    if scale:
        assert result.grad_norm == pytest.approx(1.5, rel=1e-5)


@both
def test_the_reported_norm_is_that_of_the_last_backward_s_gradients(decides):
    params = parameters(4)
    optimizer = sgd(params, decides, 2.0**5)
    optimizer.backward(loss_with(params, [3.0]))
    optimizer.clip_grad_by_norm(1.0)
    optimizer.backward(loss_with(params, [0.25]))
    optimizer.clip_grad_by_norm(1.0)
    assert optimizer.step().grad_norm == pytest.approx(1.5, rel=1e-5)


@both
def test_the_norm_is_reported_under_a_scale_and_after_clips_and_otherwise_none(decides):
    params = parameters(4)
    assert step_on(sgd(params, decides), params, 1.0).grad_norm is None
    scaled = sgd(params, decides, 2.0**8)
    assert step_on(scaled, params, 1.0).grad_norm == pytest.approx(2.0)
    scaled.zero_grad()
    scaled.backward(loss_with(params, [1.0]))
    scaled.clip_grad_by_value(0.1)
    assert scaled.step().grad_norm == pytest.approx(2.0)  # before clipping


@both
def test_error_if_nonfinite_raises_and_names_the_ordinary_way(decides):
    params = parameters(4)
    optimizer = sgd(params, decides, 2.0**8)
    optimizer.backward(loss_with(params, [INF]))
    with pytest.raises(RuntimeError, match="leave error_if_nonfinite=False and the step is skipped"):
        optimizer.clip_grad_by_norm(1.0, error_if_nonfinite=True)
    assert not optimizer.step()


@both
def test_clipping_without_gradients_returns_a_norm_of_zero(decides):
    optimizer = sgd(parameters(4), decides, 2.0**8)
    assert float(optimizer.clip_grad_by_norm(1.0)) == 0.0
    optimizer.clip_grad_by_value(1.0)
    optimizer.unscale_grads()
    assert optimizer.step().applied


# ---------------------------------------------------------------------- reading gradients


@both
def test_unscale_grads_shows_true_gradients_and_repeating_it_does_nothing(decides):
    params = parameters(4, 2)
    optimizer = sgd(params, decides, 2.0**8)
    optimizer.backward(loss_with(params, [3.0, 0.5]))
    assert torch.equal(params[0].grad, torch.full((4,), 3.0 * 256))
    for _ in range(3):
        optimizer.unscale_grads()
        assert torch.equal(params[0].grad, torch.full((4,), 3.0))
        assert torch.equal(params[1].grad, torch.full((2,), 0.5))
    assert optimizer.step()
    assert torch.equal(params[1], torch.full((2,), 0.5))


@both
@pytest.mark.parametrize("scale", [None, 2.0**8])
def test_unscale_grads_applies_clips_that_wait_and_later_clips_go_on_from_there(decides, scale):
    params = parameters(4)
    optimizer = sgd(params, decides, scale)
    optimizer.backward(loss_with(params, [3.0]))
    optimizer.clip_grad_by_norm(1.0)
    optimizer.unscale_grads()
    assert torch.allclose(params[0].grad, torch.full((4,), 0.5))
    assert float(optimizer.clip_grad_by_norm(0.5)) == pytest.approx(1.0, rel=1e-5)
    optimizer.clip_grad_by_value(0.2)
    optimizer.unscale_grads()
    assert torch.allclose(params[0].grad, torch.full((4,), 0.2))
    result = optimizer.step()
    assert result.grad_norm == pytest.approx(6.0)
    assert torch.allclose(params[0], torch.full((4,), 0.8))


@both
def test_gradients_may_be_edited_after_unscale_grads(decides):
    params = parameters(4)
    optimizer = sgd(params, decides, 2.0**8)
    optimizer.backward(loss_with(params, [3.0]))
    optimizer.unscale_grads()
    params[0].grad.mul_(2.0)
    assert float(optimizer.clip_grad_by_norm(1.0)) == pytest.approx(12.0)
    params[0].grad.div_(4.0)
    assert float(optimizer.clip_grad_by_norm(100.0)) == pytest.approx(0.25, rel=1e-5)
    assert optimizer.step()
    assert torch.allclose(params[0], torch.full((4,), 0.875))


@both
def test_a_backward_after_unscale_grads_adds_to_unscaled_gradients(decides):
    params = parameters(4)
    optimizer = sgd(params, decides, 2.0**8)
    optimizer.backward(loss_with(params, [0.25]))
    optimizer.unscale_grads()
    optimizer.backward(loss_with(params, [0.25]))
    optimizer.unscale_grads()
    assert torch.equal(params[0].grad, torch.full((4,), 0.5))
    optimizer.step()
    assert torch.equal(params[0], torch.full((4,), 0.5))


@both
def test_an_overflow_is_still_a_skip_after_unscale_grads(decides):
    params = parameters(4, 4)
    optimizer = sgd(params, decides, 2.0**8)
    optimizer.backward(loss_with(params, [1.0, INF]))
    optimizer.clip_grad_by_norm(0.5)  # by a norm of inf: no clip
    optimizer.unscale_grads()
    assert torch.equal(params[0].grad, torch.ones(4))
    result = optimizer.step()
    assert not result
    assert result.culprit == ("p1",)
    assert optimizer.loss_scale == 128.0


@both
def test_gradients_are_unscaled_and_clipped_in_grad_after_a_step(decides):
    params = parameters(4)
    optimizer = sgd(params, decides, 2.0**8)
    optimizer.backward(loss_with(params, [3.0]))
    optimizer.clip_grad_by_norm(1.0)
    optimizer.step()
    assert torch.allclose(params[0].grad, torch.full((4,), 0.5))


@both
def test_what_a_joint_skip_leaves_in_grad_keeps_its_meaning_for_the_next_backward(decides):
    a, b = parameters(4), parameters(4)
    first, second = sgd(a, decides, 2.0**8), sgd(b, decides, 2.0**8)
    backward_for([first, second], loss_with(a + b, [INF, 0.25]))
    assert not first.step()
    assert not second.step()
    second.backward(loss_with(b, [0.25]))  # nothing was zeroed in between
    assert second.step()
    assert torch.equal(b[0], torch.full((4,), 0.5))


# ---------------------------------------------------------------------- the decision


@both
@pytest.mark.parametrize("name", FUSED)
def test_an_overflow_in_the_very_first_step_leaves_a_fused_optimizer_sound(decides, name):
    reference, params = parameters(4, 3), parameters(4, 3)
    plain = FUSED[name](reference, foreach=False)
    optimizer = boost(FUSED[name](params, fused=True), 2.0**8, decides)
    for grads in ([INF, 1.0], [1.0, NAN]):
        assert not step_on(optimizer, params, *grads)
        assert torch.equal(params[0], torch.ones(4))
    for size in (1.0, 0.3, 2.0):
        plain.zero_grad()
        loss_with(reference, [size, -size]).backward()
        plain.step()
        assert step_on(optimizer, params, size, -size)
    for param, other in zip(params, reference, strict=True):
        assert torch.allclose(param, other, atol=1e-6)


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


# ---------------------------------------------------------------------- whose gradients


@both
def test_a_bare_backward_under_a_scale_is_detected_with_the_fix(decides):
    params = parameters(4)
    optimizer = sgd(params, decides, 2.0**8)
    loss_with(params, [1.0]).backward()
    for call in (optimizer.step, optimizer.unscale_grads, lambda: optimizer.clip_grad_by_norm(1.0)):
        with pytest.raises(RuntimeError, match=r"Call booster.backward\(loss, optimizer\) instead"):
            call()
    assert torch.equal(params[0], torch.ones(4))


@both
def test_a_bare_backward_is_detected_after_the_gradients_of_another_were_zeroed(decides):
    params = parameters(4)
    optimizer = sgd(params, decides, 2.0**8)
    optimizer.backward(loss_with(params, [1.0]))
    optimizer.zero_grad()
    loss_with(params, [1.0]).backward()
    with pytest.raises(RuntimeError, match="bare loss.backward"):
        optimizer.step()


@both
def test_a_bare_backward_is_torchs_own_without_a_scale(decides):
    params = parameters(4)
    optimizer = sgd(params, decides)
    loss_with(params, [3.0]).backward()
    optimizer.clip_grad_by_norm(1.0)
    assert optimizer.step()
    assert torch.allclose(params[0], torch.full((4,), 0.5))


@both
@pytest.mark.parametrize("how", ["optimizer", "to zero", "model"])
def test_zeroing_gradients_forgets_clips_that_wait(decides, how):
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(4))
    params = [model.weight]
    optimizer = sgd(params, decides, 2.0**8)
    for _ in range(2):
        optimizer.backward(loss_with(params, [3.0]))
        optimizer.clip_grad_by_norm(1.0)
        if how == "optimizer":
            optimizer.zero_grad()
            assert params[0].grad is None
        elif how == "to zero":
            optimizer.zero_grad(set_to_none=False)
            assert torch.equal(params[0].grad, torch.zeros(4))
        else:
            model.zero_grad()
    optimizer.backward(loss_with(params, [0.25]))
    assert optimizer.step()
    assert torch.equal(params[0], torch.full((4,), 0.75))


@both
def test_zeroing_after_a_skip_starts_clean(decides):
    params = parameters(4)
    optimizer = sgd(params, decides, 2.0**8)
    assert not step_on(optimizer, params, INF)
    optimizer.zero_grad(set_to_none=False)
    optimizer.backward(loss_with(params, [0.5]))
    assert optimizer.step()
    assert torch.equal(params[0], torch.full((4,), 0.5))


@both
def test_parameters_without_gradients_and_steps_without_any_are_ordinary(decides):
    params = parameters(4, 3)
    optimizer = sgd(params, decides, 2.0**8)
    assert step_on(optimizer, params, 1.0, None)
    assert torch.equal(params[1], torch.ones(3))
    optimizer.zero_grad()
    result = optimizer.step()
    assert (result.applied, result.grad_norm, result.loss_scale) == (True, None, 256.0)


def test_sparse_embedding_gradients_are_checked_clipped_and_stepped_as_in_torch():
    def train(optimize: Any) -> torch.Tensor:
        torch.manual_seed(0)
        embedding = nn.Embedding(10, 4, sparse=True)
        optimize(embedding, [torch.tensor([1, 3, 3]), torch.tensor([0, 1, 1]), torch.tensor([9, 9, 9])])
        return embedding.weight.detach()

    def torch_loop(embedding: nn.Embedding, batches: list[torch.Tensor]) -> None:
        optimizer = torch.optim.SGD(embedding.parameters(), lr=0.5)
        for batch in batches:
            optimizer.zero_grad()
            embedding(batch).pow(2).sum().backward()
            embedding.weight.grad = embedding.weight.grad.coalesce()
            factor = min(1.0, 0.5 / (float(embedding.weight.grad.values().norm()) + 1e-6))
            embedding.weight.grad.mul_(factor)
            optimizer.step()

    def ours(embedding: nn.Embedding, batches: list[torch.Tensor]) -> None:
        optimizer = boost(torch.optim.SGD(embedding.parameters(), lr=0.5), 2.0**8)
        for index, batch in enumerate(batches):
            optimizer.zero_grad()
            optimizer.backward(embedding(batch).pow(2).sum())
            optimizer.clip_grad_by_norm(0.5)
            assert optimizer.step()
            if index == 1:
                optimizer.zero_grad()
                optimizer.backward(embedding(batch).sum() * INF)
                assert optimizer.step().culprit == ("p0",)

    assert torch.allclose(train(ours), train(torch_loop), atol=1e-6)


def test_parameters_of_several_dtypes_share_one_norm():
    params = [nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2, dtype=torch.float64))]
    optimizer = boost(SGD(params, lr=1.0, foreach=True), 2.0**8)
    optimizer.backward(loss_with(params, [3.0, 4.0]))
    assert optimizer.clip_grad_by_norm(1.0).item() == pytest.approx(math.sqrt(50))
    assert optimizer.step()
    assert params[1][0].item() == pytest.approx(1 - 4 / math.sqrt(50), rel=1e-5)


def test_several_groups_keep_their_own_learning_rates():
    params = parameters(2, 2)
    optimizer = boost(SGD([{"params": params[:1], "lr": 1.0}, {"params": params[1:], "lr": 0.1}], fused=True), 2.0**8)
    assert step_on(optimizer, params, 0.5, 0.5)
    assert torch.allclose(params[0], torch.full((2,), 0.5))
    assert torch.allclose(params[1], torch.full((2,), 0.95))


@pytest.mark.parametrize("make", [AdamW, Adam, SGD])
def test_a_learning_rate_in_a_tensor_works_fused(make):
    params = parameters(4)
    optimizer = boost(make(params, lr=torch.tensor(0.1), fused=True), 2.0**8)
    assert step_on(optimizer, params, 1.0)
    assert params[0][0].item() == pytest.approx(0.9, abs=2e-3)


@both
def test_without_a_scale_every_step_after_a_bare_backward_is_decided_anew(decides):
    params = parameters(4)
    optimizer = sgd(params, decides)
    applied = []
    for grad in (0.25, NAN, 0.25, INF, 0.25):
        optimizer.zero_grad()
        loss_with(params, [grad]).backward()
        optimizer.clip_grad_by_norm(10.0)
        applied.append(optimizer.step().applied)
    assert applied == [True, False, True, False, True]
    assert torch.equal(params[0], torch.full((4,), 0.25))


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


# ---------------------------------------------------------------------- several optimizers


def backward_for(optimizers: list[Any], loss: torch.Tensor) -> None:
    from booster.update.backward import run_backward

    run_backward(loss, optimizers)


@both
def test_after_an_overflow_in_one_optimizer_the_update_of_the_other_is_right(decides):
    a, b = parameters(4), parameters(4)
    first, second = sgd(a, decides, 2.0**8), sgd(b, decides, 2.0**8)
    first.backward(loss_with(a, [INF]))
    second.backward(loss_with(b, [0.5]))
    assert not first.step()
    assert second.step()
    assert torch.equal(b[0], torch.full((4,), 0.5))
    assert (first.loss_scale, second.loss_scale) == (128.0, 256.0)
    second.zero_grad()
    second.backward(loss_with(b, [0.5]))
    assert second.step()
    assert torch.equal(b[0], torch.zeros(4))


@both
@pytest.mark.parametrize("named", ["culprit first", "culprit last"])
@pytest.mark.parametrize("order", ["culprit first", "culprit last"])
def test_a_joint_backward_is_one_decision_with_one_report(decides, order, named):
    a, b = parameters(4), parameters(4)
    first, second = sgd(a, decides, 2.0**8), sgd(b, decides, 2.0**6)
    together = [first, second] if named == "culprit first" else [second, first]
    backward_for(together, loss_with(a + b, [INF, 0.5]))
    assert float(b[0].grad[0]) == 0.5 * 64  # the smaller of both scales
    results = [each.step() for each in ([first, second] if order == "culprit first" else [second, first])]
    assert [result.applied for result in results] == [False, False]
    assert [result.culprit for result in results] == [("p0",), ("p0",)]
    assert {result.skipped_reason for result in results} == {"nonfinite_grad"}
    assert {result.loss_scale for result in results} == {64.0}
    assert (first.loss_scale, second.loss_scale) == (128.0, 32.0)
    assert torch.equal(b[0], torch.ones(4))


@both
def test_a_joint_report_names_the_loss_for_whoever_steps_second(decides):
    a, b = parameters(4), parameters(4)
    first, second = sgd(a, decides, 2.0**8), sgd(b, decides, 2.0**8)
    first.backward(loss_with(a, [NAN], NAN))
    backward_for([first, second], loss_with(a + b, [1.0, 0.5]))
    assert first.step().skipped_reason == "nonfinite_loss"
    assert second.step().skipped_reason == "nonfinite_loss"


@both
def test_a_joint_backward_that_is_finite_steps_all_and_then_each_is_free_again(decides):
    a, b = parameters(4), parameters(4)
    first, second = sgd(a, decides, 2.0**8), sgd(b, decides, 2.0**6)
    backward_for([first, second], loss_with(a + b, [0.25, 0.5]))
    assert first.step()
    assert second.step()
    assert torch.equal(a[0], torch.full((4,), 0.75))
    assert torch.equal(b[0], torch.full((4,), 0.5))
    assert not step_on(first, a, INF)
    assert step_on(second, b, 0.5)
    assert torch.equal(b[0], torch.zeros(4))


@both
def test_an_optimizer_whose_gradients_were_zeroed_is_out_of_the_joint_decision(decides):
    a, b = parameters(4), parameters(4)
    first, second = sgd(a, decides, 2.0**8), sgd(b, decides, 2.0**8)
    backward_for([first, second], loss_with(a + b, [0.5, 0.5]))
    first.zero_grad()
    first.backward(loss_with(a, [INF]))
    assert second.step()
    assert not first.step()
    assert torch.equal(b[0], torch.full((4,), 0.5))


@both
@pytest.mark.parametrize("clipped_first", [True, False])
def test_a_joint_decision_binds_an_optimizer_that_would_not_check_by_itself(decides, clipped_first):
    a, b = parameters(4), parameters(4)
    first, second = sgd(a, decides), sgd(b, decides)
    backward_for([first, second], loss_with(a + b, [NAN, 0.5]))
    first.clip_grad_by_norm(1.0)
    results = [each.step() for each in ([first, second] if clipped_first else [second, first])]
    assert [result.applied for result in results] == [False, False]
    assert torch.equal(b[0], torch.ones(4))


@both
def test_a_joint_backward_may_leave_one_optimizer_without_gradients(decides):
    a, b = parameters(4), parameters(4)
    first, second = sgd(a, decides, 2.0**8), sgd(b, decides, 2.0**8)
    backward_for([first, second], loss_with(a + b, [0.5, None]))
    assert first.step()
    assert second.step().applied
    assert torch.equal(a[0], torch.full((4,), 0.5))


@both
def test_a_gan_clips_the_generator_then_the_discriminator(decides):
    g, d = parameters(4), parameters(4)
    generator, discriminator = sgd(g, decides, 2.0**8), sgd(d, decides, 2.0**8)
    for _ in range(2):
        generator.zero_grad()
        generator.backward(loss_with(g + d, [3.0, 7.0]))  # flows through the discriminator
        generator.clip_grad_by_norm(1.0)
        assert generator.step()
        discriminator.zero_grad()
        discriminator.backward(loss_with(d, [0.25]))
        discriminator.clip_grad_by_norm(1.0)
        assert discriminator.step()
    assert torch.allclose(g[0], torch.zeros(4), atol=1e-5)
    assert torch.allclose(d[0], torch.full((4,), 0.5))
    assert (generator.loss_scale, discriminator.loss_scale) == (256.0, 256.0)


@both
def test_clips_of_two_optimizers_may_both_wait(decides):
    a, b = parameters(4), parameters(4)
    first, second = sgd(a, decides, 2.0**8), sgd(b, decides, 2.0**8)
    backward_for([first, second], loss_with(a + b, [3.0, 1.5]))
    assert float(first.clip_grad_by_norm(1.0)) == pytest.approx(6.0)
    assert float(second.clip_grad_by_norm(1.0)) == pytest.approx(3.0)
    assert first.step()
    assert second.step()
    for param in a + b:
        assert torch.allclose(param, torch.full((4,), 0.5), atol=1e-5)


# ---------------------------------------------------------------------- backward's arguments


def test_a_loss_that_cannot_be_scaled_is_refused():
    params = parameters(4)
    optimizer = sgd(params, HOST, 2.0**8)
    with pytest.raises(ValueError, match="tensor of one element"):
        optimizer.backward(params[0] * 2)
    with pytest.raises(ValueError, match="tensor of one element, got float"):
        optimizer.backward(1.0)
    with pytest.raises(RuntimeError, match="computed under no_grad"):
        optimizer.backward(torch.tensor(1.0))


@both
def test_a_loss_of_shape_one_and_of_float64_works(decides):
    params = parameters(4)
    optimizer = sgd(params, decides, 2.0**8)
    optimizer.backward((params[0] * 0.25).sum().reshape(1))
    optimizer.backward((params[0] * 0.25).sum().double())
    assert optimizer.step()
    assert torch.equal(params[0], torch.full((4,), 0.5))


@both
def test_inputs_and_retain_graph_are_those_of_torch(decides):
    params = parameters(4, 4)
    optimizer = sgd(params, decides, 2.0**8)
    loss = (params[0] * params[1]).sum() * 0.25
    optimizer.backward(loss, inputs=[params[0]], retain_graph=True)
    assert params[1].grad is None
    optimizer.backward(loss)
    assert optimizer.step()
    assert torch.equal(params[0], torch.full((4,), 0.5))
    assert torch.equal(params[1], torch.full((4,), 0.75))
