"""Real jobs of `booster run`: what reaches the script, and what happens when something goes wrong."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ports import free_port
from programs import Program

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT = 600  # seconds; ranks that wait to be stopped sleep 3000
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def environment(**added):
    inherited = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    return {**inherited, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **{k: str(v) for k, v in added.items()}}


def start(directory, *arguments, **variables):
    return Program("-m", "booster", "run", *arguments, folder=directory, environment=environment(**variables))


def finish(process):
    """(exit status, stdout, stderr); a job that hangs is killed and fails the test."""
    try:
        out, err = process.communicate(timeout=TIMEOUT)
    except subprocess.TimeoutExpired:
        process.kill()
        raise
    return process.returncode, out, err


def launch(directory, *arguments, **variables):
    return finish(start(directory, *arguments, **variables))


def write(directory, name, text):
    file = directory / name
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return name


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def wait_for(condition, seconds=TIMEOUT):
    until = time.monotonic() + seconds
    while not condition() and time.monotonic() < until:
        time.sleep(0.05)
    return condition()


REPORT = """
import json, os, sys
print(json.dumps({"rank": os.environ["RANK"], "world": os.environ["WORLD_SIZE"], "argv": sys.argv, "path": sys.path[0],
                  "name": __name__, "host": os.environ.get("FAKE_HOST"), "given": os.environ.get("GIVEN"),
                  "secret": os.environ.get("SECRET")}) + "\\n", end="", flush=True)
"""

TRAIN = """
import random, torch, torch.distributed as dist
from booster.launch import launch_from_torch
launch_from_torch()
total = torch.tensor([1.0 + dist.get_rank()])
dist.all_reduce(total)
drawn = [None, None]
dist.all_gather_object(drawn, (random.random(), torch.rand(()).item()))
if dist.get_rank() == 0:
    print(total.item(), drawn[0] == drawn[1])
"""

# Both ranks write their process ids, and so does what they have started themselves.
SLEEP = """
import os, subprocess, sys, time
child = subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(3000)"])
with open(f"pids_{os.environ['RANK']}.part", "w") as file:
    file.write(f"{os.getpid()} {child.pid}")
os.rename(f"pids_{os.environ['RANK']}.part", f"pids_{os.environ['RANK']}")
time.sleep(3000)
"""

# Rank 1 fails once rank 0 sleeps.
CRASH = (
    SLEEP.removesuffix("time.sleep(3000)\n")
    + """
def step():
    raise ValueError("the reason")
if os.environ["RANK"] == "1":
    while not os.path.exists("pids_0"):
        time.sleep(0.01)
    step()
time.sleep(3000)
"""
)


def sleeping_pids(directory, ranks=2):
    files = [directory / f"pids_{rank}" for rank in range(ranks)]
    assert wait_for(lambda: all(file.exists() for file in files)), "the ranks did not start"
    return [int(pid) for file in files for pid in file.read_text().split()]


def lines_of(out):
    return sorted((json.loads(line) for line in out.splitlines()), key=lambda line: line["rank"])


def test_arguments_with_spaces_quotes_and_dashes_reach_the_script_intact(tmp_path):
    write(tmp_path, "a script.py", REPORT)
    rest = ["two words", "it's", 'say "hi"', "$HOME", "--", "--nproc_per_node", "", "-m"]
    status, out, err = launch(tmp_path, "--nproc_per_node", "2", "a script.py", *rest)
    assert status == 0, err
    lines = lines_of(out)
    assert [(line["rank"], line["world"]) for line in lines] == [("0", "2"), ("1", "2")]
    for line in lines:
        assert line["argv"] == ["a script.py", *rest]
        assert line["path"] == str(tmp_path)
        assert line["name"] == "__main__"


@pytest.mark.slow
def test_a_module_runs_as_with_python_dash_m(tmp_path):
    write(tmp_path, "pack/__init__.py", "")
    write(tmp_path, "pack/train.py", REPORT)
    command = [sys.executable, "-m", "booster", "run", "--nproc-per-node=1", "-m", "pack.train", "--lr", "1"]
    job = subprocess.Popen(
        command, cwd=tmp_path, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    status, out, err = finish(job)
    assert status == 0, err
    (line,) = lines_of(out)
    assert line["argv"] == [str(tmp_path / "pack" / "train.py"), "--lr", "1"]
    assert line["path"] == str(tmp_path)


@pytest.mark.slow
def test_a_script_may_end_with_an_open_process_group(tmp_path):
    text = """
