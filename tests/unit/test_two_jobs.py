"""Jobs that save into one folder at the same time: nothing of a living one is lost, and what a dead one left is cleared."""

import json
import multiprocessing
import os
import random
import socket
import threading
import time
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from booster import Booster
from booster.checkpoint import CheckpointError, damage, folder, saving
from booster.checkpoint.folder import Lock, lock_of

FORK = multiprocessing.get_context("fork")  # torch is imported already


class Job:
    def __init__(self, seed=0):
        torch.manual_seed(seed)
        self.booster = Booster("cpu")
        model = nn.Linear(40, 40)
        self.model, *_ = self.booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))

    def save(self, folder, step, **options):
        return self.booster.save(folder, self.model, step=step, extra={"step": step, "pid": os.getpid()}, **options)


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def step(number):
    return f"step-{number:010d}"


def _save_many(folder, start, most, seconds, log):
    """Save every second number from `start`, and now and then 0, until there are `most` or the time is over."""
    job, draw, until = Job(), random.Random(os.getpid()), time.monotonic() + seconds
    with open(log, "a", buffering=1) as events:
        for number in range(start, start + 2 * most, 2):
            target = 0 if draw.random() < 0.1 else number
            try:
                job.save(folder, target)
            except CheckpointError as error:
                same = (
                    target == 0 and "is being written by process" in str(error) and socket.gethostname() in str(error)
                )
                events.write(f"{'refused' if same else 'failed'} {target} {error}\n")
            else:
                events.write(f"saved {target}\n")
            if time.monotonic() > until:
                break
        events.write("ended\n")


def run_jobs(folder, logs, *, most, seconds, kills=0):
    """Two jobs that save even and odd numbers, and now and then the same; so many are killed on the way and started anew.

    Returns the lines that they wrote of their saves.
    """

    def begin(start):
        log = logs / str(start)
        process = FORK.Process(target=_save_many, args=(folder, start, most, until - time.monotonic(), log))
        process.start()
        return process

    draw, until = random.Random(0), time.monotonic() + seconds
    jobs = [begin(2), begin(3)]
    for kill in range(1, kills + 1):
        time.sleep(draw.uniform(0.5, 1.5) * seconds / (kills + 1))
        victim = draw.randrange(2)
        jobs[victim].kill()
        jobs[victim].join()
        jobs[victim] = begin(1_000_000 * kill + victim)
    for job in jobs:
        job.join(seconds + 60)
        assert job.exitcode == 0
    return [line for log in logs.iterdir() for line in log.read_text().splitlines()]


@pytest.mark.parametrize(
    ("most", "seconds", "kills"),
    [(12, 600, 0), pytest.param(10**5, 300, 12, marks=[pytest.mark.slow, pytest.mark.timeout(900)])],
    ids=["short", "long"],
)
def test_two_jobs_save_into_one_folder_and_lose_nothing(tmp_path, most, seconds, kills):
    root, logs = tmp_path / "root", tmp_path / "logs"
    logs.mkdir()
    lines = run_jobs(root, logs, most=most, seconds=seconds, kills=kills)
    assert not [line for line in lines if line.startswith("failed")]
    saved = {int(line.split()[1]) for line in lines if line.startswith("saved")}
    assert len(saved) > 12
    found = {int(name.removeprefix("step-")) for name in names(root) if not name.startswith(".")}
    assert saved <= found
    assert len(found - saved) <= kills, "published, and killed before it said so"
    Job().save(root, 1)
    assert not [name for name in names(root) if name.startswith(".")], "the last one clears"
    assert not [name for name in names(root) if damage(root / name)]


def _hold(folder, ready, finish):
    """Save step 7, and stop within it."""
    real = saving.write_synced

    def slowly(path, data):
        real(path, data)
        if path.name == "manifest.json":
            ready.set()
            finish.wait(240)

    saving.write_synced = slowly
    Job().save(folder, 7)


@pytest.fixture
def writer(tmp_path):
    """Another process in the middle of its save of step 7, and what lets it go on."""
    ready, finish = FORK.Event(), FORK.Event()
    process = FORK.Process(target=_hold, args=(tmp_path, ready, finish))
    process.start()
    assert ready.wait(240)
    yield process, finish
    process.kill()
    process.join()


def test_a_living_writer_is_left_alone_and_named_to_who_wants_the_same_number(tmp_path, writer):
    process, finish = writer
    job = Job()
    before = [name for name in names(tmp_path) if ".writing" in name]
    assert len(before) == 2
    job.save(tmp_path, 8)
    job.save(tmp_path, 6)
    assert set(before) < set(names(tmp_path))
    with pytest.raises(CheckpointError, match=f"written by process {process.pid} on {socket.gethostname()}"):
        job.save(tmp_path, 7)
    with pytest.raises(CheckpointError, match=f"process {process.pid}"):
        job.save(tmp_path, 7, async_save=True)
        job.booster.wait_for_save()
    assert job.save(tmp_path, None).name == step(9)
    finish.set()
    process.join(240)
    assert process.exitcode == 0
    assert names(tmp_path) == [step(number) for number in (6, 7, 8, 9)]
    assert not damage(tmp_path / step(7))
    job.save(tmp_path, 7)


