"""Quality of every low precision on the two models of examples/gpt, over several seeds, beside bf16.

    python -m benchmarks.low_precision_quality --record runs/low_precision_quality.jsonl [--seeds 3] [--steps 150]
    python -m benchmarks.low_precision_quality --record runs/low_precision_quality.jsonl --table

The GPT (0.9 M parameters) reads 8 windows of 64 bytes of the Jargon File a step and is tested on all of its held-out text; the
vision transformer (0.8 M parameters) reads 32 images of the Fashion-MNIST subset and is tested on its 4,000 test images. AdamW,
warmup and cosine, clipped at 1. For one seed all precisions start from the same weights and see the same batches. The test runs
in the precision, too. A run is one line of the record; a second call does what is missing, so it may be stopped at any time.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.timing import describe_machine
from booster import Booster
from booster.mixed_precision import (
    FP8MixedPrecision,
    Int8MixedPrecision,
    MixedPrecision,
    MXFP8MixedPrecision,
    NVFP4MixedPrecision,
    make,
)
from booster.nn.lr_scheduler import CosineAnnealingWarmupLR

EXAMPLE = Path(__file__).resolve().parents[1] / "examples" / "gpt"
sys.path.insert(0, str(EXAMPLE))  # the example's files import each other by bare names

from data import drawn, load_images, load_text
from model import GPT, cross_entropy, make_vit

PRECISIONS: dict[str, Callable[[], MixedPrecision]] = {
    "bf16": lambda: make("bf16"),
    "fp8 tensorwise": lambda: FP8MixedPrecision(emulate="auto", convert="all"),
    "fp8 tensorwise, delayed scaling": lambda: FP8MixedPrecision(delayed_scaling=True, emulate="auto", convert="all"),
    "fp8 rowwise": lambda: FP8MixedPrecision("rowwise", emulate="auto", convert="all"),
    "fp8 rowwise_with_gw_hp": lambda: FP8MixedPrecision("rowwise_with_gw_hp", emulate="auto", convert="all"),
    "fp8 blocks": lambda: FP8MixedPrecision("blocks", emulate="auto"),
    "fp8 blocks, powers of two": lambda: FP8MixedPrecision("blocks", power_of_two_scales=True, emulate="auto"),
    "mxfp8": lambda: MXFP8MixedPrecision(emulate="auto", convert="all"),
    "int8": lambda: Int8MixedPrecision(emulate="auto"),
    "nvfp4": lambda: NVFP4MixedPrecision(emulate="auto"),
    "nvfp4, to the nearest": lambda: NVFP4MixedPrecision(emulate="auto", stochastic_rounding=False),
    "nvfp4, no Hadamard": lambda: NVFP4MixedPrecision(emulate="auto", hadamard=False),
    "nvfp4, neither": lambda: NVFP4MixedPrecision(emulate="auto", stochastic_rounding=False, hadamard=False),
}
BATCH = {"gpt": 8, "vit": 32}
LEARNING_RATE = {"gpt": 4e-3, "vit": 1e-3}


def build(model: str) -> nn.Module:
    return GPT() if model == "gpt" else make_vit(width=128, num_blocks=4, num_heads=4)


def run(name: str, precision: str, seed: int, steps: int) -> dict[str, Any]:
    """Train and test once; returns the test's mean loss and per cent of right predictions."""
    splits = load_text(64) if name == "gpt" else load_images()
    torch.manual_seed(seed)
    booster = Booster(mixed_precision=PRECISIONS[precision]())
    raw = build(name)
    adamw = torch.optim.AdamW(raw.parameters(), lr=LEARNING_RATE[name], weight_decay=0.05)
    cosine = CosineAnnealingWarmupLR(adamw, total_steps=steps, warmup_steps=steps // 10)
    model, optimizer, criterion, _, scheduler = booster.boost(raw, adamw, cross_entropy, lr_scheduler=cosine)
    start = time.process_time()
    losses = []
    for x, y in DataLoader(drawn(splits.train, steps * BATCH[name], seed), BATCH[name]):
        loss = criterion(model(x.to(booster.device)), y.to(booster.device))
        booster.backward(loss, optimizer)
        optimizer.clip_grad_by_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses.append(round(float(loss), 5))
    seconds = time.process_time() - start
    loss, right = test(booster, model, splits.validation)
    return {"loss": loss, "accuracy": right, "seconds": seconds, "training_losses": losses[:: max(1, steps // 50)]}


def test(booster: Booster, model: nn.Module, split: Dataset[Any]) -> tuple[float, float]:
    total, right, count = 0.0, 0, 0
    model.eval()
    with torch.no_grad():
        for x, y in DataLoader(split, 256):
            logits, target = model(x.to(booster.device)).float(), y.to(booster.device)
            total += float(cross_entropy(logits, target)) * target.numel()
            right += int((logits.argmax(-1) == target).sum())
            count += target.numel()
    return total / count, 100 * right / count


def read(record: Path) -> list[dict[str, Any]]:
    """The runs of a record; a last line that was cut off by a kill is left out."""
    lines = record.read_text().splitlines() if record.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def table(rows: list[dict[str, Any]], model: str, steps: int) -> str:
    """Means over seeds, and of the differences from bf16 of the same seed their mean and its standard error."""
    found = [row for row in rows if row["model"] == model and row["steps"] == steps]
    wide = {row["seed"]: row for row in found if row["precision"] == "bf16"}
    lines = [
        "| precision | seeds | accuracy, % | from bf16, points | test loss | from bf16 |",
        "|---|---|---|---|---|---|",
    ]
    for precision in PRECISIONS:
        own = [row for row in found if row["precision"] == precision and row["seed"] in wide]
        if not own:
            continue
        cells = [precision, str(len(own))]
        for key, places in (("accuracy", 2), ("loss", 4)):
            apart = [row[key] - wide[row["seed"]][key] for row in own]
            error = statistics.stdev(apart) / math.sqrt(len(apart)) if len(apart) > 1 else math.nan
            cells.append(f"{statistics.mean(row[key] for row in own):.{places}f}")
            cells.append("" if precision == "bf16" else f"{statistics.mean(apart):+.{places}f} ± {error:.{places}f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, required=True, help="file of JSON lines, made or gone on with")
    parser.add_argument("--models", nargs="+", choices=list(BATCH), default=list(BATCH))
    parser.add_argument("--precisions", nargs="+", choices=list(PRECISIONS), default=list(PRECISIONS))
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--table", action="store_true", help="run nothing, print what the record holds")
    options = parser.parse_args()
    if not options.table:
        options.record.parent.mkdir(parents=True, exist_ok=True)
        keys = ("model", "precision", "seed", "steps")
        done = {tuple(row[key] for key in keys) for row in read(options.record)}
        # Seeds outermost, so that a run that is stopped has every precision equally often.
        wanted = [
            (m, p, s, options.steps) for s in range(options.seeds) for m in options.models for p in options.precisions
        ]
        for each in wanted:
            if each not in done:
                row = {**dict(zip(keys, each, strict=True)), **run(*each), "machine": describe_machine()}
                with options.record.open("a") as file:
                    file.write(json.dumps(row) + "\n")
    for model in options.models:
        print(f"\n{model}, {options.steps} steps\n\n{table(read(options.record), model, options.steps)}")


if __name__ == "__main__":
    main()
