"""One training job that runs under every precision on every parallelism, and what is compared between them.

The job: a small transformer, a global batch divided among the data-parallel ranks, a clip in every step, two passes before
one of the steps, an inf in one rank's part of a gradient at two others, one of them right after the two passes, the very
first step among them in the runs of fused optimizers.
"""

import random
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from booster import Booster
from booster.mixed_precision import (
    BF16NaiveMixedPrecision,
    FP8MixedPrecision,
    FP16ApexMixedPrecision,
    FP16NaiveMixedPrecision,
    FP16TorchMixedPrecision,
    Int8MixedPrecision,
    MXFP8MixedPrecision,
    NVFP4MixedPrecision,
    TF32MixedPrecision,
)
from booster.mixed_precision.low_precision.linear import LowPrecisionLinear
from booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, SingleDevice, TorchDDPPlugin, TorchFSDPPlugin

DIM, HEADS, LENGTH, VOCABULARY, BATCH = 16, 4, 8, 19, 8
BLOCKS = 2  # one for each of two stages
STEPS, OVERFLOWS = 6, (1, 4)
DOUBLES = (3,)  # steps before which two batches run forward and backward, one after the other
# Of the rows in 4 to 8 bits: larger layers, since the kernels want multiples of 32 of what a rank has; fewer steps.
LOW_DIM, LOW_BLOCKS, LOW_STEPS, LOW_OVERFLOWS = 64, 2, 8, (5,)
SCALE = 2.0**10  # small enough that no step overflows by itself at the brink, where rounding would decide
MAX_NORM = 0.5


def apex(opt_level):
    # The maximum is where a dynamic scale of apex begins, if it is lower than 2**16.
    return lambda: FP16ApexMixedPrecision(opt_level, max_loss_scale=SCALE, verbosity=0)


PRECISIONS = {
    "fp32": lambda: "fp32",
    "fp16": lambda: FP16TorchMixedPrecision(init_scale=SCALE),
    "fp16_apex O1": apex("O1"),
    "fp16_apex O2": apex("O2"),
    "bf16": lambda: "bf16",
    "fp16_naive": lambda: FP16NaiveMixedPrecision(initial_scale=SCALE, hysteresis=1),
    "bf16_naive": BF16NaiveMixedPrecision,
    "tf32": lambda: TF32MixedPrecision(emulate=True),
    "fp8": lambda: FP8MixedPrecision(emulate=True),
    "mxfp8": lambda: MXFP8MixedPrecision(emulate=True),
    "nvfp4": lambda: NVFP4MixedPrecision(emulate=True),
    "int8": Int8MixedPrecision,
}
LOW = ("fp8", "mxfp8", "nvfp4", "int8")

# Loss and norm against the reference, relative to their size of about 1. Half weights round every gradient, and shards
# and stages add them in another order.
TOLERANCE = {
    "fp32": 2e-6,
    "fp16": 1e-3,
    "fp16_apex O1": 1e-3,
    "fp16_apex O2": 1e-2,
    "bf16": 1e-2,
    "fp16_naive": 1e-2,
    "bf16_naive": 1e-2,
    "tf32": 1e-3,
    # A few numbers that round the other way; nvfp4 also draws its own.
    "fp8": 1e-2,
    "mxfp8": 6e-3,
    "nvfp4": 3e-2,
    "int8": 3e-3,
}

TP_PLAN = {
    "blocks.*.q": "colwise",
    "blocks.*.k": "colwise",
    "blocks.*.v": "colwise",
    "blocks.*.out": "rowwise",
    "blocks.*.up": "colwise",
    "blocks.*.down": "rowwise",
}


@dataclass(frozen=True)
class Parallelism:
    """A column of the matrix: how many ranks, and the plugin that they make."""

    world_size: int
    make: Any
    options: dict[str, Any] = field(default_factory=dict)

    def plugin(self):
        return self.make(**self.options)


def hybrid(world_size, tp_size, pp_size):
    micro = {"num_microbatches": 2} if pp_size > 1 else {}
    return Parallelism(
        world_size,
        HybridParallelPlugin,
        {"tp_size": tp_size, "pp_size": pp_size, "pp_style": "1f1b", "tp_plan": TP_PLAN, **micro},
    )


PARALLELISMS = {
    "single": Parallelism(1, SingleDevice),
    "DDP": Parallelism(2, TorchDDPPlugin),
    "FSDP": Parallelism(2, TorchFSDPPlugin),
    "ZeRO-1": Parallelism(2, LowLevelZeroPlugin, {"stage": 1}),
    "ZeRO-2": Parallelism(2, LowLevelZeroPlugin, {"stage": 2}),
    "TP": hybrid(2, 2, 1),
    "PP": hybrid(2, 1, 2),
    "DP x TP": hybrid(4, 2, 1),
    "PP x DP": hybrid(4, 1, 2),
    "PP x DP x TP": hybrid(8, 2, 2),
}


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.head_dim = dim // HEADS
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.q, self.k, self.v, self.out = (nn.Linear(dim, dim) for _ in range(4))
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x):
        h = self.norm1(x)
        q, k, v = (f(h).view(*x.shape[:2], -1, self.head_dim).transpose(1, 2) for f in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    def __init__(self, dim=DIM, num_blocks=BLOCKS):
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, dim)
        self.position = nn.Parameter(torch.randn(LENGTH, dim) * 0.1)
        self.blocks = nn.ModuleList(Block(dim) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, VOCABULARY)

    def forward(self, tokens):
        x = self.embedding(tokens) + self.position
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def make_model(precision):
    """The model of the row, with the same weights everywhere."""
    torch.manual_seed(7)
    return Transformer(LOW_DIM, LOW_BLOCKS) if precision in LOW else Transformer()


