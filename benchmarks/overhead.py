"""What a training step costs around the model: raw torch, raw torch with a fused optimizer, Accelerate, Fabric, booster.

    python -m benchmarks.overhead [--rounds 200] [--precisions fp32,bf16,fp16]

A tiny MLP (4 x Linear(64, 64), batch 8, AdamW, clipping at norm 1), so that the work around the model is most of it. On
one core, process CPU time, blocks of 20 steps interleaved in shuffled order. "raw again" is a second copy of raw: a run is
valid only if its median differs by less than 5 us. Peers are left out where they are not installed.
"""

from __future__ import annotations

import argparse
import importlib.util
import statistics
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn

from benchmarks.timing import describe_machine, difference, interleave, pin_to_one_core, ratio
from booster import Booster

STEPS = 20
DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"

Step = Callable[[], None]


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(64, 64) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(x))
        return x


def parts(**options: Any) -> tuple[nn.Module, torch.optim.Optimizer, nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    model = MLP().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
    return model, optimizer, nn.CrossEntropyLoss(), *batch()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.randn(8, 64, device=DEVICE), torch.randint(0, 64, (8,), device=DEVICE)


def raw(precision: str, **options: Any) -> Step:
    model, optimizer, criterion, x, y = parts(**options)
    dtype = DTYPES[precision]
    scaler = torch.amp.GradScaler(DEVICE, enabled=precision == "fp16")

    def step() -> None:
        with torch.autocast(DEVICE, dtype) if dtype else nullcontext():
            loss = criterion(model(x), y)
        if scaler.is_enabled():
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
        else:
            loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        if scaler.is_enabled():
            scaler.step(optimizer)
            scaler.update()
        else:
            optimizer.step()
        optimizer.zero_grad()

    return step


def ours(precision: str, **options: Any) -> Step:
    model, optimizer, criterion, x, y = parts()
    booster = Booster(mixed_precision=precision, **options)
    model, optimizer, criterion, *_ = booster.boost(model, optimizer, criterion)

    def step() -> None:
        loss = criterion(model(x), y)
        booster.backward(loss, optimizer)
        optimizer.clip_grad_by_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def accelerate(precision: str) -> Step:
    from accelerate import Accelerator
    from accelerate.state import AcceleratorState, GradientState, PartialState
    from accelerate.utils import GradScalerKwargs

    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()
    accelerator = Accelerator(
        mixed_precision="no" if precision == "fp32" else precision,
        cpu=DEVICE == "cpu",
        kwargs_handlers=[GradScalerKwargs()],
    )
    if precision == "fp16" and accelerator.scaler is None:
        # On CPU it quietly runs float32; force what it does elsewhere, so that the same work is compared.
        accelerator.native_amp = True
        accelerator.scaler = torch.amp.GradScaler(DEVICE)
    model, optimizer, criterion, x, y = parts()
    model, optimizer = accelerator.prepare(model, optimizer)

    def step() -> None:
        with accelerator.autocast():
            loss = criterion(model(x), y)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return step


def fabric(precision: str) -> Step:
    from lightning_fabric import Fabric
    from lightning_fabric.plugins.precision import MixedPrecision

    if precision == "fp16":
        plugin = MixedPrecision("16-mixed", device=DEVICE, scaler=torch.amp.GradScaler(DEVICE))
        fabric = Fabric(accelerator=DEVICE, devices=1, plugins=[plugin])
    else:
        fabric = Fabric(accelerator=DEVICE, devices=1, precision="32-true" if precision == "fp32" else "bf16-mixed")
    model, optimizer, criterion, x, y = parts()
    model, optimizer = fabric.setup(model, optimizer)

    def step() -> None:
        loss = criterion(model(x), y)
        fabric.backward(loss)
        fabric.clip_gradients(model, optimizer, max_norm=1.0, error_if_nonfinite=False)
        optimizer.step()
        optimizer.zero_grad()

    return step


def variants(precision: str) -> Iterator[tuple[str, Step]]:
    yield "raw", raw(precision)
    yield "raw again", raw(precision)
    yield "raw fused", raw(precision, fused=True)
    if importlib.util.find_spec("accelerate"):
        yield "Accelerate", accelerate(precision)
    if importlib.util.find_spec("lightning_fabric"):
        yield "Fabric", fabric(precision)
    yield "booster", ours(precision)


def block(step: Step) -> Step:
    def run() -> None:
        for _ in range(STEPS):
            step()

    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=200)
    parser.add_argument("--precisions", default="fp32,bf16,fp16")
    options = parser.parse_args()
    pin_to_one_core()
    print(describe_machine())
    print("| precision | variant | us/step | ratio to raw | over raw us | over raw fused us |")
    print("|---|---|---|---|---|---|")
    for precision in options.precisions.split(","):
        blocks = {name: block(step) for name, step in variants(precision)}
        seconds = interleave(blocks, options.rounds, warmup=10)
        for name in blocks:
            per_step = statistics.median(seconds[name]) / STEPS * 1e6
            over_raw = difference(seconds, name, "raw") / STEPS * 1e6
            over_fused = difference(seconds, name, "raw fused") / STEPS * 1e6
            print(
                f"| {precision} | {name} | {per_step:.0f} | {ratio(seconds, name, 'raw'):.3f} "
                f"| {over_raw:+.0f} | {over_fused:+.0f} |"
            )
        control = abs(difference(seconds, "raw again", "raw")) / STEPS * 1e6
        print(f"A/A control: {control:.1f} us ({'valid' if control < 5 else 'NOT valid: the machine was too busy'})")


if __name__ == "__main__":
    main()
