"""States of pipeline ranks: by name, so that none takes the layers of another."""

import copy
from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from matrix import PRECISIONS
from refusals import fingerprint
from test_moving_masters import wholes
from test_refused_loads_ranks import Block
from torch import nn

from booster import Booster
from booster.plugin import HybridParallelPlugin, SingleDevice, TorchDDPPlugin

PLUGINS = {
    "single": SingleDevice,
    "ddp": TorchDDPPlugin,
    "pp": lambda: HybridParallelPlugin(1, 2),
    "interleaved": lambda: HybridParallelPlugin(1, 2, pp_style="interleaved", num_model_chunks=2),
}
PIPELINES = ("pp", "interleaved")


class Chain(nn.Sequential):
    """Blocks that are alike, so that a state of one stage has the shapes of another's."""

    def __init__(self):
        super().__init__(*(Block() for _ in range(4)))


def built(plugin, precision="fp32"):
    torch.manual_seed(7)
    booster = Booster("cpu", PRECISIONS[precision](), PLUGINS[plugin]())
    model = Chain()
    halves = [[p for name, p in model.named_parameters() if ("norm" in name) == norm] for norm in (False, True)]
    made = torch.optim.SGD([{"params": params} for params in halves], lr=0.01, momentum=0.9)
    model, made, criterion, *_ = booster.boost(model, made, nn.MSELoss())
    return booster, model, made, criterion


def steps(parts, first, last):
    booster, model, made, criterion = parts
    losses = []
    for step in range(first, last):
        torch.manual_seed(step)
        size, rank = booster.plugin.data_parallel_size, booster.plugin.data_parallel_rank
        pair = tuple(tensor.chunk(size)[rank] for tensor in (torch.randn(8, 8), torch.randn(8, 8)))
        out = booster.execute_pipeline(iter([pair]), model, criterion, made)
        losses.append(float(booster.reduce(out["loss"])))
        made.step()
        made.zero_grad()
    return losses


def saved(parts):
    return copy.deepcopy((wholes(parts[1].state_dict()), wholes(parts[2].state_dict())))


def of_rank_0(rank, world_size, plugin, precision):
    parts = built(plugin, precision)
    steps(parts, 0, 2)
    everyone = [None] * world_size
    dist.all_gather_object(everyone, saved(parts))
    model_state, state = everyone[0]
    fresh = built(plugin, precision)
    steps(fresh, 7, 8)
    before = fingerprint(fresh[2], fresh[1])
    if rank == 1:
        with pytest.raises(ValueError, match=r"saved on another rank of the pipeline.*lie there"):
            fresh[1].load_state_dict(model_state, strict=False)
    with pytest.raises(ValueError, match="written by a pipeline rank, of its layers alone"):
        fresh[2].load_state_dict(state)
    assert fingerprint(fresh[2], fresh[1]) == before
    single = built("single", precision)
    with pytest.raises(ValueError, match="written by a pipeline rank, of its layers alone"):
        single[2].load_state_dict(state)
    fresh[1].load_state_dict(everyone[rank][0])
    fresh[2].load_state_dict(everyone[rank][1])
    return steps(fresh, 2, 4), steps(parts, 2, 4)


@pytest.mark.crossed
@pytest.mark.parametrize("precision", ["fp32", "fp16_naive", "fp16_apex O2"])
@pytest.mark.parametrize("plugin", PIPELINES)
def test_a_state_of_one_pipeline_rank_loads_on_that_rank_alone(ranks2, plugin, precision):
    for losses, expected in ranks2(of_rank_0, plugin, precision):
        assert losses == expected


def merged(states):
    """As docs/parallelism.md shows it."""
    code = (Path(__file__).parents[2] / "docs/parallelism.md").read_text()
    scope = {}
    exec(code[code.index("def together(") :].split("```")[0], scope)  # noqa: S102
    return scope["together"](states)


def numbers(state):
    return [number for group in state["param_groups"] for number in group["params"]]


