"""Loss curves with products of halves as torch makes them and in float32, on one machine, beside the spread of seeds.

    python -m benchmarks.half_products_curves --record FILE [--models vit,gpt] [--precisions bf16,fp16] [--seeds 3]
    python -m benchmarks.half_products_curves --record FILE --table   # runs nothing, prints the table of the record

The vision transformer of `make demo` on images of Fashion-MNIST, the GPT of examples/gpt on the Jargon File; AdamW, warmup and
cosine. For one seed both start from the same weights and see the same batches; a seed stands for both. Losses are averaged over
stretches of `STRETCH` steps. "apart" is the root mean square, over stretches and seeds, of the difference between the two
curves of a seed, "spread" that between the native curves of two seeds. A run is one line of JSON; a second call makes only
what is missing. Exits with 1 where curves lie further apart than seeds do.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from benchmarks.quality import Record, images
from benchmarks.timing import describe_machine
from booster import Booster
from booster.mixed_precision import FP16TorchMixedPrecision, MixedPrecision, hardware, make
from booster.nn.lr_scheduler import CosineAnnealingWarmupLR
from examples.gpt.data import drawn, load_text
from examples.gpt.model import GPT, cross_entropy
from examples.vit.torchvision_ops import import_torchvision

STEPS = {"bf16": 150, "bf16_naive": 150, "fp16": 60}  # torch's own float16 takes ten times as long as float32
STRETCH = 10
BATCH = {"vit": 32, "gpt": 16}
CONTEXT = 64

Batch = tuple[torch.Tensor, torch.Tensor]


def demo_vit() -> nn.Module:
    import_torchvision()
    from examples.vit.model import SMALL, find_model

    return find_model(SMALL).build(10)


def image_batches(seed: int, steps: int) -> Iterator[Batch]:
    x, y = images()[0]
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        index = torch.randint(len(x), (BATCH["vit"],), generator=generator)
        yield x[index], y[index]


def text_batches(seed: int, steps: int) -> Iterator[Batch]:
    train = load_text(CONTEXT).train
    yield from DataLoader(drawn(train, steps * BATCH["gpt"], seed), BATCH["gpt"])


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, int], Iterator[Batch]], Callable[..., Any], float]] = {
    "vit": (demo_vit, image_batches, nn.CrossEntropyLoss(), 1e-3),
    "gpt": (lambda: GPT(context=CONTEXT), text_batches, cross_entropy, 4e-3),
}


def precision_of(name: str) -> MixedPrecision:
    return FP16TorchMixedPrecision(init_scale=2.0**10) if name == "fp16" else make(name)  # no first step is skipped


def losses(name: str, precision: str, choice: str, seed: int, steps: int) -> list[float]:
    """The training loss of every step."""
    build, batches, criterion, rate = MODELS[name]
    torch.manual_seed(seed)
    net = build()
    inner = torch.optim.AdamW(net.parameters(), lr=rate, weight_decay=0.01)
    schedule = CosineAnnealingWarmupLR(inner, total_steps=steps, warmup_steps=steps // 10)
    booster = Booster("cpu", precision_of(precision), half_products=choice)  # type: ignore[arg-type]
    model, optimizer, criterion, _, schedule = booster.boost(net, inner, criterion, lr_scheduler=schedule)
    found = []
    for x, y in batches(seed, steps):
        loss = criterion(model(x), y)
        booster.backward(loss, optimizer)
        optimizer.clip_grad_by_norm(1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        found.append(round(loss.item(), 5))
    return found


def smooth(curve: Sequence[float]) -> list[float]:
    return [statistics.mean(curve[start : start + STRETCH]) for start in range(0, len(curve), STRETCH)]


def apart(pairs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> float:
    """The root mean square of the differences between the smoothed curves of each pair."""
    squares = [(a - b) ** 2 for one, other in pairs for a, b in zip(smooth(one), smooth(other), strict=True)]
    return math.sqrt(statistics.mean(squares))


def rows(record: Record) -> Iterator[tuple[str, bool]]:
    """Lines of the table in Markdown, and whether the curves lie within the spread of seeds."""
    for name, precision in itertools.product(MODELS, STEPS):
        found: list[dict[int, list[float]]] = [
            {row["seed"]: row["losses"] for row in record.find(model=name, precision=precision, choice=choice)}
            for choice in ("native", "float32")
        ]
        native, wide = found
        seeds = sorted(native.keys() & wide.keys())
        if len(seeds) < 2:
            continue
        between = apart([(native[seed], wide[seed]) for seed in seeds])
        spread = apart([(native[a], native[b]) for a, b in itertools.combinations(seeds, 2)])
        last = [statistics.mean(smooth(curves[seed])[-1] for seed in seeds) for curves in found]
        steps = len(native[seeds[0]])
        within = between <= spread
        cells = [name, precision, str(len(seeds)), str(steps), *(f"{each:.4f}" for each in (*last, between, spread))]
        yield f"| {' | '.join(cells)} | {'within' if within else 'no'} |", within


HEAD = (
    "| model | precision | seeds | steps | last loss, native | last loss, float32 | apart | spread of seeds | |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", type=Path, required=True, help="file of JSON lines, made or gone on with")
    parser.add_argument("--models", default=",".join(MODELS), help=f"of {', '.join(MODELS)}")
    parser.add_argument("--precisions", default=",".join(STEPS), help=f"of {', '.join(STEPS)}")
    parser.add_argument("--seeds", type=int, default=3, help="at least 2")
    parser.add_argument("--table", action="store_true", help="run nothing, print what the record holds")
    options = parser.parse_args()
    models, precisions = options.models.split(","), options.precisions.split(",")
    if options.seeds < 2 or set(models) - set(MODELS) or set(precisions) - set(STEPS):
        parser.error(f"models are of {list(MODELS)}, precisions of {list(STEPS)}, seeds at least 2")
    torch.set_num_threads(1)
    record = Record(options.record)
    runs = itertools.product(range(options.seeds), precisions, models, ("native", "float32"))
    for seed, precision, name, choice in () if options.table else runs:
        made = {"model": name, "precision": precision, "choice": choice, "seed": seed}
        if not record.find(**made):
            start = time.process_time()
            curve = losses(name, precision, choice, seed, STEPS[precision])
            seconds = round(time.process_time() - start, 1)
            day, units = datetime.date.today().isoformat(), list(hardware.half_units())
            record.add(
                {**made, "losses": curve, "seconds": seconds, "day": day, "units": units, "machine": describe_machine()}
            )
    found = list(rows(record))
    print("\n".join([HEAD, *(line for line, _ in found)]))
    sys.exit(not all(within for _, within in found))


if __name__ == "__main__":
    main()
