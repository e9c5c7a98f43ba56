"""`booster check` and `booster env`: what this machine has, how fast each precision is on it, and what a bug report needs."""

from __future__ import annotations

import json
import os
import platform
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F

from booster.cli.option_values import command_parser, wrapped
from booster.common.arguments import columns
from booster.common.installed import find_apex, version_of
from booster.common.torch_internals.tensor_internals import scaled_matmul

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Probe:
    """One timing. gflops: forward and backward together (fp8: forward only); error: why it does not run here."""

    precision: str
    operation: str
    shape: str
    gflops: float | None = None
    milliseconds: float | None = None
    error: str | None = None


def probe_all(device: torch.device, seconds: float) -> list[Probe]:
    """Time every precision on `device`, `seconds` for each probe at most by intention (one warm-up run on top)."""
    kinds = {"matmul": _matmul, "convolution": _convolution, "attention": _attention}
    probes = [
        _timed(name, kind, partial(_graded, build(device.type == "cpu"), device, dtype), device, seconds)
        for name, dtype in _DTYPES.items()
        for kind, build in kinds.items()
    ]
    return [*probes, _timed("fp8", "matmul", partial(_fp8_matmul, device), device, seconds)]


_Built = tuple[str, float, Callable[[], object]]


def _timed(precision: str, operation: str, build: Callable[[], _Built], device: torch.device, seconds: float) -> Probe:
    shape = "-"
    try:
        shape, operations, once = build()
        once()  # the first call compiles, allocates and picks kernels
        _wait(device)
        times: list[float] = []
        start = time.perf_counter()
        # Three at least, so that the best of them is no accident; fifty say all there is to say.
        while len(times) < 3 or (time.perf_counter() - start < seconds and len(times) < 50):
            before = time.perf_counter()
            once()
            _wait(device)
            times.append(time.perf_counter() - before)
            if time.perf_counter() - start > 3 * seconds:
                break  # a very slow kernel: what there is must do
    except (RuntimeError, NotImplementedError, TypeError, AttributeError) as error:
        return Probe(precision, operation, shape, error=str(error).strip().splitlines()[0][:120])
    best = min(times)  # the least disturbed run
    return Probe(precision, operation, shape, gflops=operations / best / 1e9, milliseconds=best * 1e3)


# Shape, in words; operations forward and backward; shapes of the operands; the function of them.
_Product = tuple[str, float, Sequence[tuple[int, ...]], Callable[..., torch.Tensor]]


def _matmul(on_cpu: bool) -> _Product:
    size = 512 if on_cpu else 4096
    return f"{size}x{size}x{size}", 3 * 2.0 * size**3, [(size, size)] * 2, torch.matmul


def _convolution(on_cpu: bool) -> _Product:
    batch, channels, side = (4, 32, 16) if on_cpu else (32, 256, 56)
    shapes = [(batch, channels, side, side), (channels, channels, 3, 3)]
    operations = 3 * 2.0 * batch * side**2 * channels**2 * 9
    return f"{batch}x{channels}x{side}x{side}, 3x3", operations, shapes, partial(F.conv2d, padding=1)


def _attention(on_cpu: bool) -> _Product:
    batch, heads, length, width = shape = (4, 3, 128, 64) if on_cpu else (16, 16, 1024, 64)
    operations = 6 * 2.0 * batch * heads * length**2 * width  # two products forward, four backward; none made again
    return "x".join(map(str, shape)), operations, [shape] * 3, F.scaled_dot_product_attention


def _graded(product: _Product, device: torch.device, dtype: torch.dtype) -> _Built:
    shape, operations, shapes, function = product
    operands = [torch.randn(each, device=device, dtype=dtype, requires_grad=True) for each in shapes]

    def once() -> None:
        result = function(*operands)
        torch.autograd.grad(result, operands, torch.ones_like(result))

    return shape, operations, once


def _fp8_matmul(device: torch.device) -> _Built:
    # On CPU this kernel is a reference loop: at 128 it takes milliseconds, at 1024 seconds.
    size = 128 if device.type == "cpu" else 4096
    left = torch.randn(size, size, dtype=torch.float32, device=device).to(torch.float8_e4m3fn)
    right = torch.randn(size, size, dtype=torch.float32, device=device).to(torch.float8_e4m3fn).t()
    one = torch.ones((), dtype=torch.float32, device=device)

    def once() -> torch.Tensor:
        return scaled_matmul(left, right, one, one, torch.bfloat16)

    return f"{size}x{size}x{size}", 2.0 * size**3, once


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


# Seconds for each timing; seven timings stay well below fifteen seconds on two CPU cores.
_PROBE_SECONDS = 0.4


def check(argv: Sequence[str]) -> int:
    """Run `booster check` with the options `argv`; print a table, or JSON with --json, and return 0."""
    return _printed(
        argv,
        "check",
        "Report versions, devices, process-group backends and the speed of each precision here.",
        _collect,
        _as_text,
    )


def env(argv: Sequence[str]) -> int:
    """Run `booster env` with the options `argv`; print a table, or JSON with --json, and return 0. Nothing is timed."""
    return _printed(
        argv,
        "env",
        "Report what a bug report needs: versions, machine, devices, settings of torch, launcher's variables.",
        _collect_environment,
        _environment_as_text,
    )


def _printed(
    argv: Sequence[str],
    name: str,
    description: str,
    collect: Callable[[], dict[str, Any]],
    as_text: Callable[[dict[str, Any]], str],
) -> int:
    parser = command_parser(name, description)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    options = parser.parse_args(list(argv))
    report = collect()
    print(json.dumps(report, indent=2) if options.json else as_text(report))
    return 0


