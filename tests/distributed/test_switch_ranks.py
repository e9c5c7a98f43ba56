"""`Booster.switch` on several ranks: as saving, building anew and loading, to the bit."""

import pytest
from switching import Job, compared
from torch import nn

from booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin

PRECISIONS = ["fp32", "bf16", "fp16", "fp8", "bf16_naive", "fp16_naive"]
TP_PLAN = {"blocks.*.up": "colwise", "blocks.*.down": "rowwise"}
PLUGINS = {
    "ddp": TorchDDPPlugin,
    "zero2": lambda: LowLevelZeroPlugin(stage=2),
    "zero1": LowLevelZeroPlugin,
    "fsdp": TorchFSDPPlugin,
    "tp": lambda: HybridParallelPlugin(2, 1, tp_plan=TP_PLAN),
}


def moved(rank, world_size, name, old, folder):
    found = {}
    data = 0 if name == "tp" else rank
    norm = nn.LayerNorm  # under fully_shard BatchNorm has a group of its own under halves
    for new in PRECISIONS:
        job = Job(old, PLUGINS[name](), norm=norm)
        job.steps(0, 3, data)
        if wrong := compared(job, f"{folder}/{new}", new, PLUGINS[name](), rank=data, norm=norm):
            found[new] = wrong[:3]
    return found


@pytest.mark.crossed
@pytest.mark.parametrize("old", PRECISIONS)
@pytest.mark.parametrize("name", PLUGINS)
def test_a_switch_is_a_load_into_the_other_precision(run_on_ranks, name, old, tmp_path):
    assert run_on_ranks(moved, 2, name, old, str(tmp_path)) == [{}, {}]
