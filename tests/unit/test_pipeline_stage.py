"""Stages that are computed one after the other in one process give what the whole model gives."""

import copy

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from booster.micro_batch import divide
from booster.plugin.pipeline import plan_pipeline
from booster.plugin.pipeline.rehearsal import rehearse

DIM = 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x, first, scale):
        return (x + torch.tanh(self.linear(x)) * scale + first / 8, scale)


class Model(nn.Module):
    """Passes what the stem made to every block, beside a number that each micro-batch has of its own."""

    def __init__(self, checkpointed=False):
        super().__init__()
        self.stem = nn.Linear(DIM, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        self.head = nn.Linear(DIM, 2)
        self.checkpointed = checkpointed
        self.dropped = set()

    def forward(self, x):
        first = x = self.stem(x)
        scale = torch.ones(len(x), 1) * 0.5
        for number, block in enumerate(self.blocks):
            if number in self.dropped:
                continue
            args = (x, first, scale)
            x, scale = checkpoint(block, *args, use_reentrant=False) if self.checkpointed else block(*args)
        return self.head(x)


def cut(model, num_stages, micro_batches):
    """The stages of `model`, armed, each with a copy of its own, and where they begin."""
    stages = []
    for rank in range(num_stages):
        plan = plan_pipeline(copy.deepcopy(model), pp_size=num_stages)
        plan.cut(rank)
        (stage,) = plan.stages
        for position in range(len(plan.split.children)):
            if plan.split.stage_of(position) == rank:
                stage.arm(position, plan.model.blocks[position])
        route = rehearse(plan.skeleton, plan.split, micro_batches[0].args, {})
        stage.begin(route, micro_batches)
        stages.append(stage)
    return stages, route


@pytest.fixture
def micro_batches():
    torch.manual_seed(0)
    return divide((torch.randn(6, DIM), torch.randn(6, 2)), lambda size: 3)


def received(values):
    return tuple(value.detach().requires_grad_() for value in values)


@pytest.mark.parametrize("checkpointed", [False, True])
def test_stages_in_a_row_compute_the_model_and_its_gradients(micro_batches, checkpointed):
    torch.manual_seed(1)
    model = Model(checkpointed)
    stages, route = cut(model, 3, micro_batches)
    assert [len(boundary.specs) for boundary in route.boundaries] == [2, 2]  # `scale` is known to everybody
    outputs, inputs = [], {}
    for number in range(3):
        values = ()
        for stage in stages:
            stage.current = number
            inputs[number, stage.index] = received(values)
            values = stage.compute(inputs[number, stage.index])
            outputs.append(values)
    for number in (1, 0, 2):  # in any order, so that recomputation has to find the right micro-batch
        gradients = None
        for stage in reversed(stages):
            stage.current = number
            made = outputs[number * 3 + stage.index]
            if stage.is_last:
                torch.testing.assert_close(made, model(*micro_batches[number].args))
                (made - micro_batches[number].target).square().sum().backward()
            else:
                torch.autograd.backward(made, gradients)
            gradients = [value.grad for value in inputs[number, stage.index]]
    for part in micro_batches:
        (model(*part.args) - part.target).square().sum().backward()
    own = {name: param for stage in stages for name, param in stage.module.named_parameters()}
    assert set(own) == {name for name, _ in model.named_parameters()}
    for name, param in model.named_parameters():
        torch.testing.assert_close(own[name].grad, param.grad, msg=name)


def run(stages, number=0):
    values = ()
    for stage in stages:
        stage.current = number
        values = stage.compute(received(values))
    return values


@pytest.mark.parametrize("dropped", [{2}, {0}, {3}, {1, 2}])
def test_a_forward_that_differs_from_run_to_run_raises_instead_of_computing_nonsense(micro_batches, dropped):
    stages, _ = cut(Model(), 3, micro_batches)
    for stage in stages:
        stage.module.dropped = dropped
    if dropped in ({0}, {3}):  # blocks that are elsewhere for one stage, and not the first of any
        assert run(stages).shape == (2, 2)
        return
    with pytest.raises(RuntimeError, match="did not come to blocks.2 as it did in the first micro-batch"):
        run(stages)


def test_a_received_value_that_is_elsewhere_in_a_later_run_raises(micro_batches):
    stages, _ = cut(Model(), 2, micro_batches)
    model = stages[1].module
    model.head.register_forward_pre_hook(lambda module, args: (args[0] + model.stem.bias[0],))
    with pytest.raises(RuntimeError, match="stage 1 of the pipeline uses what lies on another stage, and did not"):
        run(stages)


def test_values_cross_in_the_dtype_that_was_declared(micro_batches):
    stages, _ = cut(Model(), 2, micro_batches)
    stages[0].module.double()
    stages[0]._feeds = [type(part)((part.args[0].double(),), {}, None) for part in micro_batches]
    with pytest.raises(RuntimeError, match=r"blocks.3 should get a tensor of torch.float32 .* and gets torch.float64"):
        run(stages)
