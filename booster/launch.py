"""From a launcher's environment, or from a notebook, to a process group, a device and seeds.

Environment variables are read here and in `booster.cli`; `mixed_precision/hardware.py` reads those that limit oneDNN.
"""

from __future__ import annotations

import argparse
import atexit
import difflib
import gc
import logging
import os
import random
import re
import socket
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from booster.common import arguments
from booster.common.hang_watchdog import PATIENCE, start_watchdog

DEFAULT_SEED = 1024
TIMEOUT_VARIABLE = "BOOSTER_RUN_TIMEOUT"  # in seconds, set by `booster run --timeout`

_logger = logging.getLogger(__name__)
_RESOLVE_SECONDS = 30  # a cluster may learn the names of its machines a little later than they start


class _Launcher(NamedTuple):
    """What starts ranks.

    Attributes:
        starter: its name, for messages.
        fix: what to do where its variables are missing.
        place: the variables of rank, world size and local rank.
        address: further variables that must be there.
    """

    starter: str
    fix: str
    place: tuple[str, str, str]
    address: tuple[str, ...] = ()


_TORCH = _Launcher(
    "`booster run` (or torchrun)",
    "start the script with `booster run --nproc_per_node N script.py`, or with plain `python` for one process",
    ("RANK", "WORLD_SIZE", "LOCAL_RANK"),
    ("MASTER_ADDR", "MASTER_PORT"),
)
_SLURM = _Launcher(
    "srun (SLURM)",
    "start the script with `srun python script.py` inside an allocation, or use launch_from_torch",
    ("SLURM_PROCID", "SLURM_NPROCS", "SLURM_LOCALID"),
)
_OPENMPI = _Launcher(
    "mpirun (Open MPI)",
    "start the script with `mpirun -np N python script.py`, or use launch_from_torch",
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"),
)


def launch(
    rank: int,
    world_size: int,
    host: str,
    port: int,
    backend: str | None = None,
    local_rank: int | None = None,
    seed: int = DEFAULT_SEED,
    timeout: float | None = None,
) -> None:
    """Join the process group at `host:port` as `rank` of `world_size`, pick the device and seed everything.

    rank: of this process, from 0.
    world_size: number of processes of the job.
    host: name, IPv4 or IPv6 address of rank 0's machine (`::1` and `[::1]` both work).
    port: 1 to 65535, free there.
    backend: None takes nccl where CUDA is available and gloo elsewhere; any other value is used as given.
    local_rank: index of this process on its machine; on CUDA it selects the device. None: rank modulo the GPU count.
    seed: given to `random`, numpy (if installed) and torch, the same on all ranks.
    timeout: seconds that a collective waits for the others before it fails; None: torch's, 30 minutes, 10 under nccl.

    Side effects: the default process group (returns when all ranks have come; closed when the process ends), the current
    CUDA device, the seeds. Raises ValueError or TypeError for a bad argument, RuntimeError if a group exists or on Windows.
    """
    _refuse_windows()
    _refuse_second_launch()
    _check_rank(rank, world_size)
    _check_whole("port", port, 1, 65535, "the port on which rank 0 listens")
    init_method = f"tcp://{_bracketed(host)}:{port}"
    await_address("host", host)
    start(rank, world_size, backend, local_rank, seed, init_method=init_method, timeout=timeout)


