"""A checkpoint resumes to the bit on its own layout, and loads into any other; a failing rank fails the save everywhere."""

import pytest
import torch
from matrix import PARALLELISMS, PRECISIONS
from runs import Run

BEFORE, AFTER = 5, 4  # steps; the last one before the save is skipped, in the middle of an epoch


def resume(rank, world_size, precision, parallelism, folder):
    first = Run(precision, parallelism, dropout=True)
    first.train(BEFORE, overflow_at=(BEFORE - 1,))
    first.save(folder, step=BEFORE, extra={"best": 0.5})
    expected = first.train(AFTER)
    second = Run(precision, parallelism, seed=rank + 11, dropout=True)
    loaded = second.load(folder)
    assert (loaded.step, loaded.extra) == (BEFORE, {"best": 0.5})
    assert second.train(AFTER) == expected
    weights = second.weights()
    for name, weight in first.weights().items():
        assert torch.equal(weights[name], weight), name
    one, other = first.parts[1], second.parts[1]
    assert (one.loss_scale, one.num_applied, one.num_skipped) == (
        other.loss_scale,
        other.num_applied,
        other.num_skipped,
    )
    assert one.num_skipped == 1


CELLS = [
    pytest.param(precision, name, marks=[pytest.mark.slow] if PARALLELISMS[name].world_size > 2 else [])
    for name in PARALLELISMS
    for precision in PRECISIONS
]


@pytest.mark.parametrize(("precision", "parallelism"), CELLS)
def test_an_interrupted_run_continues_to_the_bit(run_on_ranks, record_resume, tmp_path, precision, parallelism):
    world_size = PARALLELISMS[parallelism].world_size
    if world_size == 1:
        resume(0, 1, precision, parallelism, str(tmp_path))
    else:
        run_on_ranks(resume, world_size, precision, parallelism, str(tmp_path))
    record_resume(precision, parallelism)


def save_and_go_on(rank, world_size, precision, parallelism, folder):
    run = Run(precision, parallelism)
    run.train(BEFORE)
    run.save(folder, step=BEFORE)
    return run.train(AFTER)


def load_and_go_on(rank, world_size, precision, parallelism, folder):
    run = Run(precision, parallelism, seed=11)
    run.load(folder)
    return run.train(AFTER)


LAYOUTS = ["single", "DDP", "FSDP", "ZeRO-2", "TP", "PP"]


@pytest.mark.parametrize("target", LAYOUTS)
@pytest.mark.parametrize("source", LAYOUTS)
def test_a_checkpoint_moves_between_layouts(run_on_ranks, tmp_path, source, target):
    def on(function, name, *args):
        world_size = PARALLELISMS[name].world_size
        if world_size == 1:
            return [function(0, 1, "fp32", name, *args)]
        return run_on_ranks(function, world_size, "fp32", name, *args)

    expected = on(save_and_go_on, source, str(tmp_path))[0]
    for losses in on(load_and_go_on, target, str(tmp_path)):
        assert losses == pytest.approx(expected, abs=2e-6)
