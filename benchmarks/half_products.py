"""Products of halves on this CPU: which kinds of operation are slower than in float32, and what widening them makes of a step.

    python -m benchmarks.half_products [--kinds] [--models] [--seconds 0.1] [--rounds 5] [--choices native,auto]

Without either option both. `--kinds` times each kind of operation forward and backward in both dtypes, prints its time as a
multiple of float32's beside what the table of `booster/mixed_precision/hardware.py` says, and exits with 1 where the table is
wrong by more than `TOLERANCE`. `--models` prints forward passes in training and whole steps of four models as multiples of
float32's, as torch computes them ("native", up to 20 times) and by "auto", beside a second copy of float32, which tells what
such a figure is worth. One thread, process CPU time, an allocator that keeps what is freed, in an order shuffled in each round;
medians of ratios within a round. `--choices auto` leaves "native" out. Lesser machines are imitated by
ONEDNN_MAX_CPU_ISA=AVX2, AVX512_CORE or AVX512_CORE_BF16.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Sequence

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.timing import clock, describe_machine, interleave, keep_freed_memory, pin_to_one_core, ratio
from benchmarks.vit_step import Block
from booster import Booster
from booster.mixed_precision import hardware

HALVES = (torch.bfloat16, torch.float16)
PRECISIONS = ("bf16", "fp16", "bf16_naive")
TOLERANCE = 1.25  # of float32's time: what may be left in half, and the inverse what may be widened
HOPELESS = 20.0

# ---------------------------------------------------------------------- kinds of operation

Operation = Callable[[], torch.Tensor]


def operations(dtype: torch.dtype) -> dict[tuple[hardware.ProductKind, str], tuple[Operation, list[torch.Tensor]]]:
    """Of each kind, by name: a forward pass, and what it is differentiated by."""

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape).to(dtype).requires_grad_()

    a, b, c = random(256, 256), random(256, 256), random(256)
    x, w = random(16, 64, 64), random(16, 64, 64)
    image, kernel, turned = random(4, 32, 16, 16), random(32, 32, 3, 3), random(32, 32, 4, 4)
    q, k, v = random(4, 6, 64, 32), random(4, 6, 64, 32), random(4, 6, 64, 32)
    lstm, sequence = nn.LSTM(64, 64).to(dtype), random(16, 8, 64)
    return {
        ("matrix product", "linear 256"): (lambda: F.linear(a, b, c), [a, b, c]),
        ("matrix product", "bmm 16 x 64"): (lambda: torch.bmm(x, w), [x, w]),
        ("convolution", "conv2d 32, 3 x 3"): (lambda: F.conv2d(image, kernel, padding=1), [image, kernel]),
        ("convolution", "conv_transpose2d"): (lambda: F.conv_transpose2d(image, turned, stride=2), [image, turned]),
        ("attention", "64 tokens of 32"): (lambda: F.scaled_dot_product_attention(q, k, v), [q, k, v]),
        ("recurrent layer", "LSTM 64"): (lambda: lstm(sequence)[0], [sequence, *lstm.parameters()]),
    }


def best(function: Callable[[], object], seconds: float) -> float:
    function()
    taken, total = [], 0.0
    while len(taken) < 3 or total < seconds:
        start = clock()
        function()
        taken.append(clock() - start)
        total += taken[-1]
    return min(taken)


def time_kinds(seconds: float) -> dict[tuple[hardware.ProductKind, str], dict[torch.dtype, tuple[float, float]]]:
    """Seconds forward and backward by operation and dtype."""
    found: dict[tuple[hardware.ProductKind, str], dict[torch.dtype, tuple[float, float]]] = {}
    for dtype in (torch.float32, *HALVES):
        for key, (forward, inputs) in operations(dtype).items():
            with torch.no_grad():
                ahead = best(forward, seconds)
            out = forward()
            grad = torch.randn_like(out)

            def backward(
                out: torch.Tensor = out, grad: torch.Tensor = grad, inputs: list[torch.Tensor] = inputs
            ) -> object:
                return torch.autograd.grad(out, inputs, grad, retain_graph=True)

            found.setdefault(key, {})[dtype] = ahead, best(backward, seconds)
    return found


def check_kinds(seconds: float) -> int:
    """Print the table; return how many rows say otherwise than the machine."""
    wrong = 0
    print("| kind | operation | dtype | forward | backward | both, of float32 | computed in |")
    print("|---|---|---|---|---|---|---|")
    for (kind, name), times in time_kinds(seconds).items():
        base = times[torch.float32]
        for dtype in HALVES:
            ahead, back = (half / wide for half, wide in zip(times[dtype], base, strict=True))
            both = sum(times[dtype]) / sum(base)
            widened = kind in hardware.slow_products(dtype) | hardware.SLOW_BACKWARD
            off = both < 1 / TOLERANCE if widened else both > TOLERANCE
            wrong += off
            where = ("float32" if widened else "half") + (" (!)" if off else "")
            times_of = f"{ahead:.2f} | {back:.2f} | {both:.2f}"
            print(f"| {kind} | {name} | {str(dtype)[6:]} | {times_of} | {where} |")
    return wrong


# ---------------------------------------------------------------------- models


class ViT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.patches, self.blocks = nn.Conv2d(3, 192, 4, 4), nn.Sequential(*(Block(192, 6) for _ in range(4)))
        self.head = nn.Linear(192, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.patches(x).flatten(2).transpose(1, 2)).mean(1))


class GPT(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(256, 128), nn.Sequential(*(Block(128, 4) for _ in range(3)))
        self.head = nn.Linear(128, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.embedding(x))).flatten(0, 1)


def conv_net() -> nn.Module:
    def layer(before: int, after: int, stride: int = 1) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]

    body = [*layer(3, 32), *layer(32, 64, 2), *layer(64, 64), *layer(64, 128, 2)]
    return nn.Sequential(*body, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 10))


class LSTM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.LSTM(64, 128, 2, batch_first=True), nn.Linear(128, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(x)[0][:, -1])


def models() -> dict[str, tuple[Callable[[], nn.Module], torch.Tensor, torch.Tensor]]:
    images, labels = torch.randn(8, 3, 32, 32), torch.randint(0, 10, (8,))
    return {
        "ViT": (ViT, images, labels),
        "GPT": (GPT, torch.randint(0, 256, (8, 64)), torch.randint(0, 256, (512,))),
        "conv net": (conv_net, images, labels),
        "LSTM": (LSTM, torch.randn(16, 32, 64), torch.randint(0, 10, (16,))),
    }


def passes_of(
    precision: str, choice: str, make: Callable[[], nn.Module], x: torch.Tensor, y: torch.Tensor
) -> tuple[Callable[[], object], Callable[[], object]]:
    """A forward pass, and a whole step, of its own model."""
    torch.manual_seed(0)
    net = make()
    booster = Booster("cpu", precision, half_products=choice)  # type: ignore[arg-type]
    model, optimizer, *_ = booster.boost(net, torch.optim.AdamW(net.parameters(), lr=1e-3))

    def step() -> None:
        booster.backward(F.cross_entropy(model(x).float(), y), optimizer)
        optimizer.step()
        optimizer.zero_grad()

    return lambda: model(x), step


def runs_within(step: Callable[[], object], limit: float) -> bool:
    try:
        step()
        start = clock()
        step()
    except RuntimeError:  # torch has no kernel for it
        return False
    return clock() - start < limit


def time_models(rounds: int, choices: Sequence[str]) -> None:
    keys = [f"{precision} {choice}" for precision in PRECISIONS for choice in choices]
    print("| model | float32, ms | again | " + " | ".join(key.replace(" ", ", ") for key in keys) + " |")
    print("|---|---|---|" + "---|" * len(keys))
    for name, (make, x, y) in models().items():
        found = {key: passes_of("fp32", "auto", make, x, y) for key in ("float32", "again")}
        limit = HOPELESS * best(found["float32"][1], 0.1)
        for key in keys:
            passes = passes_of(*key.split(), make, x, y)  # type: ignore[call-arg]
            if runs_within(passes[1], limit):
                found[key] = passes
        taken = [interleave({key: found[key][index] for key in found}, rounds) for index in (0, 1)]
        cells = [
            " / ".join(f"{ratio(seconds, key, 'float32'):.2f}" for seconds in taken) if key in found else "–"
            for key in ("again", *keys)
        ]
        base = " / ".join(f"{min(seconds['float32']) * 1e3:.1f}" for seconds in taken)
        print(f"| {name} | {base} | {' | '.join(cells)} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", action="store_true")
    parser.add_argument("--models", action="store_true")
    parser.add_argument("--seconds", type=float, default=0.1)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--choices", default="native,auto", help="of half_products= (native,auto)")
    options = parser.parse_args()
    pin_to_one_core()
    keep_freed_memory()
    torch.manual_seed(0)
    limit = os.environ.get("ONEDNN_MAX_CPU_ISA") or "all"
    print(f"{describe_machine()}; oneDNN may use {limit}; units: {', '.join(hardware.half_units()) or 'none'}\n")
    both = not options.kinds and not options.models
    wrong = check_kinds(options.seconds) if options.kinds or both else 0
    if options.models or both:
        print()
        time_models(options.rounds, options.choices.split(","))
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