def launch_from_torch(
    config: Mapping[str, Any] | None = None,
    backend: str | None = None,
    seed: int = DEFAULT_SEED,
    timeout: float | None = None,
) -> None:
    """Launch from what `booster run` or torchrun put in the environment; under plain `python`, as a world of one.

    config: None or a mapping with the keys `backend`, `seed` and `timeout`; an argument that differs from its default and from
        the mapping is an error, not a precedence rule.
    backend: None takes nccl where CUDA is available and gloo elsewhere; any other value is used as given.
    seed: given to `random`, numpy (if installed) and torch, the same on all ranks.
    timeout: seconds that a collective waits for the others before it fails; None: that of `booster run --timeout`, else
        torch's, 30 minutes, 10 under nccl.

    Under plain `python` no variable, address or port is needed.
    Side effects and errors as for `launch`; a partly set environment raises RuntimeError naming the missing variable.
    """
    options = _merged(config, backend=backend, seed=seed, timeout=timeout)
    if options["timeout"] is None and TIMEOUT_VARIABLE in os.environ:
        seconds = _whole_variable(TIMEOUT_VARIABLE)
        _check_whole(TIMEOUT_VARIABLE, seconds, 1, 10**9, "the seconds that a collective waits")
        options["timeout"] = float(seconds)
    _refuse_windows()
    _refuse_second_launch()
    if not any(name in os.environ for name in _TORCH.place):
        # Raise where srun or mpirun started several tasks: each would train alone, as its own world of one
        functions = {"SLURM_STEP_NUM_TASKS": "launch_from_slurm", "OMPI_COMM_WORLD_SIZE": "launch_from_openmpi"}
        for name, function in functions.items():
            if name in os.environ and _whole_variable(name) > 1:
                raise RuntimeError(
                    f"{name}={os.environ[name]} says that this is one of several tasks, but RANK and WORLD_SIZE are not set; "
                    f"call booster.{function}(host, port) instead of launch_from_torch()"
                )
        # A store in memory: no port is opened for one process.
        start(0, 1, options["backend"], 0, options["seed"], store=dist.HashStore(), timeout=options["timeout"])
        return
    rank, world_size, local_rank = _place_by(_TORCH)
    _check_whole("MASTER_PORT", _whole_variable("MASTER_PORT"), 1, 65535, "the port on which rank 0 listens")
    await_address("MASTER_ADDR", os.environ["MASTER_ADDR"])
    # env:// and not tcp://: under torchrun the agent already listens on this port and rank 0 must not bind it again.
    given = (options["backend"], local_rank, options["seed"])
    start(rank, world_size, *given, init_method="env://", timeout=options["timeout"])


def launch_from_slurm(
    host: str, port: int, backend: str | None = None, seed: int = DEFAULT_SEED, timeout: float | None = None
) -> None:
    """Launch a task started by srun; rank, world size and local rank come from SLURM's variables.

    host: the first node, as in `scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1`.
    port: 1 to 65535, free there.
    backend, seed, timeout: those of `launch`; None likewise.

    Side effects and errors as for `launch`; RuntimeError names a missing variable.
    """
    rank, world_size, local_rank = _place_by(_SLURM)
    launch(rank, world_size, host, port, backend=backend, local_rank=local_rank, seed=seed, timeout=timeout)


def launch_from_openmpi(
    host: str, port: int, backend: str | None = None, seed: int = DEFAULT_SEED, timeout: float | None = None
) -> None:
    """Launch a process started by Open MPI's mpirun; rank, world size and local rank come from its variables.

    host: the machine of rank 0.
    port: 1 to 65535, free there.
    backend, seed, timeout: those of `launch`; None likewise.

    MPI itself carries no tensors unless backend="mpi" is available.
    Side effects and errors as for `launch`; RuntimeError names a missing variable.
    """
    rank, world_size, local_rank = _place_by(_OPENMPI)
    launch(rank, world_size, host, port, backend=backend, local_rank=local_rank, seed=seed, timeout=timeout)


