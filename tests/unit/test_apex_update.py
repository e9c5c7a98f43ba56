"""What `fp16_apex` does between backward and step, each property of apex's own tests among it."""

import collections
import itertools
import logging
import math

import pytest
import torch
from torch import nn

from benchmarks.waits import HostReads, as_on_a_gpu
from booster import Booster
from booster.mixed_precision import FP16ApexMixedPrecision
from booster.mixed_precision import apex_amp as amp


class Layers(nn.Module):
    """A half and a float32 part under O2: the first by a product, the second by BatchNorm's affine parameters."""

    def __init__(self, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.product = nn.Parameter(torch.randint(-4, 5, (4, 4), generator=generator) / 4)
        # Variance and eps add up to 1 exactly; torch before 2.13 and cuDNN refuse an eps of 0.
        self.norm = nn.BatchNorm1d(4, eps=0.0625)
        self.norm.running_var.fill_(0.9375)

    def forward(self, x):
        # Eval mode makes BatchNorm an affine map, so that all numbers are short and no dtype rounds them.
        return self.norm(x @ self.product)


def small_batch(seed):
    generator = torch.Generator().manual_seed(100 + seed)
    return torch.randint(-2, 3, (2, 4), generator=generator).float()


@pytest.fixture(autouse=True)
def no_session_left():
    yield
    amp.shutdown()


def loss_of(model, index):
    return model(small_batch(index)).float().sum() * (0.5 + index)


def build(models, num_optimizers):
    params = [list(model.parameters()) for model in models]
    if num_optimizers == 1:
        return [torch.optim.SGD([{"params": p} for p in params], lr=0.0625, momentum=0.5)]
    return [
        torch.optim.SGD([{"params": params[0]}], lr=0.0625, momentum=0.5),
        torch.optim.SGD([{"params": p} for p in params[1:]], lr=0.125),
    ]


def losses_of(models):
    """Two losses: with three models the last shares both."""
    first = loss_of(models[0], 0)
    second = loss_of(models[1], 1)
    if len(models) == 3:
        first = first + loss_of(models[2], 2)
        second = second + loss_of(models[2], 3)
    return [first, second]


def optimizers_of_loss(index, optimizers, num_models):
    if len(optimizers) == 1:
        return optimizers
    if index == 0:
        return optimizers if num_models == 3 else optimizers[:1]
    return optimizers[1:]


def reference(num_models, num_optimizers, skipped, steps):
    models = [Layers(seed).eval() for seed in range(num_models)]
    optimizers = build(models, num_optimizers)
    for step in range(steps):
        for optimizer in optimizers:
            optimizer.zero_grad()
        for loss in losses_of(models):
            loss.backward()
        for index, optimizer in enumerate(optimizers):
            if (step, index) not in skipped:
                optimizer.step()
    return [p.detach().clone() for model in models for p in model.parameters()]


def spoil(value):
    """A hook that puts `value` into one element of a gradient."""

    def hook(param):
        param.grad.view(-1)[0] = value

    return hook


@pytest.mark.crossed
@pytest.mark.parametrize("zeroing", ["optimizer", "model", "none"])
@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("num_optimizers", [1, 2])
@pytest.mark.parametrize("num_models", [2, 3])
def test_models_optimizers_and_losses_combine_and_exactly_the_right_steps_are_skipped(
    num_models, num_optimizers, level, zeroing
):
    injections = [(None, 0, "half"), *itertools.product((0, 1), (0, 1), ("half", "fp32"))]
    for num_scalers, injection in itertools.product((1, 2), injections):
        train_and_compare(num_models, num_optimizers, level, zeroing, num_scalers, *injection)


def train_and_compare(num_models, num_optimizers, level, zeroing, num_scalers, inf_step, inf_loss, where):
    precision = FP16ApexMixedPrecision(level, loss_scale="dynamic", num_losses=num_scalers, verbosity=0)
    for index in range(num_scalers):
        precision.scales[index].scale = 4.0 ** (index + 1)
    booster = Booster("cpu", precision)
    plain = [Layers(seed).eval() for seed in range(num_models)]
    made = build(plain, num_optimizers)
    held = [plain[:1], plain[1:]] if num_optimizers == 2 else [plain]
    models, optimizers = {}, []
    for optimizer, own in zip(made, held, strict=True):
        for model in own[1:]:
            models[id(model)] = booster.boost(model)[0]
        models[id(own[0])], boosted, *_ = booster.boost(own[0], optimizer)
        optimizers.append(boosted)
    models = [models[id(model)] for model in plain]
    target = plain[inf_loss].product if where == "half" else plain[inf_loss].norm.bias
    skipped = set()
    for step in range(3):
        if zeroing == "none":  # what an optimizer that steps on fresh gradients each time leaves behind
            for param in (p for model in plain for p in model.parameters()):
                param.grad = None
            for optimizer in optimizers:
                optimizer._update.gradients.reset(None)
        else:
            for owner in optimizers if zeroing == "optimizer" else models:
                owner.zero_grad()
        for index, loss in enumerate(losses_of(models)):
            of_loss = optimizers_of_loss(index, optimizers, num_models)
            handle = None
            if (step, index) == (inf_step, inf_loss):
                handle = target.register_post_accumulate_grad_hook(spoil(math.inf))
                skipped |= {(step, optimizers.index(optimizer)) for optimizer in of_loss}
            booster.backward(loss, of_loss, loss_id=index % num_scalers)
            if handle is not None:
                handle.remove()
        for index, optimizer in enumerate(optimizers):
            assert optimizer.step().applied == ((step, index) not in skipped)
    expected = reference(num_models, num_optimizers, skipped, 3)
    got = [p for model in plain for p in model.parameters()]
    masters = [p for optimizer in optimizers for p in amp.master_params(optimizer)]
    for param, value in zip(got, expected, strict=True):
        torch.testing.assert_close(param.detach().float(), value.to(param.dtype).float(), rtol=5e-3, atol=5e-3)
    if level == "O2":
        for master, value in zip(masters, expected, strict=True):
            torch.testing.assert_close(master.detach(), value, rtol=1e-3, atol=1e-3)
    halvings = [0] * num_scalers
    if inf_step is not None:
        halvings[inf_loss % num_scalers] = 1
    assert [precision.scales[i].scale for i in range(num_scalers)] == [
        4.0 ** (i + 1) / 2**n for i, n in enumerate(halvings)
    ]


def boosted_pair(level="O1", lr=0.25, model=None, **options):
    options = {"max_loss_scale": 2.0**10, **options}
    booster = Booster("cpu", FP16ApexMixedPrecision(level, verbosity=0, **options), max_consecutive_skips=None)
    plain = model or Layers(0).eval()
    model, optimizer, *_ = booster.boost(plain, torch.optim.SGD(plain.parameters(), lr=lr, momentum=0.5))
    return booster, plain, model, optimizer


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_scales_and_skips_of_an_overflow_are_in_the_state(level):
    booster, _, model, optimizer = boosted_pair(level, num_losses=3, loss_scale="dynamic")
    overflows = {0: 1, 1: 3, 2: 0}
    for loss_id, count in overflows.items():
        for _ in range(count):
            booster.backward(model(small_batch(0)).float().sum() * math.inf, optimizer, loss_id=loss_id)
            assert not optimizer.step()
            optimizer.zero_grad()
    state = booster.precision.scales.amp_state_dict()
    assert dict(state) == {
        f"loss_scaler{i}": {"loss_scale": 2.0**10 / 2**n, "unskipped": 0} for i, n in overflows.items()
    }
    saved = optimizer.state_dict()["booster"]["loss_scaler"]
    assert saved == {key: {**entry, "dynamic": True} for key, entry in state.items()}


@pytest.mark.parametrize("loss_id", [2, -1])
def test_a_loss_beyond_num_losses_raises_index_error(loss_id):
    booster, _, model, optimizer = boosted_pair(num_losses=2)
    with pytest.raises(IndexError, match=f"loss_id={loss_id}.*num_losses=2"):
        booster.backward(loss_of(model, 0), optimizer, loss_id=loss_id)


def test_a_skip_waits_for_the_next_step_even_if_later_passes_are_clean():
    booster, plain, model, optimizer = boosted_pair()
    before = plain.product.detach().clone()
    booster.backward(loss_of(model, 0) * math.inf, optimizer)
    optimizer.zero_grad()
    booster.backward(loss_of(model, 0), optimizer)
    result = optimizer.step()
    assert not result
    assert result.skipped_reason == "nonfinite_loss"
    assert torch.equal(plain.product, before)
    booster.backward(loss_of(model, 0), optimizer)
    assert optimizer.step()


def test_the_culprit_of_a_skip_is_named():
    booster, plain, model, optimizer = boosted_pair("O2")
    plain.norm.weight.register_post_accumulate_grad_hook(spoil(math.nan))
    booster.backward(loss_of(model, 0), optimizer)
    result = optimizer.step()
    assert (result.culprit, result.skipped_reason) == (("norm.weight",), "nonfinite_grad")


def test_a_static_scale_lets_an_inf_into_the_weights():
    booster, plain, model, optimizer = boosted_pair(loss_scale=128.0)
    booster.backward(loss_of(model, 0) * math.inf, optimizer)
    assert optimizer.step()
    assert not plain.product.isfinite().all()
    assert optimizer.loss_scale == 128.0


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_every_backward_but_the_last_of_an_accumulation_is_delayed(level):
    booster, plain, model, optimizer = boosted_pair(level)
    scale = booster.precision.scales[0]
    with booster.accumulate(model, optimizer, 3):
        for index in range(3):
            booster.backward(loss_of(model, index), optimizer)
            assert scale.unskipped == (1 if index == 2 else 0)
    with booster.no_sync(model):
        booster.backward(loss_of(model, 0), optimizer)
    assert scale.unskipped == 1
    with pytest.raises(RuntimeError, match="unfinished accumulation"):
        optimizer.step()
    booster.backward(loss_of(model, 0), optimizer)
    assert scale.unskipped == 2
    expected = Layers(0).eval()
    for index in range(3):
        (loss_of(expected, index) / 3).backward()
    for _ in range(2):
        loss_of(expected, 0).backward()
    masters = list(amp.master_params(optimizer))
    for master, param in zip(masters, expected.parameters(), strict=True):
        torch.testing.assert_close(master.grad, param.grad, rtol=2e-3, atol=2e-3)


def test_no_sync_of_another_model_delays_nothing():
    booster, _, model, optimizer = boosted_pair()
    other = booster.boost(nn.Linear(2, 2))[0]
    with booster.no_sync(other):
        booster.backward(loss_of(model, 0), optimizer)
    assert optimizer.step()


def test_delayed_passes_of_losses_with_different_scales_add_true_gradients():
    booster, plain, model, optimizer = boosted_pair(num_losses=2)
    booster.precision.scales[0].scale, booster.precision.scales[1].scale = 16.0, 2.0
    with booster.no_sync(model):
        booster.backward(loss_of(model, 0), optimizer, loss_id=0)
    booster.backward(loss_of(model, 1), optimizer, loss_id=1)
    expected = Layers(0).eval()
    (loss_of(expected, 0) + loss_of(expected, 1)).backward()
    torch.testing.assert_close(plain.product.grad, expected.product.grad)


@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_backward_that_raises_leaves_the_gradients_of_before(level):
    booster, plain, model, optimizer = boosted_pair(level, loss_scale="dynamic")
    booster.backward(loss_of(model, 0), optimizer)
    before = [p.grad.clone() for p in amp.master_params(optimizer)]

    class Broken(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x.clone()

        @staticmethod
        def backward(ctx, grad):
            raise ZeroDivisionError

    half_way = model(Broken.apply(small_batch(1).requires_grad_())).float().sum()
    with pytest.raises(ZeroDivisionError):
        booster.backward(half_way, optimizer)
    for master, grad in zip(amp.master_params(optimizer), before, strict=True):
        assert torch.equal(master.grad, grad)
    assert booster.precision.scales[0].unskipped == 1
    booster.backward(loss_of(model, 0), optimizer)
    for master, grad in zip(amp.master_params(optimizer), before, strict=True):
        torch.testing.assert_close(master.grad, 2 * grad)
    assert optimizer.step()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_gradients_that_are_not_zeroed_go_on_adding_up_without_the_clip_twice(level):
    booster, plain, model, optimizer = boosted_pair(level)
    booster.backward(loss_of(model, 0), optimizer)
    optimizer.clip_grad_by_norm(1.0)
    optimizer.step()
    kept = plain.norm.bias.grad.clone()  # a float32 parameter at both levels; a step leaves its gradient
    booster.backward(loss_of(model, 0), optimizer)
    expected = Layers(0).eval()
    loss_of(expected, 0).backward()
    nn.utils.clip_grad_norm_(expected.parameters(), 1.0)
    first = expected.norm.bias.grad.clone()
    torch.testing.assert_close(plain.norm.bias.grad, first + torch.full((4,), 1.0), rtol=1e-3, atol=1e-3)
    assert kept.shape == first.shape


def test_a_closure_runs_where_apex_lets_it():
    booster, plain, model, optimizer = boosted_pair("O1")

    def closure():
        optimizer.zero_grad()
        loss = loss_of(model, 0)
        booster.backward(loss, optimizer)
        return loss

    before = plain.product.detach().clone()
    optimizer.step(torch.enable_grad()(closure))
    assert not torch.equal(plain.product, before)
    booster, plain, model, optimizer = boosted_pair("O2")
    with pytest.raises(RuntimeError, match="Currently, Amp does not support closure use with optimizers"):
        optimizer.step(lambda: None)


class Delegating(torch.optim.Optimizer):
    """An optimizer around another, as LARC is: it changes gradients, then lets the other step."""

    def __init__(self, inner):
        self.inner = inner

    def __getattr__(self, name):
        if name == "inner":
            raise AttributeError(name)
        return getattr(self.inner, name)

    @property
    def param_groups(self):
        return self.inner.param_groups

    @param_groups.setter
    def param_groups(self, groups):
        self.inner.param_groups = groups

    @property
    def state(self):
        return self.inner.state

    @state.setter
    def state(self, state):
        self.inner.state = state

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    param.grad = param.grad * 0.5
        self.inner.step(closure)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_an_optimizer_that_wraps_another_survives(level):
    plain = Layers(0).eval()
    booster = Booster("cpu", FP16ApexMixedPrecision(level, verbosity=0, max_loss_scale=2.0**10))
    model, optimizer, *_ = booster.boost(plain, Delegating(torch.optim.SGD(plain.parameters(), lr=0.25)))
    expected = Layers(0).eval()
    reference_optimizer = Delegating(torch.optim.SGD(expected.parameters(), lr=0.25))
    for index in range(2):
        optimizer.zero_grad()
        booster.backward(loss_of(model, index), optimizer)
        assert optimizer.step()
        reference_optimizer.zero_grad()
        loss_of(expected, index).backward()
        reference_optimizer.step()
    for param, other in zip(plain.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(param.detach().float(), other.detach(), rtol=2e-3, atol=2e-3)


def test_an_update_can_be_driven_without_booster_backward():
    booster, plain, model, optimizer = boosted_pair()
    update = optimizer._update.gradients
    loss = loss_of(model, 0)
    scale = update.next_scale
    update.before_backward(scale)
    (loss * scale).backward()
    update.after_backward(loss)
    assert booster.precision.scales[0].unskipped == 1
    expected = Layers(0).eval()
    loss_of(expected, 0).backward()
    torch.testing.assert_close(plain.product.grad, expected.product.grad)
    assert optimizer.step()


def test_half_parameters_without_masters_are_not_stepped_by_a_kernel_that_ignores_them():
    plain = nn.Linear(64, 64, bias=False)
    before = plain.weight.detach().clone()
    booster = Booster("cpu", FP16ApexMixedPrecision("O3", verbosity=0))
    model, optimizer, *_ = booster.boost(plain, torch.optim.SGD(plain.parameters(), lr=0.5))
    booster.backward(model(torch.ones(1, 64)).sum(), optimizer)
    optimizer.step()
    torch.testing.assert_close(plain.weight.float(), before - 0.5, rtol=1e-2, atol=1e-2)
    other = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"SGD\(fused=True\) leaves float16 parameters on CPU as they are"):
        booster.boost(other, torch.optim.SGD(other.parameters(), lr=0.5, fused=True))


def initialized(seed=0, level="O1", optimizer=torch.optim.SGD, **options):
    plain = Layers(seed).eval()
    return amp.initialize(plain, optimizer(plain.parameters(), lr=0.25), opt_level=level, verbosity=0, **options)


def scaled_pass(loss, optimizers, **options):
    with amp.scale_loss(loss, optimizers, **options) as scaled:
        scaled.sum().backward()


def true_gradients(seed, times=1.0):
    plain = Layers(seed).eval()
    (loss_of(plain, 0) * times).backward()
    return [p.grad for p in plain.parameters()]


def assert_true(optimizer, seed, times=1.0):
    for master, grad in zip(amp.master_params(optimizer), true_gradients(seed, times), strict=True):
        torch.testing.assert_close(master.grad.float(), grad, rtol=2e-3, atol=2e-3 * times)


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_pairs_of_two_initializes_share_the_newer_scales_and_both_have_true_gradients(level):
    pairs = [initialized(seed, level, max_loss_scale=2.0**10) for seed in (0, 1)]
    (first, optimizer), (second, other) = pairs
    scaled_pass(loss_of(first, 0) * math.inf, optimizer)
    assert amp.state_dict()["loss_scaler0"] == {"loss_scale": 2.0**9, "unskipped": 0}
    assert not optimizer.step()
    for model, own in pairs:
        own.zero_grad()
        scaled_pass(loss_of(model, 0), own)
    for seed, (_, own) in enumerate(pairs):
        assert_true(own, seed)
        assert own.loss_scale == 2.0**9
        assert own.step()
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 128.0, "unskipped": 3}})
    assert optimizer.loss_scale == other.loss_scale == 128.0


