"""What a step of each parallelism costs beside raw torch: CPU time, bytes sent, memory, collectives and reads on the host."""

from __future__ import annotations

import gc
from collections.abc import Callable
from itertools import pairwise
from statistics import median
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.allocations import alive, allocations
from benchmarks.parallel.loops import GPT, TINY, Case, Loop, cases, pipeline
from benchmarks.scaling.bytes import NOISE, socket_bytes
from benchmarks.scaling.decoder import Model
from benchmarks.timing import clock, interleave, ratio
from benchmarks.waits import HostReads, as_on_a_gpu
from booster.common.torch_internals.tensor_internals import TorchDispatchMode
from booster.interface.optimizer import OptimizerWrapper

Say = Callable[[str], None]
BATCH = 2
_NO_MESSAGES = {"wait_tensor", "_wrap_tensor_autograd", "barrier", "recv_", "monitored_barrier_"}


def over_ranks(numbers: list[float]) -> list[float]:
    """The sum over ranks of each of `numbers`."""
    total = torch.tensor(numbers, dtype=torch.float64)
    dist.all_reduce(total)
    return total.tolist()


def heads(*names: str) -> str:
    """The first two lines of a table."""
    return f"| {' | '.join(names)} |\n{'|---' * len(names)}|"


# ---- time


