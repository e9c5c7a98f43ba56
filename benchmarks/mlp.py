"""The model of which bytes a parameter are counted, its optimizer and its batch: 5 x Linear(1024, 1024), AdamW."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

WIDTH, DEPTH, BATCH = 1024, 5, 16


class MLP(nn.Module):
    def __init__(self, *, gelu: bool = False, uses: int = 1, checkpointed: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(DEPTH))
        self.gelu, self.uses, self.checkpointed = gelu, uses, checkpointed

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(self.uses):
            for layer in self.layers:
                x = checkpoint(self.block, layer, x, use_reentrant=False) if self.checkpointed else self.block(layer, x)
        return x

    def block(self, layer: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.gelu(layer(x)) if self.gelu else layer(x)


def adamw(params: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(params, lr=1e-4)


def data(device: str, batch: int) -> torch.Tensor:
    return torch.randn(batch, WIDTH, device=device)
