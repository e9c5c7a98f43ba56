"""Ranks that step their parts by kernels train, skip and scale as those that step by torch."""

import warnings
from unittest import mock

import pytest
from interpreted import interpreted
from matrix import train
from test_device_decision import OVERFLOWS, STEPS, compare

pytestmark = interpreted
TRAINED = [
    *(("fp16", column) for column in ("single", "DDP", "FSDP", "ZeRO-1", "ZeRO-2", "TP", "PP")),
    *(("bf16_naive", column) for column in ("DDP", "FSDP", "ZeRO-1", "ZeRO-2", "TP", "PP")),
    ("fp16_naive", "ZeRO-2"),
    ("fp32", "DDP"),
]


def trains_both_ways(rank, world_size, precision, column, optimizer):
    from booster.kernels.steps import KernelSteps

    warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton")
    kept = {"steps": STEPS, "overflows": OVERFLOWS}
    by_torch = train(precision, column, optimizer, **kept)
    with mock.patch.object(KernelSteps, "run", autospec=True, side_effect=KernelSteps.run) as run:
        by_kernels = train(precision, column, optimizer, **kept, fused_optimizer="triton")
    assert run.call_count == STEPS
    return by_torch, by_kernels


@pytest.mark.parametrize(("precision", "column"), TRAINED)
def test_ranks_that_step_by_kernels_train_and_skip_as_torch_does(ranks2, precision, column):
    if column == "single":
        compare([trains_both_ways(0, 1, precision, column, "AdamW")], precision)
    else:
        compare(ranks2(trains_both_ways, precision, column, "AdamW"), precision)
