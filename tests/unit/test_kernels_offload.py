"""Kernels step what is in the host's memory: fetched, stepped and sent back, a bucket at a time, to the same bits."""

import pytest
from comparing import same
from interpreted import interpreted
from test_offload import NAIVE, Run, device, lies_where

from booster.mixed_precision import BF16NaiveMixedPrecision

pytestmark = interpreted
__all__ = ["device"]  # a fixture
FORMS = {
    **NAIVE,
    "fp32": lambda: "fp32",
    "stochastic, bf16 states": lambda: BF16NaiveMixedPrecision(
        master_weights="none", rounding="stochastic", states="bf16"
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_states_that_travel_are_stepped_by_kernels_to_the_bits_of_those_that_stay(device, name):
    options = {"fused_optimizer": "triton", "clip_grad_norm": 0.5, "skip_nonfinite": True}
    plain, moved = (Run(FORMS[name](), offload_states=on, **options) for on in (False, True))
    for steps, poison, missing in ((3, [2], []), (2, [], [1])):
        assert plain.train(steps, poison, missing) == moved.train(steps, poison, missing)
        (weights, state), (others, theirs) = plain.everything(), moved.everything()
        assert same((weights, state["state"]), (others, theirs["state"]))
    assert moved.optimizer._update.decision.steps.reason is None
    assert len(moved.optimizer._update.optimizer_state.masters.buckets) > 4
    assert all(lies_where(moved))
    assert len(lies_where(moved)) >= 8
