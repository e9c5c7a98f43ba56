"""Time of the update alone: 20 million parameters, AdamW, clipping at norm 1, against hand-written torch.

    python -m benchmarks.update [--rounds 15]

Prints milliseconds per update and ratios within one interleaved run, on one core. Gradients are float32, those of fp16
multiplied by the loss scale; they are restored, untimed, before every update.
"""

from __future__ import annotations

import argparse
import random
import statistics
from collections.abc import Callable

import torch
from torch import nn

from benchmarks.given import Bench, Ours
from benchmarks.timing import describe_machine, pin_to_one_core, ratio

SCALE = 2.0**16


def raw(scaled: bool, **options: bool) -> Callable[[list[nn.Parameter]], Callable[[], None]]:
    """The loop that users write: unscale, clip, step, update."""

    def make(params: list[nn.Parameter]) -> Callable[[], None]:
        optimizer = torch.optim.AdamW(params, lr=1e-4, **options)  # type: ignore[arg-type]
        scaler = torch.amp.GradScaler(params[0].device.type, init_scale=SCALE, enabled=scaled)
        scaler.scale(torch.zeros((), device=params[0].device))  # makes the lazily created scale tensor

        def update() -> None:
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(params, 1.0)
            scaler.step(optimizer)
            scaler.update()

        return update

    return make


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--precisions", default="fp16,bf16,fp32")
    parser.add_argument("--compile", action="store_true", help="also fused_optimizer='compile'")
    options = parser.parse_args()
    pin_to_one_core()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    grads = [torch.randn(1000, 1000, device=device) for _ in range(20)]
    print(describe_machine())
    print("| precision | raw default ms | raw fused ms | ours ms | ours/raw default | ours/raw fused | A/A fused |")
    print("|---|---|---|---|---|---|---|")
    for precision in options.precisions.split(","):
        scaled = precision == "fp16"
        source = [grad * SCALE for grad in grads] if scaled else grads
        benches = {
            "default": Bench(raw(scaled), source),
            "fused": Bench(raw(scaled, fused=True), source),
            "ours": Ours(grads, precision),
            "fused again": Bench(raw(scaled, fused=True), source),
        }
        if options.compile:
            benches["compiled"] = Ours(grads, precision, "compile")
        seconds: dict[str, list[float]] = {name: [] for name in benches}
        names = list(benches)
        order = random.Random(0)
        for index in range(3 + options.rounds):
            for name in order.sample(names, len(names)):  # see timing.interleave
                elapsed = benches[name].run()
                if index >= 3:
                    seconds[name].append(elapsed)
        median = {name: statistics.median(times) * 1e3 for name, times in seconds.items()}
        print(
            f"| {precision} | {median['default']:.1f} | {median['fused']:.1f} | {median['ours']:.1f} "
            f"| {ratio(seconds, 'ours', 'default'):.2f} | {ratio(seconds, 'ours', 'fused'):.2f} "
            f"| {ratio(seconds, 'fused again', 'fused'):.2f} |"
        )
        if options.compile:
            print(
                f"|  compiled | | | {median['compiled']:.1f} | {ratio(seconds, 'compiled', 'default'):.2f} "
                f"| {ratio(seconds, 'compiled', 'fused'):.2f} | |"
            )


if __name__ == "__main__":
    main()
