"""Zeros of gradients, where a precision counts them, are counted by the launch that reads the gradients anyway."""

import pytest
import torch
from interpreted import gradients, interpreted, pair, stepping
from prescribed import loss_with
from torch import nn
from torch.optim import SGD, AdamW

from benchmarks.launches import of_step
from booster.mixed_precision import BF16NaiveMixedPrecision, FP16NaiveMixedPrecision

pytestmark = interpreted
KINDS = {"bf16": BF16NaiveMixedPrecision, "fp16": FP16NaiveMixedPrecision}


def counting(kind, **options):
    return lambda: KINDS[kind](log_num_zeros_in_grad=True, **options)


def make_model():
    return nn.Sequential(
        nn.Linear(7, 33), nn.BatchNorm1d(33), nn.Linear(33, 90)
    )  # more than a tile, and float32 with them


def thinned(params, number, bad=None):
    """Gradients of which some are zero, of either sign, and more of them with each step."""
    found = gradients(params, number, bad)
    for grad in found:
        grad.view(-1)[: grad.numel() // (7 - number)] *= 0.0
        grad.view(-1)[-1] = -0.0
    return found


def zeros_of(grads):
    return sum(grad.numel() - int(grad.count_nonzero()) for grad in grads)


@pytest.mark.parametrize("options", [{}, {"clip_grad_norm": 0.1}], ids=["not clipped", "clipped"])
@pytest.mark.parametrize("kind", KINDS)
def test_they_are_those_that_the_host_counts_and_none_of_a_skip(kind, options):
    both = pair(make_model, lambda p: AdamW(p, lr=1e-2), counting(kind), **options)
    for number in range(4):
        bad = float("inf") if number == 2 and (options or kind == "fp16") else None
        found = []
        for booster, model, optimizer in both:
            params = list(model.parameters())
            grads = thinned(params, number, bad)
            booster.backward(loss_with(params, grads), optimizer)
            found.append(optimizer.step().num_zeros_in_grad)
            optimizer.zero_grad()
        assert found == [None if bad else zeros_of(grads)] * 2
    assert type(both[1][2]._update.decision).__name__ == "KernelDecision"


def test_gradients_that_are_written_to_after_a_clip_are_counted_as_they_are_stepped():
    booster, model, optimizer = pair(make_model, lambda p: AdamW(p), counting("bf16"))[1]
    params = list(model.parameters())
    for cut in (0, 5):
        booster.backward(loss_with(params, [torch.ones_like(param) for param in params]), optimizer)
        optimizer.clip_grad_by_norm(1.0)
        params[0].grad.view(-1)[:cut] = 0.0
        assert optimizer.step().num_zeros_in_grad == cut
        optimizer.zero_grad()


def test_what_kernels_do_not_step_is_counted_by_torch():
    both = pair(
        lambda: nn.Sequential(nn.Embedding(9, 4, sparse=True), nn.Linear(4, 3)),
        lambda p: SGD(p, lr=0.1),
        lambda: BF16NaiveMixedPrecision(log_num_zeros_in_grad=True, keep_fp32=nn.Embedding),
        clip_grad_norm=0.1,
    )
    found = []
    for booster, model, optimizer in both:
        weights = torch.tensor([[1.0], [1.0], [0.0]]) * torch.tensor([1.0, 0.0, 1.0])
        booster.backward((model(torch.tensor([1, 5, 2])) * weights).square().sum(), optimizer)
        found.append(optimizer.step().num_zeros_in_grad)
    assert found == [4 + 4 + 1] * 2  # a row of the sparse one, and a row and a bias


def test_they_cost_no_launch_and_nobody_waits():
    def launches(counts):
        return of_step(lambda: stepping(make_model(), AdamW, FP16NaiveMixedPrecision(log_num_zeros_in_grad=counts)))

    plain, counted = map(launches, (False, True))
    assert counted.found == plain.found
    assert counted.waits.total() == plain.waits.total() == 0


@pytest.mark.parametrize(("mode", "more"), [("exact", {"Triton: measure": 1, "sum": 1}), ("previous_norm", {"sum": 1})])
def test_within_a_backward_pass_they_cost_a_launch_a_part_at_most_whatever_there_is_in_it(mode, more):
    def launches(counts, depth):
        net = nn.Sequential(*(nn.Linear(7, 7) for _ in range(depth)))
        precision = BF16NaiveMixedPrecision(log_num_zeros_in_grad=counts)
        return of_step(lambda: stepping(net, AdamW, precision, release_gradients=mode))

    for depth in (1, 3):
        plain, counted = (launches(counts, depth) for counts in (False, True))
        assert counted.found - plain.found == more
        assert counted.waits.total() == plain.waits.total() == 0
