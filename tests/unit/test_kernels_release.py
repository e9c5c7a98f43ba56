"""Gradients that kernels use within backward: the steps without release, and nothing that a host waits for."""

import math

import pytest
import torch
from interpreted import interpreted, stepping
from test_release import OPTIMIZERS, PRECISIONS, Run, half_steps
from torch import nn
from torch.optim import AdamW

from benchmarks.launches import of_step
from benchmarks.waits import HostReads
from booster import Booster
from booster.update import in_backward_pass as released_pass

pytestmark = interpreted
__all__ = ["half_steps"]  # a fixture
SGD = OPTIMIZERS[
    "SGD"
]  # that does not make one size of gradients that are nothing but rounding, as of a bias before BatchNorm


def alike(found, expected, rtol):
    """Weights but for the rounding of norms, and what steps report."""
    for own, other in zip(found.net.parameters(), expected.net.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=rtol, atol=rtol)
    for own, other in zip(found.results, expected.results, strict=True):
        assert (own.applied, own.loss_scale, own.culprit, own.skipped_reason) == (
            other.applied,
            other.loss_scale,
            other.culprit,
            other.skipped_reason,
        )
        assert (own.grad_norm is None) is (other.grad_norm is None)
        if own.applied and own.grad_norm is not None:
            assert own.grad_norm == pytest.approx(other.grad_norm, rel=1e-3)
    assert found.optimizer.num_skipped == expected.optimizer.num_skipped


@pytest.mark.parametrize("precision", PRECISIONS)
def test_exact_is_the_step_without_release(precision):
    runs = [
        Run(release, precision, SGD, poison=(2,), clip_grad_norm=0.5, fused_optimizer="triton").train(5)
        for release in ("exact", False)
    ]
    alike(*runs, 1e-5 if not precision.startswith("bf16_naive") and "8bit" not in precision else 2e-2)
    assert [bool(result) for result in runs[0].results] == [True, True, False, True, True]
    assert [run.num_zeros_in_grad is None for run in runs[0].results] == [
        run.num_zeros_in_grad is None for run in runs[1].results
    ]


def test_without_a_look_at_gradients_every_bit_is_that_of_the_step_without_release():
    runs = [Run(release, "bf16_naive", fused_optimizer="triton").train(4) for release in ("exact", False)]
    assert all(map(torch.equal, runs[0].net.parameters(), runs[1].net.parameters()))


@pytest.mark.parametrize("precision", ["fp32", "bf16_naive"])
def test_the_norm_of_the_step_before_clips_as_where_a_host_decides(precision, half_steps):
    runs = [
        Run("previous_norm", precision, SGD, poison=(3,), clip_grad_norm=0.5, fused_optimizer=way).train(6)
        for way in ("triton", False)
    ]
    mine, theirs = (run.optimizer._update.gradients.in_backward.previous for run in runs)
    assert isinstance(mine, torch.Tensor)
    assert float(mine) == pytest.approx(theirs, rel=1e-3)
    assert [result.applied for result in runs[0].results] == [result.applied for result in runs[1].results]
    if precision != "fp32":  # what was stepped before the bad gradient came is the same there
        return
    for own, other in zip(runs[0].net.parameters(), runs[1].net.parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("precision", ["fp32", "bf16_naive"])
def test_a_step_after_a_skip_is_clipped_by_the_last_finite_norm(precision, half_steps):
    run = Run("previous_norm", precision, SGD, poison=(2,), clip_grad_norm=0.5, fused_optimizer="triton").train(2)
    last = float(run.optimizer._update.gradients.in_backward.previous)
    run.step()
    assert not run.results[-1].applied
    assert float(run.optimizer._update.gradients.in_backward.previous) == last > 0


@pytest.mark.parametrize(
    ("precision", "mode"),
    [
        ("fp16", "exact"),
        *((name, mode) for name in ("fp32", "bf16_naive split24 8bit") for mode in ("exact", "previous_norm")),
    ],
)
def test_nothing_waits_for_the_device(precision, mode, half_steps):
    run = Run(mode, precision, clip_grad_norm=0.5, fused_optimizer="triton").train(3)
    run.optimizer.sync()
    loss = run.loss()
    with HostReads() as reads:
        run.booster.backward(loss, run.optimizer)
        result = run.optimizer.step()
    assert reads.found == {}
    assert result.applied


def test_a_checkpoint_holds_the_norm_as_a_number_and_goes_on_from_it():
    run, other = (Run("previous_norm", "fp32", clip_grad_norm=0.5, fused_optimizer="triton") for _ in range(2))
    run.train(3)
    state = run.optimizer.state_dict()
    assert type(state["booster"]["release"]["previous_norm"]) is float
    other.model.load_state_dict(run.model.state_dict())
    other.optimizer.load_state_dict(state)
    other.data.set_state(run.data.get_state())
    alike_norms = [each.step().results[-1].grad_norm for each in (run, other)]
    assert alike_norms[0] == alike_norms[1]


def test_hooks_fire_once_for_a_step_and_not_for_a_skip():
    run, fired = Run("exact", "fp16", poison=(1,), fused_optimizer="triton"), []
    run.inner.register_step_post_hook(lambda *_: fired.append(run.number))
    run.train(3)
    assert fired == [0, 2]


def test_a_sparse_gradient_within_backward_is_stepped_by_torch():
    weights = []
    for way in ("triton", False):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 3))
        b = Booster("cpu", "fp32", release_gradients="exact", clip_grad_norm=0.1, fused_optimizer=way)
        model, optimizer, *_ = b.boost(net, torch.optim.SGD(net.parameters(), lr=0.5))
        for _ in range(3):
            b.backward(model(torch.tensor([1, 5, 5])).square().sum(), optimizer)
            assert optimizer.step().applied
        weights.append([param.detach().clone() for param in net.parameters()])
        assert all(math.isfinite(float(weight.sum())) for weight in weights[-1])
    for own, other in zip(*weights, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


def layers(depth):
    return nn.Sequential(*(nn.Linear(16, 16) for _ in range(depth)))


def test_the_norm_of_the_step_before_costs_two_launches_more_than_a_plain_step():
    """Whatever there is to step in one part: that norm clips in one, and the next norm is made in another."""
    for depth in (2, 6):
        plain, along = (
            of_step(lambda mode=mode, depth=depth: stepping(layers(depth), AdamW, "fp32", release_gradients=mode))
            for mode in (False, "previous_norm")
        )
        assert along.found - plain.found == {"Triton: clip_by": 1, "Triton: norm_of": 1}
        assert plain.found - along.found == {}
        assert along.waits.total() == plain.waits.total() == 0


def test_each_part_takes_three_launches_and_their_sums_are_joined_in_one(monkeypatch):
    monkeypatch.setattr(released_pass, "most_at_once", lambda num_elements: num_elements // 3)
    found = of_step(lambda: stepping(layers(6), AdamW, "fp32", release_gradients="previous_norm"))
    kernels = {name: count for name, count in found.found.items() if name.startswith("Triton")}
    own = {"Triton: clip_by": 1, "Triton: norm_of": 1}
    assert kernels == {**own, "Triton: measure": 3, "Triton: decide": 3, "Triton: update": 3}
    assert found.found["cat"] == 1
    assert found.waits.total() == 0
