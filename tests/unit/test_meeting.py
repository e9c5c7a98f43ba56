"""Ranks that report to each other whether a replay failed, without a collective."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from booster.common.hang_watchdog import StoreBarrier
from booster.numerics.diagnosis import replay
from booster.numerics.diagnosis.replay import RanksApart, ReplayBarrier


def meet(*failed):
    """What the meetings of ranks that failed, or did not, in turns, came to on each."""
    store = dist.HashStore()

    def attend(rank):
        own = ReplayBarrier(StoreBarrier(store, "a series", rank, len(failed)))
        return [own.any(each) for each in failed[rank]]

    with ThreadPoolExecutor(len(failed)) as threads:
        return list(threads.map(attend, range(len(failed))))


def test_all_ranks_learn_whether_any_failed_in_each_meeting_of_a_series():
    assert meet([False, True, False], [False, False, False]) == [[False, True, False]] * 2
    assert meet([True], [True], [False]) == [[True]] * 3


@pytest.mark.parametrize("failed", [True, False])
def test_a_rank_that_nobody_joins_raises_and_names_who_is_missing(failed, monkeypatch):
    monkeypatch.setattr(replay, "PATIENCE", timedelta(seconds=0.05))
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.05))
    StoreBarrier(store, "a series", 2, 3).post(1, False)
    with pytest.raises(RanksApart, match=r"on rank 0 of the group, and ranks \[1\] did not come to its end"):
        ReplayBarrier(StoreBarrier(store, "a series", 0, 3)).any(failed)


def test_a_rank_that_comes_when_another_has_given_up_hears_that_it_failed(monkeypatch):
    monkeypatch.setattr(replay, "PATIENCE", timedelta(seconds=0.05))
    store = dist.HashStore()
    with pytest.raises(RanksApart):
        ReplayBarrier(StoreBarrier(store, "a series", 0, 2)).any(True)
    assert ReplayBarrier(StoreBarrier(store, "a series", 1, 2)).any(False)


def test_words_said_at_the_same_time_are_all_heard_in_every_store(tmp_path):
    tcp = dist.TCPStore("127.0.0.1", 0, is_master=True)
    for store in (dist.HashStore(), dist.FileStore(str(tmp_path / "store"), 1), tcp):
        meetings = [StoreBarrier(dist.PrefixStore("a group", store.clone()), "a series", rank, 4) for rank in range(4)]
        with ThreadPoolExecutor(4) as threads:
            for number in range(1, 6):
                list(threads.map(lambda each: each.post(number, f"line {each.rank}\n"), meetings))  # noqa: B023
        for number in range(1, 6):
            assert meetings[0].posted(number) == {rank: f"line {rank}\n" for rank in range(4)}


def test_those_who_call_at_once_are_in_one_meeting():
    store = dist.HashStore()
    meetings = [StoreBarrier(store, "a series", rank, 3) for rank in range(3)]
    assert [each.join() for each in meetings] == [0, 0, 0]
    assert [each.start(0) for each in meetings] == [1, 1, 1]
    assert [each.start(1) for each in meetings] == [2, 2, 2]
    assert meetings[0].latest() == (2, False)


def test_who_closes_the_store_is_seen_by_its_group_and_not_by_the_next_one_that_meets_there():
    store = dist.HashStore()
    first, second = ([StoreBarrier(store, "a series", rank, 3) for rank in range(3)] for _ in range(2))
    assert [each.join() for each in first] == [0, 0, 0]
    with ThreadPoolExecutor(1) as thread:
        first[0].withdraw()
        closing = thread.submit(first[0].close, timedelta(seconds=60))
        for each in first[1:]:
            while not each.latest()[1]:
                pass
            assert not closing.done()
            each.withdraw()
        closing.result(60)
    assert [each.join() for each in second] == [0, 0, 0]
    assert [each.latest() for each in second] == [(0, False)] * 3
    second[0].withdraw()
    second[0].close(timedelta(seconds=0.05))  # of the others none has left
    assert [each.latest() for each in [*first, *second]] == [(0, False)] * 3 + [(0, True)] * 3


class Counting:
    """A store that counts what it is asked."""

    def __init__(self, store):
        self._store, self.requests = store, 0

    def __getattr__(self, name):
        self.requests += 1
        return getattr(self._store, name)


def test_a_meeting_of_twice_the_ranks_is_twice_the_requests_and_leaves_nothing_behind():
    def requests(size, meetings=6):
        inner = dist.HashStore()
        stores = [Counting(inner) for _ in range(size)]

        def attend(rank):
            own = ReplayBarrier(StoreBarrier(stores[rank], "a series", rank, size))
            return [own.any(False) for _ in range(meetings)]

        with ThreadPoolExecutor(size) as threads:
            list(threads.map(attend, range(size)))
        assert inner.num_keys() <= 2 * 2 + 1
        return sum(store.requests for store in stores) / size / meetings

    assert max(requests(size) for size in (2, 4, 8, 16, 32)) <= 5  # of each rank: to write, read, report and delete