def get_default_parser() -> argparse.ArgumentParser:
    """Return a parser with the options a launched script usually takes; add your own to it."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=str, help="path of the script's own configuration")
    parser.add_argument("--host", type=str, help="address of rank 0's machine")
    parser.add_argument("--port", type=int, help="port on which rank 0 listens")
    parser.add_argument("--world_size", "--world-size", type=int, help="number of processes of the job")
    parser.add_argument("--rank", type=int, help="index of this process in the job")
    parser.add_argument("--local_rank", "--local-rank", type=int, help="index of this process on its machine")
    parser.add_argument("--backend", type=str, default=None, help="gloo, nccl, ... (default: by device)")
    return parser


def await_address(name: str, host: str) -> None:
    """Wait until `host` resolves, and raise RuntimeError if it does not; torch would retry for minutes without a word."""
    bare = host.strip().removeprefix("[").removesuffix("]")
    if re.fullmatch(r"[0-9.]+|0[xX][0-9a-fA-F]+", bare) and not re.fullmatch(r"\d+\.\d+\.\d+\.\d+", bare):
        # The resolver reads 1 as 0.0.0.1 and 1.5 as 1.0.0.5, which no host has.
        raise ValueError(f"{name}={host!r} is not an address; give a name, or an IPv4 or IPv6 address in full")
    for seconds_left in range(_RESOLVE_SECONDS, -1, -1):
        try:
            if not bare:
                raise OSError("it is empty")
            # Both families: an IPv6 name must not be refused on a machine without IPv4.
            socket.getaddrinfo(bare, None)
            return
        except (OSError, UnicodeError) as error:
            reason = error
        if seconds_left and seconds_left == _RESOLVE_SECONDS:
            _logger.warning("%s=%r does not resolve (%s); trying for %d seconds", name, host, reason, seconds_left)
        if seconds_left:
            time.sleep(1)
    raise RuntimeError(
        f"{name}={host!r} does not resolve on {socket.gethostname()} ({reason}); give a name or an address of rank 0's machine "
        "that all machines of the job know"
    )


def environment_world_size() -> int:
    """Return the world size that torchrun or `booster run` announced, or 1; no process group is needed."""
    return _whole_variable("WORLD_SIZE") if "WORLD_SIZE" in os.environ else 1


def environment_local_rank() -> int | None:
    """Return this process's index on its machine as its launcher announced it, or None where none did."""
    for name in ("LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_RANK"):
        if name in os.environ:
            return _whole_variable(name)
    # Only srun sets the step's task count; in a batch script SLURM_LOCALID is 0 for whatever is started there.
    if "SLURM_STEP_NUM_TASKS" in os.environ and "SLURM_LOCALID" in os.environ:
        return _whole_variable("SLURM_LOCALID")
    return None


def start(
    rank: int,
    world_size: int,
    backend: str | None,
    local_rank: int | None,
    seed: int,
    *,
    init_method: str | None = None,
    store: dist.Store | None = None,
    timeout: float | None = None,
) -> None:
    """Make the process group, as everything here does in the end: the device, the seeds, and its close at the end.

    timeout: in seconds, None is torch's. Side effect: a thread that names missing ranks, `hang_watchdog`.
    """
    if timeout is not None:
        arguments.number("timeout", timeout, above=0.0, most=1e9, also="None")
    _check_whole("seed", seed, 0, 2**63 - 1, "the seed of all random number generators")
    backend = _checked_backend(backend)
    device_id = _select_device(rank, local_rank, backend)
    dist.init_process_group(
        backend,
        init_method=init_method,
        store=store,
        rank=rank,
        world_size=world_size,
        device_id=device_id,
        timeout=None if timeout is None else timedelta(seconds=timeout),
    )
    seed_everything(seed)
    # A group that is open when the interpreter ends may abort the process after all work is done.
    atexit.register(close_group)
    # Last: it watches a group that is there.
    start_watchdog(PATIENCE)


def close_group() -> None:
    """Leave the process group, if there is one, in the order that ends well."""
    # An open gloo group can abort a process at its end, live garbage with it; after an error peers may hang in closing it.
    # `last_type` is set where the interpreter ends by an error.
    if dist.is_initialized() and not hasattr(sys, "last_type"):
        gc.collect()
        dist.destroy_process_group()


def _checked_backend(backend: str | None) -> str:
    if backend is None:
        return "nccl" if torch.cuda.is_available() else "gloo"
    arguments.instance("backend", backend, str, "a string or None")
    backends = [name for name in dist.Backend.backend_list if name not in ("undefined", "fake")]
    # "cpu:gloo,cuda:nccl" names one backend per device type.
    for name in (part.rpartition(":")[2].strip().lower() for part in backend.split(",")):
        if name not in dist.Backend.backend_list:
            raise ValueError(
                f"backend={backend!r} is unknown; choose one of {backends} or None for the default by device"
            )
        if not dist.is_backend_available(name):
            raise ValueError(f"backend={backend!r}: this build of torch has no {name}; use backend='gloo' on CPU")
        if name == "nccl" and not torch.cuda.is_available():
            raise ValueError(f"backend={backend!r} needs a CUDA device and none is visible; use backend='gloo' on CPU")
    return backend.lower()


