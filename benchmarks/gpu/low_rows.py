"""Parts 4 and 9: low precision. Products and a whole GPT, and layers, eager and compiled, next to bfloat16 and torchao."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn

from benchmarks.gpu.card import Step
from benchmarks.gpu.models import GPT
from benchmarks.gpu.row import Found, Place, Row
from benchmarks.gpu.timed_rows import measured, whole
from benchmarks.gpu.ways import trained
from benchmarks.low_precision import PRECISIONS
from booster import Booster
from booster.number_formats.number_format import E4M3
from booster.number_formats.scaling import Scaling, scale_to

Make = Callable[[], Step]
BF16, COMPILED = "bf16", ", compiled"
LAYERS = ("fp8", "fp8 delayed", "fp8 rowwise", "fp8 blocks", "mxfp8", "nvfp4", "int8")


def rows(part: int, place: Place) -> list[Row]:
    """The rows of a part of these."""
    if part == 9:
        return list(_layers(place))
    rounded = Row("matrices rounded", _rounded, 20, judges=_SWITCHES)
    return [*_products(place), rounded, *_gpts(place)]


def compiled(module: nn.Module, place: Place) -> nn.Module:
    """Compiled, on a CPU without generating code, which takes half a minute."""
    torch.compiler.reset()  # else those of other rows count, and after eight it runs as it is
    return torch.compile(module, backend="aot_eager" if place.small else "inductor")  # type: ignore[return-value]


def _precision(name: str, place: Place) -> Any:
    return PRECISIONS[name]("auto" if place.small else False)


def _ours(
    net: nn.Module, criterion: Any, x: torch.Tensor, y: torch.Tensor, precision: Any, place: Place, fast: bool
) -> Step:
    booster = Booster(x.device, precision, clip_grad_norm=1.0)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    model, optimizer, criterion, *_ = booster.boost(compiled(net, place) if fast else net, optimizer, criterion)

    def step() -> None:
        booster.backward(criterion(model(x), y), optimizer)
        optimizer.step()
        optimizer.zero_grad()

    return step


def _torchao(net: nn.Module, **options: Any) -> nn.Module:
    from torchao.float8 import convert_to_float8_training

    return convert_to_float8_training(net, **options)  # type: ignore[no-any-return]


def _beside(
    title: str, make: Any, criterion: Any, x: Any, y: Any, names: Any, place: Place, fast: bool, **row: Any
) -> Iterator[Row]:
    """Each way in its own row, beside bfloat16 by hand: one that takes long to compile costs no other."""
    wrap = partial(compiled, place=place) if fast else lambda net: net
    hand = f"{BF16} by hand"
    base: dict[str, Make] = {hand: lambda: trained(wrap(make()), criterion, x, y, BF16)}

    def of(name: str, precision: Any) -> Row:
        ways = {**base, name: lambda: _ours(make(), criterion, x, y, precision(), place, fast)}
        most = 1.05 if name == BF16 else 1.0 if fast else 1.2
        goals = [(name, hand, most)] if name.startswith(("fp8", BF16)) else []
        return Row(f"{title}, {name}", partial(measured, ways, apart=True, goals=goals), **row)

    yield of(names[0], partial(_precision, names[0], place))
    yield of(BF16, lambda: BF16)
    others = {"again": base[hand], "torchao fp8": lambda: trained(wrap(_torchao(make())), criterion, x, y, BF16)}
    yield Row(f"{title}, torchao", partial(measured, {**base, **others}, apart=True), **row)
    for name in names[1:]:
        yield of(name, partial(_precision, name, place))


def _gpts(place: Place) -> Iterator[Row]:
    size = (32, 2, 2, 16, 64) if place.small else (2048, 6, 16, 1024, 32768)
    _, criterion, x, y = whole(GPT, 2 if place.small else 16, place)
    x, y = x % size[4], y % size[4]

    def net() -> nn.Module:
        torch.manual_seed(0)
        return GPT(*size).to(place.device)

    for fast, names, seconds in ((True, ("fp8", "fp8 delayed", "fp8 rowwise"), 60), (False, ("fp8",), 15)):
        title = f"GPT of 369 M, 16 x 1,024 tokens, {'compiled' if fast else 'eager'}"
        yield from _beside(title, net, criterion, x, y, names, place, fast, seconds=seconds, gib=30)


def _layers(place: Place) -> Iterator[Row]:
    width, tokens = (64, 32) if place.small else (4096, 16384)
    x = torch.randn(tokens, width, device=place.device)

    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(width, width), nn.Linear(width, width)).to(place.device)

    def criterion(out: torch.Tensor, _: Any) -> torch.Tensor:
        return out.float().square().mean()

    for fast in (True, False):
        title = f"2 x Linear(4096), 16,384 tokens, {'compiled' if fast else 'eager'}"
        # Dynamo of torch 2.13 refuses mxfp8 where it is emulated, and compiles little after that; a card emulates nothing here.
        names = [name for name in LAYERS if not (place.small and fast and name in ("mxfp8", "nvfp4"))]
        yield from _beside(title, net, criterion, x, x, names, place, fast, seconds=20 if fast else 8, gib=8)


def _products(place: Place) -> Iterator[Row]:
    rows_, inner, columns = (64, 64, 32) if place.small else (16384, 4096, 4096)

    def make(eights: bool, fast: bool = False) -> Step:
        a, b = (torch.randn(n, inner, device=place.device, dtype=torch.bfloat16) for n in (rows_, columns))
        if not eights:
            return lambda: a @ b.t()
        one, unit = [each.to(torch.float8_e4m3fn) for each in (a, b)], torch.ones((), device=place.device)
        options: Any = {"scale_a": unit, "scale_b": unit, "out_dtype": torch.bfloat16, "use_fast_accum": fast}
        return lambda: torch._scaled_mm(one[0], one[1].t(), **options)

    ways = {"bf16": partial(make, False), "fp8": partial(make, True), "fp8, fast sums": partial(make, True, True)}
    goals = [("fp8", "bf16", 0.75)]
    yield Row("one product", partial(measured, ways, goals=goals), 10)


_SWITCHES = {"matrices e4m3fn tensor": ("by Triton", "by torch")}


def _rounded(place: Place) -> Found:
    """One operand: found by kernels, by torch's operations, and by those compiled."""
    from booster.kernels import matrices

    shape = (64, 64) if place.small else (16384, 4096)
    x, scaling = torch.randn(*shape, device=place.device, dtype=torch.bfloat16), Scaling("tensor")
    by_torch: Any = torch.compile(scale_to, backend="aot_eager" if place.small else "inductor")
    ways: dict[str, Make] = {
        "by torch": lambda: lambda: scale_to(x, E4M3, scaling),
        "by torch, compiled": lambda: lambda: by_torch(x, E4M3, scaling),
        "by Triton": lambda: lambda: matrices.quantized(x, E4M3, scaling, 16),
        "by Triton, both ways": lambda: lambda: matrices.quantized(x, E4M3, scaling, 16, transposed=True),
    }
    if matrices.find_spec("triton") is None:
        ways = {name: make for name, make in ways.items() if "Triton" not in name}
    return measured(ways, place, goals=[("by Triton", "by torch, compiled", 1.2)])
