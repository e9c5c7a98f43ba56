"""Every precision on every parallelism trains like one process, clips to the same norm, and skips as one."""

import functools
import itertools

import pytest
import torch
from matrix import (
    LOW,
    LOW_BLOCKS,
    LOW_OVERFLOWS,
    LOW_STEPS,
    OPTIMIZERS,
    OVERFLOWS,
    PARALLELISMS,
    PRECISIONS,
    STEPS,
    TOLERANCE,
    cell,
    train,
)
from reference import train_by_hand

from booster.kernels import eligibility as choice

# Parts of the batch that are scaled by themselves: a share of a rank, a micro-batch of it.
SPLITS = {"single": 1, "TP": 1, "PP x DP": 4, "PP x DP x TP": 4}
HALF_WEIGHTS = {"fp16_naive", "bf16_naive"}
SAME_BY_HAND = {"fp16_apex O1": "fp16", "fp16_apex O2": "fp16_naive"}


@functools.cache
def by_hand(precision, optimizer="AdamW", steps=STEPS, overflows=OVERFLOWS, num_splits=1):
    return train_by_hand(SAME_BY_HAND.get(precision, precision), optimizer, steps, overflows, num_splits)


@functools.cache
def split_in_one_process(precision):
    return train(precision, "single", num_splits=2)


def traces_of(run_on_ranks, precision, parallelism, *args):
    """The traces of all ranks of one cell."""
    world_size = PARALLELISMS[parallelism].world_size
    if world_size == 1:
        return [train(precision, parallelism, *args)]
    return run_on_ranks(cell, world_size, precision, parallelism, *args)


def check_agreement(traces):
    """What every rank must see alike: results of steps, scales, and every weight that it holds, to the bit."""
    first = traces[0]
    for trace in traces[1:]:
        assert trace.applied == first.applied
        assert trace.scales == first.scales
        assert trace.reasons == first.reasons
        # Where a device decides, norm and culprits of a skipped step are what its own rank found.
        compared = itertools.repeat(True) if "cpu" not in choice.TAKEN_BY_TRUE else first.applied
        assert list(itertools.compress(trace.culprits, compared)) == list(itertools.compress(first.culprits, compared))
        assert list(itertools.compress(trace.norms, compared)) == list(itertools.compress(first.norms, compared))
    for one, other in itertools.combinations(traces, 2):
        for name in one.weights.keys() & other.weights.keys():
            assert torch.equal(one.weights[name], other.weights[name]), f"{name} drifted apart"


def check_like(traces, reference, tolerance):
    """Losses, clipped norms and decisions of `traces` against those of one process, and the names of weights."""
    trace = traces[0]
    assert trace.applied == reference.applied
    assert trace.scales == reference.scales
    assert [r is None for r in trace.reasons] == trace.applied
    assert [not any(named) for named in zip(*(trace.culprits for trace in traces), strict=True)] == trace.applied
    torch.testing.assert_close(trace.losses, reference.losses, rtol=0, atol=tolerance)
    for step in (i for i, applied in enumerate(reference.applied) if applied):
        assert trace.norms[step] == pytest.approx(reference.norms[step], rel=tolerance), f"step {step}"
    held = {name for trace in traces for name in trace.weights}
    assert held == reference.weights.keys()


# On every column, since they ask most of it: a scale that all ranks agree on, and weights in half. The others on one process
# and on one column of ranks each; `make slow` runs all.
EVERYWHERE = ("fp16", "bf16_naive")
OF_TWO = [name for name, column in PARALLELISMS.items() if column.world_size == 2]
OTHERS = [name for name in PRECISIONS if name not in EVERYWHERE]


def is_slow(precision, parallelism):
    world_size = PARALLELISMS[parallelism].world_size
    if world_size >= 4:
        return world_size > 4 or precision not in ("fp16", "bf16_naive")
    return precision in OTHERS and parallelism not in ("single", OF_TWO[OTHERS.index(precision) % len(OF_TWO)])


CELLS = [
    pytest.param(precision, column, marks=[pytest.mark.slow] if is_slow(precision, column) else [])
    for column in PARALLELISMS
    for precision in PRECISIONS
]


@pytest.mark.slow_cases("bf16_naive-DP x TP", "fp16-PP x DP")
@pytest.mark.parametrize(("precision", "parallelism"), CELLS)
def test_cell(run_on_ranks, record_cell, precision, parallelism):
    steps = ("AdamW", LOW_STEPS, LOW_OVERFLOWS) if precision in LOW else ()
    traces = traces_of(run_on_ranks, precision, parallelism, *steps)
    check_agreement(traces)
    if precision in LOW:
        reference = by_hand(precision, "AdamW", LOW_STEPS, LOW_OVERFLOWS, SPLITS.get(parallelism, 2))
        check_like(traces, reference, TOLERANCE[precision])
        layers = {f"blocks.{i}.{name}" for i in range(LOW_BLOCKS) for name in ("q", "k", "v", "out", "up", "down")}
        assert {name for trace in traces for name in trace.low} == layers - {"blocks.0.q"}
    elif precision in HALF_WEIGHTS and parallelism == "DDP":
        reference = split_in_one_process(precision)
        check_like(traces, reference, 1e-6)
        for name, weight in traces[0].weights.items():
            assert torch.equal(weight, reference.weights[name]), name
    elif precision in HALF_WEIGHTS and parallelism != "single":
        check_like(traces, split_in_one_process(precision), TOLERANCE[precision])
    else:
        check_like(traces, by_hand(precision), TOLERANCE[precision])
    record_cell(precision, parallelism)


# By how much losses of about 1 move where a batch is scaled in two or four parts, or averaged of them: docs/low_precision.md.
MOVED = {"fp8": 5e-3, "mxfp8": 1.7e-3, "nvfp4": 9e-3, "int8": 1.1e-3, "bf16": 7e-4}


@pytest.mark.slow
@pytest.mark.parametrize("precision", MOVED)
def test_other_parts_of_a_batch_move_the_reference_itself(precision):
    whole, *others = (
        torch.tensor(by_hand(precision, "AdamW", LOW_STEPS, LOW_OVERFLOWS, parts).losses) for parts in (1, 2, 4)
    )
    moved = max(float((losses - whole).abs().max()) for losses in others)
    assert moved == pytest.approx(MOVED[precision], rel=0.5)
    assert moved < TOLERANCE[precision]


@pytest.mark.slow_cases("DP x TP", "PP x DP")
@pytest.mark.crossed
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("parallelism", [name for name, column in PARALLELISMS.items() if column.world_size <= 4])
def test_a_first_step_that_overflows_leaves_every_fused_optimizer_sound(run_on_ranks, parallelism, optimizer):
    traces = traces_of(run_on_ranks, "fp16", parallelism, optimizer, 3, (0,))
    assert traces[0].applied == [False, True, True]
    assert all(trace.sound for trace in traces)
    check_agreement(traces)
    check_like(traces, by_hand("fp16", optimizer, 3, (0,)), TOLERANCE["fp16"])
