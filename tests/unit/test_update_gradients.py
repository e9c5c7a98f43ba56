"""What `.grad` holds between backward and step, and which gradients a step uses."""

import copy
import math
from typing import Any

import pytest
import torch
from prescribed import DEVICE, HOST, boost, loss_with, parameters, sgd, step_on
from torch import nn
from torch.optim import SGD, Adam, AdamW

from booster.interface.optimizer import gradients_of
from booster.update.backward import run_backward

INF, NAN = float("inf"), float("nan")

both = pytest.mark.parametrize("decides", [HOST, DEVICE])


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
    run_backward(loss_with(a + b, [INF, 0.25]), gradients_of([first, second]))
    assert not first.step()
    assert not second.step()
    second.backward(loss_with(b, [0.25]))  # nothing was zeroed in between
    assert second.step()
    assert torch.equal(b[0], torch.full((4,), 0.5))


# ---------------------------------------------------------------------- which gradients
@both
def test_a_bare_backward_is_detected_after_the_gradients_of_another_were_zeroed(decides):
    params = parameters(4)
    optimizer = sgd(params, decides, 2.0**8)
    optimizer.backward(loss_with(params, [1.0]))
    optimizer.zero_grad()
    loss_with(params, [1.0]).backward()
    with pytest.raises(RuntimeError, match="bare loss.backward"):
        optimizer.step()


def backward_of(model: nn.Module, optimizer: Any, passes: str) -> None:
    """Passes of a loss: b(oosted), p(lain), u(nscale), z(ero by the model), 0 (zeroed in place by the model)."""
    for each in passes:
        if each in "z0":
            model.zero_grad(set_to_none=each == "z")
        elif each == "u":
            optimizer.unscale_grads()
        else:
            loss = loss_with([model.weight], [0.25])
            optimizer.backward(loss) if each == "b" else loss.backward()


def of_a_weight(decides: Any, scale: float | None) -> tuple[nn.Module, Any]:
    model = nn.Module()
    model.weight = nn.Parameter(torch.ones(4))
    return model, sgd([model.weight], decides, scale)


@both
@pytest.mark.parametrize("steps_before", [0, 1, 100])
@pytest.mark.parametrize("passes", ["pb", "bp", "bpb", "zpb", "0pb", "bzpb"])
def test_a_bare_backward_beside_one_with_a_scale_is_refused_in_every_order(decides, passes, steps_before):
    model, optimizer = of_a_weight(decides, 2.0**8)
    for _ in range(steps_before):
        optimizer.zero_grad()
        optimizer.backward(loss_with([model.weight], [0.0]))
        optimizer.step()
    optimizer.zero_grad()
    if steps_before == 100 and passes[0] != "b":  # then the step after is looked at
        backward_of(model, optimizer, "b")
        optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="has a part of a bare loss.backward"):
        backward_of(model, optimizer, passes)
        optimizer.step()
    optimizer.zero_grad()
    backward_of(model, optimizer, "b")
    assert optimizer.step()
    assert torch.equal(model.weight, torch.full((4,), 0.75))


@both
@pytest.mark.parametrize(
    ("scale", "passes", "sum_"),
    [(None, "pb", 2), (None, "bp", 2), (2.0**8, "bup", 2), (2.0**8, "bupb", 3), (2.0**8, "pzb", 1), (2.0**8, "p0b", 1)]
    + [(2.0**8, "bzb", 1), (2.0**8, "bb", 2)],
)
def test_a_bare_backward_is_let_through_where_nothing_is_mixed(decides, scale, passes, sum_):
    model, optimizer = of_a_weight(decides, scale)
    for step in range(4):
        backward_of(model, optimizer, passes)
        assert optimizer.step()
        assert torch.equal(model.weight, torch.full((4,), 1.0 - 0.25 * sum_ * (step + 1)))
        optimizer.zero_grad()


@both
def test_what_the_loss_of_another_network_leaves_and_is_zeroed_is_let_through(decides):
    (a,), (b,) = parameters(4), parameters(4)
    first, second = sgd([a], decides, 2.0**8), sgd([b], decides, 2.0**8)
    for _ in range(3):  # a discriminator, and a generator whose loss goes through it
        second.zero_grad()
        second.backward(loss_with([b], [0.25]))
        assert second.step()
        first.zero_grad()
        first.backward(loss_with([a, b], [0.25, 1.0]))
        assert first.step()
    assert torch.equal(b, torch.full((4,), 0.25))


def test_hooks_of_stray_passes_are_gone_after_the_first_steps_and_with_a_copy():
    model, optimizer = of_a_weight(HOST, 2.0**8)
    hooks = model.weight._post_accumulate_grad_hooks
    assert len(hooks) == 1
    assert not copy.deepcopy(optimizer).param_groups[0]["params"][0]._post_accumulate_grad_hooks
    for _ in range(3):
        backward_of(model, optimizer, "zb")
        optimizer.step()
    assert not hooks
    assert not of_a_weight(HOST, None)[0].weight._post_accumulate_grad_hooks


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