def test_a_pair_whose_scale_has_other_options_keeps_it_with_a_warning_and_may_share_a_loss(caplog):
    first, optimizer = initialized(0, "O2", max_loss_scale=2.0**10)
    with caplog.at_level(logging.WARNING):
        second, other = initialized(1, "O0")
    assert "1 optimizer(s) of an earlier amp.initialize keep their own loss scales" in caplog.text
    assert (optimizer.loss_scale, other.loss_scale) == (2.0**10, 1.0)
    # Far below the smallest number of float16, so only its own scale saves it.
    scaled_pass(loss_of(first, 0) * 2.0**-26, optimizer)
    assert_true(optimizer, 0, 2.0**-26)
    assert any(master.grad.any() for master in list(amp.master_params(optimizer))[:1])
    optimizer.zero_grad()
    scaled_pass(loss_of(first, 0) + loss_of(second, 0), (optimizer, other))
    assert_true(optimizer, 0)
    assert_true(other, 1)
    scaled_pass((loss_of(first, 0) + loss_of(second, 0)) * math.inf, [optimizer, other])
    assert (optimizer.loss_scale, other.loss_scale) == (2.0**9, 1.0)
    assert not optimizer.step()
    assert not other.step()


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_loss_of_several_elements_may_overflow(level):
    model, optimizer = initialized(0, level, max_loss_scale=2.0**10)
    scaled_pass(model(small_batch(0)).float().sum(1), optimizer)
    assert optimizer.step()
    scaled_pass(model(small_batch(0)).float().sum(1) * torch.tensor([1.0, math.inf]), optimizer)
    result = optimizer.step()
    assert (result.applied, result.skipped_reason) == (False, "nonfinite_loss")
    scaled_pass(model(small_batch(0)).float().sum(1), optimizer)
    optimizer.clip_grad_by_norm(1.0)  # from here on the step looks by itself
    scaled_pass(model(small_batch(0)).float().sum(1) * math.inf, optimizer, delay_overflow_check=True)
    assert optimizer.step().skipped_reason == "nonfinite_loss"


