"""A GPT in the manner of nanoGPT, in plain torch and boosted in fp32: losses and norms are equal to rounding.

python examples/ports/gpt.py
"""

import math

import torch
from torch import nn
from torch.nn import functional as F

from booster import Booster

VOCAB, BLOCK, EMBD, HEADS = 32, 16, 32, 2
MICRO_BATCHES, STEPS, WARMUP, LR, MIN_LR = 4, 6, 2, 3e-3, 3e-4


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(EMBD), nn.LayerNorm(EMBD)
        self.c_attn, self.c_proj = nn.Linear(EMBD, 3 * EMBD), nn.Linear(EMBD, EMBD)
        self.mlp = nn.Sequential(nn.Linear(EMBD, 4 * EMBD), nn.GELU(), nn.Linear(4 * EMBD, EMBD))

    def forward(self, x):
        q, k, v = (part.unflatten(2, (HEADS, -1)).transpose(1, 2) for part in self.c_attn(self.ln_1(x)).split(EMBD, 2))
        x = x + self.c_proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.mlp(self.ln_2(x))


class GPT(nn.Module):
    def __init__(self):
        super().__init__()
        self.wte, self.wpe = nn.Embedding(VOCAB, EMBD), nn.Embedding(BLOCK, EMBD)
        self.h, self.ln_f = nn.ModuleList(Block() for _ in range(2)), nn.LayerNorm(EMBD)
        self.lm_head = nn.Linear(EMBD, VOCAB, bias=False)
        self.wte.weight = self.lm_head.weight

    def forward(self, tokens, targets):
        x = self.wte(tokens) + self.wpe.weight
        for block in self.h:
            x = block(x)
        logits = self.lm_head(self.ln_f(x))
        return logits, F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def make():
    model = GPT()
    matrices, others = ([p for p in model.parameters() if (p.dim() > 1) is wanted] for wanted in (True, False))
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return model, torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.95))


def get_lr(step):
    if step < WARMUP:
        return LR * (step + 1) / (WARMUP + 1)
    return MIN_LR + 0.5 * (1 + math.cos(math.pi * (step - WARMUP) / (STEPS - WARMUP))) * (LR - MIN_LR)


data = (torch.arange(512) * 7 + torch.randint(0, 3, (512,))) % VOCAB


def get_batch():
    starts = torch.randint(0, len(data) - BLOCK, (4,))
    return (torch.stack([data[i + shift : i + shift + BLOCK] for i in starts]) for shift in (0, 1))


torch.manual_seed(0)
model, optimizer = make()

plain = []
for step in range(STEPS):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(step)
    for _ in range(MICRO_BATCHES):
        x, y = get_batch()
        logits, loss = model(x, y)
        plain.append(loss.item())
        loss = loss / MICRO_BATCHES
        loss.backward()
    norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    plain.append(norm.item())

torch.manual_seed(0)
model, optimizer = make()
b = Booster("cpu", mixed_precision="fp32", fused_optimizer=False)
model, optimizer, *_ = b.boost(model, optimizer)

boosted = []
for step in range(STEPS):
    for group in optimizer.param_groups:
        group["lr"] = get_lr(step)
    with b.accumulate(model, optimizer, num_micro_batches=MICRO_BATCHES):
        for _ in range(MICRO_BATCHES):
            x, y = get_batch()
            logits, loss = model(x, y)
            boosted.append(loss.item())
            b.backward(loss, optimizer)
    norm = optimizer.clip_grad_by_norm(1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    boosted.append(norm.item())

torch.testing.assert_close(torch.tensor(boosted), torch.tensor(plain), rtol=1e-5, atol=0)

print(f"{len(plain)} losses and norms, equal to rounding")
