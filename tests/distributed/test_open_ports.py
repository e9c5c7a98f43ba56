"""What a running job of `booster run` listens on, and what another user of the machine can do there."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from ports import free_port, listening
from programs import Program

ROOT = Path(__file__).resolve().parents[2]
NOBODY = 65534
pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc/net/tcp")

JOB = """
import os, time, torch, torch.distributed as dist
import booster
booster.launch_from_torch()
dist.all_reduce(torch.ones(()))
group = dist.new_group([0, 1])
dist.all_reduce(torch.ones(()), group=group)
open(f"up_{os.environ['RANK']}", "w").close()
while not os.path.exists("go"):
    time.sleep(0.01)
dist.all_reduce(torch.ones(()))
"""

# Writes what torch's "c10d" rendezvous unpickles, under the key it reads at each heartbeat, as another user if it may.
INTRUDER = """
import base64, os, pickle, sys
from datetime import timedelta
from torch.distributed import TCPStore
if os.getuid() == 0:
    os.setgroups([]); os.setgid({nobody}); os.setuid({nobody})
class Evil:
    def __reduce__(self):
        return os.mkdir, ({harm!r},)
reached = 0
for port in map(int, sys.argv[1:]):
    try:
        store = TCPStore("127.0.0.1", port, None, False, timedelta(seconds=60), wait_for_workers=False)
    except Exception:  # no store listens there
        continue
    reached += 1
    for prefix in ("", "booster/"):
        for key in ("torch.rendezvous.booster", "default_pg/torch.rendezvous.booster"):
            store.set(prefix + key, base64.b64encode(pickle.dumps(Evil())))
print(reached, os.getuid())
"""


def job(directory, *options):
    (directory / "train.py").write_text(JOB)
    unset = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", "GLOO_SOCKET_IFNAME")
    variables = {name: value for name, value in os.environ.items() if name not in unset}
    arguments = ("-m", "booster", "run", "--nproc_per_node", "2", *options, "train.py")
    environment = {**variables, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return Program(*arguments, folder=directory, environment=environment)


def wait_for_ranks(directory, process):
    until = time.monotonic() + 600
    while not all((directory / f"up_{rank}").exists() for rank in range(2)):
        assert process.poll() is None, "the ranks did not start"
        assert time.monotonic() < until, "the ranks did not start"
        time.sleep(0.05)


def finish(directory, process):
    (directory / "go").touch()
    _, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    return err


def family_of(pid):
    """`pid` and all processes that descend from it."""
    parents = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parents[int(entry.name)] = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
            except OSError:  # it has ended
                continue
    family, before = {pid}, set()
    while family != before:
        before, family = family, family | {child for child, parent in parents.items() if parent in family}
    return family


@pytest.mark.slow
@pytest.mark.parametrize("port", ["chosen by the system", pytest.param("given", marks=pytest.mark.slow)])
def test_on_one_machine_nothing_of_a_job_listens_but_on_loopback(tmp_path, port):
    process = job(tmp_path, *(["--master_port", str(free_port())] if port == "given" else []))
    try:
        wait_for_ranks(tmp_path, process)
        found = listening(family_of(process.pid))
        assert len(found) >= 3  # the launcher's store, and a process group's socket of each rank
        assert [(str(address), port) for address, port in found if not address.is_loopback] == []
        assert finish(tmp_path, process) == ""
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_what_another_user_writes_into_the_store_of_a_job_is_not_run_as_its_owner(tmp_path):
    harm = tmp_path / "run_as_the_owner"
    process = job(tmp_path)
    try:
        wait_for_ranks(tmp_path, process)
        ports = [str(port) for _, port in listening({process.pid})]
        code = INTRUDER.format(nobody=NOBODY, harm=str(harm))
        done = subprocess.run([sys.executable, "-c", code, *ports], capture_output=True, text=True, timeout=600)
        reached, user = done.stdout.split()
        assert int(reached) >= 1, done.stderr  # loopback is open to all who are on the machine
        assert os.getuid() != 0 or int(user) == NOBODY
        time.sleep(7)  # torch's heartbeat comes every five seconds
        assert not harm.exists()
        finish(tmp_path, process)
    finally:
        process.kill()
        process.communicate()


def test_of_several_nodes_the_first_listens_on_the_interface_that_master_addr_names(tmp_path):
    options = ["--nnodes", "2", "--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    process = job(tmp_path, *options, "--node_rank", "0")
    try:
        until = time.monotonic() + 600
        while not (found := listening({process.pid})):
            assert process.poll() is None
            assert time.monotonic() < until
            time.sleep(0.05)
        assert {str(address) for address, _ in found} == {"127.0.0.1"}
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=600)
