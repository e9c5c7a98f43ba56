"""A deep copy of boosted model and optimizer goes on as the original would, and neither touches the other."""

import copy
import threading

import pytest
import torch
from comparing import same
from everywhere import everywhere
from torch import nn

from booster import Booster
from booster.mixed_precision import BF16MixedPrecision, FP16ApexMixedPrecision

PRECISIONS = {
    **{name: lambda name=name: name for name in everywhere()},
    **{
        f"fp16_apex {level}": lambda level=level: FP16ApexMixedPrecision(level, verbosity=0)
        for level in ("O0", "O2", "O3")
    },
}
OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01, eps=1e-4),
    "NAdam": lambda params: torch.optim.NAdam(params, lr=0.01, eps=1e-4),
}
EVERY_PRECISION = pytest.mark.parametrize("precision", PRECISIONS)


class Run:
    def __init__(self, precision, optimizer, schedule=None):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.BatchNorm1d(16), nn.Linear(16, 3))
        self.booster = Booster("cpu", precision if not isinstance(precision, str) else PRECISIONS[precision]())
        optimizer = OPTIMIZERS[optimizer](model.parameters())
        scheduler = None
        if schedule == "before":
            scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
        self.model, self.optimizer, *_, self.scheduler = self.booster.boost(model, optimizer, lr_scheduler=scheduler)
        if schedule == "after":
            self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 1, 0.5)

    def copy(self):
        clone = copy.copy(self)
        clone.model, clone.optimizer, clone.scheduler = copy.deepcopy((self.model, self.optimizer, self.scheduler))
        return clone

    def loss(self, seed):
        x = torch.randn(8, 6, generator=torch.Generator().manual_seed(seed))
        return self.model(x).square().mean()

    def train(self, seeds):
        for seed in seeds:
            self.booster.backward(self.loss(seed), self.optimizer)
            self.optimizer.clip_grad_by_norm(0.1)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if self.scheduler is not None:
                self.scheduler.step()
        return self.values()

    def values(self):
        tensors = [*self.model.state_dict().values()]
        for state in self.optimizer.state_dict()["state"].values():
            tensors += [value for value in state.values() if isinstance(value, torch.Tensor)]
        return [tensor.detach().clone() for tensor in tensors]


@pytest.mark.crossed
@EVERY_PRECISION
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("schedule", [None, "before", "after"])
def test_copy_and_original_train_alike_and_independently(precision, optimizer, schedule):
    run = Run(precision, optimizer, schedule)
    run.train(range(3))
    clone, before = run.copy(), run.values()
    assert same(clone.values(), before)
    alone = clone.train(range(3, 6))
    assert same(run.values(), before)  # the original did not move
    assert not same(alone, before)  # the copy did
    assert same(run.train(range(3, 6)), alone)
    assert same(clone.values(), alone)
    assert run.optimizer.num_applied + run.optimizer.num_skipped == 6


@EVERY_PRECISION
def test_a_copy_between_backward_and_step_leaves_the_gradients_of_the_original(precision):
    run, other = Run(precision, "SGD"), Run(precision, "SGD")
    for each in (run, other):
        each.train(range(2))
        each.booster.backward(each.loss(2), each.optimizer)
    clone = run.copy()
    clone.optimizer.zero_grad()  # torch copies parameters without their gradients
    clone.train([5])
    run.optimizer.step()
    other.optimizer.step()
    assert same(run.values(), other.values())


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_naive", "fp16_apex O0"])
def test_copies_after_a_step_with_a_closure(precision):
    run = Run(precision, "SGD")

    def closure_of(run, seed):
        def closure():
            run.optimizer.zero_grad()
            loss = run.loss(seed)
            run.booster.backward(loss, run.optimizer)
            return loss

        return closure

    result = run.optimizer.step(closure_of(run, 0))
    assert float(result.loss.detach()) > 0
    clone = run.copy()
    clone.optimizer.step(closure_of(clone, 1))
    run.optimizer.step(closure_of(run, 1))
    assert same(clone.values(), run.values())


def test_a_copy_of_the_optimizer_shares_the_precision():
    # A user's strategy may hold what cannot be copied.
    class Mine(BF16MixedPrecision):
        def __init__(self):
            super().__init__()
            self.lock = threading.Lock()

    run = Run(Mine(), "SGD")
    optimizer, model = copy.deepcopy((run.optimizer, run.model))
    run.booster.backward(model(torch.ones(2, 6)).sum(), optimizer)
    assert optimizer.step().applied


def test_a_step_with_a_closure_keeps_no_graph():
    run = Run("fp32", "SGD")

    def closure():
        loss = run.loss(0)
        run.booster.backward(loss, run.optimizer)
        return loss

    run.optimizer.step(closure)
    assert run.optimizer._history.last.loss is None
