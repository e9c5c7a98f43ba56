"""`booster env`: what a bug report needs to know of this machine."""

from __future__ import annotations

import argparse
import json
import os
import platform
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from booster.cli.check import aligned
from booster.installed import find_apex, version_of

__all__ = ["env"]

_PACKAGES = (
    "numpy",
    "safetensors",
    "xxhash",
    "torchdata",
    "torchvision",
    "torchao",
    "timm",
    "transformers",
    "peft",
    "accelerate",
    "lightning-fabric",
    "deepspeed",
    "rich",
    "ray",
    "triton",
)
# Variables that torch, its backends and launchers read. Any other may be private.
_STEERING = re.compile(
    r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|GROUP_RANK|MASTER_ADDR|MASTER_PORT|OMP_NUM_THREADS|MKL_NUM_THREADS|"
    r"(TORCH|PYTORCH|TORCHINDUCTOR|TORCHELASTIC|CUDA|CUBLAS|NVIDIA|NCCL|GLOO|UCC|OMPI|SLURM|KMP|MKL|OMP|ONEDNN|DNNL|ROCR|HIP|HSA)_.*)"
)
_SECRET = re.compile(r"TOKEN|KEY|SECRET|PASS|JWT|CREDENTIAL|AUTH", re.IGNORECASE)


def env(argv: Sequence[str]) -> int:
    """Run `booster env` with the options `argv`; print a table, or JSON with --json, and return 0. Nothing is timed."""
    parser = argparse.ArgumentParser(
        prog="booster env",
        description="Report what a bug report needs: versions, machine, devices, settings of torch, launcher's variables.",
        allow_abbrev=False,
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args(list(argv))
    report = _collect()
    print(json.dumps(report, indent=2) if options.json else _as_text(report))
    return 0


def _collect() -> dict[str, Any]:
    import torch
    import torch.distributed as dist

    import booster

    backends = ("gloo", "nccl", "mpi", "ucc", "xccl")
    packages = {name: version_of(name) for name in _PACKAGES}
    return {
        "versions": {
            "booster": booster.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "platform": platform.platform(),
            "libc": " ".join(platform.libc_ver()) or None,
        },
        "packages": {name: version for name, version in packages.items() if version is not None},
        "apex": find_apex().kind,
        "machine": {
            "cpu": _cpu_name(),
            "capability": torch.backends.cpu.get_cpu_capability(),
            "cores": os.cpu_count(),
            "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
            "memory_gib": _memory_gib(),
        },
        "cuda": {
            "built_for": torch.version.cuda or torch.version.hip,
            "cudnn": torch.backends.cudnn.version() if torch.cuda.is_available() else None,
            "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else None,
            "devices": [_device(index) for index in range(torch.cuda.device_count())],
        },
        "backends": [name for name in backends if dist.is_available() and dist.is_backend_available(name)],
        "settings": _settings(),
        "variables": {
            name: "(not shown)" if _SECRET.search(name) else value
            for name, value in sorted(os.environ.items())
            if _STEERING.fullmatch(name)
        },
    }


def _settings() -> dict[str, Any]:
    """What scripts and libraries change in torch, and numbers or speed with it."""
    import torch

    deterministic = "on" if torch.are_deterministic_algorithms_enabled() else "off"
    if torch.is_deterministic_algorithms_warn_only_enabled():
        deterministic = "warn"
    return {
        "default_dtype": str(torch.get_default_dtype()),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "deterministic_algorithms": deterministic,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "num_threads": torch.get_num_threads(),
    }


def _device(index: int) -> dict[str, Any]:
    import torch

    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gib": round(properties.total_memory / 2**30, 1),
    }


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _memory_gib() -> float | None:
    try:
        return round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1)
    except (ValueError, OSError):  # names that this system does not know
        return None


def _as_text(report: dict[str, Any]) -> str:
    cuda = report["cuda"]
    devices = [
        (f"cuda:{index}", f"{device['name']}, capability {device['capability']}, {device['memory_gib']} GiB")
        for index, device in enumerate(cuda["devices"])
    ]
    rows = [
        *report["versions"].items(),
        *report["packages"].items(),
        ("apex", report["apex"]),
        *report["machine"].items(),
        ("cuda", ", ".join(f"{name} {cuda[name]}" for name in ("built_for", "cudnn", "nccl") if cuda[name]) or None),
        *(devices or [("devices", "no CUDA device visible")]),
        ("backends", ", ".join(report["backends"]) or "none"),
        *report["settings"].items(),
        *report["variables"].items(),
    ]
    return aligned([(name, str(value)) for name, value in rows if value is not None])
