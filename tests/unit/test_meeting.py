"""Ranks that tell each other whether a replay failed, without a collective."""

from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import pytest
import torch.distributed as dist

from booster.numerics.diagnosis import meeting
from booster.numerics.diagnosis.meeting import Meeting, RanksApart


def meet(*failed):
    """What the meetings of ranks that failed, or did not, in turns, came to on each."""
    store = dist.HashStore()

    def attend(rank):
        own = Meeting(store, "a series", rank, len(failed))
        return [own.any(each) for each in failed[rank]]

    with ThreadPoolExecutor(len(failed)) as threads:
        return list(threads.map(attend, range(len(failed))))


def test_all_ranks_learn_whether_any_failed_in_each_meeting_of_a_series():
    assert meet([False, True, False], [False, False, False]) == [[False, True, False]] * 2
    assert meet([True], [True], [False]) == [[True]] * 3


@pytest.mark.parametrize("failed", [True, False])
def test_a_rank_that_nobody_joins_raises_and_names_who_is_missing(failed, monkeypatch):
    monkeypatch.setattr(meeting, "PATIENCE", timedelta(seconds=0.05))
    store = dist.HashStore()
    store.set_timeout(timedelta(seconds=0.05))
    store.set("a series/1/2", "done")
    with pytest.raises(RanksApart, match=r"on rank 0 of the group, and ranks \[1\] did not come to its end"):
        Meeting(store, "a series", 0, 3).any(failed)
