"""What a tiny step launches on a GPU, and what its host waits for, counted on CPU tensors that take the path of one."""

import pytest

from benchmarks.launches import CELLS, by_hand, interprets, ours
from booster.mixed_precision import BF16NaiveMixedPrecision, FP16NaiveMixedPrecision, FP16TorchMixedPrecision

BY_TORCH = {("fp32", True): 38, ("bf16", True): 57, ("fp16", True): 64}


@pytest.mark.parametrize(("precision", "clip"), CELLS)
def test_a_tiny_step_launches_no_more_than_the_loop_by_hand_and_waits_for_nothing(precision, clip):
    found = ours(precision, clip)
    assert found.total <= by_hand(precision, clip).total, found.found
    assert found.total <= BY_TORCH.get((precision, clip), found.total)
    assert (found.waits.total(), found.copies) == (0, int(clip or precision == "fp16"))


@pytest.mark.skipif(not interprets(), reason="needs Triton, and TRITON_INTERPRET=1; `make kernels` runs it")
@pytest.mark.parametrize(("precision", "clip"), CELLS)
def test_kernels_are_all_that_a_step_launches_beside_its_passes(precision, clip):
    found, without = (ours(precision, clip, fused_optimizer=way) for way in ("triton", True))
    kernels = {name: count for name, count in found.found.items() if name.startswith("Triton")}
    looks = {"Triton: measure": 1} if clip or precision == "fp16" else {}
    assert kernels == {**looks, "Triton: decide": 1, "Triton: update": 1}
    passes = {name: count for name, count in found.found.items() if not name.startswith("Triton")}
    assert passes.items() <= without.found.items()
    assert found.waits.total() == 0


NAIVE = {
    "masters": (lambda: BF16NaiveMixedPrecision(master_weights="fp32"), 96),
    "split": (lambda: BF16NaiveMixedPrecision(master_weights="split"), 96),
    "fp16": (FP16NaiveMixedPrecision, 110),
    "bounds": (lambda: FP16TorchMixedPrecision(hysteresis=2, min_scale=1.0, max_scale=2.0**24), 86),
}


@pytest.mark.parametrize("name", NAIVE)
def test_what_steps_of_halves_launch_is_bounded_and_waits_for_nothing(name):
    make, most = NAIVE[name]
    found = ours(make(), clip=True)
    assert found.total <= most, found.found
    assert found.waits.total() == 0
