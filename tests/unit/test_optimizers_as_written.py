"""Optimizers as people write them: what one does beside stepping parameters is as in plain torch, wherever its numbers lie."""

import collections

import pytest
import torch
from torch import nn

import booster
from booster import Booster
from booster.mixed_precision import BF16NaiveMixedPrecision

WIDTH, LAYERS, STEPS = 300, 12, 5


class Schedule:
    """What an optimizer keeps in a group, and counts with."""

    def __init__(self):
        self.calls = 0
        self.seen = {"rates": []}


def begin(kind):
    """What counts the steps of an optimizer, in a group."""
    return {
        "number": lambda: 0,
        "tensor": lambda: torch.zeros((), dtype=torch.int32),
        "list": lambda: [0],
        "nested": lambda: {"of": [torch.zeros((), dtype=torch.float64)]},
        "deque": lambda: collections.deque([0]),
        "object": Schedule,
        "attribute": lambda: None,
        "attribute tensor": lambda: None,
        "made by the first step": lambda: None,
    }[kind]()


class Counting(torch.optim.Optimizer):
    """Steps by the sign of the gradient, less in each step; how it counts is its `kind`."""

    def __init__(self, params, kind, lr=0.01):
        self.kind = kind
        self.attribute = torch.zeros((), dtype=torch.int64) if kind == "attribute tensor" else 0
        super().__init__(params, {"lr": lr, "count": begin(kind)})
        for group in self.param_groups[1:]:
            group["count"] = begin(kind)

    def count(self, group):
        count = group["count"]
        if self.kind == "number":
            group["count"] = count = count + 1
        elif self.kind == "tensor":
            count.add_(1)
        elif self.kind in ("list", "deque"):
            count[0] += 1
            count = count[0]
        elif self.kind == "nested":
            count["of"][0].add_(1)
            count = count["of"][0]
        elif self.kind == "object":
            count.calls += 1
            count.seen["rates"].append(group["lr"])
            count = len(count.seen["rates"])
        elif self.kind == "made by the first step":
            group["made"] = count = group.get("made", 0) + 1
        else:
            count = self.attribute
        return int(count)

    @torch.no_grad()
    def step(self, closure=None):
        if self.kind.startswith("attribute"):
            self.attribute += 1
        for group in self.param_groups:
            rate = group["lr"] / self.count(group)
            for param in group["params"]:
                if param.grad is not None:
                    state = self.state[param]
                    if "last" not in state:
                        state["last"] = torch.zeros_like(param)
                    state["last"].copy_(param.grad)
                    param.add_(param.grad.sign(), alpha=-rate)

    def counts(self):
        """The number of steps by each group."""
        kept = []
        for group in self.param_groups:
            count = group["count"]
            kept.append(
                {
                    "number": lambda count=count: count,
                    "tensor": lambda count=count: int(count),
                    "list": lambda count=count: count[0],
                    "deque": lambda count=count: count[0],
                    "nested": lambda count=count: int(count["of"][0]),
                    "object": lambda count=count: (count.calls + len(count.seen["rates"])) / 2,
                    "attribute": lambda: self.attribute,
                    "attribute tensor": lambda: int(self.attribute),
                    "made by the first step": lambda group=group: group.get("made", 0),
                }[self.kind]()
            )
        return kept


booster.register_elementwise(Counting)

KINDS = (
    "number",
    "tensor",
    "list",
    "deque",
    "nested",
    "object",
    "attribute",
    "attribute tensor",
    "made by the first step",
)
WAYS = {
    "fp32": ("fp32", {}),
    "bf16": ("bf16", {}),
    "masters": ("bf16_naive", {}),
    "float32 masters": (lambda: BF16NaiveMixedPrecision(master_weights="fp32"), {}),
    "8-bit states": ("bf16", {"states": "8bit"}),
    "half weights, 16-bit states": ("bf16_naive", {"states": "bf16"}),
    "released": ("bf16", {"release_gradients": "exact"}),
    "released masters": ("bf16_naive", {"release_gradients": "exact"}),
}


def layers():
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)), nn.Linear(WIDTH, 4))


def trained(precision, options, kind):
    model = layers()
    last = list(model[-1].parameters())
    frozen = nn.Parameter(torch.zeros(3))  # of a group whose step is counted although it never has a gradient
    params = [{"params": list(model[:-1].parameters())}, {"params": last}, {"params": [frozen]}]
    optimizer = Counting(params, kind)
    b = Booster("cpu", precision() if callable(precision) else precision, **options)
    model.register_parameter("frozen", frozen)
    model, optimizer, *_ = b.boost(model, optimizer)
    for step in range(STEPS):
        x = torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))
        b.backward(model(x).float().square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return b.unwrap(optimizer).counts()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_an_optimizer_counts_each_step_once_however_it_counts_and_however_it_is_stepped(kind, way):
    assert trained(*WAYS[way], kind) == [STEPS] * 3


@pytest.mark.parametrize("kind", ["tensor", "number"])
def test_a_compiled_step_counts_each_step_once(kind):
    assert trained("bf16_naive", {"fused_optimizer": "compile"}, kind) == [STEPS] * 3


@pytest.mark.parametrize("kind", ["number", "tensor", "list", "nested", "attribute"])
def test_trial_steps_for_states_and_for_memory_leave_the_count_of_a_group(kind):
    model = layers()
    optimizer = Counting(model.parameters(), kind)
    b = Booster("cpu", "bf16", states="8bit")
    b.estimate_memory(model, optimizer, (torch.randn(8, WIDTH), torch.randn(8, 4)), nn.MSELoss())
    assert optimizer.counts() == [0]
    model, optimizer, *_ = b.boost(model, optimizer)
    assert b.unwrap(optimizer).counts() == [0]
