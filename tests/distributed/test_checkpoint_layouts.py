"""A checkpoint loads into any other layout with every bit, and the next steps are those of going on."""

import pytest
from matrix import TP_PLAN, Parallelism
from runs import Run, differing

from booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin

BEFORE, AFTER = 3, 2


def hybrid(ranks, **options):
    return Parallelism(ranks, HybridParallelPlugin, {"tp_size": 1, "pp_size": 1, **options})


def tensor_parallel(size):
    return {"tp_size": size, "tp_plan": TP_PLAN}


def pipeline(size):
    return {"pp_size": size, "pp_style": "1f1b", "num_microbatches": size} if size > 1 else {}


# (kind, ranks): the hybrid is data parallelism with ZeRO on one and two ranks, tensor and pipeline parallelism on four.
LAYOUTS = {
    **{("DDP", n): Parallelism(n, TorchDDPPlugin) for n in (1, 2, 4)},
    **{("FSDP", n): Parallelism(n, TorchFSDPPlugin) for n in (1, 2, 4)},
    **{("ZeRO-2", n): Parallelism(n, LowLevelZeroPlugin, {"stage": 2}) for n in (1, 2, 4)},
    **{("TP", n): hybrid(n, **tensor_parallel(n)) for n in (1, 2, 4)},
    **{("PP", n): hybrid(n, **pipeline(n)) for n in (1, 2, 4)},
    **{("hybrid", n): hybrid(n, zero_stage=1) for n in (1, 2)},
    ("hybrid", 4): hybrid(4, **tensor_parallel(2), **pipeline(2)),
}

ONE_DIFFERS = [(a, b) for a in LAYOUTS for b in LAYOUTS if (a[0] == b[0]) != (a[1] == b[1])]
ALL_DIFFERS = [
    *((("DDP", 1), ("FSDP", 2)), (("FSDP", 4), ("DDP", 1)), (("ZeRO-2", 2), ("TP", 4)), (("TP", 2), ("ZeRO-2", 4))),
    *((("PP", 4), ("FSDP", 2)), (("FSDP", 2), ("PP", 4)), (("hybrid", 4), ("DDP", 2)), (("DDP", 2), ("hybrid", 4))),
    *((("TP", 4), ("PP", 2)), (("hybrid", 2), ("TP", 1))),
]
# Each kind saves and loads, up and down in ranks; the others are slow.
CORE = [
    *((("DDP", 2), ("ZeRO-2", 2)), (("ZeRO-2", 2), ("FSDP", 2)), (("FSDP", 2), ("TP", 2)), (("TP", 2), ("PP", 2))),
    *((("PP", 2), ("hybrid", 2)), (("hybrid", 2), ("DDP", 2)), (("FSDP", 1), ("FSDP", 2))),
]

# Of a loss of about 3, against the run that goes on: half numbers are rounded at other places on other layouts.
LOSS = {"fp32": 1e-6, "fp16": 2e-3, "fp16_apex O1": 2e-3, "fp16_apex O2": 1e-2, "fp16_naive": 1e-2}
LOSS |= {"bf16": 2e-2, "bf16_naive": 2e-2}


def named(pair):
    return " to ".join(f"{kind}@{ranks}" for kind, ranks in pair)


def case(pair, core=()):
    return pytest.param(*pair, id=named(pair), marks=[] if pair in core else [pytest.mark.slow])


def save_and_go_on(rank, world_size, precision, layout, folder, num_blocks):
    run = Run(precision, LAYOUTS[layout], num_blocks=num_blocks)
    run.train(BEFORE)
    run.save(folder, step=BEFORE)
    return run.wide(), run.losses(AFTER)


def load_and_go_on(rank, world_size, precision, layout, folder, num_blocks):
    run = Run(precision, LAYOUTS[layout], seed=11, num_blocks=num_blocks)
    # After its first backward pass DistributedDataParallel lays its buckets out anew, and gloo then sums the gradients of
    # more than two ranks in another order: torch alone has other bits in the second pass than in the first. So both loads
    # come after one.
    run.pass_without_step()
    run.load(folder)
    found = run.wide(), run.losses(AFTER)
    run.load(folder)  # once more, into the states that are there now
    assert not differing(found[0], run.wide())
    assert run.losses(AFTER) == found[1]
    return found


