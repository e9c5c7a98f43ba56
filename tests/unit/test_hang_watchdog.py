"""Questions and answers of ranks that wait for each other, through a store that they share."""

import inspect
import json
from importlib import import_module
from pathlib import Path

import pytest
import torch.distributed as dist

import booster
from booster import DistCoordinator, find_batch_size
from booster.common import hang_watchdog
from booster.common.hang_watchdog import HangWatchdog

launch = import_module("booster.launch")

WAITING = {
    "call": "save()",
    "still": 60.0,
    "where": "train.py:1 in main",
    "collective": "a",
    "is_outside": False,
    "error": None,
    "failure": None,
    "failures": 0,
}
BUSY = {**WAITING, "call": None}


class Between:
    """A store that counts what it is asked, and lets others look just after it was asked the `moment`th thing."""

    def __init__(self, store, moment=0, look=None):
        self._store, self._moment, self._look = store, moment, look
        self.requests = 0

    def clone(self):
        return self

    def set_timeout(self, timeout):
        pass

    def __getattr__(self, name):
        method = getattr(self._store, name)

        def call(*args):
            result = method(*args)
            self.requests += 1
            if self.requests == self._moment:
                self._look()
            return result

        return call


def ranks_of(stores, words, warned):
    """The watches of ranks of one store, not started, that stand where `words` says."""
    size = len(words)
    stores = stores if isinstance(stores, list) else [stores] * size
    calls = [HangWatchdog(store, rank, size, 30.0) for rank, store in enumerate(stores)]
    for rank, call in enumerate(calls):
        call._report = lambda rank=rank: words[rank]
        call._warn = lambda word, absent, silent=(), rank=rank: warned.append((rank, sorted(absent), list(silent)))
    return calls


def interleaved(words, others, rounds=8):
    """What was logged where `others` look in the midst of a look of rank 0, for each of the moments at which they may."""
    for moment in range(4, 3 * rounds):
        warned = []
        inner = dist.HashStore()
        first = Between(inner, moment, lambda: [calls[rank].poll() for rank in others])  # noqa: B023
        calls = ranks_of([first] + [inner] * (len(words) - 1), words, warned)
        for _ in range(rounds):
            for call in calls:
                call.poll()
        assert first.requests >= moment
        yield moment, sorted(warned)


@pytest.mark.parametrize("others", [(1,), (2,), (1, 2), (2, 1, 2)])
def test_nothing_that_is_said_gets_lost_wherever_others_look_in_between(others):
    for moment, warned in interleaved([WAITING, WAITING, WAITING], others):
        assert warned == [], moment  # all are in the same call
    for moment, warned in interleaved([WAITING, WAITING, BUSY], others):
        assert warned == [(0, [2], []), (1, [2], [])], moment


def test_ranks_that_wait_in_the_same_call_look_at_the_price_of_a_few_requests_each():
    def requests(size, missing):
        stores = [Between(inner) for inner in [dist.HashStore()] for _ in range(size)]
        warned = []
        calls = ranks_of(stores, [WAITING] * (size - 1) + [BUSY], warned)
        for _ in range(20):
            for call in calls[: size - missing]:
                call.poll()
        assert len(warned) == size - 1  # once each
        return sum(store.requests for store in stores) / size / 20

    found = [requests(size, missing) for size in (4, 8, 16, 32) for missing in (0, 1)]
    # To see what is called, to hear, and of every second look: to call, let two things go, and speak.
    assert max(found) <= 2 + 4


def test_one_that_is_elsewhere_is_named_once_and_one_that_never_looks_is_silent():
    warned = []
    first, second, _ = ranks_of(dist.HashStore(), [WAITING, BUSY, BUSY], warned)
    for _ in range(20):
        first.poll()
        second.poll()
    assert warned == [(0, [1], [2])]


def in_place_of_an_answer(written, warned=None):
    """What rank 0 says of rank 1 where something else writes `written` into the meeting of both."""
    store, found = dist.HashStore(), []
    first, second = ranks_of(store, [WAITING, BUSY], found)
    if warned is not None:
        first._warn = warned.__get__(first)
    first.poll()
    store.append(first._barrier._key(first._round), written)
    for _ in range(8):
        first.poll()
    return found


def said(word, rank=1):
    return json.dumps([rank, word]) + "\n"


HARMFUL = {
    "no object": said([]),
    "a number": said(3),
    "nothing": said({}),
    "other kinds": said({"call": [1], "still": "x", "where": {}, "is_outside": 1, "error": [2]}),
    "time without end": said({**BUSY, "still": float("inf")}),
    "a page for a place": said({**BUSY, "where": "a" * 10**6}),
    "another rank": said(BUSY, 7),
    "a rank that is no number": said(BUSY, "1"),
    "a rank below zero": said(BUSY, -1),
    "one thing": "[1]\n",
    "no list": "1\n",
    "lists in lists": "[" * 100_000 + "\n",
    "no text": "\xff\n",
    "a pickle": "cposix\nsystem\n(X\x04\x00\x00\x00truetR.\n",
}


@pytest.mark.parametrize("written", HARMFUL)
def test_an_answer_that_no_rank_gives_counts_as_none(written):
    assert in_place_of_an_answer(HARMFUL[written]) == [(0, [], [1])]


def test_what_others_wrote_into_the_store_is_warned_of_in_one_line_that_a_terminal_may_show(caplog):
    harm = {"where": "\x1b]0;pwned\x07\nERROR: a line of nobody", "error": "\x1b[2J", "is_outside": True}
    in_place_of_an_answer(said({**BUSY, **harm}), warned=HangWatchdog._warn)
    record = caplog.records[0]
    assert record.getMessage().isprintable()
    assert "\\x1b[2J" in record.getMessage()


def test_long_waits_and_many_of_them_leave_no_answers_behind_in_the_store():
    store, words = dist.HashStore(), [WAITING, WAITING, BUSY]
    calls = ranks_of(store, words, [])
    sizes = []
    for number in range(60):
        words[0] = words[1] = BUSY if number % 6 == 5 else WAITING
        for call in calls:
            call.poll()
        sizes.append(store.num_keys())
    assert max(sizes[30:]) <= max(sizes[:30]) <= 3 * 3 + 1


def test_the_places_that_are_named_are_there():
    package = Path(booster.__file__).parent
    for places in (hang_watchdog._STARTERS, hang_watchdog._WAITS_ON_PURPOSE):
        for file, functions in places.items():
            assert (package / file).exists()
            names = {name for name, _ in inspect.getmembers(launch, inspect.isfunction)} if functions else set()
            assert names.issuperset(functions), file


def test_a_rank_of_a_notebook_waits_in_what_its_cell_calls_and_a_wait_on_purpose_in_nothing(monkeypatch):
    call = HangWatchdog(dist.HashStore(), 0, 2, 30.0)
    seen = []
    monkeypatch.setattr(launch, "start", lambda *args, **kwargs: None)
    monkeypatch.setattr(launch, "close_group", lambda: None)

    def look(size=None):
        seen.append(call._report()["call"])

    def cell():
        find_batch_size(look, 1)
        DistCoordinator().on_master_only()(look)()

    launch._rank(0, cell, (), 2, None, 0, None, "")
    assert seen == ["find_batch_size()", None]
