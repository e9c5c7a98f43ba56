"""Models with branches that depend on rank and micro-batch: every placement trains as one process on the whole batch does."""

import random
from contextlib import nullcontext

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from booster import Booster
from booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin

PLUGINS = {
    "ddp": lambda: TorchDDPPlugin(find_unused_parameters=True),
    "zero1": lambda: LowLevelZeroPlugin(find_unused_parameters=True),
    "zero2": lambda: LowLevelZeroPlugin(stage=2),
    "fsdp": TorchFSDPPlugin,
    "hybrid": lambda: HybridParallelPlugin(tp_size=1, pp_size=1, zero_stage=1),
}
PRECISIONS = ("fp32", "bf16", "bf16_naive")
WIDTH, ROWS = 8, 4


class Block(nn.Module):
    """Experts, of which a pass uses some or none; those that it computes and does not use get no gradient."""

    def __init__(self, hidden):
        super().__init__()
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, size), nn.Tanh(), nn.Linear(size, WIDTH)) for size in hidden
        )
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, h, used, computed):
        for index in computed:
            self.experts[index](h)
        for index in used:
            h = h + self.experts[index](self.norm(h))
        return h


class Net(nn.Module):
    def __init__(self, program):
        super().__init__()
        torch.manual_seed(program["seed"])
        self.inp = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block(hidden) for hidden in program["hidden"])
        self.ends_in_a_block = program["ends_in_a_block"]  # and begins with what is a head of others
        heads = nn.ModuleList(nn.Linear(WIDTH, WIDTH if self.ends_in_a_block else 3) for _ in range(program["heads"]))
        self.tasks, self.heads = (heads, None) if self.ends_in_a_block else (None, heads)
        self.num_calls = 0

    def forward(self, x, way=None):
        if way is None:  # in a pipeline, where every micro-batch calls this once
            way = self.ways[self.num_calls % len(self.ways)]
            self.num_calls += 1
        h = torch.tanh(self.inp(x))
        if self.ends_in_a_block:
            h = self.tasks[way["head"]](h)
        for block, used, computed in zip(self.blocks, way["used"], way["computed"], strict=True):
            h = block(h, used, computed)
        return h if self.ends_in_a_block else self.heads[way["head"]](h)


def program_of(seed, world_size, *, num_blocks=None, num_micro_batches=None, after_equal_steps=0.0):
    """What `seed` draws: a model, and the way that each rank takes in each micro-batch of each step."""
    draw = random.Random(seed)
    num_blocks = num_blocks or draw.randint(2, 3)
    hidden = [[draw.choice([8, 8, 6, 12]) for _ in range(draw.randint(1, 3))] for _ in range(num_blocks)]
    heads, num_micro_batches = draw.randint(1, 3), num_micro_batches or draw.randint(1, 3)

    def way():
        return {
            "head": draw.randrange(heads),
            "used": [[index for index in range(len(sizes)) if draw.random() < 0.5] for sizes in hidden],
            "computed": [[index for index in range(len(sizes)) if draw.random() < 0.2] for sizes in hidden],
        }

    program = {
        "seed": seed,
        "hidden": hidden,
        "heads": heads,
        "accumulate": draw.random() < 0.6,
        "adamw": draw.random() < 0.5,
        "ways": [[[way() for _ in range(world_size)] for _ in range(num_micro_batches)] for _ in range(2)],
        "ends_in_a_block": draw.random() < 0.4,
    }
    if draw.random() < after_equal_steps:  # in which every rank takes one way, always the same
        one = way()
        program["ways"] = [[[one] * world_size for _ in range(num_micro_batches)] for _ in range(5)] + program["ways"]
    return program


def optimizer_of(model, program):
    # A large eps, so that a gradient near zero moves a weight little; the decay shows whether a weight was stepped at all.
    if program["adamw"]:
        return torch.optim.AdamW(model.parameters(), lr=0.1, eps=0.1, weight_decay=0.5)
    return torch.optim.SGD(model.parameters(), lr=0.5)


def batch(program, step, number, rank):
    generator = torch.Generator().manual_seed(1000 * program["seed"] + 100 * step + 10 * number + rank)
    return torch.randn(ROWS, WIDTH, generator=generator)


