"""Ranks that wait for one that does not come: who it is, and where it is instead, is said while they wait."""

import logging
import re
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn

import booster
from booster.common import hang_watchdog


class Lines(logging.Handler):
    """Keeps what is logged; the first line makes `file`, at which the other rank goes on."""

    def __init__(self, file):
        super().__init__()
        self.lines, self.file = [], file

    def emit(self, record):
        self.lines.append(f"{record.levelname} {record.getMessage()}")
        if self.file is not None:
            self.file.touch()


def raises_and_lives_on(b, model, optimizer, folder):
    """Rank 1 raises, handles it, and stays in its handler until rank 0 has its report."""
    try:
        if b.is_main:
            loss = model(torch.ones(2, 4)).sum()
            wait_until_there(folder, "raised")
            b.backward(loss, optimizer)
        else:
            raise ValueError("the reason")
    except ValueError:
        stay(folder, "raised")
        b.backward(model(torch.ones(2, 4)).sum(), optimizer)


def raised_before_and_stands_still(b, model, optimizer, folder):
    """Rank 1 has forgotten its exception, and does not move on in the script."""
    if b.is_main:
        loss = model(torch.ones(2, 4)).sum()
        wait_until_there(folder, "still")
        b.backward(loss, optimizer)
        return
    try:
        raise ValueError("the reason")
    except ValueError:
        pass
    stay(folder, "still")
    b.backward(model(torch.ones(2, 4)).sum(), optimizer)


def guarded_call(name):
    """Rank 0 alone calls what all must call, and rank 1 is busy elsewhere, so that it always moves on."""

    def case(b, model, optimizer, folder):
        call = {
            "save": lambda: b.save(folder / "checkpoint", model, optimizer),
            "save_model": lambda: b.save_model(model, folder / "weights.safetensors"),
            "load": lambda: b.load(folder / "checkpoint", model, optimizer),
            "gather": lambda: b.gather(torch.ones(2)),
        }[name]
        if not b.is_main:
            busy(folder, name)
        call()

    return case


class Joins(logging.Handler):
    """Joins those who wait at the barrier of `group` once something is logged, from the thread that logs."""

    def __init__(self, group):
        super().__init__()
        self.group = group

    def emit(self, record):
        dist.barrier(self.group)


def in_another_collective(b, model, optimizer, folder):
    """Both ranks wait in the model's forward, rank 0 for a sum and rank 1 at a barrier."""
    sums, barrier, logger = dist.new_group(), dist.new_group(), logging.getLogger("booster.common.hang_watchdog")
    joins = Joins(barrier)

    def wait(module, args):
        if b.is_main:
            dist.all_reduce(torch.zeros(1), group=sums)
        else:
            dist.barrier(barrier)

    hook = b.unwrap(model).register_forward_pre_hook(wait)
    if b.is_main:
        logger.addHandler(joins)
    loss = model(torch.ones(2, 4)).sum()
    logger.removeHandler(joins)
    hook.remove()
    if not b.is_main:
        dist.all_reduce(torch.zeros(1), group=sums)
    b.backward(loss, optimizer)


CASES = {
    "collectives": in_another_collective,
    "raised": raises_and_lives_on,
    "still": raised_before_and_stands_still,
    **{name: guarded_call(name) for name in ("save", "save_model", "gather", "load")},
}


def wait_until_there(folder, name):
    """Return when rank 1 is about to stand still: however slow it is, rank 0 meets it there."""
    while not (folder / f"there_{name}").exists():
        time.sleep(0.01)


def stay(folder, name):
    (folder / f"there_{name}").touch()
    while not (folder / f"told_{name}").exists():
        time.sleep(0.05)


def waiting_in_stay():
    """Where the script is in `stay`: nearly always asleep."""
    return rf"{re.escape(__file__)}:(?:{line_of('time.sleep(0.05)')}|{line_of('time.sleep(0.05)') - 1}) in stay"


def busy(folder, name):
    while not (folder / f"told_{name}").exists():
        sum(range(1000))