def _backends() -> list[str]:
    known = ("gloo", "nccl", "mpi", "ucc", "xccl")
    return [name for name in known if dist.is_available() and dist.is_backend_available(name)]


def _device(index: int) -> dict[str, Any]:
    properties = torch.cuda.get_device_properties(index)
    return {
        "name": properties.name,
        "capability": f"{properties.major}.{properties.minor}",
        "memory_gib": round(properties.total_memory / 2**30, 1),
    }


def _device_rows(devices: Sequence[dict[str, Any]]) -> list[tuple[str, str]]:
    return [
        (f"cuda:{index}", f"{each['name']}, capability {each['capability']}, {each['memory_gib']} GiB")
        for index, each in enumerate(devices)
    ]


def _collect() -> dict[str, Any]:
    import booster
    from booster.mixed_precision.hardware import all_half_units, half_units, slow_products

    num_gpus = torch.cuda.device_count()
    device = torch.device("cuda", 0) if num_gpus else torch.device("cpu")
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
                "in_float32": {name: sorted(slow_products(_DTYPES[name])) for name in ("bf16", "fp16")},
            },
            "cuda": [_device(index) for index in range(num_gpus)],
        },
        "backends": _backends(),
        "apex": {"kind": apex.kind, "message": apex.message, "location": apex.location, "version": apex.version},
        "probed_device": str(device),
        "precisions": [asdict(probe) for probe in probe_all(device, _PROBE_SECONDS)],
    }


def _as_text(report: dict[str, Any]) -> str:
    rows: list[tuple[str, ...]] = [(name, str(value)) for name, value in report["versions"].items() if value]
    cpu = report["devices"]["cpu"]
    rows.append(("cpu", f"{cpu['cores']} threads, {cpu['capability']}, units for halves: {_units(cpu)}"))
    if any(cpu["in_float32"].values()):
        rows.append(("half_products", _in_float32(cpu["in_float32"])))
    rows += _device_rows(report["devices"]["cuda"]) or [("cuda", "no device visible")]
    rows.append(("backends", ", ".join(report["backends"]) or "none"))
    rows.append(("apex", report["apex"]["message"]))
    header = ("precision", "operation", "shape", "ms", "GFLOP/s", "against fp32")
    # Speeds of different sizes do not compare.
    base = {(p["operation"], p["shape"]): p["gflops"] for p in report["precisions"] if p["precision"] == "fp32"}
    table = [header, *(_probe_row(p, base.get((p["operation"], p["shape"]))) for p in report["precisions"])]
    note = "forward and backward, best of several short runs; fp8: forward only; -: not timed in fp32 at that size"
    title = wrapped(f"precisions on {report['probed_device']} ({note})")
    return f"{_fitted(rows)}\n\n{title}\n{_fitted(table)}"


def _units(cpu: dict[str, Any]) -> str:
    used = cpu["half_units_used"]
    shown = [name if name in used else f"{name} (not used by oneDNN)" for name in cpu["half_units"]]
    return ", ".join(shown) or "none"


def _in_float32(kinds: dict[str, list[str]]) -> str:
    """What a `Booster` leaves no half precision to, which is what is timed below, as a sentence."""
    names: dict[str, list[str]] = {}  # of precisions, by what they have in common
    for name, found in kinds.items():
        if found:
            words = ", ".join(kind if kind == "attention" else f"{kind}s" for kind in found)
            names.setdefault(words, []).append(name)
    slow = [f"{words} of {' and '.join(those)}" for words, those in names.items()]
    return f"'auto' computes {'; '.join(slow)} in float32, faster here than torch's own, which is timed below"


def _probe_row(probe: dict[str, Any], base: float | None) -> tuple[str, ...]:
    start = (probe["precision"], probe["operation"], probe["shape"])
    if probe["error"] is not None:
        return (*start, "-", "-", f"does not run here: {probe['error']}")
    ratio = probe["gflops"] / base if base else None
    against = "-" if ratio is None else f"{ratio:.2f}x" if ratio >= 0.01 else f"{ratio:.1g}x"
    return (*start, f"{probe['milliseconds']:.2f}", f"{probe['gflops']:.1f}", against)


def _fitted(rows: Sequence[tuple[str, ...]]) -> str:
    """Return `columns` of `rows`, with the last one broken where the terminal is narrower."""
    indent = sum(max(map(len, column)) + 2 for column in list(zip(*rows, strict=True))[:-1])
    return "\n".join(wrapped(line, indent) for line in columns(rows).split("\n"))


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


def _collect_environment() -> dict[str, Any]:
    import booster

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
        "backends": _backends(),
        "settings": _settings(),
        "variables": {
            name: "(not shown)" if _SECRET.search(name) else value
            for name, value in sorted(os.environ.items())
            if _STEERING.fullmatch(name)
        },
    }


def _settings() -> dict[str, Any]:
    """What scripts and libraries change in torch, and numbers or speed with it."""
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


def _environment_as_text(report: dict[str, Any]) -> str:
    cuda = report["cuda"]
    rows = [
        *report["versions"].items(),
        *report["packages"].items(),
        ("apex", report["apex"]),
        *report["machine"].items(),
        ("cuda", ", ".join(f"{name} {cuda[name]}" for name in ("built_for", "cudnn", "nccl") if cuda[name]) or None),
        *(_device_rows(cuda["devices"]) or [("devices", "no CUDA device visible")]),
        ("backends", ", ".join(report["backends"]) or "none"),
        *report["settings"].items(),
        *report["variables"].items(),
    ]
    return _fitted([(name, str(value)) for name, value in rows if value is not None])
