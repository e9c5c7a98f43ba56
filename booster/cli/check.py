"""`booster check`: what this machine has, and which precisions run on it at what speed."""

from __future__ import annotations

import argparse
import json
import platform
from collections.abc import Sequence
from typing import Any

from booster.installed import find_apex, version_of

__all__ = ["aligned", "check"]

# Seconds for each timing; seven timings stay well below fifteen seconds on two CPU cores.
_PROBE_SECONDS = 0.4


def check(argv: Sequence[str]) -> int:
    """Run `booster check` with the options `argv`; print a table, or JSON with --json, and return 0."""
    parser = argparse.ArgumentParser(
        prog="booster check",
        description="Report versions, devices, process-group backends and the speed of each precision here.",
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
    from booster.cli.probes import probe_all
    from booster.mixed_precision.hardware import all_half_units, half_units

    num_gpus = torch.cuda.device_count()
    device = torch.device("cuda", 0) if num_gpus else torch.device("cpu")
    backends = ("gloo", "nccl", "mpi", "ucc", "xccl")
    apex = find_apex()
    return {
        "versions": {
            "booster": booster.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "hip": torch.version.hip,
            "numpy": version_of("numpy"),
            "platform": platform.platform(),
        },
        "devices": {
            "cpu": {
                "cores": torch.get_num_threads(),
                "capability": torch.backends.cpu.get_cpu_capability(),
                "half_units": list(all_half_units()),
                "half_units_used": list(half_units()),
            },
            "cuda": [
                {
                    "name": torch.cuda.get_device_name(index),
                    "capability": ".".join(map(str, torch.cuda.get_device_capability(index))),
                    "memory_gib": round(torch.cuda.get_device_properties(index).total_memory / 2**30, 1),
                }
                for index in range(num_gpus)
            ],
        },
        "backends": [name for name in backends if dist.is_available() and dist.is_backend_available(name)],
        "apex": {"kind": apex.kind, "message": apex.message, "location": apex.location, "version": apex.version},
        "probed_device": str(device),
        "precisions": [probe.as_dict() for probe in probe_all(device, _PROBE_SECONDS)],
    }


def _as_text(report: dict[str, Any]) -> str:
    rows: list[tuple[str, ...]] = [(name, str(value)) for name, value in report["versions"].items() if value]
    cpu = report["devices"]["cpu"]
    rows.append(("cpu", f"{cpu['cores']} threads, {cpu['capability']}, units for halves: {_units(cpu)}"))
    for index, gpu in enumerate(report["devices"]["cuda"]):
        rows.append((f"cuda:{index}", f"{gpu['name']}, capability {gpu['capability']}, {gpu['memory_gib']} GiB"))
    if not report["devices"]["cuda"]:
        rows.append(("cuda", "no device visible"))
    rows.append(("backends", ", ".join(report["backends"]) or "none"))
    rows.append(("apex", report["apex"]["message"]))
    header = ("precision", "operation", "shape", "ms", "GFLOP/s", "against fp32")
    # Speeds of different sizes do not compare.
    base = {(p["operation"], p["shape"]): p["gflops"] for p in report["precisions"] if p["precision"] == "fp32"}
    table = [header, *(_probe_row(p, base.get((p["operation"], p["shape"]))) for p in report["precisions"])]
    note = "forward and backward, best of several short runs; fp8: forward only; -: not timed in fp32 at that size"
    return f"{aligned(rows)}\n\nprecisions on {report['probed_device']} ({note})\n{aligned(table)}"


def _units(cpu: dict[str, Any]) -> str:
    used = cpu["half_units_used"]
    shown = [name if name in used else f"{name} (not used by oneDNN)" for name in cpu["half_units"]]
    return ", ".join(shown) or "none"


def _probe_row(probe: dict[str, Any], base: float | None) -> tuple[str, ...]:
    start = (probe["precision"], probe["operation"], probe["shape"])
    if probe["error"] is not None:
        return (*start, "-", "-", f"does not run here: {probe['error']}")
    ratio = f"{probe['gflops'] / base:.2f}x" if base else "-"
    return (*start, f"{probe['milliseconds']:.2f}", f"{probe['gflops']:.1f}", ratio)


def aligned(rows: Sequence[tuple[str, ...]]) -> str:
    """Return `rows` as lines, every column as wide as its widest cell."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows)
    return "\n".join(lines)
