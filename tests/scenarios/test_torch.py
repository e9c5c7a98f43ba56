"""Scenarios of PyTorch: its loss scale, autocast, DDP hooks, sharded optimizers and fully_shard."""

from functools import partial

import pytest
import torch
import torch.distributed as dist
from scenarios import scenario
from small_job import backward, batch, boost, flat, flat_grads, in_float32, net, sgd, spoil, train
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from booster import Booster
from booster.mixed_precision import FP16NaiveMixedPrecision, FP16TorchMixedPrecision
from booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin

torchs = partial(scenario, "PyTorch")
SCALER, AUTOCAST, CUDA = "test/test_torch.py", "test/test_autocast.py", "test/test_cuda.py"
NCCL = "test/distributed/test_c10d_nccl.py"
ZERO = "test/distributed/optim/test_zero_redundancy_optimizer.py"
FSDP = "test/distributed/_composable/fsdp/test_fully_shard_mixed_precision.py"
NORM = "test/distributed/_composable/fsdp/test_fully_shard_clip_grad_norm_.py"
STATE = "test/distributed/_composable/fsdp/test_fully_shard_state_dict.py"

ADAM = {"foreach": {"foreach": True}, "fused": {"fused": True}, "loop": {"foreach": False}}
HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


# ---------------------------------------------------------------------- the loss scale


@torchs(SCALER, "test_grad_scaling_unscale", "gradients come back without the scale; one inf or NaN anywhere is found")
@pytest.mark.parametrize("precision", ["fp16", "fp16_naive"])
@pytest.mark.parametrize("value", [None, float("inf"), float("-inf"), float("nan")])
def test_unscaling_gives_the_gradients_and_finds_what_is_not_finite(precision, value):
    reference, model, optimizer = boost("fp32")
    backward(reference, model, optimizer)
    true = flat_grads(model)
    booster, model, optimizer = boost(precision)
    backward(booster, model, optimizer)
    if value is not None:
        spoil(model, value)
    optimizer.unscale_grads()
    if value is None:
        torch.testing.assert_close(flat_grads(model), true, rtol=2e-2, atol=1e-3)
    assert optimizer.step().applied == (value is None)


@torchs(SCALER, "test_grad_scaling_unscale_sparse", "sparse gradients are unscaled, and an inf among them is found")
@pytest.mark.parametrize("bad", [False, True])
def test_sparse_gradients_are_unscaled(bad):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(8, 4, sparse=True))
    before = model[0].weight.detach().clone()
    booster = Booster("cpu", "fp16")
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1.0))
    booster.backward(model(torch.tensor([1, 1, 3])).sum() * (float("inf") if bad else 1.0), optimizer)
    assert optimizer.step().applied != bad
    moved = before - next(model.parameters()).detach()
    assert moved.sum(1).tolist() == pytest.approx([0.0] * 8 if bad else [0, 8, 0, 4, 0, 0, 0, 0], abs=1e-5)


@torchs(SCALER, "test_grad_scaling_update_scale", "grows after growth_interval clean steps, backs off at each overflow")
@pytest.mark.parametrize(("growth", "backoff"), [(2.0, 0.5), (4.0, 0.25)])
def test_the_scale_grows_and_backs_off(growth, backoff):
    precision = FP16TorchMixedPrecision(8.0, growth, backoff, growth_interval=2)
    booster, model, optimizer = boost(precision)
    seen = []
    for step in range(6):
        backward(booster, model, optimizer)
        if step in (1, 4):
            spoil(model)
        optimizer.step()
        optimizer.zero_grad()
        seen.append(optimizer.loss_scale)
    low = 8.0 * backoff
    assert seen == [8.0, low, low, low * growth, low * growth * backoff, low * growth * backoff]


@torchs(SCALER, "test_grad_scale_will_not_overflow", "a scale near the end of float32 does not grow to infinity")
def test_the_scale_does_not_become_infinite():
    booster, model, optimizer = boost(FP16TorchMixedPrecision(2.0**60, growth_factor=2.0**100, growth_interval=1))
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    x, _ = batch()
    booster.backward(model(x).sum() * 0, optimizer)
    assert optimizer.step().applied
    assert optimizer.loss_scale < float("inf")