def on_rank(rank, world_size, folder, *names):
    """What is logged in each case, by its name."""
    before = hang_watchdog._PROMPT, hang_watchdog._INTERVAL, hang_watchdog._ANSWERS
    hang_watchdog._PROMPT, hang_watchdog._INTERVAL, hang_watchdog._ANSWERS = 0.4, 0.1, 600
    b = booster.Booster("cpu", "fp32", booster.plugin.TorchDDPPlugin(), patience=0.6)
    model = nn.Linear(4, 4)
    model, optimizer, *_ = b.boost(model, torch.optim.SGD(model.parameters(), 0.1))
    warned = {}
    logger = logging.getLogger("booster.common.hang_watchdog")
    try:
        for name in names:
            dist.barrier()
            lines = Lines(folder / f"told_{name}" if rank == 0 else None)
            logger.addHandler(lines)
            try:
                CASES[name](b, model, optimizer, folder)
                time.sleep(0.3)  # for a second line, if there is one
            finally:
                logger.removeHandler(lines)
            warned[name] = lines.lines
        optimizer.step()
    finally:
        hang_watchdog._PROMPT, hang_watchdog._INTERVAL, hang_watchdog._ANSWERS = before
        hang_watchdog.start_watchdog(None)
    return warned


def line_of(text):
    lines = Path(__file__).read_text().splitlines()
    return next(number for number, line in enumerate(lines, start=1) if text in line)


def only_line(warned):
    """The one line that a wait gave, of all."""
    assert [line.partition(" ")[0] for line in warned] == ["WARNING"], warned
    return warned[0]


def test_who_waits_is_told_which_rank_raised_what_and_where_and_where_it_is_now(ranks2, tmp_path):
    warned = only_line(ranks2(on_rank, tmp_path, "raised")[0]["raised"])
    assert re.search(
        r"rank 0 has waited \d+ s in backward\(\) \(.*\) for ranks \[1\], which have not called it", warned
    )
    raised = line_of('            raise ValueError("the reason")')
    assert f"rank 1 raised ValueError: the reason at {__file__}:{raised} in raises_and_lives_on" in warned
    assert re.search(f"and is at {waiting_in_stay()}", warned)


def test_an_exception_that_the_standard_library_handles_is_not_told_and_one_of_the_script_is():
    warned, begin = [], threading.Event()

    def fail():
        begin.wait(240)
        raise ValueError("the reason")

    def note(future):
        warned.append(hang_watchdog._error(threading.get_ident()))

    with ThreadPoolExecutor(1) as pool:
        pool.submit(fail).add_done_callback(note)  # called where the pool handles what `fail` raises
        begin.set()
    try:
        fail()
    except ValueError:
        note(None)
    where = f"{__file__}:{line_of('begin.wait(240)') + 1} in fail"
    assert warned == [None, f"ValueError: the reason at {where}"]


def test_what_a_session_showed_last_is_named_and_what_no_line_raised_is_not(monkeypatch):
    for shown in (ValueError("the reason"), UserWarning("of C++, which torch prints where warnings are errors")):
        monkeypatch.setattr(sys, "last_value", shown, raising=False)
        assert hang_watchdog._error(threading.get_ident()) is None
    try:
        raise ValueError("the reason")
    except ValueError as error:
        shown = error
    monkeypatch.setattr(sys, "last_value", shown)
    assert hang_watchdog._error(threading.get_ident()).startswith("ValueError: the reason at ")


def test_a_rank_that_forgot_its_exception_and_stands_still_in_the_script_is_named_with_its_line(ranks2, tmp_path):
    warned = only_line(ranks2(on_rank, tmp_path, "still")[0]["still"])
    assert re.search(rf"for ranks \[1\], which have not called it: rank 1 is at {waiting_in_stay()}", warned)


def test_ranks_in_different_collectives_of_one_call_are_told_which_each_is_in(ranks2, tmp_path):
    warned = only_line(ranks2(on_rank, tmp_path, "collectives")[0]["collectives"])
    one, other = (
        rf"{name}\(\) called by {re.escape(__file__)}:{line_of(text)} in wait"
        for name, text in (("all_reduce", "dist.all_reduce(torch.zeros(1)"), ("barrier", "dist.barrier(barrier)"))
    )
    call = re.escape("the model's forward()")
    assert re.search(rf"rank 0 has waited \d+ s in {call} \(.*, in {one}\) for ranks \[1\]", warned), warned
    assert re.search(rf"rank 1 is at .*, in the same call, in {other}", warned), warned


def test_what_one_rank_alone_calls_names_those_that_have_not_called_it_and_goes_on_waiting(ranks2, tmp_path):
    calls = ("save", "save_model", "gather", "load")
    logged = ranks2(on_rank, tmp_path, *calls)[0]
    for name in calls:
        warned = only_line(logged[name])
        assert f" s in {name}() (" in warned
        where = rf"for ranks \[1\], which have not called it: rank 1 is at {re.escape(__file__)}:\d+ in busy"
        assert re.search(where, warned), warned
