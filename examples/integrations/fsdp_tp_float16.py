"""float16 with a loss scale over FSDP and tensor parallelism, on modules of plain torch, named and cut as torchtitan's are.

[booster run --nproc_per_node 4 | python] examples/integrations/fsdp_tp_float16.py [fp32 | fp16 | fp16_naive]
"""

import sys
from collections import OrderedDict

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

import booster
from booster.plugin import HybridParallelPlugin, SingleDevice

DIM, HEAD, WORDS = 32, 8, 64
PLAN = {f"layers.*.attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")}
PLAN |= {f"layers.*.feed_forward.{name}": ColwiseParallel() for name in ("w1", "w3")}
PLAN |= {"layers.*.attention.wo": RowwiseParallel(), "layers.*.feed_forward.w2": RowwiseParallel()}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(DIM, DIM, bias=False) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (w(x).unflatten(-1, (-1, HEAD)).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        return self.wo(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))


class FeedForward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w1, self.w2, self.w3 = (nn.Linear(*sizes, bias=False) for sizes in ((DIM, 96), (96, DIM), (DIM, 96)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.attention = nn.RMSNorm(DIM), Attention()
        self.ffn_norm, self.feed_forward = nn.RMSNorm(DIM), FeedForward()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.feed_forward(self.ffn_norm(h := x + self.attention(self.attention_norm(x)))) + h


def main(precision: str = "fp16_naive") -> None:
    booster.launch_from_torch(seed=0)
    several = booster.DistCoordinator().world_size > 1
    plugin = HybridParallelPlugin(2, 1, zero_stage=1, tp_plan=PLAN) if several else SingleDevice()
    chosen = (
        booster.mixed_precision.FP16NaiveMixedPrecision(keep_fp32="output") if precision == "fp16_naive" else precision
    )
    b = booster.Booster(mixed_precision=chosen, plugin=plugin, clip_grad_norm=1.0)
    parts = {"tok_embeddings": nn.Embedding(WORDS, DIM), "layers": nn.Sequential(Block(), Block())}
    model = nn.Sequential(OrderedDict(parts, norm=nn.RMSNorm(DIM), output=nn.Linear(DIM, WORDS, bias=False)))
    model, optimizer, *_ = b.boost(model, torch.optim.AdamW(model.parameters(), 3e-3))
    size, place = b.plugin.data_parallel_size, b.plugin.data_parallel_rank
    words = ((torch.arange(17) + torch.arange(8)[:, None] * 5) % WORDS).chunk(size)[place]
    losses = []
    for step in range(30):
        loss = F.cross_entropy(model(words[:, :-1]).flatten(0, 1), words[:, 1:].flatten())
        overflows = step == 10 and precision.startswith("fp16") and place == 0  # on some of the ranks
        b.backward(loss * torch.inf if overflows else loss, optimizer)
        if not optimizer.step():
            b.print(f"step {step} skipped on all ranks, loss scale now {optimizer.loss_scale:g}")
        optimizer.zero_grad()
        losses.append(f"{b.reduce(loss.detach()).item():.4f}")
    b.print(f"{precision}: loss {losses[0]} -> {losses[-1]}")
    dtypes = {name: weight.dtype for name, weight in b.sync_weights(model)}  # whole, on every rank
    b.print(f"a sampler gets layers in {dtypes['layers.0.attention.wq.weight']}, a head in {dtypes['output.weight']}")


if __name__ == "__main__":
    main(*sys.argv[1:])
