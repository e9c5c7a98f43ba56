"""The launchers that the docs name, really run on this machine: each trains to the losses that torchrun's job trains to.

All are slow, and skip with what to install where a part is absent.
"""

import json
import os
import re
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from clusters import find, slurm, ssh_daemon
from ports import free_port

ROOT = Path(__file__).resolve().parents[2]
LAUNCHED = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
pytestmark = pytest.mark.slow

# As a user would write it: the launch function of its launcher, and the same loop for all.
TRAIN = """
import sys
import torch, torch.distributed as dist, booster

how, *where = sys.argv[1:]
if how == "torch":
    booster.launch_from_torch(seed=3)
else:
    getattr(booster, f"launch_from_{how}")(where[0], int(where[1]), seed=3)

data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randint(3, (64,)))
model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.ReLU(), torch.nn.Linear(16, 3))
b = booster.Booster(mixed_precision="bf16", plugin=booster.plugin.TorchDDPPlugin())
model, optimizer, criterion, _, _ = b.boost(
    model, torch.optim.AdamW(model.parameters(), 1e-2), torch.nn.CrossEntropyLoss()
)
losses = []
for x, y in b.prepare_dataloader(data, batch_size=8, shuffle=True):
    loss = criterion(model(x), y)
    b.backward(loss, optimizer)
    optimizer.step()
    optimizer.zero_grad()
    losses.append(float(b.reduce(loss.detach())).hex())
coordinator = booster.DistCoordinator()
coordinator.print_on_master(f"LOSSES {coordinator.world_size} {' '.join(losses)}")
"""


