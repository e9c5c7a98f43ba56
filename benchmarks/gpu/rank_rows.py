"""Part 8: two ranks of gloo that share the card: every precision on every way to share the work, next to one process."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, partial
from importlib.util import find_spec
from typing import Any

from benchmarks.gpu.row import Found, Place, Row

COLUMNS = ("ZeRO-2", "FSDP", "DDP", "TP", "ZeRO-1")
NAMES = ("fp16", "bf16_naive", "bf16", "fp32", "fp16_naive", "fp16_apex O2", "fp8", "int8")


def rows(part: int, place: Place) -> list[Row]:
    """The rows of this part; kernels on shards are among those of part 1."""
    modes = ("all_to_all", "ring_attn", "experts")
    return [
        *(Row(f"sequences and experts, {mode}, bf16", partial(_divided, mode), 15) for mode in modes),
        *(Row(f"{column}, {name}", partial(_cell, name, column), 8) for column in COLUMNS for name in NAMES),
    ]


def kernel_rows() -> Iterator[Row]:
    """Kernels next to torch on shards, which part 1 has too."""
    if find_spec("triton") is None:
        return
    for column in ("ZeRO-1", "ZeRO-2", "FSDP"):
        for name in ("fp16", "bf16_naive"):
            judges = {"shards": None}
            yield Row(f"kernels on {column}, {name}", partial(_kernels, name, column), 30, judges=judges)


@cache
def _pool() -> Any:
    from pool import RankPool

    return RankPool(2)


def _on_ranks(rank: int, world_size: int, device: str, name: str, column: str, fused: Any) -> Any:
    import logging
    import warnings

    import matrix

    warnings.simplefilter("ignore")
    logging.getLogger("booster").setLevel(logging.ERROR)
    steps = {"steps": matrix.LOW_STEPS, "overflows": matrix.LOW_OVERFLOWS} if name in matrix.LOW else {}
    trace = matrix.train(name, column, **steps, fused_optimizer=fused, device=device)
    trace.weights = {key: value.cpu() for key, value in trace.weights.items()}
    return trace


def _cell(name: str, column: str, place: Place) -> Found:
    import matrix

    traces = _pool().run(_on_ranks, place.device, name, column, True)
    splits = 2 if column != "TP" and (name in matrix.LOW or name.endswith("naive")) else 1
    return _like(traces, _alone(name, splits, place.device), matrix.TOLERANCE[name])


@cache
def _alone(name: str, splits: int, device: str) -> Any:
    import matrix

    steps = {"steps": matrix.LOW_STEPS, "overflows": matrix.LOW_OVERFLOWS} if name in matrix.LOW else {}
    return matrix.train(name, "single", **steps, num_splits=splits, device=device)


def _on_divided(rank: int, world_size: int, device: str, mode: str) -> Any:
    """Ranks that share sequences, or the experts of a model; one process has them whole."""
    import experts
    import sequences

    from booster.plugin import SingleDevice, TorchFSDPPlugin

    if mode != "experts":
        options = {"sp_size": 2, "sequence_parallelism_mode": mode}
        trace = sequences.train(rank, world_size, "gqa", "bf16", device=device, **options)
        trace.weights = {key: value.cpu() for key, value in trace.weights.items()}
        return trace
    plugin = SingleDevice() if world_size == 1 else TorchFSDPPlugin(ep_size=2)
    losses, norms, applied, _ = experts.results(plugin, "bf16", device=device)
    return sequences.Trace(losses, norms, applied)


def _divided(mode: str, place: Place) -> Found:
    import matrix

    alone = _on_divided(0, 1, place.device, mode)
    return _like(_pool().run(_on_divided, place.device, mode), alone, matrix.TOLERANCE["bf16"])


def _kernels(name: str, column: str, place: Place) -> Found:
    ways = [_pool().run(_on_ranks, place.device, name, column, fused) for fused in (False, "triton")]
    import matrix

    return _like(ways[1], ways[0][0], matrix.TOLERANCE[name])


def _like(traces: Any, reference: Any, tolerance: float) -> Found:
    """Whether ranks agree with each other, and lose what one process does."""
    first = traces[0]
    alike = all(trace.applied == first.applied and trace.scales == first.scales for trace in traces)
    off = max(abs(one - other) for one, other in zip(first.losses, reference.losses, strict=True))
    why = [
        *["ranks disagree"] * (not alike),
        *[f"steps {first.applied}, one process {reference.applied}"] * (first.applied != reference.applied),
        *[f"losses are {off:.1g} apart, {tolerance:g} is tolerated"] * (not off <= tolerance),
        *["weights are not finite"] * (not all(trace.sound for trace in traces)),
    ]
    return {"right": not why, **({"why": "; ".join(why)} if why else {"note": f"losses {off:.1g} apart"})}