@pytest.fixture(scope="module")
def saved(run_on_ranks, tmp_path_factory):
    """saved(precision, layout, blocks) -> a folder with a checkpoint, its float32 numbers by name, the losses of going on."""
    made = {}

    def of(precision, layout, num_blocks):
        key = precision, layout, num_blocks
        if key not in made:
            folder = str(tmp_path_factory.mktemp("saved"))
            ranks = run_on_ranks(save_and_go_on, layout[1], precision, layout, folder, num_blocks)
            made[key] = folder, together(ranks), ranks[0][1]
        return made[key]

    return of


def together(ranks):
    """The numbers of all ranks, of which each stage of a pipeline has some."""
    numbers = {}
    for own, _ in ranks:
        assert not [name for name in differing(own, {**own, **numbers}) if name in own], "ranks hold different numbers"
        numbers |= own
    return numbers


def check_move(run_on_ranks, saved, source, target, precision, other):
    num_blocks = max(source[1], target[1], 2)  # of which each stage has one
    folder, expected, losses = saved(precision, source, num_blocks)
    ranks = run_on_ranks(load_and_go_on, target[1], other, target, folder, num_blocks)
    assert differing(together(ranks), expected) == []
    tolerance = max(LOSS[precision], LOSS[other])
    for _, own in ranks:
        assert own[0] == pytest.approx(losses[0], abs=tolerance, rel=0)
        assert own == pytest.approx(losses, abs=2 * tolerance, rel=0), "the steps after it use the optimizer's state"


@pytest.mark.slow_cases("PP@2 to hybrid@2", "hybrid@2 to DDP@2")
@pytest.mark.parametrize(("source", "target"), [case(pair, CORE) for pair in ONE_DIFFERS + ALL_DIFFERS])
def test_a_run_goes_on_in_another_layout(run_on_ranks, saved, source, target):
    check_move(run_on_ranks, saved, source, target, "fp32", "fp32")


MOVES = [
    (("DDP", 2), ("FSDP", 2)),
    (("FSDP", 2), ("DDP", 1)),
    (("ZeRO-2", 2), ("TP", 2)),
    (("TP", 2), ("PP", 2)),
    (("PP", 2), ("ZeRO-2", 2)),
    (("hybrid", 4), ("hybrid", 2)),
]
# Each precision is saved and loaded by a run that changes it, below.
HALVES = ["fp16", "fp16_apex O1", "fp16_apex O2", "bf16", "fp16_naive", "bf16_naive"]


@pytest.mark.crossed
@pytest.mark.parametrize(
    "precision", [p if p in ("fp16", "bf16_naive") else pytest.param(p, marks=pytest.mark.slow) for p in HALVES]
)
@pytest.mark.parametrize(
    ("source", "target"), [case(pair, [(("ZeRO-2", 2), ("TP", 2)), (("PP", 2), ("ZeRO-2", 2))]) for pair in MOVES]
)
def test_a_run_in_half_precision_goes_on_in_another_layout(run_on_ranks, saved, source, target, precision):
    check_move(run_on_ranks, saved, source, target, precision, precision)


CHANGES = [
    ("bf16_naive", "fp32"),  # out of split masters
    ("fp16_naive", "fp32"),
    ("fp32", "bf16_naive"),
    ("fp32", "fp16_naive"),
    ("fp16_apex O2", "fp16_naive"),
    ("fp16_naive", "fp16_apex O2"),
    ("bf16_naive", "fp16_naive"),
    ("fp16_apex O2", "bf16"),
]


@pytest.mark.slow
@pytest.mark.slow_cases("fp16_apex O2-fp16_naive", "fp16_apex O2-bf16")
@pytest.mark.crossed
@pytest.mark.parametrize(("precision", "other"), CHANGES)
@pytest.mark.parametrize(("source", "target"), [case(pair, [(("ZeRO-2", 2), ("TP", 2))]) for pair in MOVES])
def test_a_run_goes_on_in_another_layout_and_precision(run_on_ranks, saved, source, target, precision, other):
    check_move(run_on_ranks, saved, source, target, precision, other)