class WithoutSetToNone(torch.optim.SGD):
    """As apex's FusedAdam with set_grad_none=False."""

    def zero_grad(self):
        super().zero_grad(set_to_none=False)


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_an_optimizer_whose_zero_grad_takes_no_argument_is_zeroed_its_own_way(level):
    model, optimizer = initialized(0, level, WithoutSetToNone)
    for _ in range(2):
        optimizer.zero_grad()
        scaled_pass(loss_of(model, 0) * 2.0**-8, optimizer)
        assert_true(optimizer, 0, 2.0**-8)
    optimizer.zero_grad()
    assert all(not param.grad.any() for group in optimizer.param_groups for param in group["params"])


@pytest.mark.parametrize("overflow_before", [False, True])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_step_while_a_delayed_pass_waits_raises_and_the_pass_still_counts(level, overflow_before):
    plain = nn.Linear(4, 4)  # all of it half under O2
    booster, _, model, optimizer = boosted_pair(level, model=plain)
    if overflow_before:
        booster.backward(model(small_batch(0)).float().sum() * math.inf, optimizer)
        optimizer.zero_grad()  # the skip waits all the same
    with booster.no_sync(model):
        booster.backward(model(small_batch(0)).float().sum(), optimizer)
    with pytest.raises(RuntimeError, match="unfinished accumulation"):
        optimizer.step()
    booster.backward(model(small_batch(0)).float().sum(), optimizer)
    bias = list(amp.master_params(optimizer))[1]
    torch.testing.assert_close(bias.grad, torch.full((4,), 4.0))
    assert optimizer.step().applied == (not overflow_before)


