"""Jobs of `booster run` that get a signal to stop, or are killed, and go on from what they have saved."""

import json
import os
import signal
import stat
import subprocess
import time
from pathlib import Path

import pytest
from ports import free_port
from programs import Program, run

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 600  # seconds
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
STOPPED = 75

# Trains until it is stopped; each rank writes down where it goes on, how far it is, and at which steps it saves.
TRAIN = """
import os, signal, time, torch
from pathlib import Path
import booster
from booster import Booster
from booster.plugin import TorchDDPPlugin

booster.launch_from_torch(backend="gloo")
b = Booster(plugin=TorchDDPPlugin())
rank = os.environ["RANK"]

def note(name, step):
    with open(f"{name}_{rank}", "a") as file:
        file.write(f"{step}\\n")

class Data(torch.utils.data.Dataset):
    def __len__(self):
        return 100_000
    def __getitem__(self, index):
        return torch.ones(3)

model = torch.nn.Linear(3, 1)
optimizer = torch.optim.AdamW(model.parameters())
loader = b.prepare_dataloader(Data(), batch_size=2, num_workers=1)
model, optimizer, _, loader, _ = b.boost(model, optimizer, dataloader=loader)
parts = (model, optimizer, None, loader)
run = b.resume_or_start("checkpoints", *parts)
step = run.step
note("from", step)
for x in loader:
    b.backward(model(x).sum(), optimizer)
    optimizer.step()
    optimizer.zero_grad()
    step += 1
    note("at", step)
    EACH_STEP
    if b.stop_requested():
        b.save("checkpoints", *parts, step=step)
        note("saved", step)
        raise SystemExit(75)
    time.sleep(0.05)
"""

# Ends of SIGUSR1 in its own way; shows what reached it.
LISTEN = """
import os, signal, sys, time
def stop(number, frame):
    open("told_" + os.environ["RANK"], "w").close()
    sys.exit(75)
signal.signal(signal.SIGUSR1, stop)
open("at_" + os.environ["RANK"], "w").close()
time.sleep(3000)
"""

DEAF = """
import os, signal, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
open("at_" + os.environ["RANK"], "w").close()
time.sleep(3000)  # longer than TIMEOUT
"""

FAKE_SSH = """#!/bin/sh
# ssh -p PORT HOST COMMAND, on this machine
exec sh -c "$4"
"""


def environment(**added):
    inherited = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    return {**inherited, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **added}


def start(directory, *arguments, **variables):
    return Program("-m", "booster", "run", *arguments, folder=directory, environment=environment(**variables))


def finish(process):
    """(exit status, stderr); a job that hangs is killed and fails the test."""
    try:
        _, err = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, err


def wait_for_files(directory, *names):
    until = time.monotonic() + TIMEOUT
    while not all((directory / name).exists() for name in names):
        assert time.monotonic() < until, f"{names} did not come"
        time.sleep(0.02)


def noted(directory, name):
    """What each of two ranks has noted, in order."""
    files = [directory / f"{name}_{rank}" for rank in (0, 1)]
    return [[int(line) for line in file.read_text().split()] if file.exists() else [] for file in files]


@pytest.mark.slow
def test_sigterm_to_the_launcher_makes_every_rank_save_once_at_the_same_step(tmp_path):
    (tmp_path / "train.py").write_text(TRAIN.replace("EACH_STEP", ""))
    job = start(tmp_path, "--nproc_per_node", "2", "--max_restarts", "2", "train.py")
    wait_for_files(tmp_path, "at_0", "at_1")
    job.send_signal(signal.SIGTERM)
    status, err = finish(job)
    assert status == 128 + signal.SIGTERM, err
    assert_stopped_once(tmp_path)
    assert noted(tmp_path, "from") == [[0], [0]], "it was not relaunched"
    assert err.splitlines()[-1] == "booster run: stopped by SIGTERM; all processes of the job have ended"
    assert "Traceback" not in err


@pytest.mark.slow
def test_a_job_whose_rank_is_killed_goes_on_from_the_save_and_stops_on_sigusr1(tmp_path):
    each_step = """
    if step == 3:
        b.save("checkpoints", *parts, step=step)
    if rank == "1" and step == 4 and run.step == 0:
        os.kill(os.getpid(), signal.SIGKILL)
"""
    (tmp_path / "train.py").write_text(TRAIN.replace("EACH_STEP", each_step))
    job = start(tmp_path, "--nproc_per_node", "2", "--max_restarts", "2", "train.py")
    while min(map(len, noted(tmp_path, "from"))) < 2:
        assert job.poll() is None
        time.sleep(0.02)
    job.send_signal(signal.SIGUSR1)
    status, err = finish(job)
    assert status == STOPPED, err
    assert noted(tmp_path, "from") == [[0, 3], [0, 3]]
    assert noted(tmp_path, "at")[1][:5] == [1, 2, 3, 4, 4]
    assert_stopped_once(tmp_path)
    assert err.count("failed first") == err.count("relaunching the whole job") == 1
    assert err.splitlines()[-1] == "booster run: stopped by SIGUSR1; all processes of the job have ended"


