"""Questions and answers of ranks that wait for each other, through a store that they share."""

import torch.distributed as dist

from booster.ground.roll_call import RollCall

WAITING = {"call": "save()", "still": 60.0, "where": "train.py:1 in main", "is_outside": False, "error": None}
BUSY = {**WAITING, "call": None}


class Between:
    """A store that lets another rank look just after this one has seen what is asked, once."""

    def __init__(self, store, look):
        self._store, self._look = store, look

    def __getattr__(self, name):
        method = getattr(self._store, name)

        def call(*args):
            result = method(*args)
            if name in ("check", "get") and self._look is not None:
                look, self._look = self._look, None
                look()
            return result

        return call


def ranks_of(store, size, words, told):
    """The watches of `size` ranks of one store, not started, that stand where `words` says."""
    calls = [RollCall(store, rank, size, 30.0) for rank in range(size)]
    for rank, call in enumerate(calls):
        call._begin()
        call._word = lambda rank=rank: words[rank]
        call._tell = lambda word, absent, silent=(), rank=rank: told.append((rank, sorted(absent), list(silent)))
    return calls


def test_ranks_that_ask_at_the_same_moment_answer_each_other():
    told = []
    first, second = ranks_of(dist.HashStore(), 2, [WAITING, WAITING], told)
    first._store = Between(first._store, second.look)
    for _ in range(6):
        first.look()
        second.look()
    assert told == []  # both are in the same call


def test_one_that_is_elsewhere_is_named_once_and_one_that_never_looks_is_silent():
    told = []
    first, second, _ = ranks_of(dist.HashStore(), 3, [WAITING, BUSY, BUSY], told)
    for _ in range(20):
        first.look()
        second.look()
    assert told == [(0, [1], [2])]


def test_long_waits_and_many_of_them_leave_no_answers_behind_in_the_store():
    store, words = dist.HashStore(), [WAITING, WAITING, BUSY]
    calls = ranks_of(store, 3, words, [])
    sizes = []
    for number in range(60):
        words[0] = words[1] = BUSY if number % 6 == 5 else WAITING
        for call in calls:
            call.look()
        sizes.append(store.num_keys())
    assert max(sizes[30:]) <= max(sizes[:30]) <= 3 * 3 + 1
