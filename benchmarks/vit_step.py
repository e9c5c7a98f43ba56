"""One training step of a small ViT (dim 192, depth 12, 3 heads, 65 tokens, batch 32), plain torch against booster.

    python -m benchmarks.vit_step [--rounds 7] [--tokens 65]

On one core, process CPU time, interleaved. Plain means torch.autocast and AdamW as users write them; "fused" gives plain
torch the fused AdamW that booster switches to, so that what is left is attention in float32.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.timing import describe_machine, interleave, pin_to_one_core, ratio
from booster import Booster
from booster.mixed_precision import BF16MixedPrecision, MixedPrecision

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class Block(nn.Module):
    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, dim = x.shape
        heads = self.qkv(self.norm1(x)).view(batch, tokens, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads.unbind(0))
        x = x + self.proj(attended.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, dim: int = 192, depth: int = 12, heads: int = 3) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(dim, heads) for _ in range(depth)))
        self.head = nn.Linear(dim, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(x).mean(1))


def plain(dtype: torch.dtype | None, x: torch.Tensor, y: torch.Tensor, **options: Any) -> Callable[[], None]:
    model = ViT().to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, **options)

    def step() -> None:
        with torch.autocast(DEVICE, dtype) if dtype else nullcontext():
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def boosted(precision: str | MixedPrecision, x: torch.Tensor, y: torch.Tensor) -> Callable[[], None]:
    model = ViT()
    booster = Booster(mixed_precision=precision)
    model, optimizer, criterion, *_ = booster.boost(
        model, torch.optim.AdamW(model.parameters(), lr=1e-4), nn.CrossEntropyLoss()
    )

    def step() -> None:
        booster.backward(criterion(model(x), y), optimizer)
        optimizer.step()
        optimizer.zero_grad()

    return step


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--tokens", type=int, default=65)
    options = parser.parse_args()
    pin_to_one_core()
    torch.manual_seed(0)
    x = torch.randn(32, options.tokens, 192, device=DEVICE)
    y = torch.randint(0, 10, (32,), device=DEVICE)
    variants = {
        "fp32 plain": plain(None, x, y),
        "bf16 plain": plain(torch.bfloat16, x, y),
        "bf16 plain, fused": plain(torch.bfloat16, x, y, fused=True),
        "bf16 plain again": plain(torch.bfloat16, x, y),
        "bf16 booster": boosted("bf16", x, y),
        "bf16 booster, sdpa_fp32=False": boosted(BF16MixedPrecision(sdpa_fp32=False), x, y),
        "fp32 booster": boosted("fp32", x, y),
    }
    seconds = interleave(variants, options.rounds, warmup=2)
    print(describe_machine())
    print("| variant | ms/step | faster than bf16 plain | faster than fp32 plain |")
    print("|---|---|---|---|")
    for name in variants:
        against = [1 / ratio(seconds, name, base) for base in ("bf16 plain", "fp32 plain")]
        print(f"| {name} | {statistics.median(seconds[name]) * 1e3:.0f} | {against[0]:.2f} | {against[1]:.2f} |")


if __name__ == "__main__":
    main()
