"""Ranks that share sequences train like one device: losses, norms, skips, weights, in every mode, precision and placement."""

import pytest
import torch
from matrix import TOLERANCE
from sequences import MODELS, OVERFLOWS, several, train

MODES = ["all_to_all", "ring_attn"]


def check_like_one_device(found, case, tolerance):
    """`found`: the traces of all ranks."""
    args, options = case
    own = {name: value for name, value in options.items() if name in ("precision", "length", "overflows", "steps")}
    expected = train(0, 1, *args, **own)
    held = {name: weight for trace in found for name, weight in trace.weights.items()}  # a stage has its own alone
    assert held.keys() == expected.weights.keys(), case
    for trace in found:
        assert trace.applied == expected.applied, case
        assert trace.scales == expected.scales, case
        torch.testing.assert_close(
            trace.losses, expected.losses, rtol=0, atol=tolerance, msg=lambda text: f"{case}: {text}"
        )
        for step, applied in enumerate(expected.applied):
            if applied:
                assert trace.norms[step] == pytest.approx(expected.norms[step], rel=tolerance), (case, step)
        for name, weight in trace.weights.items():
            assert torch.equal(weight, held[name]), (case, name)


def run(run_on_ranks, world_size, cases, tolerance):
    for case, *found in zip(cases, *run_on_ranks(several, world_size, cases), strict=True):
        check_like_one_device(found, case, tolerance)


@pytest.mark.slow_cases("all_to_all")
@pytest.mark.parametrize("mode", MODES)
def test_every_model_equals_one_device(run_on_ranks, mode):
    # 17 and 13 do not divide, so there is padding, on 13 on more than one rank's end.
    sp = {"sp_size": 2, "sequence_parallelism_mode": mode}
    lengths = {"gpt": (16, 17), "encoder": (17,), "bidirectional": (13,), "mistral": (16, 17)}
    cases = [
        ((model,), {"length": n, "steps": 2, **sp})
        for model in MODELS
        if "deep" not in model
        for n in lengths.get(model, (16,))
    ]
    run(run_on_ranks, 2, cases, 1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("mode", [pytest.param("all_to_all", marks=pytest.mark.slow), "ring_attn"])
def test_on_four_ranks_with_and_without_data_parallelism(run_on_ranks, mode):
    cases = [
        (("gqa",), {"length": 19, "kind": "hybrid", "sp_size": 4, "sequence_parallelism_mode": mode}),
        (("mqa",), {"length": 13, "kind": "zero", "sp_size": 2, "sequence_parallelism_mode": mode}),
        (("mistral",), {"length": 17, "kind": "fsdp", "sp_size": 4, "sequence_parallelism_mode": mode}),
        (("encoder",), {"length": 17, "kind": "fsdp", "sp_size": 2, "sequence_parallelism_mode": mode}),
    ]
    run(run_on_ranks, 4, cases, 1e-5)


OFTEN = ["fp16", "bf16_naive"]
RARELY = ["bf16", "fp16_naive", "fp16_apex O2", "fp8"]
PRECISIONS = [*OFTEN, *(pytest.param(name, marks=pytest.mark.slow) for name in RARELY)]


@pytest.mark.parametrize("precision", PRECISIONS)
def test_precisions_round_as_on_one_device_and_an_overflow_on_one_rank_skips_on_all(run_on_ranks, precision):
    cases = [
        (
            ("gqa",),
            {
                "precision": precision,
                "overflows": OVERFLOWS,
                "kind": kind,
                "sp_size": 2,
                "sequence_parallelism_mode": mode,
            },
        )
        for mode, kind in zip(MODES, ("hybrid", "fsdp"), strict=True)
    ]
    run(run_on_ranks, 2, cases, TOLERANCE[precision])
