"""Ranks that step alike and hold the same: what has drifted apart among them is named, and nothing else is."""

import pytest
import torch
from choices import precisions
from torch import nn

from booster import Booster
from booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin


def alone(state, bucket):
    """Leave gradients apart, as hooks of local SGD do between the steps that average weights."""
    done = torch.futures.Future()
    done.set_result(bucket.buffer())
    return done


TP_PLAN = {"0": "colwise", "2": "rowwise"}
PLUGINS = {
    "ddp": TorchDDPPlugin,
    "ddp hook": lambda: TorchDDPPlugin(comm_hook=alone),
    "zero1": LowLevelZeroPlugin,
    "zero1 slices": lambda: LowLevelZeroPlugin(reduce_scatter=True),
    "zero2": lambda: LowLevelZeroPlugin(stage=2),
    "zero2 overlapping": lambda: LowLevelZeroPlugin(stage=2, overlap_allgather=True),
    "fsdp": TorchFSDPPlugin,
    "hsdp": lambda: TorchFSDPPlugin(replicate_size=2),
    "tp": lambda: HybridParallelPlugin(2, 1, tp_plan=TP_PLAN),
    "tp x fsdp": lambda: HybridParallelPlugin(2, 1, tp_plan=TP_PLAN, zero_stage=1),
    "tp x dp": lambda: HybridParallelPlugin(2, 1, tp_plan=TP_PLAN),
    "pp": lambda: HybridParallelPlugin(1, 2, num_microbatches=2),
    "pp x dp": lambda: HybridParallelPlugin(1, 2, num_microbatches=2),
}
PRECISIONS = precisions("fp32", "bf16", "fp16", "bf16_naive", scale=2.0**126)
DATA_PARALLEL = ("ddp", "zero1", "zero1 slices", "zero2", "zero2 overlapping")


class Net(nn.Sequential):
    """Layers, and what ranks may hold for themselves: a buffer, and parameters that do not train, or that DDP leaves alone."""

    def __init__(self):
        torch.manual_seed(0)
        super().__init__(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.LayerNorm(8))


class Own(nn.Module):
    """A model of which each rank holds some for itself: buffers, a frozen parameter, and one that DDP is to leave alone."""

    def __init__(self):
        super().__init__()
        self.net, self.norm = Net(), nn.BatchNorm1d(8)
        self.register_buffer("number", torch.zeros(1))
        self.frozen = nn.Parameter(torch.ones(8), requires_grad=False)
        self.own = nn.Parameter(torch.ones(8))

    def forward(self, x):
        return self.norm(self.net(x)) * self.own * self.frozen + self.number


def trained(rank, plugin, precision="fp32", how="", model=None, num_steps=11, **options):
    """Train, and return the number of the step that raised, and what it said; None if none did."""
    model = Net() if model is None else model
    b = Booster("cpu", precision, PLUGINS[plugin](), **options)
    optimizer = torch.optim.AdamW([{"params": list(model.parameters()), "lr": 1e-2}])
    boosted, optimizer, *_ = b.boost(model, optimizer)
    if how == "loaded" and rank:
        boosted.load_state_dict({name: value + 1 for name, value in boosted.state_dict().items()})
    if how.startswith("own"):
        own = (model.number, model.frozen, model.norm.running_mean, *[model.own] * (how == "own, ignored"))
        for tensor in own:
            tensor.detach().fill_(1.0 + rank)
    draws = torch.Generator().manual_seed(0)
    for number in range(1, num_steps + 1):
        x = torch.randn(4, 8, generator=draws)
        try:
            if plugin.startswith("pp"):
                b.execute_pipeline(iter([(x, x)]), boosted, nn.functional.mse_loss, optimizer)
            else:
                b.backward(boosted(x).float().square().sum(), optimizer)
            if not (how == "skips" and rank == 1 and number == 5):
                optimizer.step()
        except RuntimeError as error:
            return number, str(error).partition(", although")[0]
        optimizer.zero_grad()
        if how == "no-op" and rank == 0 and number == 2:
            optimizer.step()
        if number == 5 and how in ("lr", "betas"):
            optimizer.param_groups[0][how] = 1e-2 * (1 + rank) if how == "lr" else (0.9, 0.9 + rank / 100)
        elif number == 5 and how == "weight" and rank == 1:
            with torch.no_grad():
                optimizer.param_groups[0]["params"][-1].add_(1.0)
    return None


