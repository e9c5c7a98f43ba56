"""A long run of the example's GPT with packed optimizer states beside the same run in float32: two curves of the loss.

    python -m benchmarks.long_run [--steps 5000] [--folder runs/long]     # goes on where it was stopped
    python benchmarks/figures/long_run.py                                       # draws benchmarks/figures/long_run.json

The GPT of `benchmarks.quality`. Both start from the same weights and see the same batches: 8 windows of 64 bytes of the
Jargon File a step, AdamW, warmup and cosine, clipped at 1. They take turns, 250 steps each; then each is saved, and tested on
the held-out text. Of the training loss the mean over 25 steps is written down.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Subset

import booster
from benchmarks.quality import CONTEXT, MODES, small_gpt, tested
from benchmarks.timing import describe_machine
from booster import Booster
from booster.nn.lr_scheduler import CosineAnnealingWarmupLR
from examples.gpt.data import drawn, load_text
from examples.gpt.model import cross_entropy

RUNS = ("fp32", "bf16_naive, split24, 8bit states")
BATCH = 8
TURN, MEAN = 250, 25  # steps
OUT = Path(__file__).resolve().parent / "figures" / "long_run.json"


class Curve:
    """What a run was seen to do; saved with its checkpoints."""

    def __init__(self) -> None:
        self.loss: list[float] = []
        self.held_out: list[dict[str, float]] = []

    def state_dict(self) -> dict[str, object]:
        return {"loss": self.loss, "held_out": self.held_out}

    def load_state_dict(self, state: dict[str, object]) -> None:
        self.loss, self.held_out = list(state["loss"]), list(state["held_out"])  # type: ignore[call-overload]


class Run:
    def __init__(self, mode: str, steps: int, folder: Path) -> None:
        torch.manual_seed(0)
        self.booster = Booster(mixed_precision=MODES[mode]())
        self.text = load_text(CONTEXT)
        net = small_gpt()
        inner = torch.optim.AdamW(net.parameters(), lr=4e-3, weight_decay=0.05)
        cosine = CosineAnnealingWarmupLR(inner, total_steps=steps, warmup_steps=200)
        model, optimizer, criterion, _, scheduler = self.booster.boost(net, inner, cross_entropy, lr_scheduler=cosine)
        self.parts = model, optimizer, criterion, None, scheduler
        self.order = drawn(self.text.train, steps * BATCH, seed=0)
        self.curve = Curve()
        self.folder = folder / mode.replace(", ", "-").replace(" ", "-")
        self.step = self.booster.resume_or_start(self.folder, *self.parts, extra=self.curve).step

    def go_on(self, steps: int) -> None:
        model, optimizer, criterion, _, scheduler = self.parts
        indices = self.order.indices[self.step * BATCH : (self.step + steps) * BATCH]
        losses = []
        model.train()
        for x, y in DataLoader(Subset(self.order.dataset, indices), BATCH):
            loss = criterion(model(x.to(self.booster.device)), y.to(self.booster.device))
            self.booster.backward(loss, optimizer)
            optimizer.clip_grad_by_norm(1.0)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(loss.item())
        self.step += steps
        self.curve.loss += [round(statistics.mean(losses[i : i + MEAN]), 5) for i in range(0, steps, MEAN)]
        self.curve.held_out.append(tested(model, DataLoader(self.text.validation, 128)))
        self.booster.save(self.folder, *self.parts, extra=self.curve, step=self.step, keep_last=1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=5000, help=f"a multiple of {TURN}")
    parser.add_argument("--folder", type=Path, default=Path("runs/long"), help="of the checkpoints")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    if args.steps < TURN or args.steps % TURN:
        parser.error(f"--steps {args.steps} is not a multiple of {TURN}")
    runs = {mode: Run(mode, args.steps, args.folder) for mode in RUNS}
    while any(run.step < args.steps for run in runs.values()):
        for run in sorted(runs.values(), key=lambda run: run.step):
            if run.step < args.steps:
                run.go_on(TURN)
        write(args.out, args.steps, runs)
        if any(run.booster.stop_requested() for run in runs.values()):
            break
        print({mode: (run.step, run.curve.loss[-1], run.curve.held_out[-1]) for mode, run in runs.items()}, flush=True)


def write(path: Path, steps: int, runs: dict[str, Run]) -> None:
    said = {
        "date": time.strftime("%Y-%m-%d"),
        "machine": describe_machine(),
        "booster": booster.__version__,
        "steps": steps,
        "turn": TURN,
        "mean_over": MEAN,
        "runs": {mode: run.curve.state_dict() for mode, run in runs.items()},
    }
    path.write_text(json.dumps(said) + "\n")


if __name__ == "__main__":
    main()
