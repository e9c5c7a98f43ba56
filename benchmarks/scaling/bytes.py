"""What small jobs hold and send, and the highest point of their step, beside what the formulas of scaling say.

Messages are counted where they are handed to the process group, by a dispatch mode on the rank itself: it sees DDP's reducer,
`fully_shard`, tensor parallelism and pipelines alike. Memory is that of every storage which came with the job and is alive
after a step, whoever holds it. `socket_bytes` reads the kernel's own count of what the rank's connections sent.
"""

from __future__ import annotations

import dataclasses
import gc
import os
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, get_args

import torch
import torch.distributed as dist
from torch._subclasses import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.allocations import allocations
from benchmarks.scaling.decoder import PRECISIONS, Axis, Model, axis_shape, layer_parameters, stage_parameters
from benchmarks.scaling.formulas import Memory, held_memory, receive_buffers
from benchmarks.scaling.job import MICRO_BATCH, Case, Decoder, loss_of, make_precision, run_step
from benchmarks.scaling.moments import BUCKET, Load, Moments, step_moments
from benchmarks.scaling.plan import Plan
from benchmarks.scaling.traffic import Message, data_parallel_messages, pipeline_messages, tensor_parallel_messages
from booster import Booster
from booster.plugin.ddp.gradient_reducer import MOST_IN_FLIGHT
from booster.tensors.flat import SMALLEST_BUCKET, bucket_size

PEAK = 0.05  # of a peak, by which formula and record may differ: what single operations take for themselves
NOISE = 512  # bytes; shorter messages are flags, losses and norms
Messages = dict[tuple[str, str], int]  # (kind, axis) -> bytes


# ---- counting


class Counting(TorchDispatchMode):
    """Counts what this rank hands to process groups while it is active: (kind, ranks of the group) -> bytes.

    Bytes are those of the whole tensor, as in `traffic.Message`. short: messages under `NOISE`, left out.
    buffers: storages that all-reduces worked in, and, unless `frees_gradients`, that gradients were copied from to be sent.
    """

    def __init__(self, frees_gradients: bool = False) -> None:
        super().__init__()
        self._frees_gradients = frees_gradients
        self.bytes: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self.short = 0
        self.buffers: list[torch.UntypedStorage] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace in ("c10d", "_c10d_functional"):
            self._count(func.overloadpacket.__name__, args)
        elif func is torch.ops.aten.mul.out and not self._frees_gradients:  # gradients on their way into what is sent
            self.buffers.append(args[0].untyped_storage())
        return func(*args, **(kwargs or {}))

    def _count(self, op: str, args: Any) -> None:
        if op in _READERS:
            kind, size = _READERS[op][0], _READERS[op][1](args)
            ranks = tuple(dist.get_process_group_ranks(next(g for g in map(_group, args) if g is not None)))
            if size < NOISE:
                self.short += 1
            elif len(ranks) > 1:
                self.bytes[kind, ranks] += size
            if op == "allreduce_":
                self.buffers += [tensor.untyped_storage() for tensor in args[0]]
        elif op not in _SILENT:
            raise RuntimeError(f"{op} is a message that is not counted yet")


def _nbytes(tensors: Any) -> int:
    if isinstance(tensors, torch.Tensor):
        return tensors.nbytes
    return sum(map(_nbytes, tensors))


_READERS: dict[str, tuple[str, Callable[[Any], int]]] = {
    "allreduce_": ("all_reduce", lambda args: _nbytes(args[0])),
    "_allgather_base_": ("all_gather", lambda args: _nbytes(args[0])),
    "allgather_": ("all_gather", lambda args: _nbytes(args[0])),  # of pieces that differ in size
    "alltoall_base_": ("reduce_scatter", lambda args: _nbytes(args[1])),  # on CPU, by which ZeRO sums slices
    "_reduce_scatter_base_": ("reduce_scatter", lambda args: _nbytes(args[1])),
    "send": ("send", lambda args: _nbytes(args[0])),
    "all_reduce": ("all_reduce", lambda args: _nbytes(args[0])),
    "all_gather_into_tensor": ("all_gather", lambda args: _nbytes(args[0]) * args[1]),
    "reduce_scatter_tensor": ("reduce_scatter", lambda args: _nbytes(args[0])),
    "broadcast_": ("broadcast", lambda args: _nbytes(args[0])),
    "reduce_": (
        "reduce_scatter",
        lambda args: _nbytes(args[0]),
    ),  # to each rank its own slice, where these differ in size
}
_SILENT = {"recv_", "wait_tensor", "_wrap_tensor_autograd", "barrier"}


