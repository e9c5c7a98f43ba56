"""Ways of training in which ranks, or passes, do unequal things: each placement trains as one process does."""

from contextlib import nullcontext

import pytest
import torch
import torch.distributed as dist
from test_branches_ranks import PLUGINS, PRECISIONS, largest_error
from torch import nn
from torch.utils.checkpoint import checkpoint

from booster import Booster
from booster.mixed_precision import FP16TorchMixedPrecision
from booster.plugin import TorchFSDPPlugin

WIDTH, ROWS = 8, 4
WAYS = [(0,), (1,), (0, 1), ()]


class Part(nn.Module):
    recompute = False

    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 12), nn.Linear(12, WIDTH)

    def forward(self, h):
        return h + (checkpoint(self.body, h, use_reentrant=False) if self.recompute else self.body(h))

    def body(self, h):
        return self.down(torch.tanh(self.up(h)))


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.parts = nn.LayerNorm(WIDTH), nn.ModuleList(Part() for _ in range(2))

    def forward(self, h, way):
        h = self.norm(h)
        for index in way:
            h = self.parts[index](h)
        return h


class Net(nn.Module):
    def __init__(self, *, tied=False):
        super().__init__()
        torch.manual_seed(0)
        self.inp, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        if tied:
            self.out.weight = self.inp.weight

    def forward(self, x, way=(0, 1)):
        h = torch.tanh(self.inp(x))
        for block in self.blocks:
            h = block(h, way)
        return self.out(h)


class Taught(nn.Module):
    """A student and the average of its weights, which the loop writes between passes."""

    def __init__(self):
        super().__init__()
        self.student, self.teacher = Net(), Net().requires_grad_(False)

    def forward(self, x):
        with torch.no_grad():
            taught = self.teacher(x)
        return self.student(x) - taught


def batch(step, number, rank, rows=ROWS):
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(1000 + 100 * step + 10 * number + rank))


def way_of(step, rank, number=0):
    return WAYS[(rank + step + number) % 4]


def plain(model, step, rank):
    return [lambda: model(batch(step, 0, rank)).float().square().mean()]


def branches(model, step, rank):
    return [lambda: model(batch(step, 0, rank), way_of(step, rank)).float().square().mean()]


def micro_batches(model, step, rank):
    return [
        lambda number=number: model(batch(step, number, rank), way_of(step, rank, number)).float().square().mean() / 3
        for number in range(3)
    ]


def late_branches(model, step, rank):
    return branches(model, step, rank) if step >= 6 else plain(model, step, rank)


def two_forwards(model, step, rank):
    def loss():
        one, other = (model(batch(step, n, rank), WAYS[(rank + step + n) % 3]) for n in range(2))
        return (one - other).float().square().mean()

    return [loss]


def rows_on_one_rank(model, step, rank):
    rows = 0 if rank == step % 2 else ROWS
    return [lambda: model(batch(step, 0, rank, rows), WAYS[rank % 2]).float().square().sum() / ROWS / WIDTH]


def recompute(model, step, rank):
    for module in model.modules():
        if isinstance(module, Part):
            module.recompute = True


def alternate(model, step, rank):
    for index in range(2):
        model.blocks[index].requires_grad_(step % 2 == index)


def unfreeze_step_by_step(model, step, rank):
    model.blocks[0].requires_grad_(step % 2 == 1)
    model.inp.requires_grad_(step >= 2)
    model.out.requires_grad_(step != 3)


def average(model, step, rank):
    if step:
        with torch.no_grad():
            for kept, weight in zip(model.teacher.parameters(), model.student.parameters(), strict=True):
                kept.mul_(0.5).add_(weight.detach(), alpha=0.5)


def freeze(first, last, *, ranks=(0, 1, 2, 3)):
    def before(model, step, rank):
        model.blocks[0].parts[0].requires_grad_(not (first <= step < last and rank in ranks))

    return before


# Losses of a step on a rank; what happens before the forward pass; number of steps; how the passes are made.
SITUATIONS = {
    "two forward passes in a loss": (two_forwards, None, 3, ""),
    "a rank without rows": (rows_on_one_rank, None, 3, ""),
    "branches computed again in backward": (branches, recompute, 3, ""),
    "branches after equal steps": (late_branches, None, 9, ""),
    "frozen in turns": (plain, alternate, 10, ""),
    "unfrozen step by step": (plain, unfreeze_step_by_step, 6, ""),
    "frozen on one rank from the first step": (plain, freeze(0, 9, ranks=(0,)), 3, ""),
    "frozen on one rank later": (plain, freeze(6, 9, ranks=(0,)), 9, ""),
    "frozen for some steps": (plain, freeze(6, 8), 10, ""),
    "an average of weights": (plain, average, 4, "taught"),
    "a weight used twice": (plain, None, 3, "tied"),
    "two passes through a graph": (branches, None, 3, "retain_graph"),
    "no_sync": (micro_batches, None, 3, "no_sync"),
    "several passes": (micro_batches, None, 3, ""),
    "a group added later": (plain, None, 3, "later"),
}
REFUSED = {  # by name, or in torch's words
    "ddp": ("two passes through a graph", "frozen on one rank from the first step"),
    "zero1": ("two passes through a graph", "frozen on one rank from the first step"),
    "zero2": ("frozen on one rank from the first step",),
}


