"""Several optimizers: each with its own scale, or together as one decision."""

import pytest
import torch
from prescribed import DEVICE, HOST, loss_with, parameters, sgd, step_on

from booster.interface.optimizer import gradients_of
from booster.update.backward import run_backward

INF, NAN = float("inf"), float("nan")

both = pytest.mark.parametrize("decides", [HOST, DEVICE])


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
    run_backward(loss_with(a + b, [INF, 0.5]), gradients_of(together))
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
    run_backward(loss_with(a + b, [1.0, 0.5]), gradients_of([first, second]))
    assert first.step().skipped_reason == "nonfinite_loss"
    assert second.step().skipped_reason == "nonfinite_loss"


@both
def test_a_joint_backward_that_is_finite_steps_all_and_then_each_is_free_again(decides):
    a, b = parameters(4), parameters(4)
    first, second = sgd(a, decides, 2.0**8), sgd(b, decides, 2.0**6)
    run_backward(loss_with(a + b, [0.25, 0.5]), gradients_of([first, second]))
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
    run_backward(loss_with(a + b, [0.5, 0.5]), gradients_of([first, second]))
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
    run_backward(loss_with(a + b, [NAN, 0.5]), gradients_of([first, second]))
    first.clip_grad_by_norm(1.0)
    results = [each.step() for each in ([first, second] if clipped_first else [second, first])]
    assert [result.applied for result in results] == [False, False]
    assert torch.equal(b[0], torch.ones(4))


@both
def test_a_joint_backward_may_leave_one_optimizer_without_gradients(decides):
    a, b = parameters(4), parameters(4)
    first, second = sgd(a, decides, 2.0**8), sgd(b, decides, 2.0**8)
    run_backward(loss_with(a + b, [0.5, None]), gradients_of([first, second]))
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
    run_backward(loss_with(a + b, [3.0, 1.5]), gradients_of([first, second]))
    assert float(first.clip_grad_by_norm(1.0)) == pytest.approx(6.0)
    assert float(second.clip_grad_by_norm(1.0)) == pytest.approx(3.0)
    assert first.step()
    assert second.step()
    for param in a + b:
        assert torch.allclose(param, torch.full((4,), 0.5), atol=1e-5)


@both
@pytest.mark.parametrize("scale", [None, 2.0**8])
@pytest.mark.parametrize("max_norm", [0.25, 0.0])
def test_a_clip_holds_for_gradients_that_outlive_a_step_skipped_for_the_sake_of_another(decides, scale, max_norm):
    a, b = parameters(4), parameters(4)
    first, second = sgd(a, decides, scale), sgd(b, decides, scale)
    run_backward(loss_with(a + b, [INF, 0.5]), gradients_of([first, second]))
    first.clip_grad_by_norm(1.0)
    second.clip_grad_by_norm(max_norm)  # of 1.0
    assert not first.step()
    assert not second.step()
    second.backward(loss_with(b, [0.125]))
    assert second.step()
    assert torch.allclose(b[0], torch.full((4,), 1.0 - 0.5 * max_norm - 0.125), atol=1e-6)
