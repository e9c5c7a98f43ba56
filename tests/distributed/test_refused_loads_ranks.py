"""A load that one rank refuses is refused on all, and has changed nothing on any, in every precision on every plugin."""

import pytest
import torch
from choices import plugins, precisions
from refusals import fingerprint, zoo
from torch import nn
from torch.distributed.tensor import DTensor, Replicate

from booster import Booster

PRECISIONS = precisions("fp32", "bf16", "fp16", "O1", "O2", "fp16_naive", "bf16_naive", scale=2.0**10)
PLUGINS = plugins("ddp", "zero1", "zero2", "fsdp", "tp", "pp", tp_plan={"*.up": "colwise", "*.down": "rowwise"})


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x):
        return x + self.down(self.up(self.norm(x)).relu())


def trained(precision, plugin, steps):
    torch.manual_seed(0)
    booster = Booster("cpu", PRECISIONS[precision](), PLUGINS[plugin]())
    model = nn.Sequential(Block(), Block())
    made = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, made, criterion, *_ = booster.boost(model, made, nn.MSELoss())
    for step in range(steps + 1):
        torch.manual_seed(step)
        booster.execute_pipeline(iter([(torch.randn(4, 8), torch.randn(4, 8))]), model, criterion, made)
        if step < steps:
            made.step()
            made.zero_grad()
    made.clip_grad_by_norm(1e-3)
    return booster, model, made


def refused(rank, world_size, precision, plugin):
    _, model, made = trained(precision, plugin, 1)
    good = trained(precision, plugin, 2)[2].state_dict()
    before = fingerprint(made, model)
    wrong = []
    for index, (name, state) in enumerate(zoo(good)):
        mine = state if index % 3 == 0 or index % 2 == rank else good
        expected = "of the group could not load" if mine is good else ""
        try:
            made.load_state_dict(mine)
        except (ValueError, TypeError) as error:
            if expected not in str(error):
                wrong.append(f"{name}: {error}")
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__}: {error}")
        else:
            wrong.append(f"{name}: loaded")
        if fingerprint(made, model) != before:
            return [*wrong, f"{name}: something changed"]
    made.load_state_dict(good)
    if fingerprint(made, model) == before:
        wrong.append("the good state changed nothing")
    return wrong


@pytest.mark.slow_cases("ddp", "zero1")
@pytest.mark.crossed
@pytest.mark.parametrize("plugin", PLUGINS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_refused_load_changes_nothing_on_any_rank(ranks2, precision, plugin):
    assert ranks2(refused, precision, plugin) == [[], []]


def of_two_layouts(rank, world_size, plugin):
    _, model, made = trained("fp32", plugin, 1)
    state = trained("fp32", plugin, 2)[2].state_dict()
    before = fingerprint(made, model)
    other = {
        index: {
            key: value.redistribute(value.device_mesh, [Replicate()] * value.device_mesh.ndim)
            if isinstance(value, DTensor) and value.dim() == 2
            else value
            for key, value in own.items()
        }
        for index, own in state["state"].items()
    }
    with pytest.raises(ValueError, match="ranks differ in the tensors that change their layout"):
        made.load_state_dict({**state, "state": other} if rank == 1 else state)
    assert fingerprint(made, model) == before
    made.load_state_dict({**state, "state": other})
    assert fingerprint(made, model) != before


@pytest.mark.parametrize("plugin", ["fsdp", "tp"])
def test_ranks_with_states_of_two_layouts_do_not_wait_for_each_other(ranks2, plugin):
    ranks2(of_two_layouts, plugin)


def of_shards(rank, world_size, plugin):
    state = trained("fp32", "fsdp", 1)[2].state_dict()
    _, model, made = trained("fp32", plugin, 2)
    before = fingerprint(made, model)
    with pytest.raises(ValueError, match="holds DTensors, each a rank's shard"):
        made.load_state_dict(state)
    assert fingerprint(made, model) == before


@pytest.mark.parametrize("plugin", ["ddp", "zero1"])
def test_parts_of_tensors_are_refused_where_tensors_are_whole(ranks2, plugin):
    ranks2(of_shards, plugin)
