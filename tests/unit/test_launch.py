"""launch(): what it accepts, what it refuses and with which words. Jobs of several ranks: tests/distributed."""

import os
import random
import socket
import sys
import time
from datetime import timedelta
from importlib import import_module

import numpy
import pytest
import torch
import torch.distributed as dist
from ports import free_port

from booster.launch import (
    environment_local_rank,
    environment_world_size,
    get_default_parser,
    launch,
    launch_from_openmpi,
    launch_from_slurm,
    launch_from_torch,
)

LAUNCHER_VARIABLES = [
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"),
    *("SLURM_PROCID", "SLURM_NPROCS", "SLURM_LOCALID", "SLURM_STEP_NUM_TASKS"),
    *("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
]


@pytest.fixture(autouse=True)
def clean_process(monkeypatch):
    """No launcher's variables before, no process group afterwards, the seeds as they were."""
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    states = random.getstate(), numpy.random.get_state(), torch.get_rng_state()
    yield
    if dist.is_initialized():
        dist.destroy_process_group()
    random.setstate(states[0])
    numpy.random.set_state(states[1])
    torch.set_rng_state(states[2])


def draws():
    return random.random(), numpy.random.rand(), torch.rand(()).item()


def set_environment(monkeypatch, **variables):
    for name, value in variables.items():
        monkeypatch.setenv(name, str(value))


def torch_environment(**changed):
    variables = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    return {**variables, **changed}


def test_plain_python_is_a_world_of_one_and_collectives_work():
    launch_from_torch()
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)
    total = torch.ones(2)
    if not torch.cuda.is_available():
        assert dist.get_backend() == "gloo"
        dist.all_reduce(total)
        assert total.tolist() == [1.0, 1.0]


def test_launching_leaves_the_environment_alone(monkeypatch):
    before = dict(os.environ)
    launch_from_torch(backend="gloo")
    assert dict(os.environ) == before


def test_torchrun_variables_are_followed(monkeypatch):
    set_environment(monkeypatch, **torch_environment())
    launch_from_torch(backend="gloo")
    assert (dist.get_rank(), dist.get_world_size()) == (0, 1)


@pytest.mark.parametrize("missing", ["RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"])
def test_a_partly_set_torchrun_environment_names_the_missing_variable_the_launcher_and_the_fix(monkeypatch, missing):
    set_environment(monkeypatch, **torch_environment())
    monkeypatch.delenv(missing)
    with pytest.raises(RuntimeError, match=rf"variable {missing} is not set.*booster run.*script.py.*plain `python`"):
        launch_from_torch()


def test_a_variable_that_is_no_number_is_named(monkeypatch):
    set_environment(monkeypatch, **torch_environment(RANK="first"))
    with pytest.raises(RuntimeError, match="RANK='first' is not a whole number"):
        launch_from_torch()


def test_a_rank_outside_the_world_in_the_environment_is_refused(monkeypatch):
    set_environment(monkeypatch, **torch_environment(RANK=3))
    with pytest.raises(ValueError, match="rank=3 is out of range.*world_size=1"):
        launch_from_torch()


@pytest.mark.parametrize(
    ("variable", "function"),
    [("SLURM_STEP_NUM_TASKS", "launch_from_slurm"), ("OMPI_COMM_WORLD_SIZE", "launch_from_openmpi")],
)
def test_one_of_several_tasks_does_not_silently_train_alone(monkeypatch, variable, function):
    monkeypatch.setenv(variable, "4")
    with pytest.raises(RuntimeError, match=f"{variable}=4.*booster.{function}"):
        launch_from_torch()


@pytest.mark.parametrize("missing", range(3))
@pytest.mark.parametrize(
    ("launch_from", "command", "names"),
    [
        (launch_from_slurm, "srun", ("SLURM_PROCID", "SLURM_NPROCS", "SLURM_LOCALID")),
        (launch_from_openmpi, "mpirun", [f"OMPI_COMM_WORLD_{name}" for name in ("RANK", "SIZE", "LOCAL_RANK")]),
    ],
)
def test_a_launcher_without_its_variables_names_the_one_missing(monkeypatch, launch_from, command, names, missing):
    set_environment(monkeypatch, **dict(zip(names, (0, 1, 0), strict=True)))
    monkeypatch.delenv(names[missing])
    with pytest.raises(RuntimeError, match=f"{names[missing]} is not set; {command}"):
        launch_from("127.0.0.1", 29500)


