"""Who a rank is in the job; bytes that ranks give each other, and decisions that all ranks of a group take alike: flags,
extremes; all raise or none.

Backends do not know every dtype, and no pickle travels. `group=None` means this rank alone: no collective. What a step decides
by (`largest`, `agree_on_found_inf`, `all_reduce`) is a collective of 8 bytes, on CUDA a host sync where a float is returned.
"""

from __future__ import annotations

import functools
import gc
import hashlib
import json
import socket
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, ParamSpec, TypeVar

import torch
import torch.distributed as dist

from booster.common import arguments
from booster.launch import environment_local_rank

SENDABLE = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16}
    | {torch.int64, torch.int32, torch.int8, torch.uint8, torch.bool}
)
"""Dtypes that every backend sends as they are; others travel as bytes, see `broadcast`."""
# torch 2.13 renamed the collective and warns about the old name.
all_gather_flat: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
SMALL, TOGETHER = 2**16, 2**20  # bytes: tensors up to SMALL are sent together, in messages of up to TOGETHER


def communication_device(device: torch.device, group: dist.ProcessGroup) -> torch.device:
    """Return `device` where the group's backend can use it, else the one that it can."""
    backends = dict(entry.split(":") for entry in dist.get_backend_config(group).split(","))
    if device.type == "cpu" and "cpu" in backends and backends["cpu"] != "nccl":
        return device
    if "nccl" in backends.values():
        return device if device.type == "cuda" else torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def reduced(values: torch.Tensor, op: dist.ReduceOp.RedOpType, group: dist.ProcessGroup) -> torch.Tensor:
    """Return `values` reduced over the ranks of `group`, on a device that the backend can use; may overwrite `values`."""
    device = communication_device(values.device, group)
    there = values.to(device, non_blocking=device.type == "cuda")
    dist.all_reduce(there, op, group=group)
    return there


