"""Whatever goes wrong while a checkpoint is written, or with its files later: an error or the right state, never a mixture."""

import builtins
import io
import json
import multiprocessing
import os
import random
import resource
import shutil
import signal
import stat
import time
from pathlib import Path

import pytest
import torch
from comparing import same
from test_checkpoint import job

from booster.checkpoint import CheckpointError, damage, latest

STEP = "step-0000000001"


def names(folder):
    return sorted(path.name for path in folder.iterdir())


# ---- damaged files ----


def boundaries(data):
    """Where a safetensors file has something begin or end; of other files nothing is known."""
    if data[8:9] != b"{" or data[:1] == b"{":
        return []
    start = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:start])
    offsets = {o for entry in header.values() if "data_offsets" in entry for o in entry["data_offsets"]}
    return [7, 8, 9, start - 1, start, *(start + o for o in offsets)]


def flip(data, draw, **_):
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    return data


def truncate(data, draw, **_):
    places = [0, 1, len(data) // 2, len(data) - 1, *boundaries(data)]
    return data[: draw.choice([place for place in places if place < len(data)])]


def lose_lines(data, draw, **_):
    """A block of the file never reached the disk."""
    start = draw.randrange(len(data))
    end = start + draw.choice([1, 64, 4096])
    data[start:end] = bytes(len(data[start:end]))
    return data


def extend(data, draw, **_):
    return data + draw.choice([b"\0", b"\n", b"}", data])


def swap(data, draw, path, **_):
    return draw.choice([file for file in sorted(path.parent.iterdir()) if file != path]).read_bytes()


def of_another_step(data, path, other, **_):
    """The file of that name, and mostly of that size, of another checkpoint of the same run."""
    return (other / path.name).read_bytes()


def foreign(data, draw, **_):
    buffer = io.BytesIO()
    torch.save({"models/0/0.weight": torch.zeros(16, 8)}, buffer)
    pickled = b"cos\nsystem\n(S'touch pwned'\ntR."
    return draw.choice([buffer.getvalue(), pickled, b"", b"{}", b"[]", b"null", b"\x89PNG\r\n"])


DAMAGES = [flip, truncate, lose_lines, extend, swap, of_another_step, foreign]


def spoil(folder, other, draw):
    """One random damage to the checkpoint in `folder`; returns what, in words."""
    path = draw.choice(sorted(folder.iterdir()))
    damage_of = draw.choice([*DAMAGES, "remove", "add"])
    if damage_of == "remove":
        path.unlink()
    elif damage_of == "add":
        (folder / draw.choice(["notes.txt", "tensors-00001.safetensors", ".hidden"])).write_bytes(path.read_bytes())
    else:
        path.write_bytes(damage_of(bytearray(path.read_bytes()), draw=draw, path=path, other=other))
    return f"{getattr(damage_of, '__name__', damage_of)} {path.name}"


@pytest.mark.parametrize("number", [40, pytest.param(1000, marks=pytest.mark.slow)])
def test_damage_is_an_error_or_the_right_state(tmp_path, monkeypatch, number):
    monkeypatch.chdir(tmp_path)  # where a pickle would leave its mark
    first = job()
    first.train(1)
    other = first.booster.save(tmp_path / "other", *first.parts, step=2)
    first.train(1)
    whole = first.booster.save(tmp_path / "whole", *first.parts, step=2)
    assert {p.name: p.stat().st_size for p in whole.glob("*.safetensors")} == {
        p.name: p.stat().st_size for p in other.glob("*.safetensors")
    }
    target = job(seed=1)
    caught, harmless = 0, set()
    for seed in range(number):
        folder = tmp_path / "bad" / whole.name
        shutil.copytree(whole, folder)
        before = {key: value.clone() for key, value in target.state().items()}
        done = spoil(folder, other, random.Random(seed))
        try:
            target.booster.load(folder, *target.parts)
        except CheckpointError:
            caught += 1
            assert same(target.state(), before), f"seed {seed}: {done} was refused and changed something"
        else:
            harmless.add(done if "manifest" in done else done.split()[0])
            assert same(target.state(), first.state()), f"seed {seed}: {done} was loaded"
            target = job(seed=1)
        shutil.rmtree(folder)
    # Files next to it, zeros over zeros, and the newline at the end of the manifest.
    assert harmless <= {"add", "add manifest.json", "lose_lines", "extend manifest.json", "truncate manifest.json"}
    assert caught > 0.8 * number
    assert not (tmp_path / "pwned").exists()


@pytest.mark.parametrize("name", ["manifest.json", "state.json", "tensors-00000.safetensors"])
def test_a_checkpoint_cut_anywhere_is_refused(tmp_path, name):
    first = job()
    path = first.booster.save(tmp_path, *first.parts, step=1)
    data = (path / name).read_bytes()
    end = len(data) - 1 - (name == "manifest.json")  # which ends in a newline
    for place in {0, 1, len(data) // 2, end, *boundaries(data)} - {len(data)}:
        (path / name).write_bytes(data[:place])
        assert damage(path), f"{name} of {len(data)} bytes, cut after {place}"
    (path / name).write_bytes(data)
    assert not damage(path)
    assert damage(str(path)) == []


# ---- the disk ----


class FaultyFile:
    """A file with a `write` that fails when its turn comes, after half of the data."""

    def __init__(self, file, due):
        self._file, self._due = file, due

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._file.close()

    def write(self, data):
        if self._due():
            self._file.write(data[: len(data) // 2])
            raise OSError(28, "No space left on device")
        return self._file.write(data)


def plant(patch, function, due):
    """Make `function`, of `os` or `write` of new files, fail at the call at which `due()` is true."""
    if function == "write":
        real_open = io.open

        def opened(path, mode="r", *args, **kwargs):
            file = real_open(path, mode, *args, **kwargs)
            return FaultyFile(file, due) if "x" in mode else file

        patch.setattr(io, "open", opened)
        patch.setattr(builtins, "open", opened)
        return
    real = getattr(os, function)

    def faulty(*args, **kwargs):
        if due():
            raise OSError(28, "No space left on device")
        return real(*args, **kwargs)

    patch.setattr(os, function, faulty)


@pytest.mark.parametrize("function", ["write", "fsync", "rename", "mkdir", "open", "unlink", "rmdir"])
def test_a_fault_at_every_system_call_leaves_a_whole_checkpoint(tmp_path, monkeypatch, function):
    """The first, the second, ... call of one save fails."""
    first = job()
    first.booster.save(tmp_path, *first.parts, step=1)
    for fail_at in range(1, 50):
        first.train(1)
        before = {path.name: path.read_bytes() for path in (tmp_path / STEP).iterdir()}
        calls = 0

        def due(fail_at=fail_at):
            nonlocal calls
            calls += 1
            return calls == fail_at

        with monkeypatch.context() as patch:
            plant(patch, function, due)
            message = ""
            try:
                first.booster.save(tmp_path, *first.parts, step=1)
            except CheckpointError as error:
                message = str(error)
        assert damage(latest(tmp_path)) == []
        if message:
            assert "No space left on device" in message
        else:
            after = {path.name: path.read_bytes() for path in (tmp_path / STEP).iterdir()}
            assert after.keys() == before.keys()
            assert after != before, "a save that does not raise has saved"
        if calls < fail_at:
            break
    assert fail_at > 1, f"save never calls {function}"
    assert calls < fail_at, "every call failed once"
    first.booster.save(tmp_path, *first.parts, step=1)
    assert names(tmp_path) == [STEP]


def test_a_full_disk_is_an_error_that_leaves_the_old_checkpoint(tmp_path):
    first = job()
    first.booster.save(tmp_path, *first.parts, step=1)
    before = {path.name: path.read_bytes() for path in (tmp_path / STEP).iterdir()}
    first.train(1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    largest = max(len(data) for data in before.values())
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        for limit in (0, 100, largest // 2, largest - 1):
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
            try:
                with pytest.raises(CheckpointError, match="File too large"):
                    first.booster.save(tmp_path, *first.parts, step=1)
            finally:
                resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
            assert {p.name: p.read_bytes() for p in (tmp_path / STEP).iterdir()} == before
            assert names(tmp_path) == [STEP]
    finally:
        signal.signal(signal.SIGXFSZ, handler)


def test_leftovers_that_cannot_be_removed_do_not_stop_the_run(tmp_path, monkeypatch, caplog):
    first = job()
    leftover = tmp_path / ".step-0000000009.writing-0123456789ab"
    leftover.mkdir()
    real = shutil.rmtree

    def refusing(path, *args, **kwargs):
        if Path(path) == leftover:
            raise PermissionError(13, "Permission denied", str(path))
        real(path, *args, **kwargs)

    monkeypatch.setattr(shutil, "rmtree", refusing)
    assert first.booster.save(tmp_path, *first.parts, step=1) == latest(tmp_path)
    assert "could not be removed: [Errno 13] Permission denied" in caplog.text


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc to name open files")
@pytest.mark.parametrize("over", [False, True], ids=["a new one", "over an old one"])
def test_everything_is_on_the_disk_before_it_has_its_name(tmp_path, monkeypatch, over):
    first = job()
    root = tmp_path / "runs" / "one"
    if over:
        first.booster.save(root, *first.parts, step=1)
        first.train(1)
    events = []
    real = {name: getattr(os, name) for name in ("fsync", "rename", "mkdir")}

    def fsync(descriptor):
        real["fsync"](descriptor)
        kind = "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"
        events.append((kind, Path(os.readlink(f"/proc/self/fd/{descriptor}"))))

    def rename(source, target, **options):
        inside = {path.name: path.stat().st_size for path in Path(source).iterdir()}
        real["rename"](source, target, **options)
        events.append(("rename", Path(target), Path(source), inside))

    def mkdir(path, *args, **options):
        real["mkdir"](path, *args, **options)
        events.append(("mkdir", Path(path)))

    with monkeypatch.context() as patch:
        for function in (fsync, rename, mkdir):
            patch.setattr(os, function.__name__, function)
        first.booster.save(root, *first.parts, step=1)
    at = next(i for i, event in enumerate(events) if event[:2] == ("rename", root / STEP))
    staging, inside = events[at][2:]
    synced = [path for kind, path, *_ in events[:at] if kind == "file"]
    assert sorted(path.name for path in synced) == sorted(inside), "every file once"
    assert synced[-1] == staging / "manifest.json", "which says that there is a checkpoint"
    assert events[:at].index(("file", synced[-1])) < max(
        i for i, event in enumerate(events[:at]) if event == ("folder", staging)
    ), "and its name in the folder"
    assert ("folder", root) in events[at:], "and the checkpoint's own name"
    for index, event in enumerate(events):
        if event[0] == "mkdir" and event[1] != staging:
            assert ("folder", event[1].parent) in events[index:], f"{event[1]} is lost with the power"


# ---- the process ----


def _killed_at(function, count, folder):
    """Save, and die at the call number `count`."""
    running = job()
    running.train(1)
    calls = 0

    def due():
        nonlocal calls
        calls += 1
        if calls == count:
            os.kill(os.getpid(), signal.SIGKILL)

    plant(pytest.MonkeyPatch(), function, due)
    running.booster.save(folder, *running.parts, step=1, extra=_mark(running))


@pytest.mark.slow_cases("fsync")
@pytest.mark.parametrize("function", [pytest.param("write", marks=pytest.mark.slow), "fsync", "rename", "unlink"])
def test_killed_at_every_system_call_one_of_the_two_loads(tmp_path, function):
    first, target = job(), job(seed=1)
    path = first.booster.save(tmp_path, *first.parts, step=1, extra=_mark(first))
    whole = tmp_path.with_name(f"{tmp_path.name}.whole")
    shutil.copytree(path, whole)
    context = multiprocessing.get_context("fork")  # torch is imported already
    marks = set()
    for count in range(1, 50):
        process = context.Process(target=_killed_at, args=(function, count, str(tmp_path)))
        process.start()
        process.join(240)
        loaded = target.booster.load(tmp_path, *target.parts)
        assert loaded.extra == _mark(target), "never mixed"
        marks.add(loaded.extra[0])
        if process.exitcode == 0:
            break
        assert process.exitcode == -signal.SIGKILL
        # The next one finds the old one again, and what this one left.
        shutil.rmtree(path, ignore_errors=True)
        shutil.copytree(whole, path)
    assert process.exitcode == 0, "every call was the last once"
    assert count > 1, f"save never calls {function}"
    assert names(tmp_path) == [STEP]


def _mark(job):
    return [float(job.parts[0][0].weight.detach().float().sum())]


def _save_again_and_again(folder, begun):
    running = job()
    while True:
        running.train(1)
        os.write(begun, b".")
        running.booster.save(folder, *running.parts, step=7, extra=_mark(running))


@pytest.mark.parametrize("number", [8, pytest.param(200, marks=pytest.mark.slow)])
def test_killed_while_saving_over_a_checkpoint_one_of_the_two_loads(tmp_path, number):
    target = job(seed=1)
    draw = random.Random(0)
    context = multiprocessing.get_context("fork")
    began = time.monotonic()
    for _ in range(3):
        target.booster.save(tmp_path, *target.parts, step=7, extra=_mark(target))
    duration = (time.monotonic() - began) / 3
    inside = 0
    for _ in range(number):
        reading, begun = os.pipe()
        process = context.Process(target=_save_again_and_again, args=(str(tmp_path), begun))
        process.start()
        os.close(begun)
        for _ in range(draw.randint(1, 2)):
            os.read(reading, 1)
        time.sleep(draw.uniform(0.0, duration))
        process.kill()
        process.join()
        os.close(reading)
        inside += names(tmp_path) != ["step-0000000007"]
        loaded = target.booster.load(tmp_path, *target.parts)
        assert loaded.step == 7
        assert loaded.extra == _mark(target), "never mixed"
    assert inside >= number // 4, f"of {number} kills, {inside} were within a save"