def made(how):
    model = Taught() if how == "taught" else Net(tied=how == "tied")
    params = {name: param for name, param in model.named_parameters() if param.requires_grad}
    first = [param for name, param in params.items() if how != "later" or not name.startswith("out.")]
    return model, torch.optim.AdamW(first, lr=0.05, eps=0.1, weight_decay=0.3)


def change_alone(situation, world_size):
    losses, before, steps, how = SITUATIONS[situation]
    model, optimizer = made(how)
    start = {name: param.detach().clone() for name, param in model.named_parameters()}
    for step in range(steps):
        if how == "later" and step == 1:
            optimizer.add_param_group({"params": list(model.out.parameters())})
        for rank in range(world_size):
            if before and (rank == 0 or how != "taught"):
                before(model, step, rank)
            for loss in losses(model, step, rank):
                (loss() * (2 if how == "retain_graph" else 1) / world_size).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {name: param.detach() - start[name] for name, param in model.named_parameters()}


def error_of(situation, make, precision, rank, world_size):
    """The largest error of a weight's change, in units of what `precision` allows, and the name of the weight."""
    losses, before, steps, how = SITUATIONS[situation]
    model, optimizer = made(how)
    start = {name: param.detach().clone() for name, param in model.named_parameters()}
    booster = Booster("cpu", FP16TorchMixedPrecision(init_scale=2.0**10) if precision == "fp16" else precision, make())
    model, optimizer, *_ = booster.boost(model, optimizer)
    bare = booster.unwrap(model)
    for step in range(steps):
        if how == "later" and step == 1:
            optimizer.add_param_group({"params": list(bare.out.parameters())})
        if before:
            before(bare, step, rank)
        passes = losses(model, step, rank)
        for number, loss in enumerate(passes):
            last = number == len(passes) - 1
            with booster.no_sync(model, optimizer) if how == "no_sync" and not last else nullcontext():
                value = loss()
                if how == "retain_graph":
                    booster.backward(value, optimizer, retain_graph=True)
                booster.backward(value, optimizer)
        assert optimizer.step().applied
        optimizer.zero_grad()
    return largest_error(bare, start, change_alone(situation, world_size), precision)


def errors(rank, world_size, plugin, precision):
    make = {**PLUGINS, "fsdp": lambda: TorchFSDPPlugin(wrap_policy=Block)}[plugin]
    return {
        situation: error_of(situation, make, precision, rank, world_size)
        for situation in SITUATIONS
        if situation not in REFUSED.get(plugin, ())
    }


@pytest.mark.slow_cases("hybrid", "zero1")
@pytest.mark.crossed
@pytest.mark.parametrize("precision", [*PRECISIONS, "fp16"])
@pytest.mark.parametrize("plugin", PLUGINS)
def test_ranks_that_do_unequal_things_train_as_one_process(ranks2, plugin, precision):
    wrong = {situation: found for situation, found in ranks2(errors, plugin, precision)[0].items() if found[0] > 1}
    assert not wrong, wrong


@pytest.mark.slow
@pytest.mark.parametrize("plugin", PLUGINS)
def test_four_ranks_that_do_unequal_things_train_as_one_process(ranks4, plugin):
    assert not {key: found for key, found in ranks4(errors, plugin, "bf16_naive")[0].items() if found[0] > 1}


def unfrozen_apart(rank, world_size):
    booster = Booster("cpu", "fp32", TorchFSDPPlugin(wrap_policy=Block))
    model, optimizer = made("")
    model, optimizer, *_ = booster.boost(model, optimizer)
    for step in range(7):
        for index in range(2):
            booster.unwrap(model).blocks[0].parts[index].requires_grad_(step == 6 and index == rank)
        (loss,) = plain(model, step, rank)
        if step == 6:
            with pytest.raises(
                RuntimeError, match=r"requires_grad of blocks\.0\.parts\.0\.up\.weight.*on all ranks alike"
            ):
                booster.backward(loss(), optimizer)
            return
        booster.backward(loss(), optimizer)
        optimizer.step()
        optimizer.zero_grad()


def test_what_ranks_unfreeze_apart_after_the_first_steps_is_named(ranks2):
    ranks2(unfrozen_apart)


def sent(rank, world_size):
    """The number of all-reduces of each of some steps: equal ones, two of other branches, and equal ones again."""
    booster = Booster("cpu", "fp32", TorchFSDPPlugin(wrap_policy=Block))
    model, optimizer = made("")
    model, optimizer, *_ = booster.boost(model, optimizer)
    counts, all_reduce = [], dist.all_reduce

    def counted(*args, **kwargs):
        counts[-1] += 1
        return all_reduce(*args, **kwargs)

    dist.all_reduce = counted
    try:
        for step in range(7):
            counts.append(0)
            (loss,) = (branches if step == 5 else plain)(model, step, rank)
            booster.backward(loss(), optimizer)
            optimizer.step()
            optimizer.zero_grad()
    finally:
        dist.all_reduce = all_reduce
    return counts


def test_ranks_agree_once_a_pass_after_the_first_ones_and_where_only_parts_of_groups_are_left_out(ranks2):
    for counts in ranks2(sent):
        assert counts[4:] == [1] * 3
        assert min(counts[:4]) >= 3  # before each of the three groups