def test_a_number_that_another_job_is_writing_is_not_counted_on_to(tmp_path, writer):
    assert Job().save(tmp_path, None).name == step(8)


@pytest.mark.parametrize("number", [7, 8])
def test_what_a_dead_predecessor_left_is_cleared_at_once(tmp_path, writer, number):
    process, _ = writer
    process.kill()
    process.join()
    assert any(".writing-" in name for name in names(tmp_path))
    Job().save(tmp_path, number)
    assert names(tmp_path) == [step(number)]


# ---- writers of other machines and containers: their pids mean nothing here ----


def elsewhere(folder, number=7, pid=None):
    """The lock and the folder of a writer in another container, with the pid of a process that lives here."""
    held = lock_of(folder / step(number))
    events = {"nonce": "0123456789ab", "host": "node-17", "pid": pid or os.getpid(), "space": "another"}
    held.write_text(json.dumps(events))
    (folder / f".{step(number)}.writing-0123456789ab").mkdir()
    return held


@pytest.fixture
def slept(monkeypatch):
    """How long those who wait for a heartbeat have slept, by a clock that goes on while they sleep: none of it is waited."""
    slept = []
    clock = SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append)
    monkeypatch.setattr(folder, "time", clock)
    monkeypatch.setattr(
        folder, "DEAD", 1000.0
    )  # however slow the machine is, a lock that was just made is no dead one's
    return slept


def beats(monkeypatch, held):
    """Have the holder of the lock `held` give a heartbeat while others sleep."""
    monkeypatch.setattr(folder.time, "sleep", lambda seconds: os.utime(held))


def test_a_writer_elsewhere_lives_by_its_heartbeat_and_not_by_a_pid(tmp_path, slept, monkeypatch):
    held = elsewhere(tmp_path, pid=2**22)  # a pid that no process has here
    os.utime(held, (time.time() - 500, time.time() - 500))
    beats(monkeypatch, held)
    with pytest.raises(CheckpointError, match=f"written by process {2**22} on node-17"):
        Job().save(tmp_path, 7)
    Job().save(tmp_path, 8)
    assert f".{step(7)}.writing-0123456789ab" in names(tmp_path)


@pytest.mark.parametrize("number", [7, 8])
def test_a_writer_elsewhere_without_a_heartbeat_is_dead_whoever_has_its_pid_here(tmp_path, slept, number):
    held = elsewhere(tmp_path)
    if number == 8:  # no wait for what is not in the way
        os.utime(held, (time.time() - 2000, time.time() - 2000))
    Job().save(tmp_path, number)
    assert names(tmp_path) == [step(number)]
    assert sum(slept) == (1000 if number == 7 else 0)


def test_who_waits_for_a_heartbeat_goes_on_once_the_lock_is_gone(tmp_path, slept, monkeypatch):
    held = elsewhere(tmp_path)
    monkeypatch.setattr(folder.time, "sleep", lambda seconds: held.unlink())
    Job().save(tmp_path, 7)
    assert names(tmp_path) == [step(7)]


def test_a_lock_that_another_took_over_since_it_was_read_stays(tmp_path):
    held = elsewhere(tmp_path)
    dead = folder.read_lock(held)
    held.write_text(held.read_text().replace(dead.nonce, "ba9876543210"))
    folder.remove_lock(dead)
    now = folder.read_lock(held)
    assert now.nonce == "ba9876543210"
    folder.remove_lock(now)
    assert [name for name in names(tmp_path) if "lock" in name] == []


def test_clocks_of_hosts_that_differ_do_not_matter(tmp_path, monkeypatch):
    elsewhere(tmp_path)
    for shift in (-7200.0, 7200.0):
        with monkeypatch.context() as patch:
            patch.setattr(time, "time", lambda now=time.time, shift=shift: now() + shift)
            Job().save(tmp_path, 8)
        assert f".{step(7)}.writing-0123456789ab" in names(tmp_path)


def test_a_last_sign_of_life_that_lies_in_the_future_is_not_waited_for(tmp_path, slept):
    held = elsewhere(tmp_path)
    ahead = time.time() + 10**6  # of a file server with a clock that was set back since
    os.utime(held, (ahead, ahead))
    Job().save(tmp_path, 7)
    assert names(tmp_path) == [step(7)]
    assert sum(slept) == 1000


def test_a_lock_that_says_nothing_yet_is_respected_and_then_taken(tmp_path, slept):
    lock_of(tmp_path / step(7)).touch()
    Job().save(tmp_path, 7)
    assert names(tmp_path) == [step(7)]
    assert sum(slept) == 1000


# ---- what is where a lock should be, and is none ----


