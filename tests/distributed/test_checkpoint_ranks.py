"""A run that is interrupted twice and resumed goes on to the bit, with every precision on every layout."""

import random

import pytest
from matrix import PARALLELISMS
from runs import GROWTH, PRECISIONS, Run, differing

AFTER = 6  # steps after the second interruption, more than an epoch


def interrupted_twice(rank, world_size, precision, layout, folder, workers=0):
    """What differs between this rank's run in one piece and the same run in three, in words.

    The first save comes right after a skipped step, the second within a growth interval; both within an epoch.
    """
    draw = random.Random(f"{precision} {layout}")
    first_save = draw.randint(2, 4)
    between = draw.randint(1, GROWTH - 1)
    options = {"dropout": True, "workers": workers}

    unbroken = Run(precision, layout, **options)
    trace = unbroken.train(first_save, overflow_at=(first_save - 1,))
    assert not trace[-1][3], "the last step is skipped"
    unbroken.save(folder, step=first_save, extra={"best": 0.5})
    at_first = unbroken.state()
    trace = unbroken.train(between)
    at_second = unbroken.state()
    # This overflow is the second that the scale sees, or the first after it has grown.
    last = unbroken.train(AFTER, overflow_at=(GROWTH,))

    wrong = []
    second = Run(precision, layout, seed=rank + 11, **options)
    loaded = second.load(folder)
    if (loaded.step, loaded.extra) != (first_save, {"best": 0.5}):
        wrong.append(f"loaded {loaded}")
    wrong += [f"after the first load: {key}" for key in differing(at_first, second.state())]
    if second.train(between) != trace:
        wrong.append("steps after the first load")
    second.save(folder, step=first_save + between)

    third = Run(precision, layout, seed=rank + 31, **options)
    third.train(1)  # so that it has states, into which the load reads
    third.batches.clear()
    if third.load(folder).step != first_save + between:
        wrong.append("the second load took the first checkpoint")
    wrong += [f"after the second load: {key}" for key in differing(at_second, third.state())]
    if third.train(AFTER, overflow_at=(GROWTH,)) != last:
        wrong.append("steps after the second load")
    if second.batches + third.batches != unbroken.batches[first_save:][: between + AFTER]:
        wrong.append("batches")
    wrong += [f"at the end: {key}" for key in differing(unbroken.state(), third.state())]
    return wrong


def is_core(precision, layout):
    """Whether a cell runs each time: all precisions on one process, those with most state on two."""
    return layout == "single" or (
        PARALLELISMS[layout].world_size == 2 and precision in ("fp16_apex O2", "fp16_naive", "bf16_naive")
    )


CELLS = [
    pytest.param(precision, layout, marks=[] if is_core(precision, layout) else [pytest.mark.slow])
    for layout in PARALLELISMS
    for precision in PRECISIONS
]


@pytest.mark.slow_cases("DDP", "ZeRO-1", "PP", "ZeRO-2")
@pytest.mark.crossed
@pytest.mark.parametrize(("precision", "layout"), CELLS)
def test_an_interrupted_run_continues_to_the_bit(run_on_ranks, record_resume, tmp_path, precision, layout):
    world_size = PARALLELISMS[layout].world_size
    if world_size == 1:
        assert interrupted_twice(0, 1, precision, layout, str(tmp_path)) == []
    else:
        found = run_on_ranks(interrupted_twice, world_size, precision, layout, str(tmp_path))
        assert found == [[]] * world_size
    record_resume(precision, layout)


@pytest.mark.slow
def test_with_workers_it_continues_to_the_bit(ranks2, tmp_path):
    assert ranks2(interrupted_twice, "fp16", "DDP", str(tmp_path), 2) == [[], []]