real = dist.destroy_process_group
def say_so():
    real()
    print("closed")
dist.destroy_process_group = say_so
"""
    write(
        tmp_path, "train.py", TRAIN.replace("drawn = [None, None]", "drawn = [None]").replace("drawn[1]", "()") + text
    )
    assert launch(tmp_path, "--nproc_per_node", "1", "train.py") == (0, "1.0 False\nclosed\n", "")


@pytest.mark.slow
def test_two_jobs_at_once_meet_within_but_not_between_them_and_end_without_a_word(tmp_path):
    write(tmp_path, "train.py", TRAIN)
    jobs = [start(tmp_path, "--nproc_per_node", "2", "train.py") for _ in range(2)]
    assert [finish(job) for job in jobs] == [(0, "3.0 True\n", "")] * 2


def test_a_missing_script_exits_2_with_the_reason(tmp_path):
    status, out, err = launch(tmp_path, "no_such_file.py")
    assert (status, out) == (2, "")
    assert "script 'no_such_file.py' is not a file" in err


def test_a_port_in_use_is_said_at_once(tmp_path):
    write(tmp_path, "train.py", TRAIN)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        status, _, err = launch(tmp_path, "--nproc_per_node", "1", "--master_port", str(port), "train.py")
    assert status == 1
    assert err == f"booster run: error: port {port} is in use on this machine (another job?); choose another " + (
        "--master_port, or leave it out: a free port is taken by default\n"
    )


def test_a_crashing_rank_ends_the_others_and_its_traceback_comes_last(tmp_path):
    write(tmp_path, "train.py", CRASH)
    status, _, err = launch(
        tmp_path, "--nproc_per_node", "2", "train.py"
    )  # before rank 0 has slept, which is longer than TIMEOUT
    assert status == 1
    assert err.rstrip().endswith("ValueError: the reason")
    last = err[err.rindex("booster run: rank 1 (local rank 1") :]
    assert "failed first: exit code 1" in last
    assert "in step\n    raise ValueError" in last
    assert "worker.py" not in last  # the launcher's own frames are not the user's business
    assert "ChildFailedError" not in err
    assert not any(running(pid) for pid in sleeping_pids(tmp_path))


@pytest.mark.parametrize(
    ("end", "expected", "reported"),
    [
        pytest.param("sys.exit(7)", 7, "failed first: exit code 7", marks=pytest.mark.slow),
        ("sys.exit('no data')", 1, "SystemExit: no data"),
        ("os.kill(os.getpid(), signal.SIGKILL)", 137, "failed first: signal SIGKILL"),
    ],
)
def test_the_status_is_that_of_the_first_failing_rank(tmp_path, end, expected, reported):
    write(tmp_path, "train.py", f"import os, signal, sys, time\nif os.environ['RANK'] == '1': {end}\ntime.sleep(3000)")
    status, _, err = launch(tmp_path, "--nproc_per_node", "2", "train.py")
    assert status == expected
    assert reported in err[err.rindex("booster run: rank 1") :]


# Ranks that exchange data, of which rank 1 ends in some way; the others then meet a broken connection at once.
EXCHANGE = """
import os, signal, sys, torch, torch.distributed as dist, booster
booster.launch_from_torch(backend="gloo")
for step in range({steps}):
    dist.all_reduce(torch.ones(4))
    if step == 5 and dist.get_rank() == 1:
        {end}
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "end", "expected", "reported"),
    [
        ("2", "os.kill(os.getpid(), signal.SIGKILL)", 137, "signal SIGKILL: killed from outside"),
        pytest.param("3", "os.kill(os.getpid(), signal.SIGKILL)", 137, "signal SIGKILL: kill", marks=pytest.mark.slow),
        pytest.param("3", "os.kill(os.getpid(), signal.SIGTERM)", 143, "signal SIGTERM", marks=pytest.mark.slow),
    ],
)
def test_who_ends_first_is_blamed_and_not_those_whose_connections_it_broke(tmp_path, ranks, end, expected, reported):
    write(tmp_path, "train.py", EXCHANGE.format(steps=10, end=end))
    status, _, err = launch(tmp_path, "--nproc_per_node", ranks, "train.py")
    blamed = err.rpartition("booster run: rank 1 (local rank 1")[2]
    assert (status, f"failed first: {reported.partition(':')[0]}" in blamed) == (expected, True), err
    assert blamed.splitlines()[-1].startswith(f"booster run: the first to end was rank 1: {reported}"), err


