"""What tests of other libraries hold this one to: each has a test, and those without a place elsewhere are in this file."""

import pickle
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from comparing import flat
from small_job import backward, batch, boost, flat_grads, net, spoil, train
from torch import nn

from booster import Booster
from booster.mixed_precision import (
    BF16MixedPrecision,
    BF16NaiveMixedPrecision,
    FP16ApexMixedPrecision,
    FP16NaiveMixedPrecision,
    FP16TorchMixedPrecision,
    StaticScale,
)
from booster.plugin import TorchDDPPlugin, TorchFSDPPlugin

ROOT = Path(__file__).resolve().parents[2]
EVERY = ["fp32", "fp16", "bf16", "fp16_naive", "bf16_naive"]


def test_each_property_of_the_page_names_a_test_that_exists():
    named = re.findall(r"\| `(\w+)` \|$", (ROOT / "benchmarks/results/held_to.md").read_text(), re.MULTILINE)
    texts = [path.read_text() for path in (ROOT / "tests").rglob("test_*.py")]
    tests = {name for text in texts for name in re.findall(r"^def test_(\w+)\(", text, re.MULTILINE)}
    assert len(named) > 100
    assert sorted(set(named) - tests) == []


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"])
def test_optimizers_survive_pickle(precision):
    booster, model, optimizer = boost(precision)
    train(booster, model, optimizer, 1)
    again = pickle.loads(pickle.dumps(optimizer))  # noqa: S301 - our own bytes
    assert again.loss_scale == optimizer.loss_scale


def rates(rank, world_size, micro_batches=1):
    booster, model = Booster("cpu", "bf16", TorchDDPPlugin() if world_size > 1 else None), net()
    made = torch.optim.SGD(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(made, lambda step: 1 - step / 4)
    model, optimizer, _, _, scheduler = booster.boost(model, made, lr_scheduler=schedule)
    seen = []
    for _ in range(4):
        with booster.accumulate(model, optimizer, num_micro_batches=micro_batches):
            for seed in range(micro_batches):
                backward(booster, model, optimizer, seed)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        seen.append(scheduler.get_last_lr()[0])
    return seen


def test_a_schedule_counts_updates_on_ranks(ranks2):
    assert ranks2(rates) == [[0.75, 0.5, 0.25, 0.0]] * 2


def test_a_schedule_moves_with_updates_under_accumulation():
    assert rates(0, 1, micro_batches=2) == [0.75, 0.5, 0.25, 0.0]


def test_a_region_may_be_left():
    x = torch.ones(2, 2)
    outer, inner = Booster("cpu", "bf16"), Booster("cpu", "fp32")
    with outer.autocast():
        with inner.autocast():
            assert (x @ x).dtype == torch.float32
        assert (x @ x).dtype == torch.bfloat16


@pytest.mark.parametrize("function", [torch.cat, torch.stack])
def test_mixed_inputs_are_promoted(function):
    with Booster("cpu", "bf16").autocast():
        assert function([torch.ones(2, dtype=torch.bfloat16), torch.ones(2)]).dtype == torch.float32


def test_relative_paths_work(tmp_path, monkeypatch):
    pytest.importorskip("safetensors")
    monkeypatch.chdir(tmp_path)
    booster, model, optimizer = boost("bf16")
    booster.save("here", model, optimizer, step=4)
    assert booster.load("here", model, optimizer).step == 4


def test_what_has_no_state_is_refused(tmp_path):
    booster, model, optimizer = boost("bf16")
    with pytest.raises(TypeError, match="dataloader"):
        booster.save(tmp_path / "run", model, optimizer, dataloader=[1, 2])
    assert not (tmp_path / "run").exists()


def one_step(precision):
    """The output, the true gradients and the weights of one step."""
    booster, model, optimizer = boost(precision, partial(torch.optim.SGD, lr=1e-3))
    out = model(batch()[0]).detach().float()
    backward(booster, model, optimizer)
    optimizer.clip_grad_by_norm(1.0)
    optimizer.unscale_grads()
    gradients = flat_grads(model)
    optimizer.step()
    return out, gradients, flat(model)


@pytest.mark.parametrize(
    ("precision", "level"),
    [(FP16NaiveMixedPrecision(initial_scale=128.0), "O2"), (FP16TorchMixedPrecision(init_scale=128.0), "O1")],
)
def test_precisions_compute_what_apex_does(precision, level):
    theirs = one_step(FP16ApexMixedPrecision(level, loss_scale=128.0, verbosity=0))
    for mine, other in zip(one_step(precision), theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("precision", EVERY)
def test_float16_alone_has_a_loss_scale(precision):
    assert boost(precision)[2].loss_scale == (2.0**16 if precision.startswith("fp16") else 1.0)


@pytest.mark.parametrize("precision", [BF16MixedPrecision, BF16NaiveMixedPrecision])
def test_bfloat16_takes_no_loss_scale(precision):
    with pytest.raises(TypeError, match="scale"):
        precision(scale=StaticScale(8.0))


@pytest.mark.parametrize("precision", [*EVERY, "default_dtype"])
def test_the_default_dtype_is_restored_after_an_exception(precision):
    class Model(nn.Linear):
        def forward(self, x):
            raise LookupError

    strategy = BF16NaiveMixedPrecision(default_dtype=True) if precision == "default_dtype" else precision
    model, *_ = Booster("cpu", strategy).boost(Model(8, 4))
    with pytest.raises(LookupError):
        model(torch.rand(2, 8))
    assert torch.zeros(1).dtype == torch.get_default_dtype() == torch.float32
    assert not torch.is_autocast_enabled("cpu")


def clip_on_shards(rank, world_size, precision, kind):
    booster, model, optimizer = boost(precision, partial(torch.optim.SGD, lr=1.0), TorchFSDPPlugin())
    before = flat(model)
    backward(booster, model, optimizer)
    optimizer.clip_grad_by_norm(0.05) if kind == "norm" else optimizer.clip_grad_by_value(0.01)
    optimizer.step()
    moved = before - flat(model)
    return float(moved.norm() if kind == "norm" else moved.abs().max())


@pytest.mark.parametrize(("kind", "bound"), [("norm", 0.05), ("value", 0.01)])
def test_clipped_shards_are_within_the_bound(ranks2, kind, bound):
    for precision in ("fp32", "fp16"):
        assert ranks2(clip_on_shards, precision, kind) == pytest.approx([bound] * 2, rel=0.02)


def test_a_missing_weight_is_refused():
    _, model, _ = boost("bf16")
    state = dict(list(model.state_dict().items())[1:])
    with pytest.raises(RuntimeError, match="Missing key"):
        model.load_state_dict(state)
    model.load_state_dict(state, strict=False)


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_gradients_spoilt_after_unscaling_reach_the_weights(value):
    booster, model, optimizer = boost("fp16")
    backward(booster, model, optimizer)
    optimizer.unscale_grads()
    spoil(model, value)
    assert optimizer.step().applied
    assert not flat(model).isfinite().all()
