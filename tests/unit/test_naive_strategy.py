"""fp16_naive and bf16_naive: half parameters, the Megatron scaler, and what step() does and reports."""

import logging

import pytest
import torch
from torch import nn

from booster import Booster
from booster.mixed_precision import BF16NaiveMixedPrecision, FP16NaiveMixedPrecision, available, make

KINDS = {
    "fp16_naive": (FP16NaiveMixedPrecision, torch.float16),
    "bf16_naive": (BF16NaiveMixedPrecision, torch.bfloat16),
}
both = pytest.mark.parametrize("name", KINDS)


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3))


def boost(precision, model=None, lr=0.1, optimizer=torch.optim.SGD, **options):
    model = model or net()
    booster = Booster("cpu", precision, **options)
    boosted, optimizer, criterion, *_ = booster.boost(
        model, optimizer(model.parameters(), lr=lr), nn.CrossEntropyLoss()
    )
    return booster, boosted, optimizer, criterion


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(16, 4, generator=generator), torch.randint(0, 3, (16,), generator=generator)


def step(booster, model, optimizer, criterion, seed=0, factor=1.0):
    x, y = batch(seed)
    optimizer.zero_grad()
    booster.backward(criterion(model(x), y) * factor, optimizer)
    return optimizer.step()


def masters(optimizer):
    return optimizer.state_dict()["booster"]["masters"]["weights"]


def test_both_are_known_by_name_with_the_documented_defaults():
    assert {"fp16_naive", "bf16_naive"} <= set(available())
    scaler = make("fp16_naive").make_scaler()
    assert (scaler.scale, scaler.min_scale, scaler.max_scale) == (2.0**16, 1.0, 2.0**32)
    assert (scaler.growth_factor, scaler.backoff_factor) == (2.0, 0.5)
    assert (scaler.growth_interval, scaler.hysteresis) == (1000, 2)
    assert not make("bf16_naive").make_scaler().enabled


@both
def test_parameters_activations_and_gradients_are_half_but_for_batch_norm(name):
    dtype = KINDS[name][1]
    booster, model, optimizer, criterion = boost(name)
    seen = []
    model.get_submodule("2").register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    assert model(batch()[0]).dtype == torch.float32
    step(booster, model, optimizer, criterion)
    assert set(seen) == {dtype}
    for key, param in model.named_parameters():
        wanted = torch.float32 if key.startswith("1.") else dtype
        assert (param.dtype, param.grad.dtype) == (wanted, wanted)
    assert optimizer.param_groups[0]["params"][0] is model.get_parameter("0.weight")


@both
def test_output_to_fp32_false_returns_half(name):
    kind, dtype = KINDS[name]
    _, model, *_ = boost(kind(output_to_fp32=False))
    assert model(batch()[0]).dtype == dtype


@both
@pytest.mark.parametrize("form", ["fp32", "split"])
def test_masters_start_from_the_float32_weights_and_not_from_rounded_ones(name, form):
    original = {key: value.clone() for key, value in net().named_parameters()}
    *_, optimizer, _ = boost(KINDS[name][0](master_weights=form))
    for key, master in masters(optimizer).items():
        error = (master - original[key]).abs().max()
        assert error <= (2.0**-39 if (name, form) == ("fp16_naive", "split") else 0.0)
    assert set(masters(optimizer)) == {"0.weight", "0.bias", "3.weight", "3.bias"}


@both
def test_a_model_that_arrives_in_half_is_accepted_and_masters_start_from_its_weights(name):
    dtype = KINDS[name][1]
    model = net().to(dtype)
    original = {key: value.float() for key, value in model.named_parameters()}
    booster, model, optimizer, criterion = boost(name, model)
    assert all(torch.equal(master, original[key]) for key, master in masters(optimizer).items())
    assert step(booster, model, optimizer, criterion)


@both
def test_keep_fp32_pins_modules_and_their_parameters_keep_every_bit(name):
    kind, dtype = KINDS[name]
    original = net().get_parameter("3.weight").clone()
    booster, model, optimizer, criterion = boost(kind(keep_fp32=["3", nn.BatchNorm1d]))
    assert torch.equal(model.get_parameter("3.weight"), original)
    assert model.get_parameter("0.weight").dtype == dtype
    assert step(booster, model, optimizer, criterion)
    assert not torch.equal(model.get_parameter("3.weight"), original)


@both
@pytest.mark.parametrize("form", ["fp32", "split"])
def test_an_optimizer_that_has_stepped_before_keeps_its_state_in_float32(name, form):
    model = net()
    inner = torch.optim.AdamW(model.parameters(), lr=0.1)
    nn.CrossEntropyLoss()(model(batch()[0]), batch()[1]).backward()
    inner.step()
    before = {key: inner.state[param]["exp_avg"].clone() for key, param in model.named_parameters()}
    booster = Booster("cpu", KINDS[name][0](master_weights=form))
    model, optimizer, criterion, *_ = booster.boost(model, inner, nn.CrossEntropyLoss())
    for key, param in model.named_parameters():
        state = optimizer.state[param]
        assert torch.equal(state["exp_avg"], before[key])
        assert state["exp_avg"].dtype == torch.float32
    assert step(booster, model, optimizer, criterion)
    assert {int(state["step"]) for state in optimizer.state.values()} == {2}