def put_together(rank, world_size, source, target, precision):
    parts = built(source, precision)
    steps(parts, 0, 2)
    everyone = [None] * world_size
    dist.all_gather_object(everyone, saved(parts))
    model_state = {key: value for state, _ in everyone for key, value in state.items()}
    states = [state for _, state in everyone]
    fresh = built(target, precision)
    steps(fresh, 7, 8)
    before = fingerprint(fresh[2], fresh[1])
    for wrong, message in (
        (alike(states), "parameters .* more than once"),
        (renumbered(states), "put these lists together"),
    ):
        with pytest.raises(ValueError, match=message):
            fresh[2].load_state_dict(wrong)
        assert fingerprint(fresh[2], fresh[1]) == before
    fresh[1].load_state_dict(model_state)
    fresh[2].load_state_dict(merged(states))
    return steps(fresh, 2, 4), steps(parts, 2, 4)


def alike(states):
    groups = [
        {**group, "params": [n for state in states for n in state["param_groups"][index]["params"]]}
        for index, group in enumerate(states[0]["param_groups"])
    ]
    return {**states[0], "state": {**states[0]["state"], **states[1]["state"]}, "param_groups": groups}


def renumbered(states):
    first, second = copy.deepcopy(states)
    count = len(numbers(first))
    for group in second["param_groups"]:
        group["params"] = [number + count for number in group["params"]]
    second["state"] = {number + count: own for number, own in second["state"].items()}
    return alike([first, second])


@pytest.mark.crossed
@pytest.mark.parametrize(
    ("source", "target", "precision"),
    [*product(PIPELINES, PLUGINS, ["fp32"]), ("pp", "single", "fp16_naive"), ("interleaved", "pp", "fp16_naive")],
)
def test_states_of_all_pipeline_ranks_load_together_by_name(ranks2, source, target, precision):
    for losses, expected in ranks2(put_together, source, target, precision):
        # Gradients of micro-batches are rounded to half, and so are their sums; another layout has other ones.
        assert losses == pytest.approx(expected, **({"abs": 2e-6} if precision == "fp32" else {"rel": 2**-11}))


def with_a_late_group(plugin, precision, sides):
    """Blocks 1 and 2, of different stages, join the optimizer after boost: a rank adds what it has of them."""
    torch.manual_seed(7)
    booster = Booster("cpu", PRECISIONS[precision](), PLUGINS[plugin]())
    model = Chain()
    early = [p for name, p in model.named_parameters() if name[0] not in sides]
    made = torch.optim.SGD(early, lr=0.01, momentum=0.9)
    model, made, criterion, *_ = booster.boost(model, made, nn.MSELoss())
    made.add_param_group({"params": [p for name, p in model.named_parameters() if name[0] in sides], "lr": 0.02})
    return booster, model, made, criterion


def resumed_with_a_late_group(rank, world_size, folder, source, target, precision, sides):
    parts = with_a_late_group(source, precision, sides)
    steps(parts, 0, 2)
    parts[0].save(folder, parts[1], parts[2], step=1)
    runs = []
    for how in ("files", "states") if source == target else ("files",):
        fresh = with_a_late_group(target, precision, sides)
        steps(fresh, 7, 8)
        if how == "files":
            fresh[0].load(folder, fresh[1], fresh[2])
        else:
            model, state = copy.deepcopy((parts[1].state_dict(), parts[2].state_dict()))
            fresh[1].load_state_dict(model)
            fresh[2].load_state_dict(state)
        runs.append(fresh)
    return steps(parts, 2, 4), [steps(fresh, 2, 4) for fresh in runs]


@pytest.mark.crossed
@pytest.mark.parametrize("sides", ["12", "3"])  # of both ranks; of one, so that the other adds none
@pytest.mark.parametrize("precision", ["fp32", "fp16_naive"])
@pytest.mark.parametrize(("source", "target"), [("pp", "pp"), ("pp", "ddp"), ("ddp", "pp")])
def test_a_group_that_was_added_after_boost_is_saved_and_resumed(ranks2, tmp_path, source, target, precision, sides):
    for expected, runs in ranks2(resumed_with_a_late_group, str(tmp_path), source, target, precision, sides):
        for losses in runs:
            assert losses == pytest.approx(expected, rel=1e-3)
