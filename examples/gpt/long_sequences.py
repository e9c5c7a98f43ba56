"""Two ranks share each sequence of 8,192 characters, half of the activations on each.

A GPT over the bytes of a text. Only the batch, the positions and the loss know of it; on one process the same script trains on
whole sequences, to the same losses.

    booster run --nproc_per_node 2 examples/gpt/long_sequences.py
    python examples/gpt/long_sequences.py --tokens 1024
"""

import argparse
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import booster
from booster import Booster, DistCoordinator
from booster.plugin import HybridParallelPlugin, SingleDevice

TEXT = Path(__file__).resolve().parents[1] / "data" / "jargon_file" / "jargon_h_to_o.txt"


class Block(nn.Module):
    def __init__(self, width: int, num_heads: int) -> None:
        super().__init__()
        self.head_dim = width // num_heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (y.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for y in self.qkv(self.norm1(x)).chunk(3, -1))
        # Attention by torch, which sees the tokens of all ranks.
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, width: int = 64, num_blocks: int = 2, num_heads: int = 2, context: int = 8192) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(context, width)
        self.blocks = nn.Sequential(*(Block(width, num_heads) for _ in range(num_blocks)))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256))

    # Positions are given, since a rank's tokens do not begin at 0.
    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        return self.head(self.blocks(self.token(tokens) + self.position(positions)))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192, help="of a sequence (default: 8192)")
    parser.add_argument("--steps", type=int, default=10, help="(default: 10)")
    parser.add_argument("--mode", choices=("ring_attn", "all_to_all"), default="ring_attn")
    args = parser.parse_args()
    booster.launch_from_torch()
    ranks = DistCoordinator().world_size
    # All ranks share each sequence.
    plugin = (
        HybridParallelPlugin(1, 1, sp_size=ranks, sequence_parallelism_mode=args.mode) if ranks > 1 else SingleDevice()
    )
    b = Booster(mixed_precision="bf16", plugin=plugin)
    torch.manual_seed(0)
    model = GPT(context=args.tokens)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    model, optimizer, *_ = b.boost(model, optimizer)

    text = torch.frombuffer(bytearray(TEXT.read_bytes()), dtype=torch.uint8).long()
    starts = torch.randint(len(text) - args.tokens - 1, (args.steps,), generator=torch.Generator().manual_seed(0))
    for step, start in enumerate(starts.tolist()):
        window = text[start : start + args.tokens + 1].unsqueeze(0)
        positions = torch.arange(args.tokens).unsqueeze(0)
        # The same batch on all ranks, of which each gets a part.
        tokens, positions, targets = b.shard_sequence((window[:, :-1], positions, window[:, 1:]))
        losses = F.cross_entropy(model(tokens, positions).flatten(0, 1), targets.flatten(), reduction="none")
        loss = b.token_mean(losses, targets != -100)  # Over the tokens of all ranks.
        b.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        b.print(f"step {step}: loss {loss.item():.4f}, {tokens.shape[1]} of {args.tokens} tokens on each rank")
    DistCoordinator().destroy()


if __name__ == "__main__":
    main()
