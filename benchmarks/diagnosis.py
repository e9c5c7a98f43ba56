"""What `Booster(diagnose="first")` costs while nothing is skipped, and what a replay costs.

    python -m benchmarks.diagnosis [--rounds 60]

A small transformer (4 blocks, width 128, batch 16 of 32 tokens, AdamW, bf16). On one core, process CPU time, blocks of steps
interleaved in shuffled order. "plain again" is a second copy of plain: the run is valid only if its ratio is as near to 1 as
what is to be shown.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.timing import describe_machine, interleave, pin_to_one_core, ratio
from booster import Booster

Step = Callable[[], None]


class Net(nn.Module):
    def __init__(self, width: int = 128, blocks: int = 4) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.1, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, blocks, enable_nested_tensor=False)
        self.head = nn.Linear(width, 100)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x))


def ours(precision: str, **options: Any) -> tuple[Step, Callable[[], Any]]:
    torch.manual_seed(0)
    model = Net()
    booster = Booster("cpu", precision, skip_nonfinite=True, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, criterion, *_ = booster.boost(model, optimizer, F.cross_entropy)
    x, y = torch.randn(16, 32, 128), torch.randint(0, 100, (16 * 32,))

    def loss() -> torch.Tensor:
        return criterion(model(x).flatten(0, 1), y)

    def step() -> None:
        booster.backward(loss(), optimizer)
        optimizer.step()
        optimizer.zero_grad()

    return step, lambda: booster.diagnose(loss, optimizer)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--precision", default="bf16")
    options = parser.parse_args()
    pin_to_one_core()
    print(describe_machine())
    plain, replay = ours(options.precision)
    steps = {
        "plain": plain,
        "plain again": ours(options.precision)[0],
        "diagnose": ours(options.precision, diagnose="first")[0],
    }
    times = interleave(steps, options.rounds)
    for name in ("plain again", "diagnose"):
        print(f"{name:12} {ratio(times, name, 'plain'):.4f} of plain")
    replay()
    begin = time.process_time()
    replay()
    seconds = time.process_time() - begin
    print(f"a diagnosis that finds nothing: {seconds / min(times['plain']):.1f} steps")


if __name__ == "__main__":
    main()