def test_an_address_that_does_not_resolve_is_tried_with_a_word_and_then_refused(monkeypatch, caplog):
    module = import_module("booster.launch")
    waits = []
    monkeypatch.setattr(module, "_RESOLVE_SECONDS", 2)
    monkeypatch.setattr(time, "sleep", waits.append)
    set_environment(monkeypatch, **torch_environment(MASTER_ADDR="no.such.host.invalid"))
    with pytest.raises(
        RuntimeError, match=r"MASTER_ADDR='no.such.host.invalid' does not resolve on .* rank 0's machine"
    ):
        launch_from_torch(backend="gloo")
    with pytest.raises(RuntimeError, match="host='no.such.host.invalid' does not resolve"):
        launch(0, 1, "no.such.host.invalid", 29500, backend="gloo")
    assert waits == [1, 1, 1, 1]
    said = [record.getMessage() for record in caplog.records if record.name == "booster.launch"]
    assert len(said) == 2
    assert "MASTER_ADDR='no.such.host.invalid' does not resolve" in said[0]
    assert "trying for 2 seconds" in said[0]


def test_a_name_that_resolves_a_little_later_is_waited_for(monkeypatch):
    answers = [OSError("not yet"), OSError("not yet"), []]

    def resolve(name, port):
        if isinstance(answer := answers.pop(0), OSError):
            raise answer
        return answer

    monkeypatch.setattr(socket, "getaddrinfo", resolve)
    monkeypatch.setattr(time, "sleep", lambda seconds: None)
    import_module("booster.launch").await_address("host", "head")
    assert answers == []


@pytest.mark.parametrize("host", ["::1", "[::1]"])
def test_ipv6_hosts_work_with_and_without_brackets(host):
    try:
        with socket.socket(socket.AF_INET6) as probe:
            probe.bind(("::1", 0))
    except OSError:
        pytest.skip("this machine has no IPv6 loopback")
    launch(0, 1, host, free_port(), backend="gloo")
    assert dist.get_world_size() == 1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"rank": 2}, ValueError, "rank=2 is out of range.*from 0 to 1"),
        ({"rank": -1}, ValueError, "rank=-1 is out of range"),
        ({"world_size": 0}, ValueError, "world_size=0 is out of range"),
        ({"rank": "0"}, TypeError, "rank must be an int, got str '0'"),
        ({"port": 0}, ValueError, "port=0 is out of range.*from 1 to 65535"),
        ({"port": 65536}, ValueError, "port=65536"),
        ({"port": "29500"}, TypeError, "port must be an int"),
        ({"host": ""}, ValueError, "host='' is not an address"),
        ({"local_rank": -1}, ValueError, "local_rank=-1"),
        ({"seed": -1}, ValueError, "seed=-1"),
        ({"backend": "glow"}, ValueError, "backend='glow' is unknown; choose one of .*gloo"),
        ({"backend": "cpu:gloo,cuda:nickel"}, ValueError, "backend='cpu:gloo,cuda:nickel' is unknown"),
    ],
)
def test_a_bad_argument_is_refused_with_the_legal_range(arguments, error, message):
    good = {"rank": 0, "world_size": 2, "host": "127.0.0.1", "port": 29500}
    with pytest.raises(error, match=message):
        launch(**{**good, **arguments})


@pytest.mark.skipif(torch.cuda.is_available(), reason="nccl is legal where a GPU is")
def test_nccl_without_a_gpu_is_refused_and_gloo_is_named():
    with pytest.raises(ValueError, match="backend='nccl'.*backend='gloo'"):
        launch_from_torch(backend="nccl")