@pytest.mark.parametrize("last_is_delayed", [True, False])
@pytest.mark.parametrize("level", ["O1", "O2", "O3"])
def test_a_pass_after_a_delayed_one_that_raises_leaves_the_gradients_of_before(level, last_is_delayed):
    model, optimizer = initialized(0, level, max_loss_scale=2.0**8, loss_scale="dynamic", num_losses=2)
    optimizer._update.gradients.scaler[1].scale = 2.0**6
    scaled_pass(loss_of(model, 0), optimizer, delay_unscale=True)
    before = [param.grad.clone() for group in optimizer.param_groups for param in group["params"]]
    with (
        pytest.raises(ZeroDivisionError),
        amp.scale_loss(loss_of(model, 0), optimizer, loss_id=1, delay_unscale=last_is_delayed) as scaled,
    ):
        scaled.backward()
        raise ZeroDivisionError
    after = [param.grad for group in optimizer.param_groups for param in group["params"]]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))
    scaled_pass(loss_of(model, 0), optimizer)
    assert_true(optimizer, 0, 2.0)
    assert optimizer.step()


def test_a_pass_that_raises_leaves_the_half_gradients_of_O2():
    model, optimizer = initialized(0, "O2", max_loss_scale=2.0**8)
    scaled_pass(loss_of(model, 0), optimizer)
    before = [param.grad.clone() for group in optimizer.param_groups for param in group["params"]]
    with pytest.raises(ZeroDivisionError), amp.scale_loss(loss_of(model, 0), optimizer):
        raise ZeroDivisionError
    after = [param.grad for group in optimizer.param_groups for param in group["params"]]
    assert all(torch.equal(a, b) for a, b in zip(after, before, strict=True))