@torchs(SCALER, "test_grad_scaling_state_dict", "scale and growth counter travel with the state")
@pytest.mark.parametrize("name", ["init_scale", "initial_scale"])
def test_scale_and_growth_counter_are_saved(name):
    precision = FP16TorchMixedPrecision if name == "init_scale" else FP16NaiveMixedPrecision
    booster, model, optimizer = boost(precision(**{name: 4.0}, growth_interval=3))
    train(booster, model, optimizer, 2)
    state, weights = optimizer.state_dict(), model.state_dict()
    other, twin, fresh = boost(precision(**{name: 2.0}, growth_interval=3))
    twin.load_state_dict(weights)
    fresh.load_state_dict(state)
    assert fresh.loss_scale == 4.0
    train(other, twin, fresh, 1)
    assert fresh.loss_scale == 8.0


@torchs(SCALER, "test_grad_scaling_autocast", "four steps, one with an inf: three are applied, weights as in float32")
@pytest.mark.parametrize("make", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
@pytest.mark.parametrize("kind", ["foreach", "fused", "loop"])
def test_a_step_with_an_overflow_is_skipped_and_the_others_are_as_in_float32(make, kind):
    def made(params):
        return make(params, lr=0.01, **ADAM[kind])

    booster, model, optimizer = boost("fp16", made)
    for step in range(4):
        backward(booster, model, optimizer, step + 1)
        if step == 1:
            spoil(model)
        assert optimizer.step().applied == (step != 1)
        optimizer.zero_grad()
    assert (optimizer.num_applied, optimizer.num_skipped) == (3, 1)
    reference = in_float32(made, 4, skip=(1,))
    # Adam's direction is a quotient of gradients: half's rounding may turn a small one, by at most lr a step.
    torch.testing.assert_close(flat(model), reference, rtol=0, atol=5e-3)
    assert (flat(model) - reference).abs().mean() < 2e-4


@torchs(SCALER, "test_grad_scaling_clipping", "clipping is to the norm of true gradients, and the weights show it")
@pytest.mark.parametrize("precision", ["fp16", "fp16_naive", "bf16", "bf16_naive"])
def test_clipping_is_of_true_gradients(precision):
    def plain(params):
        return torch.optim.SGD(params, lr=0.5)

    booster, model, optimizer = boost(precision, plain)
    for seed in (1, 2):
        backward(booster, model, optimizer, seed)
        optimizer.clip_grad_by_norm(0.05)
        optimizer.step()
        optimizer.zero_grad()
    torch.testing.assert_close(flat(model), in_float32(plain, 2, clip=0.05), rtol=4e-3, atol=2e-3)


@torchs(SCALER, "test_grad_scaling_clipping_separate_unscale", "unscale, clip by torch's own function, step")
@pytest.mark.parametrize("precision", ["fp16", "fp16_naive"])
def test_unscaled_gradients_may_be_clipped_by_hand(precision):
    booster, model, optimizer = boost(precision)
    backward(booster, model, optimizer)
    optimizer.unscale_grads()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 0.05)
    assert norm > 0.05
    assert optimizer.step().applied
    torch.testing.assert_close(flat(model), in_float32(steps=1, clip=0.05), rtol=2e-3, atol=1e-3)


@torchs(SCALER, "test_grad_scaling_penalty", "a gradient penalty is that of true gradients")
@pytest.mark.parametrize("precision", ["fp16", "bf16"])
def test_a_gradient_penalty_is_of_true_gradients(precision):
    def norms(booster, model, optimizer):
        x, y = batch()
        x.requires_grad_()
        loss = F.cross_entropy(model(x), y)
        (of_input,) = torch.autograd.grad(loss, x, create_graph=True)
        booster.backward(loss + of_input.square().sum() * 10, optimizer)
        optimizer.unscale_grads()
        return flat_grads(model)

    torch.testing.assert_close(norms(*boost(precision)), norms(*boost("fp32")), rtol=3e-2, atol=3e-3)


@torchs(SCALER, "test_grad_scaling_accumulation", "gradients of two passes add up under one scale")
@pytest.mark.parametrize("precision", ["fp16", "fp16_naive", "bf16"])
def test_two_passes_before_a_step_are_one_of_both(precision):
    booster, model, optimizer = boost(precision)
    x, y = batch(rows=32)
    with booster.accumulate(model, optimizer, num_micro_batches=2):
        for part, target in zip(x.chunk(2), y.chunk(2), strict=True):
            booster.backward(F.cross_entropy(model(part), target), optimizer)
    optimizer.unscale_grads()
    reference, whole, other = boost("fp32")
    backward(reference, whole, other, rows=32)
    torch.testing.assert_close(flat_grads(model), flat_grads(whole), rtol=2e-2, atol=2e-3)