def test_the_device_follows_the_local_rank_and_too_large_a_one_is_refused(monkeypatch):
    chosen = []
    joined = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    monkeypatch.setattr(dist, "is_backend_available", lambda name: True)
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: joined.append((backend, options)))
    launch(3, 4, "127.0.0.1", 29500, local_rank=1)
    launch(2, 4, "127.0.0.1", 29500)
    assert chosen == [1, 0]
    assert [backend for backend, _ in joined] == ["nccl", "nccl"]
    assert joined[0][1]["device_id"] == torch.device("cuda", 1)
    with pytest.raises(ValueError, match="local_rank=2, but 2 CUDA device"):
        launch(2, 4, "127.0.0.1", 29500, local_rank=2)
    launch(2, 4, "127.0.0.1", 29500, local_rank=2, backend="gloo")  # training on CPU where there are GPUs
    assert chosen == [1, 0]


def test_every_generator_is_seeded():
    launch_from_torch(seed=7)
    first = draws()
    dist.destroy_process_group()
    launch_from_torch(seed=7)
    assert draws() == first
    dist.destroy_process_group()
    launch_from_torch(seed=8)
    assert all(new != old for new, old in zip(draws(), first, strict=True))


def test_launching_twice_says_so():
    launch_from_torch(backend="gloo")
    with pytest.raises(RuntimeError, match="already launched: this process is rank 0 of 1.*destroy_process_group"):
        launch_from_torch(backend="gloo")


def test_windows_is_refused_at_once(monkeypatch):
    monkeypatch.setattr(sys, "platform", "win32")
    with pytest.raises(RuntimeError, match="Windows is not supported.*WSL2"):
        launch_from_torch()


def test_config_gives_backend_and_seed():
    launch_from_torch({"backend": "gloo", "seed": 5})
    from_config = draws()
    dist.destroy_process_group()
    launch_from_torch(backend="gloo", seed=5)
    assert draws() == from_config


def test_a_timeout_comes_from_the_script_else_from_booster_run_else_it_is_torchs(monkeypatch):
    given = []
    monkeypatch.setattr(dist, "init_process_group", lambda *args, timeout, **kwargs: given.append(timeout))
    launch_from_torch()
    monkeypatch.setenv("BOOSTER_RUN_TIMEOUT", "90")
    launch_from_torch()
    launch_from_torch(timeout=7.5)
    launch_from_torch({"timeout": 8})
    assert given == [None, timedelta(seconds=90), timedelta(seconds=7.5), timedelta(seconds=8)]


def test_an_unknown_config_key_names_the_nearest_legal_one():
    with pytest.raises(ValueError, match="'backends' is unknown; did you mean 'backend'.*seed"):
        launch_from_torch({"backends": "gloo"})


def test_config_and_argument_that_disagree_are_both_named():
    with pytest.raises(ValueError, match="seed=3 was passed, but config says seed=4"):
        launch_from_torch({"seed": 4}, seed=3)


def test_a_config_path_is_refused():
    with pytest.raises(TypeError, match="config must be None or a mapping.*got str"):
        launch_from_torch("config.py")


def test_the_announced_sizes_are_read_without_a_process_group(monkeypatch):
    assert (environment_world_size(), environment_local_rank()) == (1, None)
    set_environment(monkeypatch, WORLD_SIZE=8, LOCAL_RANK=3)
    assert (environment_world_size(), environment_local_rank()) == (8, 3)
    monkeypatch.setenv("WORLD_SIZE", "many")
    with pytest.raises(RuntimeError, match="WORLD_SIZE='many'"):
        environment_world_size()


def test_the_default_parser_has_the_usual_options_in_both_spellings():
    parser = get_default_parser()
    expected = {"config": "c", "host": "h", "port": 1, "world_size": 2, "rank": 0, "local_rank": 1, "backend": "gloo"}
    underscores = [word for name, value in expected.items() for word in (f"--{name}", str(value))]
    hyphens = [word.replace("_", "-") if word.startswith("--") else word for word in underscores]
    assert vars(parser.parse_args(underscores)) == vars(parser.parse_args(hyphens)) == expected
    assert parser.parse_args([]).backend is None