def _select_device(rank: int, local_rank: int | None, backend: str) -> torch.device | None:
    """Set the CUDA device of this process; return what init_process_group binds nccl to."""
    if local_rank is not None:
        _check_whole("local_rank", local_rank, 0, 2**31 - 1, "the index of this process on its machine")
    if not torch.cuda.is_available():
        return None
    num_devices = torch.cuda.device_count()
    index = rank % num_devices if local_rank is None else local_rank
    if index >= num_devices:
        if "nccl" in backend:
            raise ValueError(
                f"local_rank={index}, but {num_devices} CUDA device(s) are visible; start at most {num_devices} "
                "process(es) on this machine, or pass backend='gloo' to train on CPU"
            )
        return None
    torch.cuda.set_device(index)
    return torch.device("cuda", index) if backend == "nccl" else None


def seed_everything(seed: int, *, by_rank: bool = False, deterministic: bool = False) -> None:
    """Seed `random`, numpy (if installed) and torch, all devices included. The launch functions seed alike on all ranks.

    seed: from 0 to 2**63 - 1.
    by_rank: add the rank, so that ranks draw different numbers, as for dropout or noise; call it after the model is made,
        which must begin alike everywhere.
    deterministic: also let torch use only operations that give the same bits on every run, and raise where an operation has
        none such, for the rest of the process; cuBLAS wants CUBLAS_WORKSPACE_CONFIG=:4096:8 in the environment before it
        starts, and torch's error says so.

    The order of data is seeded by its loader.
    """
    _check_whole("seed", seed, 0, 2**63 - 1, "the seed of all random number generators")
    arguments.flag("by_rank", by_rank)
    arguments.flag("deterministic", deterministic)
    if deterministic:
        torch.use_deterministic_algorithms(True)
        torch.backends.cudnn.benchmark = False
    if by_rank and dist.is_available() and dist.is_initialized():
        # Ranks draw other numbers, as for dropout; weights are made alike by rank 0's.
        seed = (seed + dist.get_rank()) % 2**63
    random.seed(seed)
    torch.manual_seed(seed)
    try:
        import numpy
    except ImportError:  # torch works without numpy, and so do we
        return
    numpy.random.seed(seed % 2**32)  # numpy takes 32 bits


def _merged(
    config: Mapping[str, Any] | None, *, backend: str | None, seed: int, timeout: float | None
) -> dict[str, Any]:
    given: dict[str, Any] = {"backend": backend, "seed": seed, "timeout": timeout}
    defaults = {"backend": None, "seed": DEFAULT_SEED, "timeout": None}
    if config is None:
        return given
    if not isinstance(config, Mapping):
        raise TypeError(f"config must be None or a mapping with the keys {sorted(given)}, got {type(config).__name__}")
    for key, value in config.items():
        if key not in given:
            nearest = difflib.get_close_matches(str(key), list(given), n=1, cutoff=0.0)[0]
            raise ValueError(f"config key {key!r} is unknown; did you mean {nearest!r}? Legal keys: {sorted(given)}")
        # An argument at its default cannot be told from one that was left out.
        if given[key] != defaults[key] and given[key] != value:
            raise ValueError(f"{key}={given[key]!r} was passed, but config says {key}={value!r}; keep one of them")
        given[key] = value
    return given


def _bracketed(host: str) -> str:
    if not isinstance(host, str) or not host.strip("[] "):
        raise ValueError(
            f"host={arguments.shown(host)} is not an address; pass a host name, an IPv4 or an IPv6 address of rank 0"
        )
    bare = host.strip()
    if bare.startswith("[") and bare.endswith("]"):
        bare = bare[1:-1]
    return f"[{bare}]" if ":" in bare else bare


def _check_rank(rank: int, world_size: int, source: str = "") -> None:
    _check_whole("world_size", world_size, 1, 2**31 - 1, f"the number of processes{source}")
    _check_whole("rank", rank, 0, world_size - 1, f"the index of this process among world_size={world_size}{source}")


