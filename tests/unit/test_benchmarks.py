"""Benchmarks still run: a small table of each is made by the command of its docstring."""

import os
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
# Options that make little work of it.
COMMANDS = {
    "accumulation": "",
    "advise": "--steps 1",
    "checkpoint": "--megabytes 1 --rounds 1",
    "estimates": "--only 'cnn bf16_naive'",
    "half_products": "--kinds --seconds 0.001 --rounds 1",
    "half_products_curves": "--record benchmarks/figures/half_products_curves.jsonl --table",
    "half_sums": "'cat same'",
    "low_precision": "--device cpu --sizes 32 --rounds 1 --only fp8",
    "masters": "--rounds 1 --precisions bf16",
    "memory": "--only 'booster bf16' --skip-activations --cpu",
    "memory --ranks 2": "--only 'ZeRO-2 fp16'",
    "numerics": "--models tiny --rounds 2",
    "opt_levels": "--rounds 2 --vit-rounds 1 --batch 1",
    "overhead": "--rounds 2 --precisions bf16",
    "release": "--ranks 1 --rounds 1",
    "states": "--rounds 1 --tensors 1 --only split24",
    "update": "--rounds 1 --precisions fp16",
    "vit_step": "--rounds 1",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_a_benchmark_runs(name):
    done = subprocess.run(
        [sys.executable, "-m", *shlex.split(f"benchmarks.{name} {COMMANDS[name]}")],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) > 1, done.stdout
