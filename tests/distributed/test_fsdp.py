"""TorchFSDPPlugin on gloo ranks: training equals one process, and every rank holds its share and no more."""

import copy
import functools

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard

from booster import Booster
from booster.mixed_precision import BF16NaiveMixedPrecision, FP16NaiveMixedPrecision, FP16TorchMixedPrecision
from booster.plugin import TorchFSDPPlugin

DIM, VOCABULARY, LENGTH, BATCH, STEPS = 16, 11, 6, 16, 16
SCALE = 2.0**10
PRECISIONS = {
    "fp32": lambda: "fp32",
    "fp16": lambda: FP16TorchMixedPrecision(init_scale=SCALE, growth_interval=6),
    "bf16": lambda: "bf16",
    "fp16_naive": lambda: FP16NaiveMixedPrecision(initial_scale=SCALE, hysteresis=1),
    "bf16_naive": lambda: BF16NaiveMixedPrecision(),
    "fp16_naive split": lambda: FP16NaiveMixedPrecision(initial_scale=SCALE, hysteresis=1, master_weights="split"),
    "bf16_naive none": lambda: BF16NaiveMixedPrecision(master_weights="none", rounding="stochastic"),
}
# Ranks round the products of their own rows; half weights are compared with a reference that rounds the whole batch.
TOLERANCE = {"fp32": 2e-6, "fp16": 1e-3, "bf16": 1e-2}


def tolerance(precision):
    return TOLERANCE.get(precision, 1e-2)


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x):
        q, k, v = (part.unsqueeze(1) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """Three blocks, so that not every dimension divides by the ranks: the vocabulary of 11 rows does not."""

    def __init__(self, checkpointing=False, tied=False):
        super().__init__()
        self.checkpointing = checkpointing
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)
        if tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens):
        x = self.embedding(tokens)
        for block in self.blocks:
            if self.checkpointing:
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.head(self.norm(x))


def transformer(seed=0, **options):
    torch.manual_seed(seed)
    return Transformer(**options)


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def data(step, rank=0, world_size=1):
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))
    return tokens.chunk(world_size)[rank], ((3 * tokens + 1) % VOCABULARY).chunk(world_size)[rank]


def whole(tensor):
    tensor = tensor.detach()
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).float().clone()


def flat(model):
    return torch.cat([whole(param).flatten() for param in model.parameters()])


def adamw(params):
    return torch.optim.AdamW(params, lr=3e-3)


def boost(world_size, precision="fp32", model=None, make=adamw, options=None, **booster_options):
    model = transformer() if model is None else model
    plugin = TorchFSDPPlugin(**(options or {})) if world_size > 1 else None
    booster = Booster("cpu", PRECISIONS[precision](), plugin, **booster_options)
    optimizer = make([param for param in model.parameters() if param.requires_grad])
    model, optimizer, *_ = booster.boost(model, optimizer)
    return booster, model, optimizer


def one_step(booster, model, optimizer, step, rank, world_size, clip=None):
    x, y = data(step, rank, world_size)
    loss = loss_of(model(x), y)
    booster.backward(loss, optimizer)
    norm = optimizer.clip_grad_by_norm(clip) if clip else torch.zeros(())
    result = optimizer.step()
    optimizer.zero_grad()
    return booster.reduce(loss).detach(), norm, result


def train(rank, world_size, precision, clip=None, options=None, model_options=None, make=adamw, seed=0):
    """Losses of the whole batch, norms, parameters at the end, loss scale."""
    model = transformer(seed + rank, **(model_options or {}))  # ranks must take rank 0's weights
    booster, model, optimizer = boost(world_size, precision, model, make, options)
    losses, norms = [], []
    for step in range(STEPS):
        loss, norm, result = one_step(booster, model, optimizer, step, rank, world_size, clip)
        assert result.applied
        losses.append(loss)
        norms.append(norm)
    return torch.stack(losses), torch.stack(norms), flat(model), optimizer.loss_scale


# ---- equal to one process ----


@pytest.mark.parametrize("precision", list(PRECISIONS))
def test_training_equals_one_process_on_the_whole_batch(ranks2, precision):
    losses, norms, _, scale = train(0, 1, precision, 0.5)
    assert losses[-1] < losses[0] - 0.3
    assert (norms > 0.5).any(), "nothing was clipped"
    results = ranks2(train, precision, 0.5)
    for other_losses, other_norms, other_params, other_scale in results:
        assert (other_losses - losses).abs().max() <= tolerance(precision)
        assert other_norms.tolist() == pytest.approx(norms.tolist(), rel=20 * tolerance(precision))
        assert other_scale == scale
        assert torch.equal(other_params, results[0][2])
        # AdamW turns rounding into steps where a gradient is zero but for rounding, so parameters are compared below.
    if precision == "fp16":
        assert scale > SCALE


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": False}, {"wrap_policy": 500}, {"cpu_offload": True}], ids=str)
def test_parameters_equal_those_of_one_process_under_any_option(ranks2, options):
    losses, norms, params, _ = train(0, 1, "fp32", 0.5, make=sgd)
    for other_losses, other_norms, other_params, _ in ranks2(train, "fp32", 0.5, options, None, sgd):
        assert (other_losses - losses).abs().max() <= 2e-6
        assert (other_norms - norms).abs().max() <= 2e-6
        assert (other_params - params).abs().max() <= 2e-6
