"""Gradients that a script changes between backward and step: written to, replaced, or removed."""

import copy

import pytest
import torch
from comparing import flat
from everywhere import everywhere
from small_job import backward, boost

from booster.mixed_precision import (
    BF16NaiveMixedPrecision,
    FP16ApexMixedPrecision,
    FP16NaiveMixedPrecision,
    Int8MixedPrecision,
    TF32MixedPrecision,
)

RATE, HAND = 0.5, 0.25


def apex(level, **options):
    return lambda: FP16ApexMixedPrecision(level, verbosity=0, **options)


PRECISIONS = {
    **{name: lambda name=name: name for name in everywhere() if name != "fp16_apex"},
    "O1": apex("O1", max_loss_scale=2.0**10),
    "O2": apex("O2", max_loss_scale=2.0**10),
    "O2 static": apex("O2", loss_scale=128.0),
    "O3": apex("O3", loss_scale=128.0),
    "fp16_naive split": lambda: FP16NaiveMixedPrecision(master_weights="split"),
    "bf16_naive none": lambda: BF16NaiveMixedPrecision(master_weights="none"),
    "bf16_naive 8bit": lambda: BF16NaiveMixedPrecision(states="8bit"),
    "tf32": lambda: TF32MixedPrecision(emulate=True),
    "int8": lambda: Int8MixedPrecision(keep=()),
}
TRUE_AT_REST = ("O1", "O3")


def write(param, value):
    param.grad.fill_(value)


def write_through_data(param, value):
    param.grad.data.fill_(value)


def replace(param, value):
    param.grad = torch.full_like(param.grad, value)


def replace_data(param, value):
    param.grad.data = torch.full_like(param.grad, value)


def remove(param, value):
    param.grad = None


def plain_sgd(params):
    return torch.optim.SGD(params, lr=RATE)


@pytest.mark.crossed
@pytest.mark.parametrize(
    ("edit", "unscales"),
    [
        *((edit, True) for edit in (write, write_through_data, replace, replace_data, remove)),
        *((edit, False) for edit in (write, replace, replace_data, remove)),
    ],
)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_the_step_is_that_of_the_gradients_which_were_put_there(precision, edit, unscales):
    """Without unscaling they are taken to carry the scale that gradients carry."""
    booster, model, optimizer = boost(PRECISIONS[precision](), plain_sgd)
    before, scale = flat(model), 1.0 if precision in TRUE_AT_REST or unscales else optimizer.loss_scale
    backward(booster, model, optimizer)
    if unscales:
        optimizer.unscale_grads()
    for param in model.parameters():
        edit(param, HAND * scale)
    assert optimizer.step().applied
    moved = before - flat(model)
    expected = torch.full_like(before, 0.0 if edit is remove else RATE * HAND)
    torch.testing.assert_close(moved, expected, rtol=0.0, atol=0.0 if edit is remove else 4e-3)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_gradient_that_was_changed_is_clipped_and_added_to_as_any_other(precision):
    booster, model, optimizer = boost(PRECISIONS[precision](), plain_sgd)
    backward(booster, model, optimizer)
    optimizer.unscale_grads()
    for param in model.parameters():
        param.grad.fill_(HAND)
    count = sum(param.numel() for param in model.parameters())
    norm = HAND * count**0.5
    assert float(optimizer.clip_grad_by_norm(norm / 2)) == pytest.approx(norm, rel=1e-3)
    optimizer.unscale_grads()
    for param in model.parameters():
        torch.testing.assert_close(param.grad.float(), torch.full(param.shape, HAND / 2), rtol=1e-2, atol=0.0)
        param.grad = None
    backward(booster, model, optimizer)
    optimizer.unscale_grads()
    added = [param.grad.float() for param in model.parameters()]
    booster, model, optimizer = boost(PRECISIONS[precision](), plain_sgd)
    backward(booster, model, optimizer)
    optimizer.unscale_grads()
    for ours, param in zip(added, model.parameters(), strict=True):
        torch.testing.assert_close(ours, param.grad.float(), rtol=1e-2, atol=1e-4)


def o2():
    return boost(PRECISIONS["O2"](), plain_sgd)