def _group(arg: Any) -> dist.ProcessGroup | None:
    if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
        return dist.ProcessGroup.unbox(arg)
    if isinstance(arg, str) and arg not in ("sum", "avg", "max", "min"):
        return dist.distributed_c10d._resolve_process_group(arg)
    return arg if isinstance(arg, dist.ProcessGroup) else None


def by_axis(counted: Counter[tuple[str, tuple[int, ...]]], plan: Plan) -> Messages:
    """Bytes by (kind, axis), where the axis is that of `plan` whose groups have such ranks."""
    found: Messages = {}
    shapes = {axis_shape(plan, axis): axis for axis in get_args(Axis)}
    for (kind, ranks), size in counted.items():
        axis = "pp" if kind == "send" else shapes.get((len(ranks), ranks[1] - ranks[0]), str(ranks))
        found[kind, axis] = found.get((kind, axis), 0) + size
    return found


def socket_bytes() -> int | None:
    """Bytes that the TCP connections of this process have sent so far; None where the kernel does not say."""
    total = 0
    try:
        names = os.listdir("/proc/self/fd")
    except OSError:
        return None
    for name in names:
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
            with socket.socket(fileno=os.dup(int(name))) as connection:
                if connection.type != socket.SOCK_STREAM or connection.family == socket.AF_UNIX:
                    continue
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        except OSError:
            continue
        if len(info) < 208:
            return None
        total += struct.unpack_from("Q", info, 200)[0]  # tcpi_bytes_sent
    return total


def alive_storages() -> dict[int, torch.UntypedStorage]:
    """Address -> storage, of all tensors that Python knows of, and of their gradients, which it may not know yet; single
    numbers, such as step counters, are left out."""
    gc.collect()
    found = {}
    for entry in gc.get_objects():
        if issubclass(type(entry), torch.Tensor) and not isinstance(entry, FakeTensor) and entry.device.type == "cpu":
            for tensor in (entry, entry.grad if entry.is_leaf else None):
                if tensor is None or tensor.layout is not torch.strided:  # sparse ones have no storage
                    continue
                storage = _local(tensor).untyped_storage()
                if storage.nbytes() > 8:
                    found[storage.data_ptr()] = storage
    return found


def held_by_others(storages: Iterable[torch.UntypedStorage]) -> dict[int, torch.UntypedStorage]:
    """Those of `storages`, by address, that somebody outside of Python keeps too, as DDP keeps its buckets."""
    by_address: dict[int, list[torch.UntypedStorage]] = {}
    for storage in storages:
        by_address.setdefault(storage.data_ptr(), []).append(storage)
    return {a: own[0] for a, own in by_address.items() if torch._C._storage_Use_Count(own[0]._cdata) > len(own)}


def high_level(run: Callable[[], object], buffers: list[torch.UntypedStorage]) -> tuple[int, int]:
    """Bytes by which this thread's memory was higher than before, at the highest and at the end of `run`.

    gloo's threads free some of what a collective took, which the record of this thread does not tell. The collective was
    waited for, so what nobody has at the end, and was not seen to be freed, counts as freed where it was taken.
    """
    events, _ = allocations(run)
    left: dict[int, int] = {}  # address -> index of the event that nothing took back
    lost: set[int] = set()
    for index, (_, address, nbytes) in enumerate(events):
        if nbytes > 0:
            lost |= {left[address]} if address in left else set()  # what it had before is there no more
            left[address] = index
        else:
            left.pop(address, None)
    if dist.is_initialized():
        there = set(alive_storages()) | {buffer.data_ptr() for buffer in buffers}
        lost |= {index for address, index in left.items() if address not in there}
    level = highest = 0
    for index, (_, _, nbytes) in enumerate(events):
        highest = max(highest, level + nbytes)
        if index not in lost:
            level += nbytes
    return highest, level


@dataclass
class Measured:
    """weights, gradients: bytes of the parameters and their `.grad` on this rank. held: of all storages that came with the job
    and are alive after the step, gradients included. peak: the highest point of the next step, by the allocator's record."""

    weights: int
    gradients: int
    held: int
    peak: int
    messages: Messages
    short: int