@pytest.mark.slow
def test_uneven_data_is_named_where_the_connection_breaks(tmp_path):
    write(tmp_path, "train.py", EXCHANGE.format(steps="7 + 3 * int(os.environ['RANK'])", end="pass"))
    status, _, err = launch(tmp_path, "--nproc_per_node", "2", "train.py")
    assert status == 1
    last = err[err.rindex("booster run: rank 1 (local rank 1") :]
    assert "rank(s) [0] had ended before, without an error" in last
    assert "Another rank had left the job" in last
    assert "equally many batches and steps" in last
    assert "b.prepare_dataloader" in last.splitlines()[-1]


@pytest.mark.skipif(not Path("/proc").exists(), reason="looks for processes in /proc")
def test_a_launcher_that_is_killed_leaves_no_rank_nor_what_ranks_have_started_nor_its_folder(tmp_path):
    write(tmp_path, "train.py", SLEEP)
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    job = start(tmp_path, "--nproc_per_node", "2", "train.py", TMPDIR=temporary)
    pids = sleeping_pids(tmp_path)
    assert [stat.S_IMODE(folder.stat().st_mode) for folder in temporary.glob("booster_run_*")] == [0o700]
    job.kill()
    try:
        assert job.wait(TIMEOUT) == -signal.SIGKILL
        assert wait_for(lambda: not any(running(pid) for pid in pids))
        assert wait_for(lambda: not list(temporary.glob("booster_run_*")))
    finally:
        for pid in filter(running, pids):
            os.kill(pid, signal.SIGKILL)
        finish(job)


@pytest.mark.parametrize(
    ("number", "expected"), [pytest.param(signal.SIGINT, 130, marks=pytest.mark.slow), (signal.SIGTERM, 143)]
)
def test_ctrl_c_and_sigterm_end_every_process_without_a_traceback_of_the_launcher(tmp_path, number, expected):
    write(tmp_path, "train.py", SLEEP)
    job = start(tmp_path, "--nproc_per_node", "2", "train.py")
    pids = sleeping_pids(tmp_path)
    job.send_signal(number)
    status, _, err = finish(job)
    assert status == expected
    assert f"stopped by {number.name}; all processes of the job have ended" in err.splitlines()[-1]
    assert "booster/cli" not in err
    assert wait_for(lambda: not any(running(pid) for pid in pids))


def test_max_restarts_relaunches_the_whole_job_and_says_so(tmp_path):
    text = """
import os, pathlib, time
def tries_of(rank):
    file = pathlib.Path(f"tries_{rank}")
    return len(file.read_text()) if file.exists() else 0
rank = os.environ["RANK"]
tries = tries_of(rank)
pathlib.Path(f"tries_{rank}").write_text("x" * (tries + 1))
while tries_of(0) <= tries: time.sleep(0.01)  # a slow rank 0 would be stopped before it has counted
if rank == "1" and tries < 2: os._exit(7)
if tries < 2: time.sleep(3000)
print("done")
"""
    write(tmp_path, "train.py", text)
    status, out, err = launch(tmp_path, "--nproc_per_node", "2", "--max_restarts", "3", "train.py")
    assert status == 0, err
    assert out.count("done") == 2, out  # two ranks may write into one line
    assert [f"attempt {n} of 4 failed with status 7; relaunching the whole job" in err for n in (1, 2, 3)] == [
        True,
        True,
        False,
    ]
    assert {len((tmp_path / f"tries_{rank}").read_text()) for rank in (0, 1)} == {3}


def test_logs_are_kept_by_rank_and_shown_with_the_rank_in_front(tmp_path):
    write(tmp_path, "train.py", "import os, sys; print('out', os.environ['RANK']); print('err', file=sys.stderr)")
    status, out, err = launch(tmp_path, "--nproc_per_node", "2", "--log_dir", "logs", "train.py")
    assert status == 0, err
    assert sorted(out.splitlines()) == ["[rank0]: out 0", "[rank1]: out 1"]
    kept = sorted((file.parent.name, file.name, file.read_text()) for file in (tmp_path / "logs").rglob("*.log"))
    assert kept == [
        (r, f"{s}.log", f"out {r}\n" if s == "stdout" else "err\n") for r in "01" for s in ("stderr", "stdout")
    ]


FAKE_SSH = """#!/bin/sh
# ssh -p PORT HOST COMMAND, on this machine, with as little environment as a login has
[ "$1 $2" = "-p 2222" ] || exit 255
exec env -i PATH="$PATH" FAKE_HOST="$3" sh -c "$4"
"""