def assert_stopped_once(folder):
    last = noted(folder, "at")[0][-1]
    assert noted(folder, "saved") == [[last], [last]]
    assert sorted(os.listdir(folder / "checkpoints"))[-1] == f"step-{last:010d}"


@pytest.mark.parametrize("nodes", ["one", pytest.param("two", marks=pytest.mark.slow)])
def test_sigusr1_reaches_the_ranks_of_every_node(tmp_path, nodes):
    (tmp_path / "train.py").write_text(LISTEN)
    (tmp_path / "ssh").write_text(FAKE_SSH)
    (tmp_path / "ssh").chmod(stat.S_IRWXU)
    where = ["--host", "node1,node2", "--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    options = ["--nproc_per_node", "2"] if nodes == "one" else [*where, "--nproc_per_node", "1"]
    path = f"{tmp_path}{os.pathsep}{os.environ['PATH']}"
    job = start(tmp_path, *options, "--max_restarts", "1", "train.py", PATH=path)
    wait_for_files(tmp_path, "at_0", "at_1")
    job.send_signal(signal.SIGUSR1)
    status, err = finish(job)
    assert status == STOPPED, err
    wait_for_files(tmp_path, "told_0", "told_1")
    assert "relaunching" not in err
    assert "the job stopped on request before it had finished" in err
    assert err.splitlines()[-1] == "booster run: stopped by SIGUSR1; all processes of the job have ended"


def test_who_does_not_end_within_the_grace_time_is_killed(tmp_path):
    (tmp_path / "train.py").write_text(DEAF)
    job = start(tmp_path, "--grace_seconds", "1", "--nproc_per_node", "1", "train.py")
    wait_for_files(tmp_path, "at_0")
    began = time.monotonic()
    job.send_signal(signal.SIGTERM)
    status, err = finish(job)
    assert (status, time.monotonic() - began >= 1) == (143, True), err


GPT = ROOT / "examples" / "gpt" / "train.py"
TINY = "--width 16 --blocks 1 --heads 2 --context 8 --batch-size 4 --steps 40 --precision fp16 --resume --save-every 4"


@pytest.mark.slow
def test_the_gpt_example_killed_five_times_ends_with_the_weights_of_the_unbroken_run(tmp_path):
    unbroken, broken = tmp_path / "unbroken", tmp_path / "broken"
    for folder in (unbroken, broken):
        folder.mkdir()
    options = ["--nproc_per_node", "2", "--max_restarts", "5", str(GPT), "--plugin", "ddp", *TINY.split()]
    assert finish(start(unbroken, *options, "--output", "."))[0] == 0
    job = start(broken, *options, "--output", ".")
    (folder_of_saves,) = (path.name for path in unbroken.glob("*-checkpoints"))
    killed = []
    for number in range(5):  # one rank or the other, each time that another two checkpoints are there
        goal = 7 * (number + 1)
        while _newest(broken / folder_of_saves) < goal:
            assert job.poll() is None
            time.sleep(0.01)
        pid = _rank_of(job.pid, number % 2)
        os.kill(pid, signal.SIGKILL)
        killed.append(_newest(broken / folder_of_saves))
        while Path(f"/proc/{pid}").exists():
            time.sleep(0.01)
    status, err = finish(job)
    assert status == 0, err
    assert err.count("failed with status 137; relaunching the whole job") == 5
    print(f"killed when the newest checkpoints were of steps {killed}")
    ends = []
    for folder in (unbroken, broken):
        path = folder / folder_of_saves / "step-0000000040"
        run("-m", "booster", "checkpoint", "convert", path, folder / "weights.safetensors").check_returncode()
        (history,) = folder.glob("*.json")
        ends.append(((folder / "weights.safetensors").read_bytes(), json.loads(history.read_text())["loss"]))
    assert ends[0] == ends[1]


def _newest(folder):
    steps = [int(path.name.partition("-")[2]) for path in folder.glob("step-??????????")]
    return max(steps, default=0)


def _rank_of(launcher, rank):
    """The pid of a rank, once it has started."""
    while True:
        for path in Path("/proc").glob("[0-9]*"):
            try:
                parent = int((path / "stat").read_text().rpartition(")")[2].split()[1])
                variables = (path / "environ").read_bytes().split(b"\0")
            except (OSError, IndexError):
                continue
            if parent == launcher and b"RANK=%d" % rank in variables:
                return int(path.name)
        time.sleep(0.01)
