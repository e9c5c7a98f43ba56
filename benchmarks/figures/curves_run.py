"""Train the example's vision transformer in four precisions, a step of each in turn, and write down what happened.

python benchmarks/figures/curves_run.py     # writes benchmarks/figures/curves.json, which curves.py draws

All start from the same weights and see the same batches, in one process on one thread. Times are CPU time of a whole step;
as the four take turns, what else the machine does meets all of them alike. Memory is what `Booster.estimate_memory` says.
"""

import argparse
import json
import platform
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import torch

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "vit")]

import torchvision_ops

torchvision_ops.import_torchvision()

from data import load_images
from model import find_model
from recipe import Recipe

import booster
from booster import Booster

PRECISIONS = ("fp32", "fp16", "bf16", "bf16_naive")


class Run:
    """One precision: its model, data and schedule, and what its steps took."""

    def __init__(self, precision: str, recipe: Recipe, images: Any, spec: Any) -> None:
        torch.manual_seed(0)
        self.b = Booster(mixed_precision=precision)
        model = spec.build(images.num_classes)
        optimizer = recipe.make_optimizer(model.parameters())
        criterion = torch.nn.CrossEntropyLoss()
        batch = (torch.empty(recipe.batch_size, 1, 28, 28), torch.empty(recipe.batch_size, dtype=torch.long))
        self.memory = self.b.estimate_memory(model, optimizer, batch, criterion).as_dict()
        loader = self.b.plugin.prepare_dataloader(images.train, recipe.batch_size, shuffle=True, seed=0, drop_last=True)
        schedule = recipe.make_scheduler(optimizer, len(loader))
        self.parts = self.b.boost(model, optimizer, criterion, loader, schedule)
        self.batches = self._endless()
        self.loss: list[float] = []
        self.seconds: list[float] = []
        self.skipped = 0

    def _endless(self) -> Any:
        while True:
            yield from self.parts[3]

    def step(self) -> None:
        model, optimizer, criterion, _, schedule = self.parts
        inputs, labels = next(self.batches)
        begin = time.process_time()
        loss = criterion(model(inputs), labels)
        self.b.backward(loss, optimizer)
        self.skipped += not optimizer.step()
        optimizer.zero_grad()
        self.seconds.append(time.process_time() - begin)
        schedule.step()
        self.loss.append(loss.item())

    @torch.no_grad()
    def accuracy(self, images: Any) -> float:
        model = self.parts[0].eval()
        loader = self.b.prepare_dataloader(images.test, 256)
        return torch.cat([model(x).argmax(-1) == y for x, y in loader]).float().mean().item()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--out", type=Path, default=Path(__file__).with_name("curves.json"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    recipe = Recipe(steps=args.steps, batch_size=args.batch_size)
    spec = find_model(recipe.model)
    images = load_images(recipe.dataset, Path("data"), channels=spec.channels, size=spec.size, tutorial=False)
    runs = {name: Run(name, recipe, images, spec) for name in PRECISIONS}
    for step in range(args.steps):
        for run in runs.values():
            run.step()
        if step % 50 == 49:
            print(step + 1, {name: round(run.loss[-1], 3) for name, run in runs.items()}, flush=True)
    written = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": _processor(),
        "torch": torch.__version__,
        "booster": booster.__version__,
        "batch_size": recipe.batch_size,
        "runs": {
            name: {
                "loss": [round(loss, 4) for loss in run.loss],
                "step_ms": round(1000 * statistics.median(run.seconds), 2),
                "accuracy": run.accuracy(images),
                "skipped": run.skipped,
                "memory": run.memory,
            }
            for name, run in runs.items()
        },
    }
    args.out.write_text(json.dumps(written) + "\n")
    for name, run in written["runs"].items():
        print(name, run["step_ms"], run["accuracy"], run["skipped"], run["memory"]["peak"] / 2**20)


def _processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":")[1].strip() for line in lines if line.startswith("model name")), platform.processor())


if __name__ == "__main__":
    main()
