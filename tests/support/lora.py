"""A small transformer with a frozen base and low-rank adapters, of the structure that peft gives a model."""

from types import SimpleNamespace

import torch
from torch import nn
from torch.nn import functional as F

from booster import Booster, load_weights
from booster.frozen import FrozenLinear

VOCABULARY, WIDTH, LENGTH, RANK = 16, 32, 6, 8


class LoraLinear(nn.Module):
    """`base_layer` plus a product of two small matrices, the second of which begins at zero; names are peft's."""

    def __init__(self, base_layer, rank=RANK, dtype=torch.float32, scaling=2.0):
        super().__init__()
        self.base_layer, self.scaling = base_layer, scaling
        self.lora_A = nn.ModuleDict({"default": nn.Linear(base_layer.in_features, rank, bias=False, dtype=dtype)})
        self.lora_B = nn.ModuleDict({"default": nn.Linear(rank, base_layer.out_features, bias=False, dtype=dtype)})
        nn.init.zeros_(self.lora_B["default"].weight)

    def forward(self, x):
        result = self.base_layer(x)
        a, b = self.lora_A["default"], self.lora_B["default"]
        return result + (b(a(x.to(a.weight.dtype))) * self.scaling).to(result.dtype)


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class Base(nn.Module):
    def __init__(self, num_blocks=2, width=WIDTH):
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(num_blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def base(seed=0):
    torch.manual_seed(seed)
    return Base()


def loaded(path, **storage):
    """The base, built on the meta device and read from `path`."""
    with torch.device("meta"):
        model = Base()
    return load_weights(model, path, device="cpu", **storage)


def widened(model):
    """Plain linear layers instead of frozen ones, with the weights that those stand for, as frozen."""
    for name, module in [*model.named_modules()]:
        if isinstance(module, FrozenLinear):
            plain = nn.Linear(module.in_features, module.out_features)
            plain.weight, plain.bias = nn.Parameter(module.unpacked()), module.bias
            model.set_submodule(name, plain)
    return model


def adapted(model, dtype=torch.float32, layers=("up", "down")):
    """Freeze `model` and put adapters around the linear layers of these names."""
    model.requires_grad_(False)
    torch.manual_seed(7)
    for name, module in [*model.named_modules()]:
        if isinstance(module, nn.Linear) and name.rpartition(".")[2] in layers:
            model.set_submodule(name, LoraLinear(module, dtype=dtype))
    return model


class Grouped(nn.Module):
    """What a library of quantised models brings: integer codes and half scales, as buffers."""

    def __init__(self, linear):
        super().__init__()
        scale = linear.weight.detach().abs().amax(1, keepdim=True) / 127
        self.register_buffer("qweight", (linear.weight.detach() / scale).round().to(torch.int32))
        self.register_buffer("scales", scale.half())
        self.in_features, self.out_features = linear.in_features, linear.out_features

    def forward(self, x):
        return F.linear(x, self.qweight.to(x.dtype) * self.scales.to(x.dtype))


def quantised_by_others():
    """A base with layers of a kind that this library does not know, of which the head trains."""
    model = base()
    for block in model.blocks:
        block.up, block.down = Grouped(block.up), Grouped(block.down)
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    return model


def boosted(model, precision, plugin=None, lr=0.02):
    booster = Booster("cpu", precision, plugin)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)  # all of them, as scripts do
    model, optimizer, criterion, *_ = booster.boost(model, optimizer, nn.CrossEntropyLoss())
    return SimpleNamespace(booster=booster, model=model, optimizer=optimizer, criterion=criterion)


def steps(job, count, *, first=0, rank=0, world_size=1, overflow=()):
    """Train so many steps; returns the losses and which steps were applied."""
    losses, applied = [], []
    for step in range(first, first + count):
        draw = torch.Generator().manual_seed(step % 4)
        tokens = torch.randint(0, VOCABULARY, (8, LENGTH + 1), generator=draw).chunk(world_size)[rank]
        loss = job.criterion(job.model(tokens[:, :-1]).transpose(1, 2), tokens[:, 1:])
        losses.append(loss.item())
        job.booster.backward(loss * torch.inf if step in overflow and rank == world_size - 1 else loss, job.optimizer)
        applied.append(bool(job.optimizer.step()))
        job.optimizer.zero_grad()
    return losses, applied


def trained(job):
    """What trains, whole."""
    params = {name: param for name, param in job.model.named_parameters() if param.requires_grad}
    return {n: (p.full_tensor() if hasattr(p, "full_tensor") else p).detach().clone() for n, p in params.items()}


# Of losses, and of what was learnt: sums of products come in other orders where autograd multiplies by transposed matrices.
TOLERANCES = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 2e-2}


def differs(one, other, start, tolerance):
    """The names of what trained differently, relative to how far it came from `start`, in norms; empty where nothing did."""
    found = []
    for name, value in one.items():
        came = (other[name].float() - start[name].float()).norm()
        if not float((value.float() - other[name].float()).norm()) <= tolerance * 10 * float(came):
            found.append(name)
    return found