def times(say: Say, rounds: int, precision: str, only: set[str]) -> None:
    say(f"\nCPU time of a step over both ranks, {precision}: ratio to raw torch with fused kernels; {rounds} rounds\n")
    say(heads("", "GPT, 8.7 M: raw ms", "raw again", "booster", "tiny layers: raw ms", "raw again", "booster"))
    for name, case in cases(only).items():
        cells = []
        for size in (GPT, TINY):
            seconds = timed(case, size, precision, rounds if size is GPT else 2 * rounds)
            raw = sorted(seconds["raw"])[len(seconds["raw"]) // 2] * 1e3
            cells += [f"{raw:.0f}", *(f"{ratio(seconds, way, 'raw'):.3f}" for way in ("again", "booster"))]
        say(f"| {name} | {' | '.join(cells)} |")


def timed(case: Case, size: Model, precision: str, rounds: int) -> dict[str, list[float]]:
    """Seconds of each way in each round, summed over ranks."""
    made = {"raw": case.raw, "again": case.raw, "booster": case.booster}
    loops: dict[str, Loop] = {}
    for name, make in made.items():
        torch.manual_seed(0)
        loops[name] = make(size, BATCH, precision)

    def run(loop: Loop) -> None:
        dist.barrier()
        loop.run()

    seconds = interleave({name: lambda loop=loop: run(loop) for name, loop in loops.items()}, rounds)  # type: ignore[misc]
    found = {name: over_ranks(each) for name, each in seconds.items()}
    loops.clear()
    gc.collect()
    return found


def phases(say: Say, rounds: int, precision: str, only: set[str]) -> None:
    say(
        f"\nOf tiny layers, {precision}: CPU ms over both ranks of raw torch, and booster's ratio to it; {rounds} rounds\n"
    )
    parts = ("passes", "clip", "step", "zero_grad")
    say(heads("", *(title for part in parts for title in (f"{part}: raw ms", "booster"))))
    for name, case in cases(only).items():
        seconds: dict[str, list[list[float]]] = {"raw": [], "booster": []}
        loops = {"raw": case.raw(TINY, BATCH, precision), "booster": case.booster(TINY, BATCH, precision)}

        def run(way: str, loops: dict[str, Loop] = loops, seconds: Any = seconds) -> None:
            dist.barrier()
            times = [clock()]
            for part in loops[way].parts():
                part()
                times.append(clock())
            seconds[way].append([after - before for before, after in pairwise(times)])

        interleave({way: lambda way=way: run(way) for way in loops}, rounds)  # type: ignore[misc]
        found = {
            way: [over_ranks(list(part)) for part in zip(*each[-rounds:], strict=True)] for way, each in seconds.items()
        }
        cells = []
        for raw, ours in zip(found["raw"], found["booster"], strict=True):
            cells += [f"{median(raw) * 1e3:.1f}", f"{ratio({'a': ours, 'b': raw}, 'a', 'b'):.2f}"]
        say(f"| {name} | {' | '.join(cells)} |")


def micro_batches(say: Say, rounds: int, precision: str) -> None:
    few, many = 4, 16
    say(
        f"\nA pipeline of tiny layers, {precision}: CPU ms over both ranks, from steps of {few} and of {many} micro-batches;"
    )
    say(f"{rounds} rounds\n")
    say(heads("", "raw ms", "raw again", "booster"))
    loops: dict[tuple[str, int], Loop] = {}
    for num in (few, many):
        case = pipeline(num)
        for name, make in (("raw", case.raw), ("again", case.raw), ("booster", case.booster)):
            torch.manual_seed(0)
            loops[name, num] = make(TINY, BATCH, precision)

    def run(loop: Loop) -> None:
        dist.barrier()
        loop.run()

    keyed = {f"{name} {num}": lambda loop=loop: run(loop) for (name, num), loop in loops.items()}  # type: ignore[misc]
    found = {name: over_ranks(each) for name, each in interleave(keyed, rounds).items()}
    ways = ("raw", "again", "booster")
    one = {
        way: [(b - a) / (many - few) for a, b in zip(found[f"{way} {few}"], found[f"{way} {many}"], strict=True)]
        for way in ways
    }
    cells = [f"{median(one['raw']) * 1e3:.2f}", *(f"{ratio(one, way, 'raw'):.3f}" for way in ways[1:])]
    say(f"| one more micro-batch | {' | '.join(cells)} |")


# ---- bytes, collectives and reads


class Calls(TorchDispatchMode):
    """Counts what this rank hands to process groups: all calls, those under 512 bytes, and by name those to itself alone."""

    def __init__(self) -> None:
        super().__init__()
        self.large = self.small = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if func.namespace in ("c10d", "_c10d_functional") and name not in _NO_MESSAGES:
            size = sum(_bytes(arg) for arg in args[:2] if not isinstance(arg, (str, int)))
            self.small += size < NOISE
            self.large += size >= NOISE
        return func(*args, **(kwargs or {}))


def _bytes(arg: Any) -> int:
    if isinstance(arg, torch.Tensor):
        return arg.nbytes
    return max(map(_bytes, arg), default=0) if isinstance(arg, (list, tuple)) else 0


def messages(say: Say, precision: str, only: set[str]) -> None:
    say(
        f"\nA warm step with a clip, {precision}, rank 0: bytes sent per parameter (the kernel's count), collectives of 512"
    )
    say("bytes or more, small ones, and reads of numbers on the host in clip and step. device: as decided on a GPU\n")
    small = ("small: raw", "booster", "device", "reads: raw", "booster", "device")
    say(heads("", "bytes: raw", "booster", "calls: raw", "booster", *small))
    for name, case in cases(only).items():
        raw, ours = counted(case.raw, precision), counted(case.booster, precision)
        with as_on_a_gpu():
            device = counted(case.booster, precision)
        cells = [f"{each['bytes']:.2f}" for each in (raw, ours)]
        cells += [f"{each['large']}" for each in (raw, ours)]
        cells += [f"{each[kind]}" for kind in ("small", "reads") for each in (raw, ours, device)]
        say(f"| {name} | {' | '.join(cells)} |")


def counted(make: Callable[[Model, int, str], Loop], precision: str) -> dict[str, Any]:
    torch.manual_seed(0)
    loop = make(GPT, BATCH, precision)
    for _ in range(2):
        loop.run()
    dist.barrier()
    before = socket_bytes() or 0
    loop.run()
    dist.barrier()
    sent = (socket_bytes() or 0) - before
    with Calls() as calls:
        loop.passes()
        if isinstance(loop.optimizer, OptimizerWrapper):
            loop.optimizer.sync()  # of the step before, of which a copy is on its way since then
        with HostReads() as reads:
            loop.clip()
            loop.optimizer.step()
    loop.optimizer.zero_grad()
    found = {"large": calls.large, "small": calls.small, "reads": sum(reads.found.values())}
    return {"bytes": sent / GPT.parameters, **found}


# ---- memory


def memory(say: Say, precisions: list[str], only: set[str]) -> None:
    say(
        "\nBytes per parameter of the whole model on rank 0, by the allocator's events since before the model was made:"
    )
    say("held between steps, held with gradients after a step, and the highest within a step\n")
    say(heads("", "between: raw", "booster", "with gradients: raw", "booster", "peak: raw", "booster", "precision"))
    for name, case in cases(only).items():
        for precision in precisions:
            raw, ours = weighed(case.raw, precision), weighed(case.booster, precision)
            cells = " | ".join(f"{a:.2f} | {b:.2f}" for a, b in zip(raw, ours, strict=True))
            say(f"| {name} | {cells} | {case.precision(precision)} |")


def weighed(make: Callable[[Model, int, str], Loop], precision: str) -> tuple[float, float, float]:
    gc.collect()
    alive()
    kept: list[Loop] = []

    def build() -> None:
        torch.manual_seed(0)
        kept.append(make(GPT, BATCH, precision))
        for _ in range(2):
            kept[0].run()
        gc.collect()

    between = sum(nbytes for _, _, nbytes in allocations(build)[0])
    events, _ = allocations(kept[0].step)
    level = highest = between
    for _, _, nbytes in events:
        level += nbytes
        highest = max(highest, level)
    kept[0].optimizer.zero_grad()
    return between / GPT.parameters, level / GPT.parameters, highest / GPT.parameters