def _check_whole(name: str, value: int, low: int, high: int, what: str) -> None:
    if not arguments.is_whole(value):
        raise TypeError(f"{name} must be an int, got {arguments.described(value)}")
    if not low <= value <= high:
        raise ValueError(f"{name}={value} is out of range; {what} must be from {low} to {high}")


def _place_by(launcher: _Launcher) -> tuple[int, int, int]:
    """Return rank, world size and local rank, as `launcher` has put them into the environment."""
    for name in (*launcher.place, *launcher.address):
        if name not in os.environ:
            raise RuntimeError(f"environment variable {name} is not set; {launcher.starter} sets it: {launcher.fix}")
    rank, world_size, local_rank = (_whole_variable(name) for name in launcher.place)
    _check_rank(rank, world_size, f" ({launcher.place[0]}, {launcher.place[1]})")
    _check_whole(launcher.place[2], local_rank, 0, 2**31 - 1, "the index of this process on its machine")
    return rank, world_size, local_rank


def _whole_variable(name: str) -> int:
    text = os.environ[name]
    try:
        value = int(text)
    except ValueError:
        value = -1
    if value < 0:
        raise RuntimeError(
            f"environment variable {name}={text!r} is not a whole number of at least 0; unset it or correct it"
        )
    return value


def _refuse_windows() -> None:
    if sys.platform == "win32":
        raise RuntimeError("Windows is not supported; run under WSL2 (Windows Subsystem for Linux) instead")


def _refuse_second_launch() -> None:
    if dist.is_available() and dist.is_initialized():
        raise RuntimeError(
            f"already launched: this process is rank {dist.get_rank()} of {dist.get_world_size()}; call a launch "
            "function once per process, or torch.distributed.destroy_process_group() before launching again"
        )


def launch_notebook(
    function: Callable[..., Any],
    num_processes: int,
    *args: Any,
    backend: str | None = None,
    seed: int = DEFAULT_SEED,
    timeout: float | None = None,
) -> None:
    """Call `function` with `args` on `num_processes` ranks of this machine, and return when all of them have.

    Each rank is a process forked from this one by torch.multiprocessing, so that `function` may be defined in a cell and
    finds what the cells before it made. It is launched when `function` begins: process group, device and seeds, as by
    `launch_from_torch`, which it does not call. What it changes is gone with its process: save what you want to keep.
    A rank computes with one thread on CPU, since the threads of this process do not live on in it.

    args: what `function` is called with, after a fork, so of any kind.
    backend, seed, timeout: those of `launch_from_torch`; None likewise.

    Raises RuntimeError where this process has used CUDA, which no fork
    can use again, or has a process group; torch's ProcessRaisedException, with the traceback of the first rank that failed,
    after the others were ended; RuntimeError on Windows.
    """
    arguments.function("function", function)
    arguments.count("num_processes", num_processes, what="the number of ranks")
    _refuse_windows()
    if torch.cuda.is_initialized():
        raise RuntimeError(
            "launch_notebook: this process has used CUDA, and processes forked from it cannot; restart the kernel, and put "
            "nothing on a GPU before launch_notebook"
        )
    if dist.is_available() and dist.is_initialized():
        raise RuntimeError(
            "launch_notebook: this process has a process group already; destroy_process_group() first, or restart the kernel"
        )
    # Imported here: no script that is launched otherwise needs it.
    from torch import multiprocessing

    sys.stdout.flush()  # or every rank would print again what waits here
    sys.stderr.flush()
    with tempfile.TemporaryDirectory(prefix="booster-notebook-") as folder:
        meeting = f"file://{Path(folder) / 'meeting'}"
        given = (function, args, num_processes, backend, seed, timeout, meeting)
        multiprocessing.start_processes(_rank, given, nprocs=num_processes, start_method="fork")


def _rank(
    rank: int,
    function: Callable[..., Any],
    args: tuple[Any, ...],
    world_size: int,
    backend: str | None,
    seed: int,
    timeout: float | None,
    meeting: str,
) -> None:
    # OpenMP's threads of the parent are not in a fork: the first parallel loop would wait for them.
    torch.set_num_threads(1)
    start(rank, world_size, backend, rank, seed, init_method=meeting, timeout=timeout)
    function(*args)
    close_group()
