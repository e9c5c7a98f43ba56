"""Stages that are computed one after the other in one process give what the whole model gives."""

import copy
import weakref

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from booster.plugin.pipeline import PipelinePlan
from booster.plugin.pipeline.shape_inference import infer_shapes
from booster.tensors.trees import divide

DIM = 4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x, first, scale):
        return (x + torch.tanh(self.linear(x)) * scale + first / 8, scale)


class Model(nn.Module):
    """Passes what the stem made to every block, with a number that each micro-batch has for itself."""

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
    """The stages of `model`, armed, each with its own copy, and where they begin."""
    stages = []
    for rank in range(num_stages):
        plan = PipelinePlan(copy.deepcopy(model), pp_size=num_stages)
        plan.cut(rank)
        (stage,) = plan.stages
        for position in range(len(plan.split.children)):
            if plan.split.stage_of(position) == rank:
                stage.register_receiving(position, plan.model.blocks[position])
        io = infer_shapes(plan.meta_model, plan.split, micro_batches[0].args, {})
        stage.prepare(io, micro_batches)
        stages.append(stage)
    return stages, io


@pytest.fixture
def micro_batches():
    torch.manual_seed(0)
    return divide((torch.randn(6, DIM), torch.randn(6, 2)), lambda size: 3)


def received(values):
    return tuple(value.detach().requires_grad_() for value in values)


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
    with pytest.raises(RuntimeError, match="stage 1 of the pipeline uses what is on another stage, and did not"):
        run(stages)


def test_values_cross_in_the_dtype_that_was_declared(micro_batches):
    stages, _ = cut(Model(), 2, micro_batches)
    stages[0].module.double()
    stages[0]._micro_batches = [type(part)((part.args[0].double(),), {}, None) for part in micro_batches]
    with pytest.raises(RuntimeError, match=r"blocks.3 should get a tensor of torch.float32 .* and gets torch.float64"):
        run(stages)


class Deep(nn.Module):
    """Twelve blocks behind an embedding and positions; `write` changes what a block returned, in place."""

    def __init__(self, write=None):
        super().__init__()
        self.embedding, self.position = nn.Embedding(7, DIM), nn.Parameter(torch.ones(3, DIM))
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(DIM, DIM), nn.Tanh()) for _ in range(12))
        self.head = nn.Linear(DIM, 2)
        self.write = write

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position[: tokens.shape[1]] * (tokens > 0).unsqueeze(2)
        x = torch.cat([x[:, :1], x[:, 1:]], dim=1)
        for block in self.blocks:
            x = block(x)
            if self.write is not None:
                self.write(x)
        return self.head(x)


def of_tokens():
    torch.manual_seed(0)
    return divide((torch.randint(7, (6, 3)), torch.randn(6, 2)), lambda size: 3)


def counted(stage):
    """The functions that torch runs on fake tensors for `stage`, from now on."""
    mode, calls = stage._meta_model.mode, []
    run = mode.dispatch
    mode.dispatch = lambda func, *args: calls.append(func) or run(func, *args)
    return calls


def test_what_lies_on_other_stages_is_asked_once_for_a_shape_and_not_for_every_micro_batch():
    stages, io = cut(Deep(), 2, of_tokens())
    calls = counted(stages[1])
    run(stages, 0)
    assert calls
    calls.clear()
    run(stages, 1)
    run(stages, 2)
    assert calls == []
    kept = len(stages[1]._io.results[1])
    stages[1].prepare(stages[1]._io, of_tokens())
    run(stages, 0)
    assert calls == []
    assert len(stages[1]._io.results[1]) == kept


def lengthened(x):
    x.unsqueeze_(0)
    x.squeeze_(0)
    x.mul_(2)


def swapped(x):
    x.transpose_(0, 1)


@pytest.mark.parametrize("write", [lengthened, swapped])
def test_a_forward_that_writes_into_what_lies_on_other_stages_still_computes_the_model(write):
    torch.manual_seed(1)
    model, parts = Deep(write), of_tokens()
    stages, io = cut(model, 2, parts)
    assert stages[1]._io.results == {1: None}
    for number in (0, 1, 2, 0):
        torch.testing.assert_close(run(stages, number), model(*parts[number].args))


def test_answers_depend_on_numbers_and_keep_no_real_tensor():
    stages, _ = cut(Deep(), 2, of_tokens())
    meta_model = stages[1]._meta_model
    meta_model.mode.results = {}
    one = meta_model.fake((2, 3), torch.float32, torch.device("cpu"), requires_grad=True)
    assert [one[:, :n].shape[1] for n in (1, 2, torch.tensor(1), torch.tensor(2))] == [1, 2, 1, 2]
    assert (one * 1).dtype != (one > 1).dtype
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.mm(one, one.t()).dtype == torch.bfloat16
    assert torch.mm(one, one.t()).dtype == torch.float32
    real = torch.ones(2, 3)
    seen = weakref.ref(real)
    product = one * real
    assert product is one * real
    assert product.requires_grad
    del real
    assert seen() is None