def measure(case: Case) -> Measured:
    """Build the case's job on this rank, run first steps, count the next one's messages and what is held after it, and record
    another."""
    plugin = case.plugin(**case.options)
    inputs = _tokens(case)
    before = alive_storages()  # held, so that no address is used again
    booster, model, optimizer, criterion = _boost(case, plugin)
    for _ in range(3 if "tp_size" in case.options else 1):  # in which ranks that divide layers compare gradients
        run_step(booster, model, optimizer, criterion, inputs, case)
        optimizer.zero_grad()
    with Counting() as counting:
        run_step(booster, model, optimizer, criterion, inputs, case)
    known = alive_storages().keys()
    others = {address: own for address, own in held_by_others(counting.buffers).items() if address not in known}
    counting.buffers.clear()

    def alive() -> int:
        found = alive_storages() | others
        return sum(storage.nbytes() for address, storage in found.items() if address not in before)

    params = list(model.parameters())
    weights = sum(_local(param).nbytes for param in params)
    gradients = sum(_local(param.grad).nbytes for param in params if param.grad is not None)
    held = alive()
    optimizer.zero_grad()
    between = alive()
    highest, _ = high_level(lambda: run_step(booster, model, optimizer, criterion, inputs, case), list(others.values()))
    return Measured(
        weights=weights,
        gradients=gradients,
        held=held,
        peak=between + highest,
        messages=by_axis(counting.bytes, case.plan),
        short=counting.short,
    )


def measure_waiting(case: Case) -> int:
    """Bytes of gradients on this rank after the first of two micro-batches, of which only the second synchronises."""
    booster, model, optimizer, criterion = _boost(case, case.plugin(**case.options))
    inputs = _tokens(case)
    run_step(booster, model, optimizer, criterion, inputs, case)
    optimizer.zero_grad()
    before = alive_storages()
    with booster.accumulate(model, optimizer, num_micro_batches=2):
        booster.backward(criterion(model(inputs), inputs), optimizer)
        now = alive_storages()
        booster.backward(criterion(model(inputs), inputs), optimizer)
    return sum(storage.nbytes() for address, storage in now.items() if address not in before)


def _boost(case: Case, plugin: Any) -> tuple[Any, ...]:
    torch.manual_seed(0)
    options = {} if case.precision == "fp32" else {"sdpa_fp32": False}  # which keeps half activations half on a CPU
    booster = Booster("cpu", make_precision(case.precision, **options), plugin)
    net = Decoder(case.model, checkpointed=case.checkpointed)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    model, boosted, criterion, *_ = booster.boost(net, optimizer, loss_of)
    return booster, model, boosted, criterion


def _tokens(case: Case) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = (case.num_micro_batches * MICRO_BATCH, case.model.sequence)
    return torch.randint(case.model.vocabulary, shape, generator=generator)


def measure_activations(case: Case, model: Model) -> int:
    """Bytes that autograd keeps for one layer of `model` on this rank: the difference of three layers to two."""
    two, three = (_saved_bytes(case, dataclasses.replace(model, layers=layers)) for layers in (2, 3))
    return three - two


def _saved_bytes(case: Case, model: Model) -> int:
    torch.manual_seed(0)
    net = Decoder(model)
    booster = Booster("cpu", make_precision(case.precision, sdpa_fp32=False), case.plugin(**case.options))
    boosted, *_ = booster.boost(net)
    tokens = torch.randint(model.vocabulary, (MICRO_BATCH, model.sequence))
    kept: dict[int, torch.UntypedStorage] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = _local(tensor).untyped_storage()
        kept[storage.data_ptr()] = storage
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        output = boosted(tokens)
    weights = {_local(param).untyped_storage().data_ptr() for param in net.parameters()}
    total = sum(storage.nbytes() for address, storage in kept.items() if address not in weights)
    output.sum().backward()
    return total


def _local(tensor: Any) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


# ---- what the formulas say of a case


def expected_memory(case: Case, stage: int = 0) -> Memory:
    precision = PRECISIONS[case.precision]
    memory = held_memory(stage_parameters(case.model, case.plan, stage), case.plan, precision)
    received = receive_buffers(case.model, case.plan, precision, case.tokens, stage)
    return dataclasses.replace(memory, buffers=memory.buffers + received + kept_scratch(case, stage))


def kept_scratch(case: Case, stage: int = 0) -> float:
    """Return the bytes of a small model's scratch for masters, which stays from step to step on a CPU."""
    precision = PRECISIONS[case.precision]
    parameters = stage_parameters(case.model, case.plan, stage) / case.plan.state_shards
    size = bucket_size(int(parameters), torch.device("cpu"))
    if size > SMALLEST_BUCKET:
        return 0
    return min(size, parameters) * (precision.shard_scratch if case.plan.engine == "fully_shard" else precision.scratch)


def expected_moments(case: Case, stage: int = 0) -> Moments:
    load = Load(
        MICRO_BATCH,
        case.num_micro_batches,
        checkpointed=case.checkpointed,
        accumulates=case.accumulates,
        bucket_bytes=case.options.get("bucket_cap_mb", BUCKET / 2**20) * 2**20,
        device="cpu",
    )
    return step_moments(case.model, case.plan, PRECISIONS[case.precision], load, stage)


