"""Scenarios of Colossal-AI: plugins, precisions, ZeRO, norms, schedules, checkpoints, the engine of older scripts."""

import copy
import gc
import weakref
from functools import partial

import pytest
import torch
from scenarios import scenario
from small_job import backward, batch, boost, flat, flat_grads, in_float32, net, sgd, train
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

from booster import AMP_TYPE, Booster, DistCoordinator
from booster.mixed_precision import FP16ApexMixedPrecision, FP16NaiveMixedPrecision, FP16TorchMixedPrecision
from booster.nn.lr_scheduler import CosineAnnealingWarmupLR
from booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin

colossalai = partial(scenario, "Colossal-AI")
PLUGINS = "tests/test_booster/test_plugin"
LEGACY, ZERO, CHECKPOINT = "tests/test_legacy", "tests/test_zero/test_low_level", "tests/test_checkpoint_io"


@colossalai(
    "tests/test_booster/test_accelerator.py", "test_accelerator", "the model lands on the device of the Booster"
)
def test_the_model_lands_on_the_device():
    booster, model, _ = boost("fp32")
    assert {p.device for p in model.parameters()} == {booster.device} == {torch.device("cpu")}


@colossalai(
    "tests/test_booster/test_mixed_precision/test_fp16_torch.py",
    "run_torch_amp",
    "float16 trains with clipping to norm 1, as float32 does",
)
def test_float16_trains_with_clipping():
    booster, model, optimizer = boost("fp16")
    for seed in (1, 2, 3):
        backward(booster, model, optimizer, seed)
        optimizer.clip_grad_by_norm(1.0)
        assert optimizer.step().applied
        optimizer.zero_grad()
    torch.testing.assert_close(flat(model), in_float32(steps=3, clip=1.0), rtol=0, atol=2e-3)


def first_batch(rank, world_size):
    loader = TorchDDPPlugin().prepare_dataloader(TensorDataset(torch.arange(10)), batch_size=2)
    return next(iter(loader))[0].tolist()


@colossalai(f"{PLUGINS}/test_dp_plugin_base.py", "check_dataloader_sharding", "ranks begin with different batches")
def test_ranks_begin_with_different_batches(ranks2):
    first, second = ranks2(first_batch)
    assert not set(first) & set(second)


class One(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.rand(1))

    def forward(self, x):
        return self.weight * x


def gradients_around_no_sync(rank, world_size, plugin, precision):
    model, booster = One(), Booster("cpu", precision, plugin())
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.full((1,), rank + 1.0)
    with booster.no_sync(model, optimizer):
        booster.backward(model(x).sum(), optimizer)
    local = None if plugin is TorchFSDPPlugin else next(model.parameters()).grad.item()
    booster.backward(model(x).sum(), optimizer)
    optimizer.clip_grad_by_norm(1.0)
    optimizer.step()
    return local, flat(model).item()


@colossalai(
    f"{PLUGINS}/test_torch_ddp_plugin.py", "check_torch_ddp_no_sync", "gradients differ inside no_sync, weights never"
)
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_gradients_differ_inside_no_sync(ranks2, precision):
    (a, first), (b, second) = ranks2(gradients_around_no_sync, TorchDDPPlugin, precision)
    assert a != b
    assert first == second


@colossalai(f"{PLUGINS}/test_torch_fsdp_plugin.py", "check_torch_fsdp_plugin", "the same for shards")
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16_naive"])
def test_shards_agree_after_no_sync(ranks2, precision):
    (_, first), (_, second) = ranks2(gradients_around_no_sync, TorchFSDPPlugin, precision)
    assert first == second


def zero_norm(rank, world_size, stage):
    precision = FP16NaiveMixedPrecision(initial_scale=2.0**5, clip_grad_norm=1.0)
    booster, model, optimizer = boost(precision, plugin=LowLevelZeroPlugin(stage=stage))
    backward(booster, model, optimizer)
    return optimizer.step().grad_norm


@colossalai(
    f"{PLUGINS}/test_low_level_zero_plugin.py", "check_low_level_zero_plugin", "the norm is a number: the true one"
)
@pytest.mark.parametrize("stage", [1, 2])
def test_the_norm_under_zero_is_the_true_one(ranks2, stage):
    booster, model, optimizer = boost("fp32")
    backward(booster, model, optimizer)
    true = float(flat_grads(model).norm())
    assert ranks2(zero_norm, stage) == pytest.approx([true] * 2, rel=1e-2)


# ---------------------------------------------------------------------- older scripts


def amp_job(precision):
    """The output, the true gradients and the weights of one step."""
    booster, model, optimizer = boost(precision, partial(torch.optim.SGD, lr=1e-3))
    out = model(batch()[0]).detach().float()
    backward(booster, model, optimizer)
    optimizer.clip_grad_by_norm(1.0)
    optimizer.unscale_grads()
    gradients = flat_grads(model)
    optimizer.step()
    return out, gradients, flat(model)


