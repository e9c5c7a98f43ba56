"""Test accuracy of every precision on real images and text, over several seeds, against float32's.

    python -m benchmarks.quality [--model mlp|cnn|vit|gpt] [--seeds 5] [--epochs 5] [--modes "NAME;..."] [--optimizer adamw]
    python -m benchmarks.quality ... --record FILE          # goes on where it was stopped
    python -m benchmarks.quality ... --record FILE --table  # runs nothing, shows what there is

10,000 training and 4,000 test images of Fashion-MNIST (examples/data). The optimizer under a cosine schedule, batches of 128.
gpt is the GPT of examples/gpt, with 2 blocks 64 wide, on the Jargon File: --steps of 16 windows of 64 bytes, warmup and cosine,
clipped at 1; its accuracy is the per cent of the bytes of all the held-out text that it predicts rightly. For one seed all
precisions start from the same weights and see the same batches. A precision passes if the mean of its accuracy is within
max(1.0 point, 2 standard errors of the difference) of float32's; the exit code is 1 if one does not. Prints a table in
Markdown. A run is one line of JSON of the record.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.timing import describe_machine
from booster import Booster
from booster.mixed_precision import BF16NaiveMixedPrecision, FP16NaiveMixedPrecision, MixedPrecision, make
from booster.nn.lr_scheduler import CosineAnnealingWarmupLR
from examples.gpt.data import drawn, load_text
from examples.gpt.model import GPT, cross_entropy
from examples.vit.data import MEAN, STD, load_images

BATCH = 128
EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "vit"
GPT_BATCH, CONTEXT = 16, 64
LEARNING_RATE = {"mlp": 1e-3, "cnn": 2e-3, "vit": 1e-3, "gpt": 4e-3}
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
    "fp32, 8bit states": lambda: make("fp32").with_kept(states="8bit"),
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


def small_gpt() -> nn.Module:
    return GPT(width=64, num_blocks=2, context=CONTEXT)


MODELS = {"mlp": mlp, "cnn": cnn, "vit": ViT, "gpt": small_gpt}


@functools.cache
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


def train_on_images(name: str, mode: str, seed: int, epochs: int, make_optimizer: str) -> dict[str, float]:
    """Train from `seed` and test; returns the test's accuracy in per cent and mean loss."""
    splits = images()
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
    return tested(model, zip(test_x.split(500), test_y.split(500), strict=True))


