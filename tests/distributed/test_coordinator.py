"""DistCoordinator alone, on ranks, and when the first rank fails."""

import time

import pytest
import torch.distributed as dist

from booster.ranks.agreement import DistCoordinator


def test_without_a_process_group_it_is_a_world_of_one(capsys):
    coordinator = DistCoordinator()
    assert (coordinator.rank, coordinator.world_size, coordinator.local_rank) == (0, 1, 0)
    assert coordinator.is_master()
    assert coordinator.is_node_master()
    assert coordinator.is_last_process()
    with coordinator.priority_execution():
        coordinator.print_on_master("master")
        coordinator.print_on_node_master("node")
    coordinator.block_all()
    coordinator.destroy()
    assert capsys.readouterr().out == "master\nnode\n"


def describe(rank, world_size):
    coordinator = DistCoordinator()
    pair = dist.new_group([1, 2])
    double = coordinator.on_master_only()(lambda value: 2 * value)
    facts = {
        "place": (coordinator.rank, coordinator.world_size, coordinator.local_rank),
        "master": coordinator.is_master(),
        "last": coordinator.is_last_process(),
        "node_master": coordinator.is_node_master(),
        "double": double(21),
    }
    if rank in (1, 2):
        facts["pair"] = (coordinator.is_master(pair), coordinator.is_last_process(pair))
    coordinator.block_all()
    return facts


def test_each_rank_knows_its_place_in_the_world_in_its_machine_and_in_a_group(ranks4):
    results = ranks4(describe)
    assert [r["place"] for r in results] == [(rank, 4, rank) for rank in range(4)]
    assert [r["master"] for r in results] == [True, False, False, False]
    assert [r["node_master"] for r in results] == [True, False, False, False]
    assert [r["last"] for r in results] == [False, False, False, True]
    assert [r["double"] for r in results] == [42, None, None, None]
    assert [r.get("pair") for r in results] == [None, (True, False), (False, True), None]


def enter_in_turn(rank, world_size, executor_rank):
    entered = left = 0.0
    with DistCoordinator().priority_execution(executor_rank):
        entered = time.monotonic()
        if rank == executor_rank:
            time.sleep(0.3)
        left = time.monotonic()
    return entered, left


@pytest.mark.parametrize("executor_rank", [0, 1])
def test_the_executor_leaves_the_body_before_the_others_enter(ranks2, executor_rank):
    times = ranks2(enter_in_turn, executor_rank)
    assert times[executor_rank][1] <= times[1 - executor_rank][0]


def fail_first(rank, world_size, failing_rank):
    coordinator = DistCoordinator()
    entered = False
    try:
        with coordinator.priority_execution():
            entered = True
            if rank == failing_rank:
                raise OSError("disk full")
    except (OSError, RuntimeError) as error:
        return entered, str(error)
    return entered, None


def test_when_the_first_rank_fails_the_others_get_an_error_and_do_not_enter(ranks2):
    first, second = ranks2(fail_first, 0)
    assert first == (True, "disk full")
    assert second[0] is False
    assert "rank 0 failed in the body, so rank 1 did not enter it" in second[1]


def test_a_failure_of_a_later_rank_is_its_own(ranks2):
    assert ranks2(fail_first, 1) == [(True, None), (True, "disk full")]


def ask_for_a_rank_outside(rank, world_size):
    with pytest.raises(ValueError, match="executor_rank=2 is not a rank of this group; it must be from 0 to 1"):
        with DistCoordinator().priority_execution(2):
            pass


def test_an_executor_outside_the_group_is_refused(ranks2):
    ranks2(ask_for_a_rank_outside)
