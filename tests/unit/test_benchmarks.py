"""Benchmarks of updates, layers and checkpoints still run: a small table of each is made by the command of its docstring."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Options that make little work of it.
COMMANDS = {
    "advise": "--steps 1",
    "checkpoint": "--megabytes 1 --rounds 1",
    "low_precision": "--device cpu --sizes 32 --rounds 1 --only fp8",
    "masters": "--rounds 1 --precisions bf16",
    "states": "--rounds 1 --tensors 1 --only split24",
    "update": "--rounds 1 --precisions fp16",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_benchmark_runs(name):
    done = subprocess.run(
        [sys.executable, "-m", f"benchmarks.{name}", *shlex.split(COMMANDS[name])],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) > 1, done.stdout