def on_cpu(case: Case, moments: Moments, stage: int = 0) -> Moments:
    """Add what only a CPU takes: gloo's copies of what it gathers and reduces, the receiving half of ZeRO's all-to-all, and
    split weights that are widened before they are added to.

    gloo frees its copies in its own threads, so that of several buckets not all need be there at one time.
    """
    plan, precision = case.plan, PRECISIONS[case.precision]
    parameters = stage_parameters(case.model, plan, stage)
    more = dict.fromkeys(("begins", "gathers", "reduces", "ends", "update"), 0.0)
    bucket = bucket_size(int(parameters / plan.state_shards), torch.device("cpu"))
    kept = kept_scratch(case, stage)
    if case.precision == "naive, split":
        more["update"] = 4 * bucket
    if plan.engine == "replicated" and plan.state_shards > 1:  # gathered when scratch that is not kept is free again
        freed = 0 if kept else precision.scratch * bucket
        more["update"] = max(more["update"], parameters * precision.weight - freed)
    if plan.engine == "replicated" and plan.gradient_shards > 1:
        whole, in_flight = (
            parameters * precision.gradient,
            MOST_IN_FLIGHT * case.options.get("bucket_cap_mb", BUCKET / 2**20) * 2**20,
        )
        filled = 0 if plan.keeps_buckets else in_flight
        more["reduces"] = more["ends"] = max(0, min(in_flight, whole - filled))
    if (
        plan.engine == "fully_shard"
        and plan.weight_shards > 1
        and plan.pp == 1
        and (case.num_micro_batches == 1 or not case.accumulates)
    ):
        layer = case.model.layer_matrices / plan.tp + 2 * case.model.hidden
        more["reduces"] = layer * (precision.reduce - precision.gather)  # instead of the gradients before their cast
    for name in more.keys() - {"update"}:
        more[name] += kept
    return dataclasses.replace(moments, **{name: getattr(moments, name) + size for name, size in more.items()})


def expected_messages(case: Case, stage: int = 0) -> Messages:
    plan, precision = case.plan, PRECISIONS[case.precision]
    parameters = stage_parameters(case.model, plan, stage)
    gathers = 1 if plan.pp > 1 else case.num_micro_batches  # a pipeline keeps weights until its last micro-batch
    messages: Iterable[Message] = (
        *data_parallel_messages(
            plan,
            precision,
            parameters,
            parameters - layer_parameters(case.model, plan),
            gathers,
            accumulate=case.accumulates,
        ),
        *tensor_parallel_messages(
            case.model,
            plan,
            precision,
            case.tokens,
            stage=stage,
            accumulated=case.num_micro_batches > 1,
            checkpointed=case.checkpointed,
        ),
        *pipeline_messages(case.model, plan, precision, case.tokens, stage),
    )
    found: Messages = {}
    for message in messages:
        if message.size:
            found[message.kind, message.axis] = found.get((message.kind, message.axis), 0) + round(message.size)
    return found


# ---- the check


def check_case(case: Case) -> Measured:
    """Measure `case` on this rank and compare it with the formulas. Raises AssertionError where they differ.

    Messages must agree to the byte. Held memory may exceed the formula by flags: under 8 bytes a parameter tensor. The peak
    must lie between the formula and that on CPU, within `PEAK` of either.
    """
    stage = dist.get_rank() // (dist.get_world_size() // case.plan.pp)
    measured, expected = measure(case), expected_memory(case, stage)
    _compare(case, "weights", measured.weights, expected.weights)
    if case.plan.engine == "fully_shard" or case.plan.gradient_shards == 1:  # ZeRO-2 keeps its part elsewhere
        _compare(case, "gradients", measured.gradients, expected.gradients)
    drawn_by = 2 * torch.get_rng_state().nbytes if case.plan.tp > 1 else 0  # by ranks that divide layers, and their own
    _compare(case, "held", measured.held, expected.held, slack=8 * (9 * case.model.layers + 3) + drawn_by)
    _compare(case, "messages", measured.messages, expected_messages(case, stage))
    moments = expected_moments(case, stage)
    low, high = moments.peak, on_cpu(case, moments, stage).peak
    if not low * (1 - PEAK) <= measured.peak <= high * (1 + PEAK):
        raise AssertionError(
            f"{case.name}, {case.precision}: peak {measured.peak}, by the formula {low:.0f}, on CPU {high:.0f}"
        )
    return measured


def _compare(case: Case, what: str, measured: Any, formula: Any, slack: int = 0) -> None:
    if measured != formula and not (slack and 0 <= measured - formula <= slack):
        raise AssertionError(f"{case.name}, {case.precision}: {what} {measured}, by the formula {formula}")