def nowhere(path):
    path.symlink_to(path.with_name("nowhere"))


def itself(path):
    path.symlink_to(path.name)


def zeros(path):
    path.symlink_to("/dev/zero")


def as_folder(path):
    path.mkdir()


@pytest.mark.parametrize("make", [nowhere, itself, zeros, as_folder])
def test_what_is_no_file_in_place_of_a_lock_is_named_at_once_and_no_other_step_minds(tmp_path, make, caplog):
    make(lock_of(tmp_path / step(7)))
    with pytest.raises(CheckpointError, match=r"\.step-0000000007\.writing\.lock should say who writes .* Remove it"):
        Job().save(tmp_path, 7)
    Job().save(tmp_path, 8)
    assert names(tmp_path) == [f".{step(7)}.writing.lock", step(8)]


OF_NO_WRITER = {
    "a number without end": '{"nonce": "a", "host": "h", "pid": Infinity, "space": "x"}',
    "another without end": '{"nonce": "a", "host": "h", "pid": 1e999, "space": "x"}',
    "lists in lists": "[" * 4000,
    "half a character": '{"nonce": "\\ud800", "host": "\\ud800", "pid": 1, "space": "x"}',
    "no text": b"\xff\xfe\x00",
    "a list": "[1]",
    "nothing": "",
}


@pytest.mark.parametrize("said", OF_NO_WRITER)
def test_a_lock_that_says_what_no_writer_says_goes_by_its_age(tmp_path, slept, said):
    text = OF_NO_WRITER[said]
    for number in (7, 9):
        lock_of(tmp_path / step(number)).write_bytes(text if isinstance(text, bytes) else text.encode())
        os.utime(lock_of(tmp_path / step(number)), (0, 0))
    Job().save(tmp_path, 7)
    assert names(tmp_path) == [step(7)]
    assert not slept


def test_who_holds_a_lock_is_named_as_a_terminal_may_show_it(tmp_path, slept, monkeypatch):
    held = elsewhere(tmp_path)
    held.write_text(held.read_text().replace("node-17", "\\u001b]0;pwned\\u0007"))
    os.utime(held, (time.time() - 500, time.time() - 500))
    beats(monkeypatch, held)
    with pytest.raises(CheckpointError, match="written by process") as raised:
        Job().save(tmp_path, 7)
    assert "\\x1b]0;pwned\\x07" in str(raised.value)
    assert str(raised.value).isprintable()


# ---- before a checkpoint gets its name ----


def interrupt(monkeypatch, action):
    """Run `action` with the folder in which a save has written all of its files."""
    real = saving.write_synced

    def then(path, data):
        real(path, data)
        if path.name == "manifest.json":
            action(path.parent)

    monkeypatch.setattr(saving, "write_synced", then)


def test_a_writer_that_another_took_over_from_publishes_nothing(tmp_path, monkeypatch):
    job = Job()
    before = json.loads((job.save(tmp_path, 7) / "manifest.json").read_text())

    def taken_over(staging):
        lock_of(tmp_path / step(7)).unlink()
        elsewhere(tmp_path)

    interrupt(monkeypatch, taken_over)
    with pytest.raises(CheckpointError, match="taken over by process .* on node-17"):
        job.save(tmp_path, 7)
    assert json.loads((tmp_path / step(7) / "manifest.json").read_text()) == before
    assert lock_of(tmp_path / step(7)).exists(), "it is the other one's"


@pytest.mark.parametrize("name", ["state.json", "tensors-00000.safetensors", "manifest.json"])
@pytest.mark.parametrize("how", ["removed", "cut"])
def test_a_folder_that_is_not_whole_any_more_gets_no_name(tmp_path, monkeypatch, name, how):
    interrupt(
        monkeypatch, lambda staging: (staging / name).unlink() if how == "removed" else (staging / name).write_text("")
    )
    with pytest.raises(CheckpointError):
        Job().save(tmp_path, 7)
    assert names(tmp_path) == []


def test_a_save_gives_a_sign_of_life_as_long_as_it_takes(tmp_path, monkeypatch):
    monkeypatch.setattr(folder, "BEAT", 0.05)
    held = Lock(tmp_path / step(7))
    try:
        for _ in range(4):
            before, until = held._path.stat().st_mtime_ns, time.monotonic() + 240
            while held._path.stat().st_mtime_ns == before:
                assert time.monotonic() < until
                time.sleep(0.01)
    finally:
        held.release()
    assert names(tmp_path) == []
    assert not [thread for thread in threading.enumerate() if thread.name == "booster-checkpoint-lock"]


def test_files_of_other_programs_are_left_alone(tmp_path):
    for name in (".npm.lock", ".step-0000000007.lock", "step.writing.lock"):
        (tmp_path / name).write_text("theirs")
        os.utime(tmp_path / name, (0, 0))
    Job().save(tmp_path, 7)
    assert len(names(tmp_path)) == 4
