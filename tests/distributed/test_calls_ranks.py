"""How many functions of this library a warm step calls where ranks divide or share parameters."""

import pytest
import torch
from choices import plugins
from counts import whole

PLUGINS = plugins("ddp", "zero 1", "zero 2", "fsdp")
# (calls, files) of forward, criterion, backward, clip, step and zero_grad of four parameters, under bf16.
WHOLE = {"ddp": (85, 18), "zero 1": (215, 23), "zero 2": (243, 29), "fsdp": (146, 25)}


def counted(rank, world_size, plugin, depth):
    return whole("bf16", torch.optim.AdamW, depth, plugin=PLUGINS[plugin]())


@pytest.mark.parametrize("plugin", WHOLE)
def test_a_whole_step_stays_within_its_calls_and_files(ranks2, plugin):
    for most, found in zip(WHOLE[plugin], ranks2(counted, plugin, 1)[0], strict=True):
        assert found <= most, (most, found)