@colossalai(
    f"{LEGACY}/test_amp/test_naive_fp16.py", "test_naive_amp", "the naive precision computes what apex's O2 does"
)
@colossalai(f"{LEGACY}/test_amp/test_torch_fp16.py", "test_torch_amp", "and autocast what O1 does")
@pytest.mark.parametrize("pair", ["naive and O2", "torch and O1"])
def test_precisions_compute_what_apex_does(pair):
    if pair == "naive and O2":
        ours, level = FP16NaiveMixedPrecision(initial_scale=128.0), "O2"
    else:
        ours, level = FP16TorchMixedPrecision(init_scale=128.0), "O1"
    theirs = amp_job(FP16ApexMixedPrecision(level, loss_scale=128.0, verbosity=0))
    for mine, other in zip(amp_job(ours), theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-3)


@colossalai(
    f"{LEGACY}/test_engine/test_engine.py", "run_train", "a step of every mode of the older config, and of none"
)
@pytest.mark.parametrize("mode", [None, *AMP_TYPE])
def test_every_mode_of_the_older_config_steps(mode):
    quiet = {"verbosity": 0} if mode is AMP_TYPE.APEX else {}
    scale = {"initial_scale": 2**10} if mode in (AMP_TYPE.NAIVE, getattr(AMP_TYPE, "PARALLEL", None)) else {}
    booster = Booster.from_config(fp16=None if mode is None else {"mode": mode, **quiet, **scale}, device="cpu")
    model = net()
    model, optimizer, criterion, *_ = booster.boost(model, sgd(model.parameters()), nn.CrossEntropyLoss())
    before = flat(model)
    x, y = batch()
    booster.backward(criterion(model(x), y), optimizer)
    assert optimizer.step().applied
    assert not torch.equal(flat(model), before)


@colossalai(
    f"{LEGACY}/test_utils/test_norm_gradient_clipping.py",
    "run_grad_clip_norm",
    "norms of every type are those of torch",
)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, 3.0, float("inf")])
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_norms_of_every_type(norm_type, precision):
    booster, model, optimizer = boost(precision)
    backward(booster, model, optimizer)
    reference = copy.deepcopy([p.grad for p in model.parameters()])
    scale = optimizer.loss_scale
    true = float(nn.utils.get_total_norm([grad / scale for grad in reference], norm_type))
    assert float(optimizer.clip_grad_by_norm(1.0, norm_type)) == pytest.approx(true, rel=1e-5)


# ---------------------------------------------------------------------- ZeRO


def zero_gradients(rank, world_size, plugin, accumulate):
    booster, model, optimizer = boost("fp32", partial(torch.optim.Adam, lr=1e-2), plugin())
    if accumulate:
        with booster.no_sync(model, optimizer):
            backward(booster, model, optimizer, seed=rank + 1)
    backward(booster, model, optimizer, seed=rank + 3)
    optimizer.clip_grad_by_norm(1.0)
    optimizer.step()
    return flat(model)


@colossalai(f"{ZERO}/test_grad_acc.py", "test_grad_accumulation", "ZeRO-1 trains as DDP does, with and without no_sync")
@pytest.mark.parametrize("accumulate", [False, True])
def test_zero_trains_as_ddp_does(ranks2, accumulate):
    reference = ranks2(zero_gradients, TorchDDPPlugin, accumulate)
    results = ranks2(zero_gradients, LowLevelZeroPlugin, accumulate)
    for mine, theirs in zip(results, reference, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=0, atol=1e-6)


def stages(rank, world_size, stage, precision):
    raw = nn.Sequential(nn.Linear(13, 7), nn.Linear(7, 5), nn.Linear(5, 3))  # odd sizes: padding
    torch.manual_seed(0)
    for param in raw.parameters():
        nn.init.normal_(param, std=0.3)
    booster = Booster("cpu", precision, LowLevelZeroPlugin(stage=stage))
    model, optimizer, *_ = booster.boost(raw, torch.optim.SGD(raw.parameters(), lr=0.1))
    for seed in (1, 2):
        x = torch.randn(4, 13, generator=torch.Generator().manual_seed(seed + 10 * rank))
        booster.backward(model(x).float().square().mean(), optimizer)
        assert optimizer.step().applied
        optimizer.zero_grad()
    return flat(model)


@colossalai(
    f"{ZERO}/test_zero1_2.py", "exam_zero_1_2", "both stages give the same weights, bit for bit, also of odd sizes"
)
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16_naive"])
def test_both_stages_are_equal(ranks2, precision):
    first, second = ranks2(stages, 1, precision), ranks2(stages, 2, precision)
    for mine, theirs in zip(first, second, strict=True):
        assert torch.equal(mine, theirs)


