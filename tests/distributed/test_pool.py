"""The harness itself: a distributed test is worth no more than what the pool does with its failures."""

import inspect
import os
import shutil
import subprocess
import sys
import tempfile
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pool import STOPS, RankPool, RanksFailed


@pytest.fixture
def pool():
    pool = RankPool(2)
    yield pool
    pool.close()


def state(pid):
    """A letter, as the kernel names it; None where there is no such process."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return None


def alive(pid):
    return state(pid) not in ("Z", None)


def wait_until(condition, seconds=600.0):
    until = time.monotonic() + seconds
    while time.monotonic() < until and not condition():
        time.sleep(0.05)
    return condition()


def add_ranks(rank, world_size, offset):
    total = torch.tensor(float(rank + offset))
    dist.all_reduce(total)
    return rank, world_size, dist.get_world_size(), total


def test_every_rank_runs_the_function_and_results_come_in_rank_order(ranks2, ranks4):
    for run, size in ((ranks2, 2), (ranks4, 4)):
        results = run(add_ranks, 10)
        assert [r[:3] for r in results] == [(rank, size, size) for rank in range(size)]
        assert all(r[3].item() == 10 * size + sum(range(size)) for r in results)


def pid(rank, world_size):
    return os.getpid()


def test_cases_share_one_set_of_processes(pool):
    first = pool.run(pid)
    assert pool.run(pid) == first
    assert len(set(first) | {os.getpid()}) == 3


@pytest.mark.skipif(not STOPS, reason="ranks wait running here")
def test_ranks_without_a_case_are_stopped_with_all_their_threads(pool):
    for _ in range(2):
        assert pool.run(own_state) == ["R", "R"]
        assert wait_until(lambda: all(state(p) == "T" for p in pool.pids))


def own_state(rank, world_size):
    return state(os.getpid())


def fail_everywhere(rank, world_size):
    raise ValueError(f"broken on rank {rank}")


def test_an_error_shows_the_traceback_of_every_rank(pool):
    with pytest.raises(AssertionError) as info:
        pool.run(fail_everywhere)
    text = str(info.value)
    assert "fail_everywhere failed on 2 of 2 ranks" in text
    assert all(f"ValueError: broken on rank {rank}" in text for rank in range(2))
    assert text.count("in fail_everywhere") == 2


def fail_on_one_while_the_other_waits(rank, world_size):
    dist.barrier()  # each is at the next line when the other one is
    if rank == 1:
        raise ValueError("only rank 1")
    dist.barrier()


def test_a_rank_left_waiting_is_shown_where_it_waits_and_the_next_case_works(pool):
    pool.run(pid)
    old = pool.pids
    pool.grace = 4.0
    with pytest.raises(RanksFailed) as info:
        pool.run(fail_on_one_while_the_other_waits)
    assert "ValueError: only rank 1" in info.value.tracebacks[1]
    assert "after the failure of rank 1" in info.value.tracebacks[0]
    assert "in barrier" in info.value.tracebacks[0]
    assert not any(alive(p) for p in old)
    assert pool.run(add_ranks, 0)[0][3].item() == 1.0
    assert set(pool.pids).isdisjoint(old)


def hang(rank, world_size):
    time.sleep(600)


def test_a_case_that_takes_too_long_is_ended(pool):
    pool.run(pid)
    pool.case_timeout = 5.0
    with pytest.raises(RanksFailed, match=r"no answer within 5 s(.|\n)*in hang"):
        pool.run(hang)
    assert pool.pids == []


def die_on_one(rank, world_size):
    if rank == 0:
        os._exit(7)


def test_a_rank_that_dies_is_reported_with_its_exit_code(pool):
    with pytest.raises(RanksFailed, match="exit code 7") as info:
        pool.run(die_on_one)
    assert list(info.value.tracebacks) == [0]


def warn(rank, world_size):
    warnings.warn("careful", UserWarning)


def test_a_warning_in_a_rank_is_an_error(pool):
    with pytest.raises(RanksFailed, match="UserWarning: careful"):
        pool.run(warn)


@pytest.mark.filterwarnings("ignore:careful")
def test_a_warning_that_the_test_allows_is_allowed_in_the_ranks(ranks2):
    ranks2(warn)


def return_a_function(rank, world_size):
    return lambda: None


def test_a_result_that_does_not_pickle_is_reported(pool):
    with pytest.raises(RanksFailed, match="pickle"):
        pool.run(return_a_function)


class Unreadable:
    def __reduce__(self):
        return _refuse, ()


def _refuse():
    raise ValueError("not readable here")


def return_what_cannot_be_read(rank, world_size):
    return Unreadable()


def test_after_a_result_that_cannot_be_read_the_next_case_gets_its_own_results(pool):
    with pytest.raises(ValueError, match="not readable here"):
        pool.run(return_what_cannot_be_read)
    assert [result[:2] for result in pool.run(add_ranks, 0)] == [(0, 2), (1, 2)]


def draw(rank, world_size):
    return torch.rand(3)


def test_every_case_starts_from_the_same_seed(ranks2):
    first, second = ranks2(draw), ranks2(draw)
    assert all(torch.equal(first[0], value) for value in first + second)


def threads(rank, world_size):
    return torch.get_num_threads()


def test_ranks_use_one_thread(ranks4):
    assert ranks4(threads) == [1] * 4


def start_a_child(rank, world_size):
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(3000)"]).pid


def test_closing_leaves_no_process_and_no_folder(pool):
    children = pool.run(start_a_child)
    pids, folder = pool.pids, pool._group.folder
    pool.close()
    assert wait_until(lambda: not any(alive(p) for p in pids + children))
    assert not folder.exists()


def announce_and_hang(rank, world_size, folder):
    announce(rank, world_size, folder)
    time.sleep(3000)


def announce(rank, world_size, folder):
    (Path(folder) / str(os.getpid())).touch()


@pytest.mark.slow
def test_idle_and_busy_ranks_die_with_a_parent_that_is_killed(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import os, sys\n"
        "sys.path[:0] = sys.argv[1].split(os.pathsep)\n"
        "import pool\n"
        "from pool import RankPool\n"
        "pool.PRELOADED[:] = ['torch.distributed']\n"
        "from test_pool import announce, announce_and_hang\n"
        "if __name__ == '__main__':\n"
        "    idle = RankPool(2)\n"
        "    idle.run(announce, sys.argv[2])\n"
        "    RankPool(2).run(announce_and_hang, sys.argv[2])\n"
    )
    folder = tmp_path / "pids"
    folder.mkdir()
    # The path of a socket holds about 100 characters, and that of a worker's tmp_path has most of them.
    meeting = Path(tempfile.mkdtemp())
    folders = os.pathsep.join(str(Path(file).parent) for file in (__file__, inspect.getfile(RankPool)))
    command = [sys.executable, str(script), folders, str(folder)]
    with subprocess.Popen(command, env={**os.environ, "TMPDIR": str(meeting)}) as parent:
        assert wait_until(lambda: len(list(folder.iterdir())) == 4, 120.0)
        parent.kill()
    assert wait_until(lambda: not any(alive(int(path.name)) for path in folder.iterdir()))
    assert not list(meeting.glob("booster-*"))
    shutil.rmtree(meeting)
