"""What recording costs a step: a record of every step, and looking at gradients and weights every so many.

    python -m benchmarks.record [--rounds 40] [--precision fp16] [--depth 4 --width 512]

An MLP on one core, in process CPU time, in blocks of steps interleaved in shuffled order: one without a record, the same
again (a run is valid only if both agree within 1 %), and one with. The price of a sample is that of a block of 4 steps with
`every=1`, less that of one without samples; at N = 100 a hundredth of it falls on each step. No block of 100 steps is timed,
because the noise of its length would be larger than what is asked.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.timing import describe_machine, difference, interleave, pin_to_one_core, ratio
from booster import Booster

STEPS = 4
NO_SAMPLE = 10**9  # steps between samples, of which only the first step has one


def training(
    precision: str, depth: int, width: int, batch: int, every: int | None, recorded: bool
) -> Callable[[], None]:
    """A block of STEPS steps of a new model, recorded or not."""
    torch.manual_seed(0)
    layers = [layer for _ in range(depth) for layer in (nn.Linear(width, width), nn.GELU())]
    model = nn.Sequential(*layers, nn.Linear(width, 10))
    booster = Booster("cpu", precision, clip_grad_norm=1.0)
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
    x, y = torch.randn(batch, width), torch.randint(0, 10, (batch,))
    if recorded:
        booster.record(tempfile.mkdtemp(prefix="record-"), every=every)

    def block() -> None:
        for _ in range(STEPS):
            booster.backward(nn.functional.cross_entropy(model(x), y), optimizer)
            optimizer.step()
            optimizer.zero_grad()

    return block


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--precision", default="fp16")
    parser.add_argument("--depth", type=int, default=4)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--batch", type=int, default=64)
    options = parser.parse_args()
    pin_to_one_core()

    def make(every: int | None, recorded: bool) -> Callable[[], None]:
        return training(options.precision, options.depth, options.width, options.batch, every, recorded)

    variants = {
        "no record": make(None, False),
        "no record again": make(None, False),
        "every step": make(NO_SAMPLE, True),
        "every step, all sampled": make(1, True),
    }
    seconds = interleave(variants, options.rounds)
    step = statistics.median(seconds["no record"]) / STEPS
    sample = difference(seconds, "every step, all sampled", "every step") / STEPS
    recording = difference(seconds, "every step", "no record") / STEPS
    print(describe_machine())
    print(f"{options.precision}, {options.depth} x {options.width}, batch {options.batch}: {step * 1e3:.2f} ms a step")
    print(f"A/A                 {ratio(seconds, 'no record again', 'no record'):.4f}")
    print(f"recording           {recording * 1e6:.0f} us a step, {recording / step:+.2%}")
    print(f"a sample            {sample * 1e3:.2f} ms, {sample / step:.2f} steps")
    print(f"sampling, N = 100   {sample / step / 100:+.2%} a step")


if __name__ == "__main__":
    main()