class Products(torch.optim.SGD):
    """Notes the dtype of a matrix product inside its step."""

    def __init__(self, params, lr):
        super().__init__(params, lr)
        self.seen = []

    def step(self, closure=None):
        loss = None if closure is None else closure()
        self.seen.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
        super().step()
        return loss


def test_an_optimizer_steps_without_the_casts_of_O1_and_its_closure_with_them():
    model, optimizer = initialized(0, "O1", Products, max_loss_scale=16.0)
    in_closure = []

    def closure():
        optimizer.zero_grad()
        in_closure.append((torch.ones(2, 2) @ torch.ones(2, 2)).dtype)
        loss = loss_of(model, 0)
        scaled_pass(loss, optimizer)
        return loss

    optimizer.step(closure)
    assert optimizer.unwrap().seen == [torch.float32]
    assert in_closure == [torch.float16]
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float16
    scaled_pass(loss_of(model, 0), optimizer)
    optimizer.step()
    assert optimizer.unwrap().seen == [torch.float32] * 2

    def broken():
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        optimizer.step(broken)
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float16


def halve(param):
    param.grad.mul_(0.5)


def put_half(param):
    param.grad = param.grad * 0.5


def drop(param):
    param.grad = None


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
@pytest.mark.parametrize("write", [halve, put_half, drop])
@pytest.mark.parametrize("clipped", [False, True])
def test_what_a_step_hook_writes_into_a_gradient_is_stepped_on(level, write, clipped):
    def hook(optimizer, args, kwargs):
        for group in optimizer.param_groups:
            write(group["params"][0])

    plain = Layers(0).eval()
    reference = torch.optim.SGD(plain.parameters(), lr=0.25, momentum=0.5)
    booster, own, model, optimizer = boosted_pair(level, loss_scale=64.0)
    for each in (reference, optimizer):
        each.register_step_pre_hook(hook)
    for step in range(2):
        loss_of(plain, step).backward()
        booster.backward(loss_of(model, step), optimizer)
        if clipped:
            nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            optimizer.clip_grad_by_norm(0.1)
        for each in (reference, optimizer):
            each.step()
            each.zero_grad()
    for param, expected in zip(own.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(param.float(), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize("level", ["O0", "O1", "O2"])
def test_a_group_of_a_dtype_that_a_scaled_update_cannot_step_is_refused(level):
    _, _, _, optimizer = boosted_pair(level)
    group = {"params": [nn.Parameter(torch.ones(2, dtype=torch.bfloat16))]}
    if level == "O0":
        optimizer.add_param_group(group)
        return
    with pytest.raises(TypeError, match=r"must be either torch.float16 or torch.float32.*bfloat16"):
        optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1


KEPT = "the checkpoint's loss scale is not loaded, because this run's is"


@pytest.mark.parametrize(
    ("wrote", "reads", "scale", "warning"),
    [
        ("dynamic", 64.0, 64.0, f"{KEPT} static: this run keeps 64 instead of 512"),
        (128.0, 64.0, 64.0, f"{KEPT} static: this run keeps 64 instead of 128"),
        (128.0, "dynamic", 1024.0, f"{KEPT} dynamic and that one was static: this run keeps 1024 instead of 128"),
        (64.0, 64.0, 64.0, None),
        ("dynamic", "dynamic", 512.0, None),
    ],
)
def test_a_checkpoint_of_the_other_kind_of_scale_leaves_that_of_this_run(wrote, reads, scale, warning, caplog):
    booster, _, model, optimizer = boosted_pair("O2", loss_scale=wrote)
    if wrote == "dynamic":
        booster.precision.scales[0].scale = 512.0
    booster.backward(loss_of(model, 0), optimizer)
    optimizer.step()
    state = optimizer.state_dict()
    booster, _, model, optimizer = boosted_pair("O2", loss_scale=reads)
    caplog.clear()
    optimizer.load_state_dict(state)
    assert optimizer.loss_scale == scale
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING] == (
        [] if warning is None else [warning]
    )
    assert booster.precision.scales[0].unskipped == (1 if warning is None else 0)
    booster.backward(loss_of(model, 0), optimizer)
    assert optimizer.step()


def test_a_scale_loads_from_what_apex_itself_wrote():
    _, _, _, optimizer = boosted_pair("O1")
    state = optimizer.state_dict()
    state["booster"]["loss_scaler"] = {"loss_scaler0": {"loss_scale": 32.0, "unskipped": 7}}
    optimizer.load_state_dict(state)
    assert optimizer.loss_scale == 32.0
    initialized(0, "O1", loss_scale=64.0)
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 64.0, "unskipped": 0}}
    amp.load_state_dict({"loss_scaler0": {"loss_scale": 32.0, "unskipped": 7}})  # apex loads into a static one too
    assert amp.state_dict() == {"loss_scaler0": {"loss_scale": 32.0, "unskipped": 7}}


