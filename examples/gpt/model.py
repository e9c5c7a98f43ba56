"""The two models of the example: a GPT that reads bytes, and timm's vision transformer for 28x28 grey images.

Both are plain modules. How they are divided among processes is said elsewhere, see `plugins.py`.
"""

import sys
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

NUM_BYTES = 256
INITIAL_STD = 0.06  # suits widths of about 100

# Which linear layers tensor parallelism divides, and how: the heads of the attention, the hidden features of the MLP.
GPT_PLAN = {
    "blocks.*.attn.q_proj": "colwise",
    "blocks.*.attn.k_proj": "colwise",
    "blocks.*.attn.v_proj": "colwise",
    "blocks.*.attn.out_proj": "rowwise",
    "blocks.*.mlp.fc": "colwise",
    "blocks.*.mlp.proj": "rowwise",
}


class CausalAttention(nn.Module):
    """Multi-head attention to what came before. The number of heads follows from the width of the projections."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.head_dim = width // num_heads
        self.q_proj = nn.Linear(width, width)
        self.k_proj = nn.Linear(width, width)
        self.v_proj = nn.Linear(width, width)
        self.out_proj = nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (
            # -1: all heads, or those of this process where the projections are divided
            proj(x).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for proj in (self.q_proj, self.k_proj, self.v_proj)
        )
        return self.out_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.fc = nn.Linear(width, 4 * width)
        self.proj = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.proj(F.gelu(self.fc(x)))


class Block(nn.Module):
    """Attention and MLP, each normalised before and added to what it read."""

    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.attn_norm = nn.LayerNorm(width)
        self.attn = CausalAttention(width, num_heads)
        self.mlp_norm = nn.LayerNorm(width)
        self.mlp = MLP(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Embedding(nn.Module):
    """Bytes and their learned positions as vectors: int64 (batch, time) to (batch, time, width)."""

    def __init__(self, width: int, context: int) -> None:
        super().__init__()
        self.token = nn.Embedding(NUM_BYTES, width)
        self.position = nn.Embedding(context, width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))


class GPT(nn.Module):
    """A GPT over bytes: int64 (batch, time) to the logits of each next byte, (batch, time, 256).

    context: the longest time. tied_head: predict with the weights of the token embedding.
    """

    def __init__(
        self, *, width: int = 128, num_blocks: int = 4, num_heads: int = 4, context: int = 64, tied_head: bool = False
    ) -> None:
        super().__init__()
        if width % num_heads:
            raise ValueError(f"width={width} does not divide by num_heads={num_heads}; give a multiple of it")
        self.embed = Embedding(width, context)
        self.blocks = nn.ModuleList(Block(width, num_heads) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, NUM_BYTES, bias=False)
        self._initialise(num_blocks)
        if tied_head:
            self.head.weight = self.embed.token.weight

    def _initialise(self, num_blocks: int) -> None:
        for name, param in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(param)
            elif "norm" not in name:
                # Each block adds twice to the residual stream: its variance is not to grow with the depth.
                added = name.endswith(("out_proj.weight", "mlp.proj.weight"))
                nn.init.normal_(param, std=INITIAL_STD / (2 * num_blocks) ** 0.5 if added else INITIAL_STD)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_vit(*, width: int, num_blocks: int, num_heads: int) -> nn.Module:
    """timm's vision transformer for grey images of 28x28 pixels in ten classes."""
    sys.path.append(str(Path(__file__).resolve().parents[1] / "vit"))
    from torchvision_ops import import_torchvision

    import_torchvision()  # timm needs torchvision, which fails with a CPU-only torch without this
    from timm.models.vision_transformer import VisionTransformer

    return VisionTransformer(
        img_size=28,
        patch_size=7,
        in_chans=1,
        num_classes=10,
        embed_dim=width,
        depth=num_blocks,
        num_heads=num_heads,
    )


def cross_entropy(logits: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The mean over all predictions: logits (..., classes), int64 targets (...)."""
    return F.cross_entropy(logits.flatten(0, -2), target.flatten())
