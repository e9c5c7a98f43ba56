"""Parts 2, 3 and 5: ways to make a step, timed beside each other in the same rounds."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch
from torch.nn import functional as F

from benchmarks.gpu import card
from benchmarks.gpu.card import Step
from benchmarks.gpu.models import GPT, ViT, gpt2_shapes, tiny
from benchmarks.gpu.row import Found, Place, Row
from benchmarks.gpu.ways import NAIVE, Tiny, Update, captured, torch_graph, trained
from benchmarks.gpu.worker import words

Make = Callable[[], Step]
OURS, TRITON = "by torch", "by Triton"
BY: dict[str, Any] = {OURS: True, TRITON: "triton"}
FORMS = {
    "bf16_naive, float32 masters": "weights Float32Master",
    "bf16_naive, split": "weights SplitBFloat16",
    "bf16_naive, split24": "weights Split24BFloat16",
    "bf16_naive, Kahan": "weights Kahan",
    "bf16_naive, stochastic": "weights Stochastic",
    "split24 + 8-bit states": "states 8bit",
}
"""The switch that the time of a precision decides."""


def rows(part: int, place: Place) -> list[Row]:
    """The rows of a part of these."""
    return list({2: _updates, 3: _tiny_steps, 5: _graphs}[part](place))


def measured(ways: Mapping[str, Make], place: Place, *, apart: bool = False, goals: Any = ()) -> Found:
    """Time `ways`, and count their launches and waits; what cannot be made is left out with the reason.

    apart: one is on the card at a time, and the peak of its memory is measured, GiB.
    """
    found: Found = {"ways": {}, "left": {}, "launches": {}, "waits": {}, "peak": {}, "goals": list(goals)}
    made: dict[str, Step] = {}

    def time_those() -> None:
        for name, values in card.timed(made, place).items():
            found["ways"][name] = card.median(values)
            found["launches"][name], found["waits"][name] = (
                of(made[name], place) for of in (card.launches, card.waits)
            )

    for name, make in ways.items():
        try:
            if place.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            made[name] = make()
            if apart:
                time_those()
                if place.device == "cuda":
                    found["peak"][name] = round(torch.cuda.max_memory_allocated() / 2**30, 2)
        except (ImportError, ValueError, NotImplementedError, AttributeError) as error:  # refused by name, or a peer
            found["left"][name] = f"{type(error).__name__}: {' '.join(str(error).split())[:160]}"
            made.pop(name, None)
        except Exception as error:  # which costs this way, and no other
            found["left"][name], found["error"] = words(error), f"{name}: {words(error)}"
            made.pop(name, None)
        if apart:
            made.clear()
    if made:
        time_those()
    return {key: value for key, value in found.items() if value}


def _row(name: str, ways: Mapping[str, Make], *, goals: Any = (), judges: Any = None, **row: Any) -> Row:
    return Row(name, partial(measured, ways, goals=goals), judges=judges or {}, **row)


def peers(*packages: str) -> list[str]:
    """Those of `packages` that are installed."""
    return [package for package in packages if find_spec(package) is not None]


# ---------------------------------------------------------------------- the update alone


def _updates(place: Place) -> Iterator[Row]:
    shapes = gpt2_shapes(place.small)
    update, numel = Update(place.device, shapes), sum(torch.Size(shape).numel() for shape in shapes)
    fused = "torch fused, clip"
    base: dict[str, Make] = {fused: partial(update.by_hand, fused=True)}
    yield Row("the copy's floor", partial(_floor, numel), 10)
    yield _row("A/A", {**base, "again": base[fused]}, seconds=10)

    def ours(name: str, precision: Any, judges: str = "", **options: Any) -> Row:
        ways = base | {way: partial(update.ours, precision, fused_optimizer=how, **options) for way, how in BY.items()}
        goals = [(TRITON, fused, 1.0)]
        decided = {judges: (TRITON, OURS)} if judges else {}
        return Row(name, partial(_with_floor, ways, goals), 25, gib=9, judges=decided)

    yield ours("fp32", "fp32", "weights float32")
    for name in FORMS:
        yield ours(name, NAIVE[name], FORMS[name])
    for name in ("bf16", "fp16"):
        yield ours(name, name)
    yield ours("fp32, 8-bit states", "fp32", "weights Same", states="8bit")
    yield ours("fp16_naive", NAIVE["fp16_naive"], "weights SplitFloat16")
    yield _row("torch's own", {
        **base,
        "foreach": update.by_hand,
        "fused, no clip": partial(update.by_hand, fused=True, clip=False),
        "fp16 GradScaler, fused": partial(update.by_hand, fused=True, scaled=True),
    }, seconds=15, gib=9)  # fmt: skip
    for package, module, name in (
        ("bitsandbytes", "bitsandbytes.optim", "AdamW8bit"),
        ("torchao", "torchao.optim", "AdamW8bit"),
        ("flashoptim", "flashoptim", "FlashAdamW"),
    ):
        yield _row(
            f"{package} {name}",
            {**base, package: partial(update.peer, module, name, package == "flashoptim")},
            seconds=30,
        )


def _floor(numel: int, place: Place) -> Found:
    rate = card.bandwidth(place)
    return {"note": f"a copy moves {rate / 1e12:.2f} TB/s; 32 bytes a parameter", "floor": 32 * numel / rate * 1e6}


def _with_floor(ways: Mapping[str, Make], goals: Any, place: Place) -> Found:
    moved: list[int] = []

    def counted(make: Make) -> Step:
        step = make()
        moved.append(getattr(step, "bytes_of_a_step", 0))
        return step

    found = measured({name: partial(counted, make) for name, make in ways.items()}, place, goals=goals)
    return {**found, **({"floor": max(moved) / card.bandwidth(place) * 1e6} if any(moved) else {})}


# ---------------------------------------------------------------------- the host's time


def _tiny_steps(place: Place) -> Iterator[Row]:
    step = Tiny(place.device)
    for precision in ("fp32", "bf16", "fp16"):
        ways: dict[str, Make] = {"torch fused": partial(step.by_hand, precision)}
        ways["again"] = ways["torch fused"]
        ways |= {way: partial(step.ours, precision, fused_optimizer=how) for way, how in BY.items()}
        if peers("accelerate"):
            ways["Accelerate"] = partial(step.accelerate, precision)
        if peers("lightning"):
            ways["Fabric"] = partial(step.fabric, precision)
        ways["torch in a graph"] = lambda p=precision: torch_graph(
            tiny(place.device), F.cross_entropy, step.x, step.y, p
        )
        yield _row(precision, ways, goals=[(TRITON, "torch fused", 1.0)], seconds=25)
    for name, made in NAIVE.items():
        ways = {"torch fused": partial(step.by_hand, "bf16")}
        ways |= {way: partial(step.ours, made, fused_optimizer=how) for way, how in BY.items()}
        yield _row(name, ways, goals=[(TRITON, "torch fused", 1.25)], seconds=20)
    released = {how: partial(step.ours, "fp32", fused_optimizer=BY[how], release_gradients="exact") for how in BY}
    judged = {"release": (TRITON, OURS)}
    yield _row("fp32, released", {"torch fused": partial(step.by_hand, "fp32"), **released}, judges=judged, seconds=15)


# ---------------------------------------------------------------------- graphs


def _graphs(place: Place) -> Iterator[Row]:
    step = Tiny(place.device)
    for precision in ("fp32", "bf16", "fp16"):
        yield _graph_row(
            f"4 x Linear(64), {precision}", lambda: tiny(place.device), F.cross_entropy, step.x, step.y, precision
        )
    for name in ("bf16_naive, float32 masters", "bf16_naive, split"):
        ways = {
            "torch in a graph": lambda: torch_graph(tiny(place.device), F.cross_entropy, step.x, step.y, "bf16"),
            "captured": lambda made=NAIVE[name]: captured(tiny(place.device), F.cross_entropy, step.x, step.y, made),
        }
        yield _row(f"4 x Linear(64), {name}", ways, goals=[("captured", "torch in a graph", 1.25)], seconds=15)
    for batch in (1, 8):
        for model in (ViT, GPT):
            name = "ViT-S/16" if model is ViT else "GPT-2 124M"
            make, criterion, x, y = whole(model, batch, place)
            for precision in ("bf16", "fp16"):
                yield _graph_row(f"{name}, batch {batch}, {precision}", make, criterion, x, y, precision, gib=24)


def whole(model: Any, batch: int, place: Place) -> tuple[Callable[[], Any], Any, torch.Tensor, torch.Tensor]:
    """What makes a ViT-S/16 or a GPT-2 124M, its criterion, and a batch."""
    torch.manual_seed(0)
    if model is GPT:
        size = (32, 2, 2, 16, 64) if place.small else (768, 12, 12, 1024, 50304)
        x, y = (torch.randint(0, size[4], (batch, size[3])) for _ in range(2))
    else:
        size = (32, 2, 2, 32, 10) if place.small else (384, 12, 6, 224, 1000)
        x, y = torch.randn(batch, 3, size[3], size[3]), torch.randint(0, size[4], (batch,))
    x, y = x.to(place.device), y.to(place.device)
    return functools.partial(_seeded, model, size, place.device), of_words if model is GPT else F.cross_entropy, x, y


def _seeded(model: Any, size: tuple[int, ...], device: str) -> Any:
    torch.manual_seed(0)
    return model(*size).to(device)


def of_words(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out.flatten(0, 1), y.flatten())


def _graph_row(
    name: str, make: Any, criterion: Any, x: torch.Tensor, y: torch.Tensor, precision: str, **row: Any
) -> Row:
    ways: dict[str, Make] = {
        "torch in a graph": lambda: torch_graph(make(), criterion, x, y, precision),
        "again": lambda: torch_graph(make(), criterion, x, y, precision),
        "captured": lambda: captured(make(), criterion, x, y, precision),
        "captured, torch's kernels": lambda: captured(make(), criterion, x, y, precision, fused_optimizer=True),
        "ours, eager": lambda: captured(make(), criterion, x, y, precision, capture=False),
    }
    if precision != "fp16":
        ways["torch, eager"] = lambda: trained(make(), criterion, x, y, precision)
    measure = partial(measured, ways, apart=True, goals=[("captured", "torch in a graph", 1.1)])
    return Row(name, measure, 25, **row)