def train_on_text(mode: str, seed: int, steps: int, make_optimizer: str) -> dict[str, float]:
    """As `train_on_images`, of the GPT; what counts are its predictions of bytes."""
    text = load_text(CONTEXT)
    torch.manual_seed(seed)
    booster = Booster(mixed_precision=MODES[mode]())
    net = small_gpt()
    inner = OPTIMIZERS[make_optimizer](net.parameters(), LEARNING_RATE["gpt"])
    cosine = CosineAnnealingWarmupLR(inner, total_steps=steps, warmup_steps=steps // 10)
    model, optimizer, criterion, _, scheduler = booster.boost(net, inner, cross_entropy, lr_scheduler=cosine)
    for x, y in DataLoader(drawn(text.train, steps * GPT_BATCH, seed), GPT_BATCH):
        optimizer.zero_grad()
        booster.backward(criterion(model(x.to(booster.device)), y.to(booster.device)), optimizer)
        optimizer.clip_grad_by_norm(1.0)
        optimizer.step()
        scheduler.step()
    held_out = DataLoader(text.validation, 128)
    return tested(model, ((x.to(booster.device), y.to(booster.device)) for x, y in held_out))


@torch.no_grad()
def tested(model: nn.Module, batches: Iterable[tuple[torch.Tensor, torch.Tensor]]) -> dict[str, float]:
    right = count = 0
    loss = 0.0
    model.eval()
    for x, y in batches:
        logits = model(x).float()
        right += int((logits.argmax(-1) == y).sum())
        loss += float(cross_entropy(logits, y)) * y.numel()
        count += y.numel()
    return {"accuracy": 100 * right / count, "loss": loss / count}


def standard_error(values: list[float]) -> float:
    return statistics.stdev(values) / math.sqrt(len(values))


class Record:
    """The runs that were made, one line of JSON for each in `path`, or nowhere."""

    def __init__(self, path: Path | None) -> None:
        self._path = path
        lines = path.read_text().splitlines() if path is not None and path.exists() else []
        self.rows: list[dict[str, Any]] = [json.loads(line) for line in lines if line.endswith("}")]

    def find(self, **wanted: object) -> list[dict[str, Any]]:
        return [row for row in self.rows if all(row[key] == value for key, value in wanted.items())]

    def add(self, row: dict[str, Any]) -> None:
        self.rows.append(row)
        if self._path is not None:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a") as file:
                file.write(json.dumps(row) + "\n")


def parse_args() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=list(MODELS), default="mlp")
    parser.add_argument("--seeds", type=int, default=5, help="at least 2")
    parser.add_argument("--epochs", type=int, help="of the images; default: 5")
    parser.add_argument("--steps", type=int, help="of the gpt; default: 300")
    parser.add_argument("--modes", default=";".join(MODES), help="names with ';' between them; fp32 is always run")
    parser.add_argument("--optimizer", choices=list(OPTIMIZERS), default="adamw")
    parser.add_argument("--record", type=Path, help="file of runs; those that are in it are not made again")
    parser.add_argument("--table", action="store_true", help="make no run")
    args = parser.parse_args()
    args.modes = ["fp32", *(mode for mode in args.modes.split(";") if mode != "fp32")]
    unknown = [mode for mode in args.modes if mode not in MODES]
    if unknown:
        parser.error(f"unknown modes {unknown}; choose from {list(MODES)}")
    if args.seeds < 2:
        parser.error("--seeds must be at least 2")
    if args.table and args.record is None:
        parser.error("--table shows what a record holds; give --record FILE")
    text = args.model == "gpt"
    if (args.epochs if text else args.steps) is not None:
        parser.error(f"--model {args.model} takes {'--steps' if text else '--epochs'}")
    args.length = (args.steps or 300) if text else (args.epochs or 5)
    return args


def main() -> None:
    args = parse_args()
    record = Record(args.record)
    common = {"model": args.model, "optimizer": args.optimizer, "length": args.length}
    # Seeds outermost, so that what was stopped has every mode equally often.
    for seed in range(0 if args.table else args.seeds):
        for mode in args.modes:
            if record.find(**common, mode=mode, seed=seed):
                continue
            start = time.process_time()
            if args.model == "gpt":
                found = train_on_text(mode, seed, args.length, args.optimizer)
            else:
                found = train_on_images(args.model, mode, seed, args.length, args.optimizer)
            found["seconds"] = round(time.process_time() - start, 2)
            record.add({**common, "mode": mode, "seed": seed, **found, "machine": describe_machine()})
    unit = "steps" if args.model == "gpt" else "epochs"
    print(f"{args.model}, {args.optimizer}, {args.length} {unit}; {describe_machine()}\n")
    sys.exit(not show(record, common, args.modes))


def show(record: Record, common: dict[str, Any], modes: list[str]) -> bool:
    """Print the table; returns whether all modes pass. Only seeds that have float32's run count."""
    print(
        "| precision | seeds | mean accuracy, % | standard error | from fp32 | allowed | | test loss | CPU seconds a run |"
    )
    print("|---|---|---|---|---|---|---|---|---|")
    reference = {row["seed"]: row["accuracy"] for row in record.find(**common, mode="fp32")}
    passed = True
    for mode in modes:
        rows = [row for row in record.find(**common, mode=mode) if row["seed"] in reference]
        scores = [row["accuracy"] for row in rows]
        if len(scores) < 2:
            continue
        base = [reference[row["seed"]] for row in rows]
        difference = statistics.mean(scores) - statistics.mean(base)
        allowed = max(MARGIN, 2 * math.hypot(standard_error(scores), standard_error(base)))
        passed &= abs(difference) <= allowed
        loss, seconds = (statistics.mean(row[key] for row in rows) for key in ("loss", "seconds"))
        print(
            f"| {mode} | {len(scores)} | {statistics.mean(scores):.2f} | {standard_error(scores):.2f} | {difference:+.2f} | "
            f"{allowed:.2f} | {'within' if abs(difference) <= allowed else 'no'} | {loss:.4f} | {seconds:.1f} |"
        )
    return passed


if __name__ == "__main__":
    main()