def extremes(values: torch.Tensor, group: dist.ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the smallest and the largest of each of `values` over the ranks of `group`, none of which may be NaN.

    They are on a device that the backend can use.
    """
    # A minimum is the maximum of the negatives, so that both are one collective.
    least, most = reduced(torch.stack([-values, values]), dist.ReduceOp.MAX, group)
    return -least, most


def is_sendable(tensor: torch.Tensor) -> bool:
    """Return whether others can send `tensor`, and write to it, as it is; `broadcast` can send any."""
    return tensor.dtype in SENDABLE and (0 not in tensor.stride() or not tensor.numel())


def broadcast(values: torch.Tensor, source: int, group: dist.ProcessGroup) -> None:
    """Give `values` of the rank `source` of `group` to all its ranks, in place, of one shape; a collective unless empty."""
    if values.numel():
        there = values.contiguous()  # a backend sends raw memory
        dist.broadcast(there.view(-1).view(torch.uint8), group=group, group_src=source)
        if there.data_ptr() != values.data_ptr():
            _write(values, there)


def _write(values: torch.Tensor, new: torch.Tensor) -> None:
    """Copy `new` to `values`, also where elements share memory, as `expand` makes them."""
    for dim, stride in enumerate(values.stride()):
        if not stride:
            values, new = values.narrow(dim, 0, 1), new.narrow(dim, 0, 1)
    values.copy_(new)


def broadcast_from_first(tensors: Iterable[torch.Tensor], group: dist.ProcessGroup | None) -> None:
    """Give every rank of `group` the values that its first rank has, in place.

    group: None means this rank alone. Tensors on the meta device are left out. Collectives: a small one, one for each tensor of
    more than `SMALL` bytes, and one for so many others as make `TOGETHER` bytes; a host read.
    """
    if group is None or dist.get_world_size(group) == 1:
        return
    tensors = list(tensors)
    # Raises RuntimeError on every rank where shapes and dtypes are not the same on all, in the same order.
    _check_alike(tensors, group)
    waiting: dict[torch.device, list[torch.Tensor]] = {}
    sizes: Counter[torch.device] = Counter()
    for tensor in tensors:
        local = tensor.detach()
        # Nothing to send, and no memory to receive into.
        if local.is_meta or not local.numel():
            continue
        if local.nbytes > SMALL:
            _align([local], group)
            continue
        device = local.device
        waiting.setdefault(device, []).append(local)
        sizes[device] += local.nbytes
        if sizes[device] >= TOGETHER:
            _align(waiting.pop(device), group)
            del sizes[device]
    for others in waiting.values():
        _align(others, group)


def _check_alike(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    # One number for all shapes and dtypes: equal where its maximum and its minimum are.
    kinds = zlib.crc32(repr([(str(each.dtype), tuple(each.shape), each.is_meta) for each in tensors]).encode())
    least, most = extremes(torch.tensor(kinds, dtype=torch.int64), group)
    if least != most:
        raise RuntimeError(
            "parameters and buffers are not the same on all ranks, or not in the same order; build the model alike on every "
            "rank: not from a set, which has another order in each process, and with no layer that one rank leaves out"
        )


def _align(tensors: list[torch.Tensor], group: dist.ProcessGroup) -> None:
    """`broadcast_from_first` tensors of one device, which travel together."""
    device = communication_device(tensors[0].device, group)
    there = [tensor.to(device).contiguous() for tensor in tensors]
    if len(there) == 1:
        broadcast(there[0], 0, group)
    else:
        own = [each.view(-1).view(torch.uint8) for each in there]
        sizes = [each.numel() for each in own]
        message = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        parts = message.split_with_sizes(sizes)
        torch._foreach_copy_(parts, own)
        broadcast(message, 0, group)
        torch._foreach_copy_(own, parts)
    for tensor, aligned in zip(tensors, there, strict=True):
        if aligned.data_ptr() != tensor.data_ptr():
            _write(tensor, aligned)


def gather_bytes(data: bytes, group: dist.ProcessGroup | None) -> list[bytes]:
    """Return what each rank of `group` brings, in the order of ranks; one or two small collectives. None: this rank alone."""
    if group is None:
        return [data]
    device, ranks = communication_device(torch.device("cpu"), group), dist.get_world_size(group)
    own = torch.tensor(len(data), dtype=torch.int64, device=device)
    received = [torch.empty_like(own) for _ in range(ranks)]
    dist.all_gather(received, own, group=group)
    lengths = torch.stack(received).tolist()
    if not any(lengths):
        return [b""] * ranks
    padded = torch.zeros(max(lengths), dtype=torch.uint8, device=device)
    if data:
        padded[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
    # Backends gather one size, so that all send the longest.
    everyone = [torch.empty_like(padded) for _ in lengths]
    dist.all_gather(everyone, padded, group=group)
    return [_bytes(each[:length]) for each, length in zip(everyone, lengths, strict=True)]


def _bytes(values: torch.Tensor) -> bytes:
    if not values.numel():
        return b""
    read = bytearray(values.numel())
    torch.frombuffer(read, dtype=torch.uint8).copy_(values)
    return bytes(read)


# ---------------------------------------------------------------------- values of every rank


def gather(value: Any, group: dist.ProcessGroup | None) -> list[Any]:
    """Return the value of each rank of `group`, in the order of ranks.

    value: what JSON can write, which keeps every float exactly; None where a rank has nothing to say.
    """
    if group is None:
        return [value]
    # JSON, not pickle: what another rank sends is read as data.
    sent = b"" if value is None else json.dumps(value).encode()
    # A small collective, and a second one unless all give None.
    return [json.loads(data) if data else None for data in gather_bytes(sent, group)]


def any_rank(flag: bool, group: dist.ProcessGroup | None) -> bool:
    """Return whether `flag` is true on any rank of `group`; a collective of 4 bytes and a host read."""
    if group is None or dist.get_world_size(group) == 1:
        return flag
    return bool(reduced(torch.tensor(float(flag), dtype=torch.float32), dist.ReduceOp.MAX, group).item())


def all_names(names: tuple[str, ...], group: dist.ProcessGroup | None) -> tuple[str, ...]:
    """Return the names that any rank of `group` gives, each once, in the order of ranks. Collectives as of `gather`."""
    return tuple(dict.fromkeys(name for given in gather(list(names) or None, group) for name in given or () if name))


@contextmanager
def all_or_none(group: dist.ProcessGroup | None, what: str) -> Iterator[None]:
    """If the body raises on one rank of `group`, raise on all: there its own error, elsewhere ValueError with its text.

    what: what the body does, for that message. Collectives as of `gather`.
    """
    problem: Exception | None = None
    try:
        # The body makes no collective: a rank that raises before it would leave the others waiting.
        yield
    except Exception as error:
        problem = error  # raised once the others know
    texts = gather(None if problem is None else f"{type(problem).__name__}: {problem}", group)
    if problem is not None:
        raise problem
    failed = [f"rank {rank} of the group could not {what}: {text}" for rank, text in enumerate(texts) if text]
    if failed:
        raise ValueError(f"nothing was done on this rank either, because {'; '.join(failed)}")


def are_alike(text: str, group: dist.ProcessGroup | None) -> bool:
    """Return whether all ranks of `group` have the same `text`."""
    # Six bytes, which a float64 holds exactly: one message, however long the text.
    code = float(int.from_bytes(hashlib.blake2b(text.encode(), digest_size=6).digest(), "big"))
    least, most = min_and_max(code, group)
    return least == most


# ---------------------------------------------------------------------- numbers that a step decides by


def largest(value: float, group: dist.ProcessGroup | None) -> float:
    """Return the largest `value` of all ranks of `group`, none of which may be NaN."""
    if group is None:
        return value
    return float(reduced(torch.tensor(value, dtype=torch.float64), dist.ReduceOp.MAX, group))


def min_and_max(value: float, group: dist.ProcessGroup | None) -> tuple[float, float]:
    """Return the smallest and the largest `value` of all ranks of `group`, none of which may be NaN."""
    if group is None:
        return value, value
    least, most = extremes(torch.tensor(value, dtype=torch.float64), group)
    return float(least), float(most)


def all_reduce(value: torch.Tensor, group: dist.ProcessGroup | None, op: dist.ReduceOp.RedOpType) -> torch.Tensor:
    """Return `value`, a 0-dim floating tensor, reduced over the ranks of `group`, on its own device, which nothing waits for.

    A MAX must not be of NaN; in a SUM inf and NaN reach every rank.
    """
    if group is None:
        return value
    # A backend that cannot reduce there is given a copy.
    return reduced(value, op, group).to(value.device)


def agree_on_found_inf(found: bool, finite_loss: bool, group: dist.ProcessGroup | None) -> tuple[bool, bool]:
    """Return whether any rank found an inf or NaN in its gradients, and whether the losses of those that did were finite."""
    code = largest(0.0 if not found else 1.0 if finite_loss else 2.0, group)
    return code > 0.0, code < 2.0


P = ParamSpec("P")
R = TypeVar("R")


def is_main() -> bool:
    """Say whether this process is rank 0 of the job, or a world of one; no collective."""
    return not (dist.is_available() and dist.is_initialized()) or dist.get_rank() == 0


def world() -> dist.ProcessGroup | None:
    """Return the group of all ranks of the job; None in a world of one, as everything here takes it."""
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1 else None


def size_of(group: dist.ProcessGroup | None) -> int:
    """Return how many ranks `group` has; None is a world of one."""
    return 1 if group is None else dist.get_world_size(group)


def rank_in(group: dist.ProcessGroup | None) -> int:
    """Return this process's rank in `group`; None is a world of one."""
    return 0 if group is None else dist.get_rank(group)


def wait_for_all() -> None:
    """Wait until every rank of the job has come here; nothing in a world of one."""
    if dist.is_available() and dist.is_initialized():
        dist.barrier()


class DistCoordinator:
    """Rank, world size and the usual "only one process does this" patterns; without a process group, a world of one.

    Make it after `booster.launch`: rank and world size are read once. It is an ordinary object; make as many as you
    like. local_rank: index on this machine; None takes it from the launcher's environment. Only where no launcher
    announced it, the ranks exchange host names (two small collectives over the world).
    """

    def __init__(self, local_rank: int | None = None) -> None:
        launched = dist.is_available() and dist.is_initialized()
        self.rank: int = dist.get_rank() if launched else 0
        self.world_size: int = dist.get_world_size() if launched else 1
        if local_rank is not None:
            arguments.count("local_rank", local_rank, least=0, also="None")
        if local_rank is None:
            local_rank = environment_local_rank() if launched else 0
        if local_rank is None:
            # Ranks of one machine are numbered in the order of the world, as launchers do.
            hosts = gather_bytes(socket.gethostname().encode(), dist.group.WORLD)
            local_rank = hosts[: self.rank].count(hosts[self.rank])
        self.local_rank: int = local_rank

    def is_master(self, group: dist.ProcessGroup | None = None) -> bool:
        """Say whether this process is rank 0 of `group` (None: of the world)."""
        return (self.rank if group is None else dist.get_rank(arguments.group("group", group))) == 0

    def is_node_master(self) -> bool:
        """Say whether this process is the first one on its machine."""
        return self.local_rank == 0

    def is_last_process(self, group: dist.ProcessGroup | None = None) -> bool:
        """Say whether this process is the last rank of `group` (None: of the world)."""
        if group is None:
            return self.rank == self.world_size - 1
        return dist.get_rank(arguments.group("group", group)) == dist.get_world_size(group) - 1

    def print_on_master(self, msg: str, group: dist.ProcessGroup | None = None) -> None:
        """Print `msg` on rank 0 of `group` (None: of the world); no collective."""
        if self.is_master(group):
            print(msg, flush=True)  # noqa: T201 - printing is what was asked for

    def print_on_node_master(self, msg: str) -> None:
        """Print `msg` once per machine; no collective."""
        if self.is_node_master():
            print(msg, flush=True)  # noqa: T201 - printing is what was asked for

    @contextmanager
    def priority_execution(self, executor_rank: int = 0, group: dist.ProcessGroup | None = None) -> Iterator[None]:
        """Run the body on `executor_rank` first, then on the others (a download, then reads of its cache).

        executor_rank: a rank of the group, all ranks of which must enter.
        group: the ranks that do; None: the world.

        Cost: one broadcast of one number. If the body raises on the executor, the others raise RuntimeError instead
        of entering; if it raises on another rank, only that rank knows.
        """
        size = self.world_size if group is None else dist.get_world_size(arguments.group("group", group))
        if arguments.count("executor_rank", executor_rank, least=0) >= size:
            raise ValueError(
                f"executor_rank={executor_rank} is not a rank of this group; it must be from 0 to {size - 1}"
            )
        rank = self.rank if group is None else dist.get_rank(group)
        if rank != executor_rank:
            # The broadcast is the wait: it comes when the executor has left the body.
            if not self._broadcast_outcome(True, executor_rank, group):
                raise RuntimeError(
                    f"priority_execution: rank {executor_rank} failed in the body, so rank {rank} did not enter it; "
                    f"see the error of rank {executor_rank}"
                )
            yield
            return
        # Sent also where the body raises, so that nobody waits for a rank that is gone.
        succeeded = False
        try:
            yield
            succeeded = True
        finally:
            if size > 1:
                self._broadcast_outcome(succeeded, executor_rank, group)

    def block_all(self, group: dist.ProcessGroup | None = None) -> None:
        """Wait until every rank of `group` (None: of the world) has come here; nothing in a world of one."""
        if group is not None:
            arguments.group("group", group)
        if dist.is_available() and dist.is_initialized():
            dist.barrier(group)

    def on_master_only(
        self, group: dist.ProcessGroup | None = None
    ) -> Callable[[Callable[P, R]], Callable[P, R | None]]:
        """Decorate a function so that only rank 0 of `group` runs it; the others get None at once (no barrier)."""
        if group is not None:
            arguments.group("group", group)

        def decorate(function: Callable[P, R]) -> Callable[P, R | None]:
            arguments.function("function", function)

            @functools.wraps(function)
            def run_on_master(*args: P.args, **kwargs: P.kwargs) -> R | None:
                return function(*args, **kwargs) if self.is_master(group) else None

            return run_on_master

        return decorate

    def destroy(self) -> None:
        """Leave the process group, if there is one; afterwards `booster.launch` may be called again."""
        if dist.is_available() and dist.is_initialized():
            # A DDP model that is garbage by now must go first: its reducer meeting the end of gloo's threads aborts.
            gc.collect()
            dist.destroy_process_group()

    def _broadcast_outcome(self, succeeded: bool, executor_rank: int, group: dist.ProcessGroup | None) -> bool:
        device = torch.device("cuda" if "nccl" in dist.get_backend(group) else "cpu")
        flag = torch.tensor([float(succeeded)], dtype=torch.float32, device=device)
        dist.broadcast(flag, group=group, group_src=executor_rank)
        return bool(flag.item())
