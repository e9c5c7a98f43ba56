"""Ranks with kernels that step within backward train and skip as those that step by torch, all at once."""

import re
import warnings

import pytest
from interpreted import interpreted
from test_release_ranks import Run

pytestmark = interpreted
CASES = [("fp16", column) for column in ("DDP", "ZeRO-2", "FSDP", "TP")] + [("bf16_naive split24 8bit", "ZeRO-1")]


def trains_both_ways(rank, world_size, plugin, precision):
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton")
    weights, results = [], []
    for release, way in (("exact", "triton"), (False, True)):
        run = Run(rank, release, plugin, precision, spoil=(1,), clip_grad_norm=0.5, fused_optimizer=way).train(4)
        found = [value.full_tensor() if hasattr(value, "full_tensor") else value for value in run.net.parameters()]
        weights.append([value.detach().float() for value in found])
        results.append(
            [re.findall(r"applied=\w+|skipped_reason=\S+|loss_scale=[\d.]+", result) for result in run.results]
        )
    return max(float((own - other).abs().max()) for own, other in zip(*weights, strict=True)), results


def clips_by_the_norm_before_both_ways(rank, world_size, plugin, precision):
    warnings.filterwarnings("ignore", category=RuntimeWarning, module="triton")
    options = {"spoil": (), "clip_grad_norm": 0.5}
    runs = [
        Run(rank, "previous_norm", plugin, precision, fused_optimizer=way, **options).train(4)
        for way in ("triton", False)
    ]
    weights = [
        [value.full_tensor() if hasattr(value, "full_tensor") else value for value in run.net.parameters()]
        for run in runs
    ]
    far = max(
        float((own.detach().float() - other.detach().float()).abs().max()) for own, other in zip(*weights, strict=True)
    )
    return (
        far,
        [float(run.optimizer._update.gradients.in_backward.previous) for run in runs],
        runs[0].optimizer._update.decision._num_readings,
    )


@pytest.mark.parametrize("plugin", ["DDP", "ZeRO-1", "FSDP"])
def test_ranks_clip_by_the_norm_before_as_where_torch_steps(ranks2, plugin):
    found = ranks2(clips_by_the_norm_before_both_ways, plugin, "fp32")
    assert len({tuple(norms) for _, norms, _ in found}) == 1
    for far, (mine, theirs), readings in found:
        assert far <= 1e-5
        assert mine == pytest.approx(theirs, rel=1e-5)
        assert readings > 0


@pytest.mark.parametrize(("precision", "plugin"), CASES)
def test_ranks_release_by_kernels_as_they_step_by_torch(ranks2, precision, plugin):
    for far, (mine, theirs) in ranks2(trains_both_ways, plugin, precision):
        assert mine == theirs
        assert "applied=False" in mine[1]
        assert far <= (1e-4 if precision == "fp16" else 2e-2)
