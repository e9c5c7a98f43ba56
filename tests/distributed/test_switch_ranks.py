"""`Booster.switch` on several ranks: as saving, building anew and loading, to the bit."""

import gc

import pytest
import torch
import torch.distributed as dist
from choices import plugins
from switching import AllReduces, Job, compared
from torch import nn

from booster import Booster
from booster.mixed_precision import BF16MixedPrecision, PrecisionSchedule
from booster.plugin import TorchDDPPlugin

PRECISIONS = ["fp32", "bf16", "fp16", "fp8", "bf16_naive", "fp16_naive"]
TP_PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
PLUGINS = plugins("ddp", "zero2", "zero1", "fsdp", "tp", tp_plan=TP_PLAN)


def moved(rank, world_size, name, old, news, folder):
    found = {}
    data = 0 if name == "tp" else rank
    norm = nn.LayerNorm  # under fully_shard BatchNorm has its own group under halves
    for new in news:
        job = Job(old, PLUGINS[name](), norm=norm)
        job.steps(0, 3, data)
        if wrong := compared(job, f"{folder}/{new}", new, PLUGINS[name](), rank=data, norm=norm):
            found[new] = wrong[:3]
    return found


# Each precision is left once each time, for every other one, by one plugin after the other.
QUICK = [(list(PLUGINS)[i % len(PLUGINS)], old, PRECISIONS[i % 3 :: 3]) for i, old in enumerate(PRECISIONS)]


@pytest.mark.slow_cases("zero1", "fp16_naive")
@pytest.mark.parametrize(
    ("name", "old", "news"),
    [
        *(pytest.param(*case, id="-".join([*case[:2], "some"])) for case in QUICK),
        pytest.param("fsdp", "bf16", ["half buffers"], id="fsdp-bf16-half-buffers"),
        *(
            pytest.param(name, old, PRECISIONS, id=f"{name}-{old}", marks=pytest.mark.slow)
            for name in PLUGINS
            for old in PRECISIONS
        ),
    ],
)
def test_a_switch_is_a_load_into_the_other_precision(run_on_ranks, name, old, news, tmp_path):
    assert run_on_ranks(moved, 2, name, old, news, str(tmp_path)) == [{}, {}]


def averaged_once(rank, world_size):
    """All-reduces of a step after a switch, with the old placement still there, and of a first step in that precision."""
    switched, fresh = Job("fp32", TorchDDPPlugin()), Job("bf16", TorchDDPPlugin())
    old = [each for each in gc.get_objects() if type(each) is nn.parallel.DistributedDataParallel]
    switched.steps(0, 2, rank)
    switched.model(torch.ones(16, 32))  # whose gradients the old one goes on to wait for
    switched.booster.switch(BF16MixedPrecision())
    found = []
    for job in (switched, fresh):
        with AllReduces() as counting:
            job.steps(2, 3, rank)
        found.append(counting.number)
    return len(old), found


def test_what_was_placed_before_a_switch_averages_no_more(ranks2):
    for old, (switched, fresh) in ranks2(averaged_once):
        assert old >= 2
        assert switched == fresh > 0


def evaluated_alone(rank, world_size):
    """Of a model without buffers, which DDP would send around in every forward pass."""
    booster = Booster("cpu", PrecisionSchedule({0: "fp32", 2: "bf16_naive"}), TorchDDPPlugin())
    model = nn.Linear(8, 8)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x, dtypes = torch.ones(2, 8), []
    for _ in range(3):
        booster.backward(model(x).sum(), optimizer)
        dtypes.append(model.weight.dtype)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            with torch.no_grad():
                model(x)
        dist.barrier()
    return dtypes


def test_one_rank_may_evaluate_alone_where_a_phase_ends(run_on_ranks):
    assert run_on_ranks(evaluated_alone, 2) == [[torch.float32, torch.float32, torch.bfloat16]] * 2
