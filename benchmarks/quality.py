"""Test accuracy of every precision on real images, over several seeds, against float32's.

    python -m benchmarks.quality [--model mlp|cnn|vit] [--seeds 5] [--epochs 5] [--modes "NAME;..."] [--optimizer adamw]

10,000 training and 4,000 test images of Fashion-MNIST (examples/data). The optimizer under a cosine schedule, batches of 128.
For one seed all precisions start from the same weights and see the same batches. A precision passes if the mean of its accuracy
is within max(1.0 point, 2 standard errors of the difference) of float32's; the exit code is 1 if one does not. Prints a table
in Markdown.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from benchmarks.timing import describe_machine
from booster import Booster
from booster.mixed_precision import BF16NaiveMixedPrecision, FP16NaiveMixedPrecision, MixedPrecision, make

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "vit"
sys.path.insert(0, str(EXAMPLE))  # the example's files import each other by bare names

from data import MEAN, STD, load_images

BATCH = 128
LEARNING_RATE = {"mlp": 1e-3, "cnn": 2e-3, "vit": 1e-3}
MARGIN = 1.0  # points of accuracy

MODES: dict[str, Callable[[], MixedPrecision]] = {
    "fp32": lambda: make("fp32"),
    "bf16": lambda: make("bf16"),
    "fp16": lambda: make("fp16"),
    "bf16_naive": lambda: make("bf16_naive"),
    "bf16_naive, separate masters": lambda: BF16NaiveMixedPrecision(master_weights="fp32"),
    "bf16_naive, no masters, stochastic": lambda: BF16NaiveMixedPrecision(master_weights="none", rounding="stochastic"),
    "bf16_naive, no masters, kahan": lambda: BF16NaiveMixedPrecision(master_weights="none", rounding="kahan"),
    "fp16_naive": lambda: make("fp16_naive"),
    "fp16_naive, split masters": lambda: FP16NaiveMixedPrecision(master_weights="split"),
    "fp32, 8bit states": lambda: make("fp32").with_states("8bit"),
    "bf16_naive, split24, 8bit states": lambda: BF16NaiveMixedPrecision(master_weights="split24", states="8bit"),
    "fp16_naive, split24, 8bit states": lambda: FP16NaiveMixedPrecision(master_weights="split24", states="8bit"),
}
# Of parameters and the learning rate of AdamW for the model.
OPTIMIZERS: dict[str, Callable[[Any, float], torch.optim.Optimizer]] = {
    "adamw": lambda params, rate: torch.optim.AdamW(params, lr=rate, weight_decay=0.01),
    "sgd": lambda params, rate: torch.optim.SGD(params, lr=50 * rate, momentum=0.9),
    "adagrad": lambda params, rate: torch.optim.Adagrad(params, lr=10 * rate),
    "rmsprop": lambda params, rate: torch.optim.RMSprop(params, lr=rate),
    "nadam": lambda params, rate: torch.optim.NAdam(params, lr=rate),
}


def mlp() -> nn.Module:
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)
    )


def cnn() -> nn.Module:
    """Convolutions with BatchNorm, which the naive precisions keep in float32."""

    def block(inside: int, outside: int) -> list[nn.Module]:
        return [nn.Conv2d(inside, outside, 3, 2, 1, bias=False), nn.BatchNorm2d(outside), nn.ReLU()]

    return nn.Sequential(*block(1, 16), *block(16, 32), *block(32, 64), nn.Flatten(), nn.Linear(64 * 16, 10))


class ViT(nn.Module):
    """16 patches of 7 x 7 pixels through two transformer layers."""

    def __init__(self, width: int = 64) -> None:
        super().__init__()
        self.patches = nn.Conv2d(1, width, 7, 7)
        self.position = nn.Parameter(torch.randn(16, width) * 0.02)
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 2, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) + self.position
        return self.head(self.layers(tokens).mean(1))


MODELS = {"mlp": mlp, "cnn": cnn, "vit": ViT}


def images() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Training and test images, float32 (N, 1, 28, 28) and normalised, with their labels."""
    found = load_images("fashion-mnist-subset", EXAMPLE, channels=1, size=28)
    return [
        (((part.images.float() / 255 - MEAN) / STD).unsqueeze(1), part.labels)  # type: ignore[attr-defined, union-attr]
        for part in (found.train, found.test)
    ]


def batches(count: int, epochs: int, generator: torch.Generator) -> Iterator[torch.Tensor]:
    for _ in range(epochs):
        order = torch.randperm(count, generator=generator)
        yield from order.split(BATCH)[: count // BATCH]


def accuracy(
    name: str, mode: str, seed: int, epochs: int, splits: list[tuple[torch.Tensor, torch.Tensor]], make_optimizer: str
) -> float:
    """Per cent of the test images that a model trained from `seed` classifies rightly."""
    torch.manual_seed(seed)
    booster = Booster(mixed_precision=MODES[mode]())
    (x, y), (test_x, test_y) = [(x.to(booster.device), y.to(booster.device)) for x, y in splits]
    net = MODELS[name]()
    inner = OPTIMIZERS[make_optimizer](net.parameters(), LEARNING_RATE[name])
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(inner, epochs * (len(x) // BATCH))
    model, optimizer, criterion, _, scheduler = booster.boost(net, inner, nn.CrossEntropyLoss(), lr_scheduler=cosine)
    for index in batches(len(x), epochs, torch.Generator().manual_seed(seed)):
        optimizer.zero_grad()
        booster.backward(criterion(model(x[index]), y[index]), optimizer)
        optimizer.step()
        scheduler.step()
    model.eval()
    with torch.no_grad():
        right = sum(int((model(part).argmax(1) == label).sum()) for part, label in chunks(test_x, test_y))
    return 100 * right / len(test_y)


def chunks(x: torch.Tensor, y: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    yield from zip(x.split(500), y.split(500), strict=True)


def standard_error(values: list[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="mlp")
    parser.add_argument("--seeds", type=int, default=5, help="at least 2")
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--modes", default=";".join(MODES), help="names with ';' between them; fp32 is always run")
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="adamw")
    args = parser.parse_args()
    modes = ["fp32", *(mode for mode in args.modes.split(";") if mode != "fp32")]
    unknown = [mode for mode in modes if mode not in MODES]
    if unknown or args.seeds < 2:
        parser.error(f"unknown modes {unknown}; choose from {list(MODES)}" if unknown else "--seeds must be at least 2")
    splits = images()
    print(f"{args.model}, {args.optimizer}, {args.epochs} epochs, seeds 0 to {args.seeds - 1}; {describe_machine()}\n")
    print("| precision | mean accuracy, % | standard error | from fp32 | allowed | | seconds a run |")
    print("|---|---|---|---|---|---|---|")
    reference: list[float] = []
    failed = False
    for mode in modes:
        start = time.perf_counter()
        scores = [accuracy(args.model, mode, seed, args.epochs, splits, args.optimizer) for seed in range(args.seeds)]
        seconds = (time.perf_counter() - start) / args.seeds
        reference = reference or scores
        difference = statistics.mean(scores) - statistics.mean(reference)
        allowed = max(MARGIN, 2 * math.hypot(standard_error(scores), standard_error(reference)))
        failed |= abs(difference) > allowed
        print(
            f"| {mode} | {statistics.mean(scores):.2f} | {standard_error(scores):.2f} | {difference:+.2f} | {allowed:.2f} | "
            f"{'no' if abs(difference) > allowed else 'within'} | {seconds:.1f} |",
            flush=True,
        )
    sys.exit(failed)


if __name__ == "__main__":
    main()