@torchs(
    SCALER,
    "test_grad_scaling_multiple",
    "two models, two optimizers, one loss of both: an inf in one skips both steps",
    differs="there the optimizer that saw no inf steps. One loss had one backward pass, so half a step would train one model "
    "on a pass that the other rejects; call `backward` for each optimizer by itself to have them decide alone",
)
def test_optimizers_of_one_loss_skip_together():
    booster = Booster("cpu", "fp16")
    pairs = []
    for _ in range(2):
        model = net()
        pairs.append(booster.boost(model, sgd(model.parameters()))[:2])
    x, y = batch()
    before = [flat(model) for model, _ in pairs]
    booster.backward(sum(F.cross_entropy(model(x), y) for model, _ in pairs), [optimizer for _, optimizer in pairs])
    spoil(pairs[0][0])
    assert [optimizer.step().applied for _, optimizer in pairs] == [False, False]
    assert all(torch.equal(flat(model), was) for (model, _), was in zip(pairs, before, strict=True))


@torchs(
    SCALER,
    "test_params_invalidated_with_grads_invalidated_between_unscale_and_step",
    "unscaling is when gradients are looked at: what is spoilt afterwards reaches the weights",
)
@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_gradients_spoilt_after_unscaling_reach_the_weights(value):
    booster, model, optimizer = boost("fp16")
    backward(booster, model, optimizer)
    optimizer.unscale_grads()
    spoil(model, value)
    assert optimizer.step().applied
    assert not flat(model).isfinite().all()


@torchs(
    SCALER,
    "test_grad_scaling_autocast (scale by hand)",
    "a bare loss.backward() under a loss scale is an error at the step; without a scale it trains",
    differs="there the loss is scaled by hand. `b.backward` scales, so gradients that never met the scale are a slip",
)
@pytest.mark.parametrize("precision", ["fp16", "fp16_naive", "bf16"])
def test_a_bare_backward_is_an_error_under_a_scale(precision):
    booster, model, optimizer = boost(precision)
    x, y = batch()
    with booster.autocast():
        loss = F.cross_entropy(model(x), y)
    loss.backward()
    if precision == "bf16":
        assert optimizer.step().applied
        return
    with pytest.raises(RuntimeError, match=r"b\.backward"):
        optimizer.step()


# ---------------------------------------------------------------------- autocast


@torchs(AUTOCAST, "test_autocast_torch_16", "products inside a boosted model are half")
@pytest.mark.parametrize("precision", HALVES)
def test_products_are_half(precision):
    seen = []

    class Model(nn.Linear):
        def forward(self, x):
            seen.append((super().forward(x).dtype, (x @ x.mT).dtype, torch.addmm(x[:4, :4], x[:4], x[:4].mT).dtype))
            return super().forward(x)

    model, *_ = Booster("cpu", precision).boost(Model(8, 4))
    model(torch.randn(4, 8))
    assert set(seen[0]) == {HALVES[precision]}


@torchs(AUTOCAST, "test_autocast_torch_fp32", "losses and other sensitive functions of half tensors are float32")
@pytest.mark.parametrize("precision", HALVES)
@pytest.mark.parametrize("function", [F.mse_loss, F.l1_loss, F.binary_cross_entropy_with_logits])
def test_losses_are_float32(precision, function):
    x = torch.rand(4, dtype=HALVES[precision])
    with Booster("cpu", precision).autocast():
        assert function(x, x).dtype == torch.float32


@torchs(AUTOCAST, "test_autocast_torch_need_autocast_promote", "operations on half and float32 give the wider")
@pytest.mark.parametrize("function", [torch.cat, torch.stack])
def test_mixed_inputs_are_promoted(function):
    with Booster("cpu", "bf16").autocast():
        assert function([torch.ones(2, dtype=torch.bfloat16), torch.ones(2)]).dtype == torch.float32


