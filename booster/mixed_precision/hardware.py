"""Whether a device multiplies in a format."""

from __future__ import annotations

import torch


def missing(name: str, device: torch.device, *, capability: tuple[int, int], generations: str) -> str:
    """What `device` lacks to multiply in `name`, as a sentence; empty where it lacks nothing.

    capability: the least compute capability of a CUDA device that does. generations: of which that is the first.
    """
    if device.type == "cpu":
        found = "this is a CPU"
    elif torch.version.hip:
        found = f"{torch.cuda.get_device_name(device)} is AMD's, on which this library has not been tried"
    else:
        has = torch.cuda.get_device_capability(device)
        if has >= capability:
            return ""
        found = f"{torch.cuda.get_device_name(device)} has {has[0]}.{has[1]}"
    return (
        f"{name} needs an NVIDIA GPU of compute capability {capability[0]}.{capability[1]} ({generations}), and {found}"
    )


def missing_on_cpu(name: str, device: torch.device) -> str:
    """What `device` lacks to multiply in bfloat16 by oneDNN, as a sentence; empty where it lacks nothing."""
    if device.type != "cpu":
        found = f"the device is {device}"
    elif not torch.backends.mkldnn.is_available():
        found = "this torch is built without oneDNN"
    else:
        has = torch.cpu.get_capabilities()
        if has.get("avx512_bf16") or has.get("amx_bf16"):
            return ""
        found = f"this one is {has.get('cpu_name') or has.get('architecture', 'another')}"
    return f"{name} need a CPU with AVX512-BF16 or AMX, and {found}"
