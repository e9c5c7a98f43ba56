"""Bytes that ranks give each other: backends do not know every dtype, and no pickle travels."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.distributed as dist


def communication_device(device: torch.device, group: dist.ProcessGroup) -> torch.device:
    """Return `device` where the group's backend can use it, else the one that it can."""
    backends = dict(entry.split(":") for entry in dist.get_backend_config(group).split(","))
    if device.type == "cpu" and "cpu" in backends and backends["cpu"] != "nccl":
        return device
    if "nccl" in backends.values():
        return device if device.type == "cuda" else torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def broadcast(values: torch.Tensor, source: int, group: dist.ProcessGroup) -> None:
    """Give `values` of the rank `source` of `group` to all its ranks, in place; a collective unless it is empty.

    values: contiguous, on a device that the backend can use, of any dtype, on every rank of the same shape.
    """
    if values.numel():
        dist.broadcast(values.view(-1).view(torch.uint8), group=group, group_src=source)


def align(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Give every rank of `group` the values that its first rank has, in place; a collective for each tensor.

    group: None means this rank alone. Tensors on the meta device are left out.
    """
    if group is None or dist.get_world_size(group) == 1:
        return
    for tensor in tensors:
        local = tensor.detach()
        if local.is_meta or not local.numel():
            continue
        there = local.to(communication_device(local.device, group)).contiguous()
        broadcast(there, 0, group)
        if there.data_ptr() != local.data_ptr():
            local.copy_(there)


def exchange(data: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    """Return what each rank of `group` brings, in the order of ranks; a small collective, and another one unless all is empty.

    group: None means this rank alone.
    """
    if group is None:
        return [data]
    device = communication_device(torch.device("cpu"), group)
    size = torch.tensor([len(data)], dtype=torch.int64, device=device)
    sizes = [torch.empty_like(size) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, size, group=group)
    lengths = [int(length) for length in sizes]
    if not any(lengths):
        return [b""] * len(lengths)
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    if data:
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    everyone = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(everyone, padded, group=group)
    return [bytes(part[:length].tolist()) for part, length in zip(everyone, lengths, strict=True)]
