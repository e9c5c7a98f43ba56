"""Part 6: memory of a step beside its estimate."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch

from benchmarks.allocations import high_water
from benchmarks.estimates import PRECISIONS
from benchmarks.gpu.models import GPT, ViT
from benchmarks.gpu.row import Found, Place, Row
from benchmarks.gpu.timed_rows import whole
from booster import Booster
from booster.memory import estimate

OFF = 0.1  # of the allocator's record
NAMES = ("bf16", "fp32", "fp16", "bf16_naive", "seven bytes", "fp8")


def rows(part: int, place: Place) -> list[Row]:
    """The rows of this part."""
    return list(_rows())


def _rows() -> Iterator[Row]:
    for model, title in ((GPT, "GPT-2 124M"), (ViT, "ViT-S/16")):
        for precision in NAMES:
            yield Row(f"{title}, {precision}", partial(_beside, model, precision, {}), 20, gib=24)
        yield Row(
            f"{title}, bf16, released", partial(_beside, model, "bf16", {"release_gradients": "exact"}), 20, gib=24
        )


def _beside(model: Any, precision: str, options: dict[str, Any], place: Place) -> Found:
    make, criterion, x, y = whole(model, 8, place)
    if place.small:  # on a CPU, where memory of small models is all workspaces
        make = partial(model, *((128, 4, 4, 64, 512) if model is GPT else (192, 3, 3, 64, 10)))
        x = torch.randint(0, 512, (8, 64)) if model is GPT else torch.randn(8, 3, 64, 64)
        y = torch.randint(0, 512, (8, 64)) if model is GPT else torch.randint(0, 10, (8,))
    fp8: Any = {"fp8": "fp8"} if place.device == "cuda" else {}
    chosen = fp8.get(precision) or PRECISIONS[precision]()
    net = make()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    said = estimate(net, optimizer, (x, y), criterion, precision=chosen, device=place.device, **options)
    kept: list[Any] = []

    def step() -> None:
        booster, boosted, optimizer, loss_of = kept
        booster.backward(loss_of(boosted(x), y), optimizer)
        optimizer.step()

    def begin() -> None:
        booster = Booster(place.device, fp8.get(precision) or PRECISIONS[precision](), **options)
        net = make()
        boosted, optimizer, loss_of, *_ = booster.boost(net, torch.optim.AdamW(net.parameters(), lr=1e-4), criterion)
        kept.extend([booster, boosted, optimizer, loss_of])
        for _ in range(2):
            step()
            optimizer.zero_grad()
        step()

    del net, optimizer
    gc.collect()
    for dtype in (
        (torch.float32, torch.bfloat16) if place.device == "cuda" else ()
    ):  # what libraries keep for themselves
        ones = torch.ones(64, 64, device=place.device, dtype=dtype, requires_grad=True)
        (ones @ ones).sum().backward()
    _, held = high_water(begin, place.device)
    batch = sum(each.nbytes for each in (x, y))  # which was there before
    _, freed = high_water(kept[2].zero_grad, place.device)
    highest, _ = high_water(step, place.device)
    held, peak = held + batch, held + batch + freed + highest
    off = said.peak / peak - 1, said.held / held - 1
    mib = 2**20
    note = f"peak {peak / mib:,.0f} MiB, estimate {off[0]:+.1%}; held {held / mib:,.0f} MiB, estimate {off[1]:+.1%}"
    right = all(abs(each) <= OFF for each in off)
    return {"right": right, "note": note, **({} if right else {"why": f"more than {OFF:.0%} off"})}