def zero_state(rank, world_size, state, moments):
    booster, model, optimizer = boost("fp32", partial(torch.optim.Adam, lr=1e-2), LowLevelZeroPlugin())
    model.load_state_dict(state)
    optimizer.load_state_dict(moments)
    train(booster, model, optimizer, 1, first=9)
    return flat(model)


@colossalai(f"{ZERO}/test_zero_ckpt.py", "test_zero_ckpt", "the state of a plain torch run loads under ZeRO")
def test_the_state_of_a_plain_run_loads_under_zero(ranks2):
    model = net()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    results = None
    for seed in (1, 2, 9):
        if seed == 9:
            results = ranks2(zero_state, copy.deepcopy(model.state_dict()), copy.deepcopy(optimizer.state_dict()))
        x, y = batch(seed)
        optimizer.zero_grad()
        F.cross_entropy(model(x), y).backward()
        optimizer.step()
    for weights in results:
        torch.testing.assert_close(weights, flat(model), rtol=0, atol=1e-5)


def dies(rank, world_size):
    booster, model, optimizer = boost("fp16_naive", plugin=LowLevelZeroPlugin())
    train(booster, model, optimizer, 1)
    seen = weakref.ref(optimizer)
    del model, optimizer
    gc.collect()
    return seen() is None


@colossalai(f"{ZERO}/test_mem_leak.py", "test_zero_optim_mem_leak", "a ZeRO optimizer dies with its last reference")
def test_a_zero_optimizer_dies(ranks2):
    assert ranks2(dies) == [True, True]


# ---------------------------------------------------------------------- schedules, checkpoints, ranks


@colossalai(
    "tests/test_optimizer/test_lr_scheduler.py", "test_lr_scheduler_save_load", "a schedule's state loads at every step"
)
def test_the_state_of_a_schedule_loads_at_every_step():
    def make():
        return CosineAnnealingWarmupLR(sgd(net().parameters()), total_steps=5, warmup_steps=2)

    scheduler = make()
    for _ in range(5):
        other = make()
        other.load_state_dict(scheduler.state_dict())
        assert other.state_dict() == scheduler.state_dict()
        assert other.get_last_lr() == scheduler.get_last_lr()
        scheduler.optimizer.step()
        scheduler.step()


@colossalai(
    f"{CHECKPOINT}/test_general_checkpoint_io.py",
    "test_sharded_model_checkpoint, test_unsharded_checkpoint",
    "weights in one file or several load back",
)
@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("safe", [False, True])
def test_weights_load_back(shard, safe, tmp_path):
    pytest.importorskip("safetensors")
    booster, model, _ = boost("bf16_naive")
    booster.save_model(model, tmp_path / "weights", shard=shard, use_safetensors=safe)
    other, twin, _ = boost("bf16_naive")
    twin.load_state_dict({name: torch.zeros_like(value) for name, value in twin.state_dict().items()})
    other.load_model(twin, tmp_path / "weights")
    assert torch.equal(flat(twin), flat(model))


def saved_on_ranks(rank, world_size, folder, plugin):
    booster, model, optimizer = boost("fp16", plugin=plugin())
    train(booster, model, optimizer, 2)
    booster.save(folder, model, optimizer)
    other, twin, fresh = boost("fp16", plugin=plugin())
    other.load(folder, twin, fresh)
    same = torch.equal(flat(twin), flat(model))
    train(booster, model, optimizer, 1, first=5)
    train(other, twin, fresh, 1, first=5)
    return same, torch.equal(flat(twin), flat(model))


@colossalai(
    f"{CHECKPOINT}/test_torch_ddp_checkpoint_io.py",
    "check_torch_ddp_checkpointIO",
    "model and optimizer are equal after loading, in mixed precision too",
)
@colossalai(
    f"{CHECKPOINT}/test_low_level_zero_checkpoint_io.py", "check_low_level_zero_checkpointIO", "under ZeRO as well"
)
@pytest.mark.parametrize("plugin", [TorchDDPPlugin, LowLevelZeroPlugin])
def test_checkpoints_on_ranks_load_back(ranks2, plugin, tmp_path):
    pytest.importorskip("safetensors")
    assert ranks2(saved_on_ranks, tmp_path / "run", plugin) == [(True, True)] * 2


def coordinates(rank, world_size):
    coordinator = DistCoordinator()
    return coordinator.rank, coordinator.world_size, coordinator.is_master()


@colossalai(
    "tests/test_cluster/test_process_group_mesh.py", "check_process_group_mesh (ranks)", "ranks know their place"
)
def test_ranks_know_their_place(ranks2):
    assert ranks2(coordinates) == [(0, 2, True), (1, 2, False)]