@torchs(AUTOCAST, "test_autocast_disabled_with_fp32_dtype", "float32 is no autocast, also inside one")
def test_float32_leaves_an_autocast():
    with torch.autocast("cpu", torch.bfloat16), Booster("cpu", "fp32").autocast():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == torch.float32


@torchs(CUDA, "test_autocast_cache_leak", "evaluating without gradients between steps leaves the weights trainable")
@pytest.mark.parametrize("precision", ["fp16", "bf16", "bf16_naive"])
def test_evaluation_between_steps_changes_nothing(precision):
    jobs = [boost(precision), boost(precision)]
    for job, evaluates in zip(jobs, (True, False), strict=True):
        for seed in (1, 2):
            if evaluates:
                with torch.no_grad():
                    job[1](batch(9)[0])
            train(*job, steps=1, first=seed)
    assert torch.equal(flat(jobs[0][1]), flat(jobs[1][1]))


@torchs(CUDA, "test_autocast_checkpointing", "recomputed activations have the dtype of the first pass")
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp16_naive"])
def test_checkpointed_gradients_are_those_of_a_plain_pass(precision):
    class Checkpointed(nn.Module):
        def __init__(self, inner, reentrant):
            super().__init__()
            self.inner, self.reentrant = inner, reentrant

        def forward(self, x):
            return checkpoint(self.inner, x.requires_grad_(), use_reentrant=self.reentrant)

    found = []
    for wrap in (lambda m: m, partial(Checkpointed, reentrant=False), partial(Checkpointed, reentrant=True)):
        booster, model = Booster("cpu", precision), wrap(net())
        model, optimizer, *_ = booster.boost(model, sgd(model.parameters()))
        backward(booster, model, optimizer)
        found.append(flat_grads(model))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


# ---------------------------------------------------------------------- ranks


def train_on_ranks(rank, world_size, precision, plugin):
    """Two steps of a 32-row batch divided among ranks; returns losses, norms, weights."""
    booster, model, optimizer = boost(precision, plugin=plugin() if callable(plugin) else plugin)
    norms = []
    for seed in (1, 2):
        x, y = batch(seed, 32)
        x, y = x.chunk(world_size)[rank], y.chunk(world_size)[rank]
        booster.backward(F.cross_entropy(model(x), y), optimizer)
        norms.append(float(optimizer.clip_grad_by_norm(0.5)))
        optimizer.step()
        optimizer.zero_grad()
    return norms, flat(model)


def hooked(rank, world_size, name, precision):
    hook = {
        "fp16": default_hooks.fp16_compress_hook,
        "bf16": default_hooks.bf16_compress_hook,
        "bf16 wrapper": (None, default_hooks.bf16_compress_wrapper(default_hooks.allreduce_hook)),
        "PowerSGD": (
            powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2),
            powerSGD_hook.powerSGD_hook,
        ),
        "bf16 wrapper of PowerSGD": (
            powerSGD_hook.PowerSGDState(None, matrix_approximation_rank=4, start_powerSGD_iter=2),
            default_hooks.bf16_compress_wrapper(powerSGD_hook.powerSGD_hook),
        ),
    }[name]
    return train_on_ranks(rank, world_size, precision, partial(TorchDDPPlugin, comm_hook=hook))


@torchs(NCCL, "test_fp16_compress_wrapper_nccl", "gradients compressed to float16 train as whole ones")
@torchs(
    NCCL, "test_bf16_compress_wrapper_nccl", "to bfloat16 too, by the hook alone and as a wrapper, also of PowerSGD"
)
@torchs(NCCL, "test_powerSGD_ddp_comm_hook_nccl", "and PowerSGD by itself")
@pytest.mark.parametrize("name", ["fp16", "bf16", "bf16 wrapper", "PowerSGD", "bf16 wrapper of PowerSGD"])
def test_communication_hooks_of_torch_train(ranks2, name):
    for precision in ("fp16", "bf16"):
        norms, weights = train_on_ranks(0, 1, precision, None)
        for other, result in ranks2(hooked, name, precision):
            assert other == pytest.approx(norms, rel=3e-2)
            torch.testing.assert_close(result, weights, rtol=2e-2, atol=5e-3)


