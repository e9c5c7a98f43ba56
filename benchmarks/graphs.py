"""Whole steps of a ViT and of GPT-2 124M in one CUDA graph, at batch 1 and 8, beside the same by hand.

    python -m benchmarks.graphs [--small] [--device cpu]

Prints what `benchmarks.gpu` prints for a tiny model: microseconds, launches, waits of the host and peaks of memory, of steps by
hand as they are and in a graph ("again": a second copy, whose ratio is what the machine says of equal things), and of ours as
they are, captured by kernels of the library, and captured by torch's. --small and --device cpu are to see that it runs.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from benchmarks.gpu import GPT, NAIVE, Block, Step, captured, shown, torch_graph
from benchmarks.timing import describe_machine

BATCHES = (1, 8)


class ViT(nn.Module):
    """ViT-S/16 as timm has it, but for its class token: patches, blocks, and a layer on their mean."""

    def __init__(self, width: int, layers: int, heads: int, size: int, classes: int) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        self.places = nn.Parameter(torch.zeros(1, (size // 16) ** 2, width))
        self.blocks = nn.ModuleList(Block(width, heads, causal=False) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.patches(x).flatten(2).transpose(1, 2) + self.places
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(1))


def of_words(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out.flatten(0, 1), y.flatten())


class GraphsSection:
    """A step of one model at one batch."""

    def __init__(self, model: str, batch: int, device: str, small: bool) -> None:
        self.title = f"{model}, batch {batch}, AdamW, clip at 1"
        self._device, self._is_gpt = device, model.startswith("GPT")
        torch.manual_seed(0)
        if self._is_gpt:
            self._size = (32, 2, 2, 16, 64) if small else (768, 12, 12, 1024, 50304)
            length, words = self._size[3:]
            x, y = (torch.randint(0, words, (batch, length)) for _ in range(2))
        else:
            self._size = (32, 2, 2, 32, 10) if small else (384, 12, 6, 224, 1000)
            side, classes = self._size[3:]
            x, y = torch.randn(batch, 3, side, side), torch.randint(0, classes, (batch,))
        self._x, self._y = x.to(device), y.to(device)

    def ways(self) -> Iterator[tuple[str, Callable[[], Step]]]:
        for precision in ("bf16", "fp16"):
            yield f"torch in a graph, {precision}", partial(self._by, torch_graph, precision)
            yield f"again, {precision}", partial(self._by, torch_graph, precision)
            yield f"torch, {precision}", partial(self._by, torch_graph, precision, capture=False)
            yield f"ours, {precision}", partial(self._by, captured, precision, capture=False)
            yield f"captured, {precision}", partial(self._by, captured, precision)
            yield (
                f"captured by torch's kernels, {precision}",
                partial(self._by, captured, precision, fused_optimizer=True),
            )
        yield "captured, bf16_naive, split", lambda: self._by(captured, NAIVE["bf16_naive, split"]())

    def _by(self, way: Any, precision: Any, **options: Any) -> Step:
        torch.manual_seed(0)
        net = (GPT if self._is_gpt else ViT)(*self._size).to(self._device)
        return way(net, of_words if self._is_gpt else F.cross_entropy, self._x, self._y, precision, **options)


def main(arguments: list[str] | None = None) -> int:
    """Return the exit code: 2 where there is no GPU."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--small", action="store_true", help="tiny models, to see that it runs")
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    given = parser.parse_args(arguments)
    if given.device == "cuda" and not torch.cuda.is_available():
        print(
            f"benchmarks.graphs needs a GPU, and torch {torch.__version__} sees none; --small --device cpu shows that it runs"
        )
        return 2
    print(describe_machine())
    for model in ("ViT-S/16", "GPT-2 124M"):
        for batch in BATCHES:
            section = GraphsSection(model, batch, given.device, given.small)
            shown(section, 1 if given.small else 5, 1 if given.small else 10, apart=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