def environment(**added):
    kept = {k: v for k, v in os.environ.items() if k not in LAUNCHED}
    return {**kept, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", **added}


def run(command, folder, **variables):
    done = subprocess.run(
        [str(part) for part in command],
        cwd=folder,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def losses_in(text):
    (line,) = [line for line in text.splitlines() if line.startswith("LOSSES")]
    _, world_size, *losses = line.split()
    return int(world_size), losses


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "train.py"
    path.write_text(TRAIN)
    return path


@pytest.fixture(scope="module")
def of_torchrun(tmp_path_factory):
    """(world size, losses) of the same script under torchrun."""
    folder = tmp_path_factory.mktemp("torchrun")
    (folder / "train.py").write_text(TRAIN)
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", f"--master_port={free_port()}"]
    result = losses_in(run([*torchrun, "train.py", "torch"], folder))
    assert result[0] == 2
    assert len(set(result[1])) == 4
    return result


def test_booster_run_trains_to_the_losses_of_torchrun(script, of_torchrun):
    command = [sys.executable, "-m", "booster", "run", "--nproc_per_node", "2", script, "torch"]
    assert losses_in(run(command, script.parent)) == of_torchrun


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    with slurm(tmp_path_factory.mktemp("slurm")) as variables:
        yield variables


def test_tasks_of_srun_train_to_the_losses_of_torchrun(script, of_torchrun, cluster):
    command = ["srun", "--ntasks=2", sys.executable, script, "slurm", "127.0.0.1", free_port()]
    assert losses_in(run(command, script.parent, **cluster)) == of_torchrun


def test_the_batch_script_of_the_docs_trains_under_sbatch(script, of_torchrun, cluster):
    batch = script.parent / "job.sh"
    batch.write_text(
        "#!/bin/bash\n#SBATCH --ntasks=2\n#SBATCH --output=out.txt\n"
        'export HEAD=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)\n'
        f'srun --ntasks-per-node 2 {sys.executable} {script} slurm "$HEAD" {free_port()}\n'
    )
    run(["sbatch", "--wait", batch], script.parent, **cluster)
    assert losses_in((script.parent / "out.txt").read_text()) == of_torchrun


def test_booster_run_on_a_node_of_slurm_trains_to_the_losses_of_torchrun(script, of_torchrun, cluster):
    command = [sys.executable, "-m", "booster", "run", "--nproc_per_node", "2", script, "torch"]
    assert losses_in(run(["srun", "--ntasks=1", *command], script.parent, **cluster)) == of_torchrun


def test_several_tasks_of_srun_are_told_the_function_that_joins_them(script, cluster):
    done = subprocess.run(
        ["srun", "--ntasks=2", sys.executable, str(script), "torch"],
        env=environment(**cluster),
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode != 0
    assert "booster.launch_from_slurm" in done.stderr


def test_processes_of_mpirun_train_to_the_losses_of_torchrun(script, of_torchrun):
    mpirun = find("mpirun", "apt-get install openmpi-bin")
    options = ["--oversubscribe", "--bind-to", "none", "-np", "2"]
    if os.getuid() == 0:
        options.append("--allow-run-as-root")
    command = [mpirun, *options, sys.executable, script, "openmpi", "127.0.0.1", free_port()]
    assert losses_in(run(command, script.parent)) == of_torchrun


def test_hosts_that_a_real_ssh_reaches_train_to_the_losses_of_torchrun(tmp_path, script, of_torchrun):
    real = find("ssh", "apt-get install openssh-client")
    keys = tmp_path / "keys"
    keys.mkdir()
    with ssh_daemon(keys) as server:
        # A login would find these in ~/.ssh/config. Nothing of the user's own is read or written.
        with Path(server["config"]).open("a") as file:
            file.write("  HostName 127.0.0.1\n")
        programs = tmp_path / "bin"
        programs.mkdir()
        ssh = programs / "ssh"
        ssh.write_text(f'#!/bin/sh\nexec {real} -F {server["config"]} "$@"\n')
        ssh.chmod(ssh.stat().st_mode | stat.S_IXUSR)
        options = ["--host", "node1,node2", "--ssh_port", server["port"], "--nproc_per_node", "1"]
        where = ["--master_addr", "127.0.0.1", "--master_port", free_port(), "--env", "OMP_NUM_THREADS=1"]
        command = [sys.executable, "-m", "booster", "run", *options, *where, script, "torch"]
        out = run(command, tmp_path, PATH=f"{programs}{os.pathsep}{os.environ['PATH']}")
    assert losses_in(out) == of_torchrun
    assert not list(keys.glob("user")) + list(keys.glob("host"))


def test_workers_of_ray_train_train_to_the_losses_of_torchrun(tmp_path, of_torchrun):
    pytest.importorskip("ray.train.torch", reason="needs Ray Train: pip install 'ray[train]'")
    example = ROOT / "examples" / "launchers" / "ray_train.py"
    run([sys.executable, example, "--output", tmp_path / "losses.json"], tmp_path, RAY_DEDUP_LOGS="0")
    world_size, losses = json.loads((tmp_path / "losses.json").read_text())
    assert (world_size, [loss.hex() for loss in losses]) == of_torchrun


def made(kind, value, modules):
    """`value`, as read from a file, as the model that a schema names; what the schema does not know raises."""
    outer = re.fullmatch(r"(list|dict)(?:\[|\(str, )(.+)[\])]", kind)
    if outer:
        assert isinstance(value, {"list": list, "dict": dict}[outer[1]]), f"{value!r} is no {outer[1]}"
    if outer and outer[1] == "list":
        return [made(outer[2], each, modules) for each in value]
    if outer:
        return {key: made(outer[2], each, modules) for key, each in value.items()}
    model = next((getattr(module, kind) for module in modules if hasattr(module, kind)), None)
    if model is None:
        assert isinstance(value, {"str": str, "int": int, "bool": bool}.get(kind, object)), f"{value!r} is no {kind}"
        return value
    names = {written: name for name, written in model.attribute_map.items()}
    assert set(value) <= set(names), f"{kind} has no {set(value) - set(names)}"
    return model(**{names[key]: made(model.openapi_types[names[key]], each, modules) for key, each in value.items()})


def job_of_kubernetes():
    return yaml.safe_load((ROOT / "examples" / "launchers" / "pytorchjob.yaml").read_text())


def test_the_job_of_kubernetes_is_one_that_its_operator_reads():
    """Every name down to the mounts of a container is one of the schema, of its type, and nothing required is missing."""
    models = pytest.importorskip("kubeflow.training.models", reason="needs kubeflow-training: pip install it")
    job = made("KubeflowOrgV1PyTorchJob", job_of_kubernetes(), (models, pytest.importorskip("kubernetes.client")))
    for role, replica in job.spec.pytorch_replica_specs.items():
        assert role in ("Master", "Worker")
        assert replica.restart_policy in ("Always", "OnFailure", "Never", "ExitCode")
        # The operator puts its variables into the container of this name.
        (container,) = replica.template.spec.containers
        assert container.name == "pytorch"
        assert {mount.name for mount in container.volume_mounts} == {
            each.name for each in replica.template.spec.volumes
        }


@pytest.mark.parametrize(
    ("path", "key", "value", "message"),
    [
        (("spec",), "pytorchReplicaSpec", {}, "KubeflowOrgV1PyTorchJobSpec has no"),
        (
            ("spec", "pytorchReplicaSpecs", "Master", "template", "spec", "containers", 0),
            "args",
            "--lr 1",
            "'--lr 1' is no list",
        ),
        (
            ("spec", "pytorchReplicaSpecs", "Master", "template", "spec", "containers", 0),
            "volumeMount",
            [],
            "V1Container has no",
        ),
        (("spec", "pytorchReplicaSpecs", "Master"), "replicas", "one", "'one' is no int"),
    ],
)
def test_a_wrong_job_of_kubernetes_is_found(path, key, value, message):
    models = pytest.importorskip("kubeflow.training.models", reason="needs kubeflow-training: pip install it")
    job = inner = job_of_kubernetes()
    for name in path:
        inner = inner[name]
    inner[key] = value
    with pytest.raises((AssertionError, ValueError, TypeError), match=message):
        made("KubeflowOrgV1PyTorchJob", job, (models, pytest.importorskip("kubernetes.client")))