@torchs(ZERO, "test_step", "a sharded step is the step of one process")
@torchs(ZERO, "test_zero_join_cpu (equal inputs)", "and is the same on all ranks")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16_naive"])
def test_a_sharded_step_is_that_of_one_process(ranks2, precision):
    norms, weights = train_on_ranks(0, 1, precision, None)
    results = ranks2(train_on_ranks, precision, LowLevelZeroPlugin)
    for other, result in results:
        assert other == pytest.approx(norms, rel=2e-2)
        torch.testing.assert_close(result, weights, rtol=1e-2, atol=3e-3)
    assert torch.equal(results[0][1], results[1][1])


def whole_states(rank, world_size):
    booster, model, optimizer = boost("bf16", plugin=LowLevelZeroPlugin())
    train(booster, model, optimizer, 2)
    state = optimizer.state_dict()
    again, twin, fresh = boost("bf16", plugin=LowLevelZeroPlugin())
    twin.load_state_dict(model.state_dict())
    fresh.load_state_dict(state)
    train(booster, model, optimizer, 1, first=7)
    train(again, twin, fresh, 1, first=7)
    return torch.equal(flat(model), flat(twin))


@torchs(ZERO, "test_state_dict", "the state loads, and training goes on bit for bit")
def test_sharded_state_loads_bit_for_bit(ranks2):
    assert ranks2(whole_states) == [True, True]


def dtypes_of_fsdp(rank, world_size, precision):
    seen = {}
    model = net()
    model[0].register_forward_hook(lambda module, args, out: seen.update(weight=module.weight.dtype, out=out.dtype))
    booster = Booster("cpu", precision, TorchFSDPPlugin())
    model, optimizer, *_ = booster.boost(model, sgd(model.parameters()))
    x, y = batch()
    out = model(x)
    booster.backward(F.cross_entropy(out, y), optimizer)
    return {**seen, "model": out.dtype, "grad": next(model.parameters()).grad.dtype}


@torchs(
    FSDP, "test_compute_dtype", "parameters are gathered in half for the forward pass, outputs come back in float32"
)
@torchs(FSDP, "test_reduce_dtype", "reduced gradients are in the dtype of the parameters at rest, float32")
@pytest.mark.parametrize("precision", ["fp16_naive", "bf16_naive"])
def test_fully_sharded_parameters_compute_in_half(ranks2, precision):
    half = torch.float16 if precision == "fp16_naive" else torch.bfloat16
    for seen in ranks2(dtypes_of_fsdp, precision):
        assert seen == {"weight": half, "out": half, "model": torch.float32, "grad": torch.float32}


@torchs(NORM, "test_clip_grad_norm_1d", "the norm is that of the whole gradients, on every rank")
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16_naive"])
def test_the_norm_over_shards_is_that_of_one_process(ranks2, precision):
    norms, weights = train_on_ranks(0, 1, precision, None)
    for other, result in ranks2(train_on_ranks, precision, TorchFSDPPlugin):
        assert other == pytest.approx(norms, rel=2e-2)
        torch.testing.assert_close(result, weights, rtol=1e-2, atol=3e-3)


def load_whole(rank, world_size, precision, state, weights, moments):
    booster, model, optimizer = boost(precision, plugin=TorchFSDPPlugin())
    model.load_state_dict(state)
    same = torch.equal(flat(model), weights)
    optimizer.load_state_dict(moments)
    x, y = batch(7, 32)
    x, y = x.chunk(world_size)[rank], y.chunk(world_size)[rank]
    booster.backward(F.cross_entropy(model(x), y), optimizer)
    optimizer.step()
    return same, flat(model)


@torchs(STATE, "test_dp_state_dict_save_load", "a whole state dict loads into a sharded model, and training goes on")
@pytest.mark.parametrize("precision", ["fp32", "fp16_naive", "bf16_naive"])
def test_a_whole_state_dict_loads_into_shards(ranks2, precision):
    booster, model, optimizer = boost(precision)
    train(booster, model, optimizer, 2)
    state, moments = model.state_dict(), optimizer.state_dict()
    weights = flat(model)
    results = ranks2(load_whole, precision, state, weights, moments)
    x, y = batch(7, 32)
    booster.backward(F.cross_entropy(model(x), y), optimizer)
    optimizer.step()
    assert dist.is_initialized() is False
    for same, result in results:
        torch.testing.assert_close(result, flat(model), rtol=1e-2, atol=2e-3)
        assert same or precision != "fp32"