def drifts(rank, world_size, cases):
    found = {}
    for plugin, how in cases:
        found[plugin, how] = trained(rank, plugin, how=how)
    return found


LR = "lr of param_groups[0] is 0.01 on rank 0 and 0.02 on rank 1"
DRIFTS = {
    ("ddp", "lr"): (11, LR),
    ("ddp", "betas"): (11, "betas of param_groups[0] is 0.9 on rank 0 and 0.91 on rank 1"),
    ("ddp", "weight"): (11, "the weight '3.bias' is not the same on rank 0 and rank 1"),
    ("ddp", "skips"): (11, "the weight '0.weight' is not the same on rank 0 and rank 1"),
    ("ddp hook", "lr"): None,
    **{(plugin, "lr"): (11, LR) for plugin in (*DATA_PARALLEL[1:], "fsdp", "pp")},
    **{
        (plugin, "loaded"): (2, "the weight '0.weight' is not the same on rank 0 and rank 1")
        for plugin in DATA_PARALLEL
    },
    ("tp", "lr"): (11, f"{LR}, the weight '2.bias' is not the same on rank 0 and rank 1"),
    ("tp", "weight"): (11, "the weight '2.bias' is not the same on rank 0 and rank 1"),
}

OF_FOUR = {
    ("hsdp", "weight"): (11, "the weight '3.bias' is not the same on rank 1 and rank 3"),
    ("tp x fsdp", "weight"): (
        11,
        "the weight '2.bias' is not the same on rank 0 and rank 1, the weight '2.bias' is not the same on rank 2 and rank 3",
    ),
    ("tp x dp", "weight"): (
        11,
        "the weight '2.bias' is not the same on rank 0 and rank 1, the weight '3.bias' is not the same on rank 1 and rank 3, "
        "the weight '2.bias' is not the same on rank 2 and rank 3",
    ),
    ("pp x dp", "weight"): (11, "the weight '0.bias' is not the same on rank 0 and rank 1"),
    **{(plugin, ""): None for plugin in ("hsdp", "tp x fsdp", "tp x dp", "pp x dp")},
}


def test_what_has_drifted_apart_is_named_on_every_rank(ranks2):
    for found in ranks2(drifts, list(DRIFTS)):
        assert found == DRIFTS


@pytest.mark.slow
@pytest.mark.slow_cases("alike")
@pytest.mark.parametrize("how", ["weight", ""], ids=["weight", "alike"])
def test_what_copies_of_shards_and_of_stages_hold_is_compared_among_them(ranks4, how):
    expected = {case: found for case, found in OF_FOUR.items() if case[1] == how}
    assert ranks4(drifts, list(expected)) == [expected] * 4


def alike(rank, world_size, precision):
    found = {}
    for plugin in (*DATA_PARALLEL, "fsdp", "tp", "pp"):
        found[plugin, "plain"] = trained(rank, plugin, PRECISIONS[precision]())
        if plugin == "ddp":
            found[plugin, "no-op"] = trained(rank, plugin, PRECISIONS[precision](), how="no-op")
            model = Own()
            model._ddp_params_and_buffers_to_ignore = ["own"]
            found[plugin, "ignored"] = trained(rank, plugin, PRECISIONS[precision](), how="own, ignored", model=model)
        if plugin in DATA_PARALLEL:
            found[plugin, "own"] = trained(rank, plugin, PRECISIONS[precision](), how="own", model=Own())
        if plugin in ("ddp", "zero1", "zero2", "fsdp") and precision != "fp16":
            options = {"release_gradients": "exact"}
            found[plugin, "release"] = trained(rank, plugin, PRECISIONS[precision](), **options)
    return {key: value for key, value in found.items() if value is not None}


@pytest.mark.slow
@pytest.mark.parametrize(
    "precision", [each if each == "fp16" else pytest.param(each, marks=pytest.mark.slow) for each in PRECISIONS]
)
def test_ranks_that_step_alike_are_not_said_to_drift(ranks2, precision):
    assert ranks2(alike, precision) == [{}] * 2
