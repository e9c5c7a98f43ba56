"""What `booster.numerics.advise` takes, beside what a long measurement takes, for three models.

The long measurement shares no code with `advise`: plain boosted loops, a hundred steps of each precision in shuffled order,
medians of processor time, gradients compared by hand. The rule is the same: the fastest within a gradient error of 0.1,
and of those within 2 % of it the most exact.

    python -m benchmarks.advise [--steps 100] [--seed 0]
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from booster import Booster
from booster.numerics import Budget, advise

PRECISIONS = ("fp32", "bf16", "bf16_naive", "fp16", "fp16_naive", "int8")


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 512), nn.GELU(), nn.Linear(512, 512), nn.GELU(), nn.Linear(512, 10))


def conv_net() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.Conv2d(16, 32, 3, stride=2, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(32, 10),
    )


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attended.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(
        self, width: int = 128, depth: int = 2, heads: int = 4, vocabulary: int = 256, tokens: int = 32
    ) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(vocabulary, width), nn.Parameter(torch.randn(tokens, width) * 0.02)
        self.blocks = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.norm(self.blocks(self.embed(tokens) + self.place)))


def of_tokens(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output.flatten(0, 1), target.flatten())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-3)


def cases() -> dict[str, tuple[Callable[[], nn.Module], Any, Callable[..., Any]]]:
    torch.manual_seed(0)
    text = torch.randint(0, 256, (8, 33))
    return {
        "MLP 64-512-512-10, batch 256": (
            mlp,
            (torch.randn(256, 64), torch.randint(0, 10, (256,))),
            nn.CrossEntropyLoss(),
        ),
        "MLP of 16 and 32, batch 8": (
            lambda: nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4)),
            (torch.randn(8, 16), torch.randint(0, 4, (8,))),
            nn.CrossEntropyLoss(),
        ),
        "conv net, 16 images of 32x32": (
            conv_net,
            (torch.randn(16, 3, 32, 32), torch.randint(0, 10, (16,))),
            nn.CrossEntropyLoss(),
        ),
        "GPT 128 wide, 2 blocks, 8x32 tokens": (GPT, (text[:, :-1].clone(), text[:, 1:].clone()), of_tokens),
    }


class Loop:
    """One model in one precision, as a user boosts it."""

    def __init__(self, precision: str, make: Callable[[], nn.Module], batch: Any, criterion: Any, seed: int) -> None:
        torch.manual_seed(seed)
        self.booster = Booster("cpu", precision)
        model = make()
        self.model, self.optimizer, self.criterion, *_ = self.booster.boost(model, adamw(model), criterion)
        self.x, self.y = batch
        self.times: list[float] = []

    def gradient(self) -> torch.Tensor:
        while True:
            self.booster.backward(self.criterion(self.model(self.x), self.y), self.optimizer)
            scale = self.optimizer.loss_scale
            flat = torch.cat([p.grad.double().flatten() for p in self.model.parameters()]) / scale
            if bool(flat.isfinite().all()):
                self.optimizer.zero_grad()
                return flat
            self.optimizer.step()
            self.optimizer.zero_grad()

    def step(self) -> None:
        start = time.thread_time()
        self.booster.backward(self.criterion(self.model(self.x), self.y), self.optimizer)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.times.append(time.thread_time() - start)


def measured(make: Any, batch: Any, criterion: Any, steps: int, seed: int) -> dict[str, tuple[float, float]]:
    """Ratio of time to float32's, and gradient error at the first weights, by precision."""
    loops: dict[str, Loop] = {}
    for name in PRECISIONS:
        try:
            loops[name] = Loop(name, make, batch, criterion, seed)
        except ValueError:
            continue  # this precision refuses this model
    exact = loops["fp32"].gradient()
    errors = {name: float((loop.gradient() - exact).norm() / exact.norm()) for name, loop in loops.items()}
    for _ in range(steps + 3):
        for loop in random.sample([*loops.values()], len(loops)):
            loop.step()
    medians = {name: statistics.median(loop.times[3:]) for name, loop in loops.items()}
    return {name: (medians[name] / medians["fp32"], errors[name]) for name in loops}


def taken(table: dict[str, tuple[float, float]]) -> str:
    legal = {name: entry for name, entry in table.items() if entry[1] <= 0.1}
    best = min(ratio for ratio, _ in legal.values())
    return min((error, ratio, name) for name, (ratio, error) in legal.items() if ratio <= 1.02 * best)[2]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    torch.set_num_threads(1)
    random.seed(options.seed)
    for label, (make, batch, criterion) in cases().items():
        start = time.thread_time()
        found = advise(
            make,
            batch,
            criterion,
            adamw,
            device="cpu",
            precisions=PRECISIONS,
            seed=options.seed,
            budget=Budget(seconds=None),
        )
        spent = time.thread_time() - start
        table = measured(make, batch, criterion, options.steps, options.seed)
        print(f"\n{label}: advise takes {found.best} in {spent:.1f} s, the long measurement {taken(table)}")
        for name, (ratio, error) in table.items():
            row = found[name]
            print(
                f"  {name:<11} time {row.ratio:.2f} {ratio:.2f}   gradient error {row.gradient_error:.1e} {error:.1e}"
            )
        print(f"  A/A of advise: {found.noise:.1%}")


if __name__ == "__main__":
    main()
