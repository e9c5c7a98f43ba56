"""A save that fails on one rank, or loses one, is an error on every rank within seconds, and the old checkpoint stays."""

import errno
import json
import os
import shutil
import signal
import time
from functools import partial
from pathlib import Path

import pytest
import torch
from pool import CASE_TIMEOUT, PROCESS_GROUP_TIMEOUT, RankPool, RanksFailed
from runs import Run, differing

from booster.checkpoint import CheckpointError, damage, latest
from booster.checkpoint import dcp_storage as of_tensors

STEPS = ["step-0000000001", "step-0000000002"]


def failing(monkeypatch, act):
    """Call `act` when this rank has written half of its tensors."""
    real = of_tensors.write_tensors

    def write_tensors(path, entries, tensor_of):
        keys = list(entries)

        def halfway(key):
            if key == keys[len(keys) // 2]:
                act()
            return tensor_of(key)

        return real(path, entries, halfway)

    monkeypatch.setattr(of_tensors, "write_tensors", write_tensors)


def raising(number):
    def act(folder):
        raise OSError(number, os.strerror(number))

    return act


def without_staging(folder):
    for path in Path(folder).glob(".step-*.writing-*/"):
        shutil.rmtree(path)


# By what happens to the folder: how, and what the error says.
FAULTS = {
    "full": (raising(errno.ENOSPC), "on rank {victim}: OSError: .*No space left on device"),
    "read-only": (raising(errno.EROFS), "on rank {victim}: OSError: .*Read-only file system"),
    "staging removed": (without_staging, "No such file or directory"),
    "removed": (shutil.rmtree, "No such file or directory"),
}


def saves_twice(rank, world_size, layout, victim, folder, fault="full"):
    act, message = FAULTS[fault]
    run = Run("fp16_naive", layout)
    run.train(1)
    run.save(folder, step=1)
    run.train(1)
    with pytest.MonkeyPatch.context() as patch:
        if rank == victim:
            failing(patch, partial(act, folder))
        with pytest.raises(CheckpointError, match=message.format(victim=victim)):
            run.save(folder, step=2)
    torch.distributed.barrier()  # the first rank has cleared up
    before = sorted(os.listdir(folder)) if os.path.exists(folder) else []
    assert not [each for name in before for each in damage(Path(folder, name))]
    torch.distributed.barrier()
    run.save(folder, step=2)  # the ranks are in step with each other
    return before, damage(latest(folder))


@pytest.mark.crossed
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("layout", ["FSDP", "PP"])
def test_a_full_disk_on_one_rank_is_an_error_on_all(ranks2, tmp_path, layout, victim):
    assert ranks2(saves_twice, layout, victim, str(tmp_path)) == [(STEPS[:1], [])] * 2
    assert sorted(os.listdir(tmp_path)) == STEPS


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("fault", list(FAULTS)[1:])
def test_a_folder_that_fails_or_goes_is_an_error_on_all_and_the_next_save_is_whole(ranks2, tmp_path, fault, victim):
    left = [] if fault == "removed" else STEPS[:1]
    assert ranks2(saves_twice, "FSDP", victim, str(tmp_path / "run"), fault) == [(left, [])] * 2
    assert sorted(os.listdir(tmp_path / "run")) == [*left, STEPS[1]]


def one_dies(rank, world_size, victim, folder):
    run = Run("fp16_naive", "FSDP")
    run.save(folder, step=1)
    torch.distributed.barrier()
    with pytest.MonkeyPatch.context() as patch:
        if rank == victim:
            failing(patch, lambda: os.kill(os.getpid(), signal.SIGKILL))
        began = time.monotonic()
        try:
            run.save(folder, step=2)
        except CheckpointError:
            Path(folder, f"rank{rank}.json").write_text(json.dumps(time.monotonic() - began))


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_that_dies_is_an_error_on_the_others(tmp_path, victim):
    pool = RankPool(2, grace=CASE_TIMEOUT)  # the other one may take its time to find out
    try:
        with pytest.raises(RanksFailed) as error:
            pool.run(one_dies, victim, str(tmp_path))
    finally:
        pool.close()
    assert list(error.value.tracebacks) == [victim]
    assert json.loads((tmp_path / f"rank{1 - victim}.json").read_text()) < PROCESS_GROUP_TIMEOUT / 2
    assert latest(tmp_path).name == STEPS[0]
    run = Run("fp16_naive", "single")
    assert run.load(tmp_path).step == 1
    run.save(tmp_path, step=2)
    assert [name for name in sorted(os.listdir(tmp_path)) if not name.startswith("rank")] == STEPS, (
        "nothing is left behind"
    )


def loads_past_damage(rank, world_size, layout, folder):
    run = Run("fp16_naive", layout)
    run.train(1)
    run.save(folder, step=1)
    expected = run.state()
    run.train(1)
    run.save(folder, step=2)
    spoilt = Path(folder, STEPS[1], f"tensors-{world_size - 1:05d}.safetensors")
    torch.distributed.barrier()
    if rank == 0:
        data = bytearray(spoilt.read_bytes())
        data[-1] ^= 1
        spoilt.write_bytes(data)
    torch.distributed.barrier()
    with pytest.raises(CheckpointError, match=f"is damaged: {spoilt.name} holds other bytes than were written"):
        run.load(spoilt.parent)
    return run.load(folder).step, differing(run.state(), expected)


@pytest.mark.slow_cases("DDP")
@pytest.mark.parametrize("layout", ["DDP", "ZeRO-2"])
def test_damage_that_one_rank_finds_is_an_error_on_all(ranks2, tmp_path, layout):
    assert ranks2(loads_past_damage, layout, str(tmp_path)) == [(1, [])] * 2
