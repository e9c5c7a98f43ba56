"""Schedulers and daemons of clusters, really run: one machine, folders and ports of their own, ended with the test."""

import getpass
import os
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from ports import free_port

# Slurm's own names for itself may carry a suffix; what root alone may run is outside many a PATH.
_PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin"])


def find(program: str, fix: str) -> str:
    """The path of `program`, or a skip that says how to get it."""
    path = shutil.which(program, path=_PATH)
    if path is None:
        pytest.skip(f"needs {program}: {fix}")
    return path


def wait_until(condition, what: str, seconds: float = 600.0) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if condition():
            return
        time.sleep(0.2)
    raise TimeoutError(f"{what} did not come within {seconds:g} s")


def listens(port: int) -> bool:
    with socket.socket() as probe:
        probe.settimeout(1)
        return probe.connect_ex(("127.0.0.1", port)) == 0


@contextmanager
def daemon(command: list[str], log: Path, **options) -> Iterator[subprocess.Popen]:
    """`command` in the foreground of its own process, which is ended afterwards."""
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT, start_new_session=True, **options)
    try:
        yield process
    finally:
        process.terminate()
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


@contextmanager
def slurm(folder: Path) -> Iterator[dict[str, str]]:
    """A cluster of one node with four processors; yields the variables with which srun and sbatch find it."""
    fix = "apt-get install slurmctld slurmd slurm-client"
    controller, node = (find(program, fix) for program in ("slurmctld", "slurmd"))
    find("srun", fix)
    if os.getuid() != 0:
        pytest.skip("slurmd needs root")
    name = socket.gethostname().partition(".")[0]
    ports = free_port(), free_port()
    for part in ("state", "spool"):
        (folder / part).mkdir()
    settings = {
        "ClusterName": "booster",
        "SlurmctldHost": f"{name}(127.0.0.1)",
        "SlurmUser": getpass.getuser(),
        "AuthType": "auth/none",
        "CredType": "cred/none",
        "SlurmctldPort": ports[0],
        "SlurmdPort": ports[1],
        "StateSaveLocation": folder / "state",
        "SlurmdSpoolDir": folder / "spool",
        "SlurmctldPidFile": folder / "slurmctld.pid",
        "SlurmdPidFile": folder / "slurmd.pid",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "SelectType": "select/cons_tres",
        "SlurmdParameters": "config_overrides",  # more processors than the machine has
        "ReturnToService": 2,
        "MpiDefault": "none",
    }
    lines = [f"{key}={value}" for key, value in settings.items()]
    lines += [
        f"NodeName={name} NodeAddr=127.0.0.1 CPUs=4 RealMemory=1000 State=UNKNOWN",
        f"PartitionName=all Nodes={name} Default=YES MaxTime=INFINITE State=UP",
    ]
    configuration = folder / "slurm.conf"
    configuration.write_text("\n".join(lines) + "\n")
    variables = {"SLURM_CONF": str(configuration)}
    environment = {**os.environ, **variables, "PATH": _PATH}

    def idle() -> bool:
        done = subprocess.run(
            ["sinfo", "-h", "-o", "%T"], env=environment, capture_output=True, text=True, timeout=60, check=False
        )
        return done.stdout.strip() == "idle"

    with (
        daemon([controller, "-D", "-f", str(configuration)], folder / "slurmctld.log"),
        daemon([node, "-D", "-f", str(configuration)], folder / "slurmd.log"),
    ):
        try:
            wait_until(idle, "an idle node of SLURM")
        except TimeoutError as error:
            logs = [(folder / f"{part}.log").read_text()[-2000:] for part in ("slurmctld", "slurmd")]
            raise AssertionError("\n".join(logs)) from error
        yield variables


@contextmanager
def ssh_daemon(folder: Path) -> Iterator[dict[str, str]]:
    """An sshd on the loopback that lets in one key, made here; yields the options with which ssh reaches it, by name."""
    server = find("sshd", "apt-get install openssh-server")
    maker = find("ssh-keygen", "apt-get install openssh-client")
    folder.chmod(0o700)
    for key in ("host", "user"):
        subprocess.run([maker, "-q", "-t", "ed25519", "-N", "", "-f", str(folder / key)], check=True, timeout=60)
    (folder / "authorized_keys").write_text((folder / "user.pub").read_text())
    (folder / "authorized_keys").chmod(0o600)
    port = free_port()
    (folder / "sshd_config").write_text(
        f"ListenAddress 127.0.0.1\nPort {port}\nHostKey {folder / 'host'}\nPidFile {folder / 'sshd.pid'}\n"
        f"AuthorizedKeysFile {folder / 'authorized_keys'}\nPasswordAuthentication no\nUsePAM no\nStrictModes no\n"
    )
    (folder / "ssh_config").write_text(
        f"Host *\n  IdentityFile {folder / 'user'}\n  IdentitiesOnly yes\n  StrictHostKeyChecking no\n"
        f"  UserKnownHostsFile {folder / 'known_hosts'}\n  LogLevel ERROR\n"
    )
    made = Path("/run/sshd")
    if os.getuid() == 0:
        made.mkdir(mode=0o755, exist_ok=True)  # where sshd of Debian separates its privileges
    with daemon([server, "-D", "-e", "-f", str(folder / "sshd_config")], folder / "sshd.log"):
        wait_until(lambda: listens(port), f"sshd on port {port}")
        yield {"port": str(port), "config": str(folder / "ssh_config")}
    for key in ("host", "user"):
        (folder / key).unlink()
