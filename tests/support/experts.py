"""A small mixture of experts, and its training on any placement."""

import torch
import torch.nn.functional as F
from comparing import weights
from torch import nn
from torch.utils.checkpoint import checkpoint

from booster import Booster

WIDTH, EXPERTS, TOP_K = 16, 8, 2


class Experts(nn.Module):
    """As transformers writes them, with a bias. `fused` multiplies them in one; else one after the other."""

    def __init__(self, fused, count=EXPERTS):
        super().__init__()
        self.num_experts, self.fused = count, fused
        self.up = nn.Parameter(torch.randn(count, 32, WIDTH) * 0.2)
        self.down = nn.Parameter(torch.randn(count, WIDTH, 32) * 0.2)
        self.bias = nn.Parameter(torch.randn(count, WIDTH) * 0.1)

    def forward(self, tokens, index, weights):
        rows, numbers, scales = tokens.repeat_interleave(index.shape[1], 0), index.flatten(), weights.flatten()
        order = numbers.argsort(stable=True)
        rows, numbers = rows[order], numbers[order]
        counts = (numbers[:, None] == torch.arange(self.num_experts, dtype=torch.int64, device=numbers.device)).sum(0)
        if self.fused:
            ends = counts.cumsum(0).to(torch.int32)
            hidden = F.grouped_mm(rows.to(self.up.dtype), self.up.mT, offs=ends).relu()
            out = F.grouped_mm(hidden.to(self.down.dtype), self.down.mT, offs=ends) + self.bias[numbers]
        else:
            parts = rows.split(counts.tolist())
            made = [
                F.linear(F.linear(part, self.up[i]).relu(), self.down[i]) + self.bias[i] for i, part in enumerate(parts)
            ]
            out = torch.cat(made)
        out = out * scales[order].unsqueeze(1)
        return torch.zeros_like(out).index_copy(0, order, out).unflatten(0, index.shape).sum(1).to(tokens.dtype)


class Block(nn.Module):
    def __init__(self, fused, chosen, recompute, count, top_k):
        super().__init__()
        self.chosen, self.recompute, self.top_k = torch.tensor(chosen, dtype=torch.int64), recompute, top_k
        self.norm, self.router = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, count, bias=False)
        self.experts = Experts(fused, count)

    def forward(self, x):
        tokens = self.norm(x).flatten(0, 1)
        scores = self.router(tokens).float().softmax(-1)
        # By place in a sample, so that rounding changes no choice.
        places = (
            torch.arange(x.shape[1] * self.top_k, dtype=torch.int64, device=x.device)
            .view(-1, self.top_k)
            .repeat(len(x), 1)
        )
        index = self.chosen.to(x.device)[places * 3 % len(self.chosen)]
        given = tokens, index, scores.gather(1, index).to(tokens.dtype)
        out = checkpoint(self.experts, *given, use_reentrant=False) if self.recompute else self.experts(*given)
        return x + out.view_as(x)


class Mixture(nn.Module):
    """chosen: the experts that tokens go to, top_k each, of `count`. recompute: experts are computed again in backward."""

    def __init__(self, fused=True, chosen=range(EXPERTS), recompute=False, count=EXPERTS, top_k=TOP_K):
        super().__init__()
        chosen = list(chosen)
        self.inp, self.head = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(fused, chosen, recompute, count, top_k) for _ in range(2)])

    def forward(self, x):
        x = self.inp(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def batches(count, seed=1, samples=8, tokens=5):
    """`samples` of so many tokens each."""
    draw = torch.Generator().manual_seed(seed)
    size = samples, tokens, WIDTH
    return [(torch.randn(size, generator=draw), torch.randn(size, generator=draw)) for _ in range(count)]


def made(plugin, precision="fp32", optimizer=torch.optim.AdamW, device="cpu", **options):
    """Returns the booster, and what it makes of a model, an optimizer and a criterion."""
    torch.manual_seed(0)
    model = Mixture(**options)
    booster = Booster(device, precision, plugin)
    return booster, *booster.boost(model, optimizer(model.parameters(), lr=1e-2), nn.MSELoss())[:3]


def steps(parts, given, micro_batches=1, clip=0.5):
    """Returns losses over all ranks, norms, and whether steps were taken."""
    booster, model, optimizer, criterion = parts
    rank, size = booster.plugin.data_parallel_rank, booster.plugin.data_parallel_size
    losses, norms, taken = [], [], []
    for x, y in given:
        x, y = (each.chunk(size)[rank].to(booster.device).chunk(micro_batches) for each in (x, y))
        loss = 0.0
        for place, (one, other) in enumerate(zip(x, y, strict=True)):
            with booster.no_sync(model) if place + 1 < micro_batches else torch.enable_grad():
                part = criterion(model(one), other) / micro_batches
                booster.backward(part, optimizer)
                loss += float(booster.reduce(part.detach()))
        losses.append(loss)
        norms.append(float(optimizer.clip_grad_by_norm(clip)))
        taken.append(bool(optimizer.step()))
        optimizer.zero_grad()
    return losses, norms, taken


def results(plugin, precision, given=None, micro_batches=1, clip=0.5, **options):
    parts = made(plugin, precision, **options)
    return *steps(parts, batches(4) if given is None else given, micro_batches, clip), weights(parts[1])
