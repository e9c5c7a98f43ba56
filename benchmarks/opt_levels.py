"""What O1 of fp16_apex costs against fp16: the same autocast, plus the casts of a torch function mode and apex's update.

    python -m benchmarks.opt_levels [--rounds 60] [--vit-rounds 12] [--batch 8]

Whole training steps with AdamW, without clipping, of the tiny MLP of overhead.py and of the example's small vision
transformer. On one core, process CPU time, interleaved in shuffled order. "fp16 again" is a second copy of fp16, to tell
what the measurement is worth.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.overhead import MLP
from benchmarks.timing import describe_machine, difference, interleave, pin_to_one_core, ratio
from booster import Booster
from booster.mixed_precision import FP16ApexMixedPrecision, FP16TorchMixedPrecision, MixedPrecision

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "examples" / "vit"))
import torchvision_ops

torchvision_ops.import_torchvision()
from model import SMALL, find_model

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STEPS = 10  # of the MLP in a block; one step of the transformer is long enough

Step = Callable[[], None]


def training(
    precision: MixedPrecision, make: Callable[[], nn.Module], x: torch.Tensor, y: torch.Tensor, steps: int
) -> Step:
    torch.manual_seed(0)
    model: Any = make()
    booster = Booster(DEVICE, precision)
    model, optimizer, criterion, *_ = booster.boost(
        model, torch.optim.AdamW(model.parameters(), lr=1e-3), nn.CrossEntropyLoss()
    )

    def block() -> None:
        for _ in range(steps):
            booster.backward(criterion(model(x), y), optimizer)
            optimizer.step()
            optimizer.zero_grad()

    return block


def variants(make: Callable[[], nn.Module], x: torch.Tensor, y: torch.Tensor, steps: int) -> dict[str, Step]:
    scale = 2.0**10  # clean steps only
    precisions = {
        "fp16": FP16TorchMixedPrecision(init_scale=scale),
        "fp16 again": FP16TorchMixedPrecision(init_scale=scale),
        "fp16_apex O1": FP16ApexMixedPrecision("O1", max_loss_scale=scale, verbosity=0, backend="native"),
        "fp16_apex O0": FP16ApexMixedPrecision("O0", verbosity=0, backend="native"),
    }
    return {name: training(precision, make, x, y, steps) for name, precision in precisions.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--vit-rounds", type=int, default=12)
    parser.add_argument("--batch", type=int, default=8, help="images in a batch of the transformer")
    options = parser.parse_args()
    pin_to_one_core()
    torch.manual_seed(0)
    spec = find_model(SMALL)
    images = torch.randn(options.batch, spec.channels, spec.size, spec.size, device=DEVICE)
    labels = torch.randint(0, 10, (options.batch,), device=DEVICE)
    rows, targets = torch.randn(8, 64, device=DEVICE), torch.randint(0, 64, (8,), device=DEVICE)
    models = {
        "tiny MLP": (variants(MLP, rows, targets, STEPS), STEPS, options.rounds),
        "example ViT": (variants(lambda: spec.build(10), images, labels, 1), 1, options.vit_rounds),
    }
    print(describe_machine())
    print("| model | variant | ms/step | ratio to fp16 | over fp16, ms |")
    print("|---|---|---|---|---|")
    for model, (blocks, steps, rounds) in models.items():
        seconds = interleave(blocks, rounds)
        for name in blocks:
            per_step = statistics.median(seconds[name]) / steps * 1e3
            over = difference(seconds, name, "fp16") / steps * 1e3
            print(f"| {model} | {name} | {per_step:.3f} | {ratio(seconds, name, 'fp16'):.3f} | {over:+.3f} |")


if __name__ == "__main__":
    main()