def test_a_step_that_grows_the_scale_divides_by_the_scale_that_backward_used():
    for interval in (1, 1000):
        model = nn.Linear(1, 1, bias=False)
        nn.init.ones_(model.weight)
        precision = FP16NaiveMixedPrecision(initial_scale=8.0, growth_interval=interval)
        booster = Booster("cpu", precision)
        model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1.0))
        booster.backward(model(torch.ones(1, 1)).sum(), optimizer)
        result = optimizer.step()
        assert model.weight.item() == 0.0  # 1 - lr * 1; divided by the new scale it would be 0.5
        assert (result.loss_scale, result.grad_norm) == (8.0, 1.0)
        assert optimizer.loss_scale == (16.0 if interval == 1 else 8.0)


def test_the_hysteresis_trace_of_the_megatron_rule_is_reproduced():
    precision = FP16NaiveMixedPrecision(initial_scale=65536.0, hysteresis=2, growth_interval=4, min_scale=None)
    scaler = precision.make_scaler()
    trace = []
    for found in (1, 0, 0, 0, 1, 1, 0, 0, 0, 0, 1, 1):
        scaler.update(bool(found))
        trace.append(int(scaler.scale) // 1024)
    assert trace == [64, 64, 64, 64, 32, 16, 16, 16, 16, 32, 32, 16]


@both
def test_clip_grad_norm_clips_inside_step_and_grad_norm_is_the_true_norm(name):
    results = []
    for inside in (True, False):
        booster, model, optimizer, criterion = boost(KINDS[name][0](clip_grad_norm=0.05 if inside else 0.0))
        x, y = batch()
        booster.backward(criterion(model(x), y), optimizer)
        true = torch.stack([p.grad.float().norm() for p in model.parameters()]).norm() / optimizer.loss_scale
        if not inside:
            optimizer.clip_grad_by_norm(0.05)
        result = optimizer.step()
        assert result.grad_norm == pytest.approx(float(true), rel=1e-5)
        assert result.grad_norm > 0.05
        results.append(masters(optimizer))
    assert all(torch.equal(a, b) for a, b in zip(results[0].values(), results[1].values(), strict=True))
    unclipped = boost(name)
    step(*unclipped)
    assert not torch.equal(masters(unclipped[2])["3.weight"], results[0]["3.weight"])


@both
def test_two_different_norms_to_clip_to_raise_and_equal_ones_do_not(name):
    kind = KINDS[name][0]
    with pytest.raises(ValueError, match=r"clip_grad_norm is 2.0 for Booster and 1.0 for .*; give it once"):
        boost(kind(clip_grad_norm=1.0), clip_grad_norm=2.0)
    assert step(*boost(kind(clip_grad_norm=1.0), clip_grad_norm=1.0))


@both
def test_zeros_in_the_gradients_are_counted_when_asked(name):
    booster, model, optimizer, criterion = boost(KINDS[name][0](log_num_zeros_in_grad=True))
    x, y = batch()
    x[:, 1:3] = 0.0
    booster.backward(criterion(model(x), y), optimizer)
    zeros = sum(int((param.grad == 0).sum()) for param in model.parameters())
    result = optimizer.step()
    assert result.num_zeros_in_grad == zeros >= 16
    assert step(*boost(name)).num_zeros_in_grad is None


def test_verbose_logs_changes_of_the_scale_and_zeros_and_nothing_is_logged_otherwise(caplog):
    for verbose in (True, False):
        caplog.clear()
        with caplog.at_level(logging.INFO, "booster.masters"):
            run = boost(FP16NaiveMixedPrecision(verbose=verbose, log_num_zeros_in_grad=True, growth_interval=1))
            step(*run)
        wanted = ["elements of the gradients were zero", "loss scale 65536 -> 131072 after an applied step"]
        assert len(caplog.messages) == (2 if verbose else 0)
        assert all(part in message for part, message in zip(wanted, caplog.messages, strict=False))


def test_a_step_leaves_the_gradients_of_pinned_modules_with_their_scale_as_those_of_the_others():
    booster, model, optimizer, criterion = boost("fp16_naive", optimizer=torch.optim.AdamW)
    x, y = batch()
    booster.backward(criterion(model(x), y), optimizer)
    before = {name: param.grad.clone() for name, param in model.named_parameters()}
    assert optimizer.step()
    assert all(torch.equal(param.grad, before[name]) for name, param in model.named_parameters())


def test_options_may_be_given_in_the_documented_order():
    precision = FP16NaiveMixedPrecision(False, 2.0**10, 1, 2, 0.5, 1000, 2, 2.0**32, 0.0, False, True, False)
    assert precision.make_scaler().scale == 2.0**10
    assert precision.output_dtype is None


def test_a_clip_by_value_beyond_the_range_of_scaled_float16_gradients_changes_nothing():
    model = nn.Linear(2, 1, bias=False)
    booster = Booster("cpu", FP16NaiveMixedPrecision())
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), 0.1))
    for bound, expected in ((1.0, 0.25), (0.125, 0.125)):
        booster.backward(model(torch.ones(1, 2)).sum() / 4, optimizer)
        optimizer.clip_grad_by_value(bound)
        optimizer.unscale_grads()
        assert model.weight.grad.tolist() == [[expected, expected]]
        optimizer.zero_grad()


def test_masters_are_not_dropped_by_a_precision_that_keeps_none():
    model = nn.Linear(2, 1)
    _, optimizer, *_ = Booster("cpu", "bf16_naive").boost(model, torch.optim.AdamW(model.parameters()))
    state = optimizer.state_dict()
    plain = nn.Linear(2, 1)
    _, other, *_ = Booster("cpu", "bf16").boost(plain, torch.optim.AdamW(plain.parameters()))
    with pytest.raises(ValueError, match="keeps none"):
        other.load_state_dict(state)
    del state["booster"]["masters"]
    other.load_state_dict(state)