def loss_of(logits, targets):
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


OPTIMIZERS = {
    "AdamW": partial(torch.optim.AdamW, lr=3e-3),
    "Adam": partial(torch.optim.Adam, lr=3e-3),
    "SGD": partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "Adagrad": partial(torch.optim.Adagrad, lr=0.02),
}


@dataclass
class Trace:
    """What one rank saw: a list entry for every step, and the weights at the end by name."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    applied: list[bool] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    reasons: list[Any] = field(default_factory=list)
    culprits: list[tuple[str, ...]] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    sound: bool = True
    low: list[str] = field(default_factory=list)  # names of the layers that multiply in 4 to 8 bits


def train(
    precision,
    parallelism,
    optimizer="AdamW",
    steps=STEPS,
    overflows=OVERFLOWS,
    num_splits=1,
    seed=0,
    fused_optimizer=True,
    device="cpu",
    half_products="auto",
):
    """Train the job and return this rank's `Trace`.

    num_splits: parts of every batch; a single process averages their gradients, for a reference that rounds half gradients
    as data-parallel ranks do.
    """
    model = make_model(precision)
    column = PARALLELISMS[parallelism]
    booster = Booster(
        device,
        PRECISIONS[precision](),
        column.plugin(),
        skip_nonfinite=True,
        fused_optimizer=fused_optimizer,
        half_products=half_products,
    )
    plugin = booster.plugin
    made = OPTIMIZERS[optimizer](model.parameters())
    model, made, criterion, _, _ = booster.boost(model, made, loss_of)
    data = torch.Generator().manual_seed(3)
    # Not seeded by the rank: all ranks draw the same victim.
    draw = random.Random(f"{precision} {parallelism} {optimizer} {seed}")
    trace = Trace()
    share = BATCH // plugin.data_parallel_size
    first = plugin.data_parallel_rank * share
    for step in range(steps):
        if step in overflows:
            poison_next_backward(made, draw)
        loss = 0.0
        for _ in range(2 if step in DOUBLES else 1):
            tokens = torch.randint(VOCABULARY, (BATCH, LENGTH + 1), generator=data)[first : first + share].to(device)
            inputs, targets = tokens[:, :-1], (tokens[:, :-1] * 3 + 1) % VOCABULARY
            if num_splits == 1:
                result = booster.execute_pipeline(iter([(inputs, targets)]), model, criterion, made)
                loss += float(booster.reduce(result["loss"]))
                continue
            before = [param.grad for param in model.parameters()]  # to which every rank adds its own
            shares = []
            for x, y in zip(inputs.chunk(num_splits), targets.chunk(num_splits), strict=True):
                for param, grad in zip(model.parameters(), before, strict=True):
                    param.grad = None if grad is None else grad.clone()
                part = criterion(model(x), y)
                booster.backward(part, made)
                loss += float(part.detach()) / num_splits
                shares.append([param.grad / num_splits for param in model.parameters()])
            for param, grads in zip(model.parameters(), zip(*shares, strict=True), strict=True):
                param.grad = sum(grads[1:], grads[0])
        made.clip_grad_by_norm(MAX_NORM)
        result = made.step()
        made.zero_grad()
        trace.losses.append(loss)
        trace.norms.append(result.grad_norm)
        trace.applied.append(result.applied)
        trace.scales.append(made.loss_scale)
        trace.reasons.append(result.skipped_reason)
        trace.culprits.append(result.culprit)
    trace.low = [name for name, module in model.named_modules() if isinstance(module, LowPrecisionLinear)]
    for name, param in model.named_parameters():
        whole = param.detach().full_tensor() if hasattr(param, "full_tensor") else param.detach()
        trace.weights[name] = whole.float().clone()
        trace.sound = trace.sound and bool(whole.isfinite().all())
    return trace


def poison_next_backward(optimizer, draw):
    """Write an inf into the gradient of one parameter on one rank, or into its part of it where ranks hold parts.

    After autograd and its reductions, and before anything looks at gradients, which some precisions do in every backward.
    """
    victim = draw.randrange(dist.get_world_size()) if dist.is_initialized() else 0
    choice = draw.random()
    update = optimizer._update.gradients

    def after_backward(loss):
        del update.after_backward
        if not dist.is_initialized() or dist.get_rank() == victim:
            with update.shards.local():
                held = [param for group in optimizer.param_groups for param in group["params"]]
                grads = [param.grad for param in held if param.grad is not None and param.grad.numel()]
                grads[int(choice * len(grads))].view(-1)[0] = float("inf")
        update.after_backward(loss)

    update.after_backward = after_backward


def cell(rank, world_size, precision, parallelism, optimizer="AdamW", steps=STEPS, overflows=OVERFLOWS):
    """One cell on one rank, for the fixtures `ranks2` and `ranks4`."""
    return train(precision, parallelism, optimizer, steps, overflows)