def change_alone(program):
    """The change of every weight in one process that sees all batches, in float32; zeros where nothing used it."""
    model = Net(program)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer = optimizer_of(model, program)
    for step, of_step in enumerate(program["ways"]):
        for number, of_ranks in enumerate(of_step):
            for rank, way in enumerate(of_ranks):
                loss = model(batch(program, step, number, rank), way).square().mean()
                (loss / len(of_ranks) / len(of_step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() - before[name] for name, param in model.named_parameters()}


def trained(rank, world_size, seeds, plugin, precision):
    """Of each seed the largest error of a weight's change, in units of what `precision` allows."""
    worst = {}
    for seed in seeds:
        program = program_of(seed, world_size, after_equal_steps=0.5 * (plugin in ("fsdp", "hybrid")))
        torch.manual_seed(program["seed"])
        model = Net(program)
        before = {name: param.detach().clone() for name, param in model.named_parameters()}
        booster = Booster("cpu", precision, PLUGINS[plugin]())
        model, optimizer, *_ = booster.boost(model, optimizer_of(model, program))
        for step, of_step in enumerate(program["ways"]):
            accumulates = program["accumulate"]
            group = (
                booster.accumulate(model, optimizer, num_micro_batches=len(of_step)) if accumulates else nullcontext()
            )
            with group:
                for number, of_ranks in enumerate(of_step):
                    loss = model(batch(program, step, number, rank), of_ranks[rank]).float().square().mean()
                    booster.backward(loss if accumulates else loss / len(of_step), optimizer)
            assert optimizer.step().applied
            optimizer.zero_grad()
        worst[seed] = largest_error(booster.unwrap(model), before, change_alone(program), precision)
    return worst


def largest_error(model, before, right, precision):
    """The largest error of the change of a weight of `model`, in units of what `precision` allows, and its name."""
    found = 0.0, ""
    # Each of some ten products of a pass, and each sum of gradients, rounds by half a unit; a half weight once more.
    unit = torch.finfo({"fp32": torch.float32, "fp16": torch.float16}.get(precision, torch.bfloat16)).eps
    largest = max(float(change.norm()) for change in right.values())
    for name, param in model.named_parameters():
        now = (param.full_tensor() if isinstance(param, DTensor) else param).detach().float()
        error = float((now - before[name] - right[name]).norm())
        allowed = unit * (32 * float(right[name].norm()) + 4 * largest + float(now.norm()))
        found = max(found, (error / allowed, name))
    return found


STAGES = {"gpipe": 1, "1f1b": 1, "interleaved": 2, "zbv": 2}


def staged(rank, world_size, seeds, style, zero_stage, precision):
    """As `trained`, in a pipeline of two ranks, two of which share each stage's batch."""
    worst = {}
    for seed in seeds:
        program = program_of(seed, 2, num_blocks=2 * STAGES[style], num_micro_batches=4 if seed % 2 else 2)
        model = Net(program)
        before = {name: param.detach().clone() for name, param in model.named_parameters()}
        plugin = HybridParallelPlugin(
            1,
            2,
            zero_stage=zero_stage,
            num_microbatches=len(program["ways"][0]),
            pp_style=style,
            num_model_chunks=STAGES[style],
            split_points=[f"blocks.{number}" for number in range(1, 2 * STAGES[style])],
        )
        copy = plugin.data_parallel_rank
        model.ways = [of_ranks[copy] for of_step in program["ways"] for of_ranks in of_step]
        booster = Booster("cpu", precision, plugin)
        model, optimizer, *_ = booster.boost(model, optimizer_of(model, program))
        for step, of_step in enumerate(program["ways"]):
            x = torch.cat([batch(program, step, number, copy) for number in range(len(of_step))])
            booster.execute_pipeline(iter([(x, x)]), model, lambda out, _: out.float().square().mean(), optimizer)
            assert optimizer.step().applied
            optimizer.zero_grad()
        worst[seed] = largest_error(booster.unwrap(model), before, change_alone(program), precision)
    return worst


@pytest.mark.slow_cases("gpipe", "1f1b", "seeds 2 and 3", "interleaved")
@pytest.mark.crossed
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("zero_stage", [0, 1])
@pytest.mark.parametrize("style", STAGES)
@pytest.mark.parametrize("seeds", [range(2), range(2, 4)], ids=["seeds 0 and 1", "seeds 2 and 3"])
def test_ranks_whose_stages_take_other_branches_train_as_one_process(ranks4, seeds, style, zero_stage, precision):
    for found in ranks4(staged, seeds, style, zero_stage, precision):
        assert not {seed: each for seed, each in found.items() if each[0] > 1}


class Apart(nn.Module):
    """Experts of equal size that are gathered and reduced by themselves."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inp, self.experts = nn.Linear(WIDTH, WIDTH), nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))

    def forward(self, x, way, both):
        outputs = [expert(self.inp(x)) for expert in self.experts] if both else {way: self.experts[way](self.inp(x))}
        return outputs[way]


def named_before_reducing(rank, world_size, plugin, both):
    make = {
        "fsdp": TorchFSDPPlugin,
        "hybrid": lambda **kw: HybridParallelPlugin(tp_size=1, pp_size=1, zero_stage=1, **kw),
    }
    booster = Booster("cpu", "fp32", make[plugin](wrap_policy="experts.*"))
    model = Apart()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.5))
    with pytest.raises(RuntimeError, match=r"some go through 'experts\.0', 'experts\.1' now"):
        booster.backward(model(torch.ones(ROWS, WIDTH), rank, both).sum(), optimizer)
    optimizer.zero_grad()
    booster.backward(model(torch.ones(ROWS, WIDTH), 0, both).sum(), optimizer)
    return optimizer.step().applied


@pytest.mark.parametrize("both", [False, True])
@pytest.mark.parametrize("plugin", ["fsdp", "hybrid"])
def test_modules_that_travel_alone_and_are_used_on_some_ranks_are_named_before_anything_is_reduced(
    ranks2, plugin, both
):
    assert ranks2(named_before_reducing, plugin, both) == [True, True]


def named_in_evaluation(rank, world_size, plugin):
    booster = Booster("cpu", "fp32", TorchFSDPPlugin(wrap_policy="experts.*", **plugin))
    model = Apart()
    right = model.experts[1](model.inp(torch.ones(ROWS, WIDTH))).detach()
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.0))
    for _ in range(5):  # more than the first passes, in which ranks compare each gather
        booster.backward(model(torch.ones(ROWS, WIDTH), 0, True).sum(), optimizer)
        optimizer.step(), optimizer.zero_grad()
    model.eval()
    with torch.no_grad():
        with pytest.raises(RuntimeError, match=r"some go through 'experts\.0', 'experts\.1' now"):
            model(torch.ones(ROWS, WIDTH), rank, False)
        torch.testing.assert_close(model(torch.ones(ROWS, WIDTH), 1, False), right)
    return True


@pytest.mark.parametrize("plugin", [{}, {"reshard_after_forward": False}], ids=str)
def test_modules_that_some_ranks_alone_evaluate_are_named(ranks2, plugin):
    assert ranks2(named_in_evaluation, plugin) == [True, True]


class Empty(nn.Module):
    def __init__(self, shape):
        super().__init__()
        torch.manual_seed(0)
        self.nothing, self.layer = nn.Parameter(torch.zeros(shape)), nn.Linear(WIDTH, WIDTH)

    def forward(self, x):
        return self.layer(x) + self.nothing.sum()


def with_empty(rank, world_size, plugin, precision):
    found = []
    for shape in ((0, 3), (3, 0)):
        booster, model = Booster("cpu", precision, PLUGINS[plugin]()), Empty(shape)
        model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.1))
        for _ in range(2):
            booster.backward(model(torch.ones(ROWS, WIDTH)).float().square().mean(), optimizer)
            found.append(optimizer.step().applied)
            optimizer.zero_grad()
    return found


@pytest.mark.crossed
@pytest.mark.parametrize("precision", ["fp32", "bf16_naive"])
@pytest.mark.parametrize("plugin", PLUGINS)
def test_a_parameter_without_elements_lies_beside_others(ranks2, plugin, precision):
    assert ranks2(with_empty, plugin, precision) == [[True] * 4] * 2


@pytest.mark.slow_cases("hybrid", "zero1")
@pytest.mark.crossed
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("plugin", PLUGINS)
def test_ranks_that_take_other_branches_train_as_one_process(ranks2, plugin, precision):
    wrong = {seed: found for seed, found in ranks2(trained, range(4, 10), plugin, precision)[0].items() if found[0] > 1}
    assert not wrong, wrong


@pytest.mark.slow
@pytest.mark.parametrize("first", range(6, 206, 20))
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("plugin", PLUGINS)
def test_two_hundred_programs_of_branches_train_as_one_process(ranks2, plugin, precision, first):
    found = ranks2(trained, range(first, first + 20), plugin, precision)[0]
    assert not {seed: each for seed, each in found.items() if each[0] > 1}


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("plugin", PLUGINS)
def test_four_ranks_that_take_other_branches_train_as_one_process(ranks4, plugin, precision):
    wrong = {seed: found for seed, found in ranks4(trained, range(8), plugin, precision)[0].items() if found[0] > 1}
    assert not wrong, wrong
