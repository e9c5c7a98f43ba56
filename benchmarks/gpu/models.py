"""What is trained on a card: GPT-2's parameters alone, a tiny net, a GPT and a ViT."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional as F


def gpt2_shapes(small: bool) -> list[tuple[int, ...]]:
    """Shapes of the 148 parameters of GPT-2 124M; of a few small ones."""
    if small:
        return [(64, 64)] * 8
    block = [(768,), (768,), (2304, 768), (2304,), (768, 768), (768,), (768,), (768,), (3072, 768), (3072,)]
    block += [(768, 3072), (768,)]
    return [(50304, 768), (1024, 768), *block * 12, (768,), (768,)]


class Weights(nn.Module):
    """Parameters, and a loss of them whose gradients are given."""

    def __init__(self, shapes: list[tuple[int, ...]], device: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.all = nn.ParameterList(nn.Parameter(torch.randn(shape, device=device) * 0.02) for shape in shapes)

    def forward(self) -> torch.Tensor:
        return sum((param.reshape(-1)[:1].sum() for param in self.all), torch.zeros((), device=self.all[0].device))


def tiny(device: str) -> nn.Module:
    """Four layers of 64."""
    torch.manual_seed(0)
    return nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(64, 64), nn.ReLU()))).to(device)


class Block(nn.Module):
    def __init__(self, width: int, heads: int, *, causal: bool = True) -> None:
        super().__init__()
        self.heads, self.causal = heads, causal
        self.first, self.second = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.first(x)).view(batch, length, 3, self.heads, width // self.heads).permute(2, 0, 3, 1, 4)
        heads = F.scaled_dot_product_attention(*parts.unbind(0), is_causal=self.causal)
        x = x + self.out(heads.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.second(x))))


class GPT(nn.Module):
    def __init__(self, width: int, layers: int, heads: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.words(tokens) + self.places(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


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