@pytest.fixture
def cluster(tmp_path):
    """Options for two "machines" behind a stand-in for ssh, and the variables that put it on PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    (folder / "ssh").write_text(FAKE_SSH)
    (folder / "ssh").chmod((folder / "ssh").stat().st_mode | stat.S_IXUSR)
    where = ["--host", "node1,node2", "--ssh_port", "2222", "--master_addr", "127.0.0.1", "--nproc_per_node", "1"]
    path = f"{folder}{os.pathsep}{os.environ['PATH']}"
    return [*where, "--master_port", str(free_port())], {"PATH": path}


@pytest.mark.slow
def test_hosts_are_reached_by_ssh_with_only_the_named_environment(tmp_path, cluster):
    options, variables = cluster
    write(tmp_path, "train.py", REPORT)
    arguments = [*options, "--env", "GIVEN", "train.py", "two words", "it's"]
    status, out, err = launch(tmp_path, *arguments, **variables, GIVEN="a b", SECRET="hidden")
    assert status == 0, err
    lines = lines_of(out)
    assert [(line["rank"], line["world"], line["host"]) for line in lines] == [("0", "2", "node1"), ("1", "2", "node2")]
    assert {(line["given"], line["secret"]) for line in lines} == {("a b", None)}
    assert {tuple(line["argv"]) for line in lines} == {("train.py", "two words", "it's")}


@pytest.mark.slow
def test_a_failing_node_ends_the_others_and_is_named_with_its_traceback_last(tmp_path, cluster):
    options, variables = cluster
    write(tmp_path, "train.py", CRASH)
    status, _, err = launch(tmp_path, *options, "train.py", **variables)
    assert status == 1
    assert "booster run: node 1 (node2) failed first: exit status 1; the other nodes were stopped" in err
    assert err.rstrip().endswith("ValueError: the reason")
    pids = sleeping_pids(tmp_path)
    assert wait_for(lambda: not any(running(pid) for pid in pids))


@pytest.mark.slow
def test_ctrl_c_reaches_every_node(tmp_path, cluster):
    options, variables = cluster
    write(tmp_path, "train.py", SLEEP)
    # The nodes end by themselves: cutting the connections comes later than `finish` waits.
    job = start(tmp_path, *options, "--grace_seconds", "3000", "train.py", **variables)
    pids = sleeping_pids(tmp_path)
    job.send_signal(signal.SIGINT)
    status, _, err = finish(job)
    assert status == 130, err
    assert wait_for(lambda: not any(running(pid) for pid in pids))


def test_ssh_that_fails_is_told_from_a_failing_script(tmp_path, cluster):
    options, variables = cluster
    write(tmp_path, "train.py", "")
    status, _, err = launch(tmp_path, *[o.replace("2222", "1") for o in options], "train.py", **variables)
    assert status == 255
    assert "failed first: exit status 255" in err
    assert "255 is ssh's own failure" in err


# Rank 0 serves the store, and rank 1 lives on for longer than rank 0 waits at its end, with a thread that looks into the store.
LONGER = """
import os, time
from pathlib import Path
from booster.ranks.agreement import DistCoordinator
if dist.get_rank() == 0:
    Path("pid").write_text(str(os.getpid()))
coordinator = DistCoordinator()
dist.barrier()
if dist.get_rank() == 1:
    try:
        while True:
            os.kill(int(Path("pid").read_text()), 0)
            time.sleep(0.05)
    except ProcessLookupError:
        time.sleep(2.5)
coordinator.destroy()
"""


@pytest.mark.parametrize(
    ("call", "names"),
    [
        ("launch_from_slurm(host, port)", ("SLURM_PROCID", "SLURM_NPROCS", "SLURM_LOCALID")),
        pytest.param(
            "launch_from_openmpi(host, port)",
            ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
            marks=pytest.mark.slow,
        ),
    ],
)
def test_tasks_of_srun_and_mpirun_meet(tmp_path, call, names):
    text = f"from booster.launch import *\nhost, port = '127.0.0.1', {free_port()}\n"
    text += TRAIN.replace("launch_from_torch()", call).replace("import launch_from_torch", "import *")
    # Nothing closes the group for a script that the launcher of a cluster started.
    text += LONGER
    write(tmp_path, "train.py", text)
    tasks = []
    for rank in range(2):
        variables = dict(zip(names, (rank, 2, rank), strict=True))
        tasks.append(Program("train.py", folder=tmp_path, environment=environment(**variables)))
    assert [finish(task) for task in tasks] == [(0, "3.0 True\n", ""), (0, "", "")]