def test_sums_of_o2_that_nobody_changed_are_stepped_with_all_their_bits():
    weights = []
    for shows in (False, True):
        booster, model, optimizer = o2()
        for seed in (1, 2, 3):
            backward(booster, model, optimizer, seed)
        if shows:
            optimizer.unscale_grads()
            optimizer.unscale_grads()
        optimizer.step()
        weights.append(optimizer.state_dict()["booster"]["masters"]["weights"])
    torch.testing.assert_close(weights[0], weights[1], rtol=0.0, atol=0.0)


def test_after_several_passes_of_o2_changes_want_the_sum_in_grad_first():
    booster, model, optimizer = o2()
    before = flat(model)
    for seed in (1, 2):
        backward(booster, model, optimizer, seed)
    for param in model.parameters():
        param.grad.mul_(2.0)
    with pytest.raises(
        RuntimeError, match=r"gradient of 0.weight was changed by hand .* Call optimizer.unscale_grads\(\) before"
    ):
        optimizer.step()
    assert torch.equal(flat(model), before)

    booster, model, optimizer = o2()
    for seed in (1, 2):
        backward(booster, model, optimizer, seed)
    optimizer.unscale_grads()
    shown = torch.cat([param.grad.float().flatten() for param in model.parameters()])
    for param in model.parameters():
        param.grad.mul_(2.0)
    optimizer.step()
    torch.testing.assert_close(before - flat(model), RATE * 2 * shown, rtol=0.0, atol=2e-3)


def test_gradients_that_the_model_zeroed_are_gone_under_o2_too():
    booster, model, optimizer = o2()
    backward(booster, model, optimizer, 1)
    model.zero_grad()
    backward(booster, model, optimizer, 2)
    optimizer.step()
    expected = o2()
    backward(*expected, 2)
    expected[2].step()
    assert torch.equal(flat(model), flat(expected[1]))


@pytest.mark.parametrize("precision", ["fp32", "O2"])
def test_a_copy_has_no_gradients_as_copies_of_parameters_have_none(precision):
    booster, model, optimizer = boost(PRECISIONS[precision](), plain_sgd)
    before = flat(model)
    backward(booster, model, optimizer)
    copied, its_optimizer = copy.deepcopy((model, optimizer))
    its_optimizer.step()
    optimizer.step()
    assert torch.equal(flat(copied), before)
    assert not torch.equal(flat(model), before)


def test_gradients_that_conflict_are_projected_as_in_float32():
    """Of two losses, as in PCGrad: each gradient loses what points against the other."""
    moved = {}
    for precision in ("fp32", "O2"):
        booster, model, optimizer = boost(PRECISIONS[precision](), plain_sgd)
        before, of_losses = flat(model), []
        for seed in (1, 2):
            optimizer.zero_grad()
            backward(booster, model, optimizer, seed)
            optimizer.unscale_grads()
            of_losses.append([param.grad.float().clone() for param in model.parameters()])
        for param, mine, other in zip(model.parameters(), *of_losses, strict=True):
            along = torch.sum(mine * other).clamp(max=0.0)
            param.grad = (mine - along / other.square().sum() * other + other).to(param.dtype)
        optimizer.step()
        moved[precision] = before - flat(model)
    torch.testing.assert_close(moved["O2"], moved["fp32"], rtol=0.0, atol=2e-3)
    assert moved["fp32"].abs().max() > 0.05


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("steps_before", [0, 1])
def test_gradients_that_no_backward_brought_move_the_weights_or_raise(precision, steps_before):
    booster, model, optimizer = boost(PRECISIONS[precision](), plain_sgd)
    for _ in range(steps_before):
        backward(booster, model, optimizer)
        optimizer.step()
        optimizer.zero_grad()
    before = flat(model)
    for param in model.parameters():
        param.grad = torch.full_like(param, HAND)
    if optimizer.loss_scale != 1.0 and precision not in TRUE_AT_REST or precision.startswith("O2"):
        with pytest.raises(RuntimeError, match="there are gradients, but no b.backward"):
            optimizer.step()
        assert torch.equal(flat(model), before)
    else:
        assert optimizer.step().applied
        torch.testing.assert_close(before - flat(model), torch.full_like(before, RATE * HAND), rtol=0.0, atol=4e-3)
