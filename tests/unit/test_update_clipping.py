"""Clips and norms: any kind, any order, any number of times, as torch's in that order."""

import math

import pytest
import torch
from prescribed import DEVICE, HOST, boost, loss_with, parameters, sgd, step_on
from torch import nn
from torch.optim import SGD

from booster.tensors.grads import clamp_values, tensor_norms, unscale_values

INF, NAN = float("inf"), float("nan")

both = pytest.mark.parametrize("decides", [HOST, DEVICE])


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
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, INF])
def test_an_empty_parameter_has_no_part_in_any_norm(decides, norm_type):
    params = parameters(3, 0)
    optimizer = sgd(params, decides, 2.0**8)
    optimizer.backward(loss_with(params, [2.0, 1.0]))
    assert float(optimizer.clip_grad_by_norm(1e6, norm_type)) == pytest.approx(2.0 * 3 ** (1 / norm_type))
    assert optimizer.step()


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
def test_clipping_before_any_backward_pass_is_refused(decides):
    optimizer = sgd(parameters(4), decides, 2.0**8)
    with pytest.raises(RuntimeError, match="came before"):
        optimizer.clip_grad_by_norm(1.0)
    with pytest.raises(RuntimeError, match="came before"):
        optimizer.clip_grad_by_value(1.0)
    optimizer.unscale_grads()
    assert optimizer.step().applied


@both
def test_what_a_clip_found_is_named_though_gradients_went_between_it_and_the_step(decides):
    params = parameters(3, 4, 5)
    optimizer = sgd(params, decides, 2.0**8)
    optimizer.backward(loss_with(params, [1.0, 1.0, INF]))
    optimizer.clip_grad_by_norm(1.0)
    params[0].grad = params[1].grad = None
    optimizer.clip_grad_by_value(1.0)
    result = optimizer.step()
    assert not result.applied
    assert result.culprit == ("p2",)


def test_gradients_of_several_dtypes_are_read_and_clamped_each_in_its_own_range():
    wide, half = torch.full((4,), 1e30, dtype=torch.float64), torch.full((4,), 3.0, dtype=torch.float16)
    assert tensor_norms([wide, half], 2.0).tolist() == [2e30, 6.0]
    clamp_values([wide, half], 1e6)  # beyond float16
    assert (wide.tolist(), half.tolist()) == ([1e6] * 4, [3.0] * 4)


@pytest.mark.parametrize("bad", [math.inf, math.nan, 1.0])
def test_an_inf_is_found_in_gradients_that_are_part_of_a_graph(bad):
    leaf = torch.ones(2, requires_grad=True)
    assert unscale_values([leaf * bad, torch.ones(2)], 0.5, check=True) == (bad != 1.0)
