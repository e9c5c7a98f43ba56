"""`fp16_apex` does what was recorded of NVIDIA's apex.amp: 26 runs of one model, 4 of two, and the dtypes of 100 operations."""

import math

import pytest
import torch
from apex_o1_operations import KNOWN_DIFFERENCES, OPERATIONS, outcome
from apex_reference import (
    RECORDING,
    ThroughAmp,
    ThroughBooster,
    TwoThroughAmp,
    TwoThroughBooster,
    run_multi,
    run_single,
)

from booster.mixed_precision import apex_amp as amp

# The recording's build and kind of device; elsewhere sums are taken in another order.
SAME_BUILD = torch.__version__.startswith("2.13.0") and not torch.version.cuda
TOLERANCE = 1e-6 if SAME_BUILD else 2e-3
SAME_BITS = SAME_BUILD and torch.backends.cpu.get_cpu_capability() == "AVX512"
# Runs with products in float32 alone: those under a loss scale, or without the casts, differ in the last bits.
FLOAT32_PRODUCTS = {"sgd/O0/dynamic", "sgd/O0/static128", "sgd/O0/cast_false", "sgd/O1/nopatch"}


def assert_close(got, recorded, tolerance):
    assert len(got) == len(recorded)
    for mine, theirs in zip(got, recorded, strict=True):
        if theirs is not None:  # not a number, or not to be compared
            assert mine == pytest.approx(theirs, rel=tolerance, abs=tolerance, nan_ok=True)


@pytest.fixture(autouse=True)
def no_session_left():
    yield
    amp.shutdown()


@pytest.mark.slow_cases("sgd/O1/accum4", "sgd/O2/no_bn32", "sgd/O1/min2^15")
@pytest.mark.parametrize("through", [ThroughBooster, ThroughAmp])
@pytest.mark.parametrize("name", RECORDING["runs"])
def test_a_run_is_the_recorded_one(name, through):
    recorded = RECORDING["runs"][name]
    got = run_single(recorded["config"], through)
    for key in ("scale", "unskipped", "skipped", "messages", "opt_state_dtypes"):
        assert got[key] == recorded[key], key
    assert dict(got["amp_state_dict"]) == recorded["amp_state_dict"]
    # A user of Booster sees no scaled loss.
    unseen = {"scaled"} if through is ThroughBooster else set()
    assert got["dtypes"] == {key: dtypes for key, dtypes in recorded["dtypes"].items() if key not in unseen}
    # The one line that speaks of apex's own kernels is not about the options.
    assert got["init_log"] == [line for line in recorded["init_log"] if not line.startswith("Warning:")]
    assert [math.isnan(loss) for loss in got["loss"]] == [loss is None for loss in recorded["loss"]]
    assert_close(got["loss"], recorded["loss"], TOLERANCE)
    for key in ("master_sum", "master_norm", "grad_norm", "final_master"):
        # Weights are compared more loosely: 20 steps of momentum amplify the last bits of a float32 matrix product.
        assert_close(got[key], recorded[key], 10 * TOLERANCE)
    if SAME_BITS and name not in FLOAT32_PRODUCTS:
        for key in ("final_model_sha", "final_master_sha"):
            assert got[key] == recorded[key], key
    assert_close([got["bn_running_mean_sum"]], [recorded["bn_running_mean_sum"]], 10 * TOLERANCE)
    assert_close([got["bn_running_var_sum"]], [recorded["bn_running_var_sum"]], 10 * TOLERANCE)


@pytest.mark.parametrize("through", [TwoThroughBooster, TwoThroughAmp])
@pytest.mark.parametrize("name", RECORDING["multi"])
def test_a_run_of_two_models_and_two_losses_is_the_recorded_one(name, through):
    recorded = RECORDING["multi"][name]
    got = run_multi(recorded["config"], through)
    for key in ("scales", "unskipped", "skipped", "messages"):
        assert got[key] == recorded[key], key
    assert dict(got["amp_state_dict"]) == recorded["amp_state_dict"]
    for mine, theirs in zip(got["loss"], recorded["loss"], strict=True):
        assert_close(mine, theirs, TOLERANCE)
    for mine, theirs in zip(got["sums"], recorded["sums"], strict=True):
        assert_close(mine, theirs, 10 * TOLERANCE)


def test_every_recorded_operation_is_compared():
    assert set(OPERATIONS) == set(RECORDING["o1_ops"])
    assert {name for name, _ in KNOWN_DIFFERENCES} <= set(OPERATIONS)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_under_O1_gives_the_recorded_dtype_or_differs_for_a_listed_reason(name, dtype):
    recorded = RECORDING["o1_ops"][name][f"apex_O1({dtype})"]
    got = outcome(name, getattr(torch, dtype))
    known = KNOWN_DIFFERENCES.get((name, dtype))
    if known is None:
        both_raise = recorded.startswith("ERR") and got.split(":")[0] == recorded.split(":")[0]
        assert got == recorded or both_raise, f"{got} instead of {recorded}"
    else:
        assert got.startswith(known[0]), f"{got} instead of the listed {known[0]}"
        assert not got.startswith(recorded), "it agrees by now; take it off the list"