def test_a_clip_makes_a_step_under_a_static_scale_look_at_its_gradients():
    booster, plain, model, optimizer = boosted_pair(loss_scale=128.0)
    booster.backward(loss_of(model, 0) * math.inf, optimizer)
    optimizer.clip_grad_by_norm(1.0)
    assert not optimizer.step()
    assert plain.product.isfinite().all()


def test_a_loss_may_be_for_any_sequence_of_optimizers():
    model, optimizer = initialized(0, max_loss_scale=2.0**10)
    for given in ((optimizer,), collections.deque([optimizer]), optimizer):
        optimizer.zero_grad()
        scaled_pass(loss_of(model, 0), given)
        assert_true(optimizer, 0)
    with pytest.raises(TypeError, match="scale_loss needs the optimizer that amp.initialize returned, got SGD"):
        scaled_pass(loss_of(model, 0), (optimizer.unwrap(),))


@pytest.mark.parametrize("level", ["O0", "O1", "O2", "O3"])
def test_a_clip_before_a_step_that_an_earlier_pass_skips_stays_in_the_gradients(level):
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    precision = FP16ApexMixedPrecision(level, loss_scale="dynamic", max_loss_scale=64.0, verbosity=0)
    booster = Booster("cpu", precision)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.5))
    x = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
    booster.backward(model(x).square().sum() * math.inf, optimizer)
    optimizer.zero_grad()
    booster.backward((model(x) * 3).square().mean(), optimizer)
    gradients = {param: param.grad.clone() for param in model.parameters()}
    norm = optimizer.clip_grad_by_norm(0.01)
    assert float(norm) > 0.1
    assert not optimizer.step().applied
    for param, before in gradients.items():
        if level != "O2" or param.dtype == torch.float32:  # apex drops the others, see `ApexMasterUpdate`
            torch.testing.assert_close(param.grad, before * (0.01 / norm), rtol=2e-3, atol=1e-7)


@pytest.mark.parametrize("clip", [False, True])
@pytest.mark.parametrize("passes", [1, 2])
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_a_pass_reads_one_number_as_in_apex_and_a_clip_one_more(level, passes, clip):
    """What a GPU is waited for: apex prints the scale of a loss, and whether the next step is skipped, when a pass is over."""
    with as_on_a_gpu():
        booster = Booster("cpu", FP16ApexMixedPrecision(level, verbosity=0))
        net = nn.Sequential(nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 3))
        model, optimizer, criterion, *_ = booster.boost(net, torch.optim.AdamW(net.parameters()), nn.CrossEntropyLoss())
        x, y = torch.randn(4, 6), torch.randint(0, 3, (4,))
        for _ in range(3):
            losses = [criterion(model(x), y) for _ in range(passes)]
            with HostReads() as reads:
                for loss in losses:
                    booster.backward(loss, optimizer)
                if clip:
                    optimizer.clip_grad_by_norm(1.0)
                assert optimizer.step().applied
            optimizer.zero_grad()
    assert reads.found.total() == passes + clip, reads.found
