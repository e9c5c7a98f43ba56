"""A training job on sequences that ranks may share, and the models that it trains: one's numbers on any number of ranks."""

import random
from dataclasses import dataclass, field

import torch
from matrix import PRECISIONS, poison_next_backward
from packages import package
from torch import nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map

from booster import Booster
from booster.plugin import HybridParallelPlugin, SingleDevice, TorchFSDPPlugin

VOCABULARY, DIM, HEADS, BATCH, WINDOW = 20, 32, 4, 4, 6
STEPS, OVERFLOWS = 4, (1,)


class Block(nn.Module):
    """causal: attention reads what came before; kv_heads: fewer of keys and values; window: so many tokens back."""

    def __init__(self, causal=True, kv_heads=HEADS, window=None, dropout=0.0):
        super().__init__()
        self.causal, self.kv_heads, self.window, self.dropout = causal, kv_heads, window, dropout
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.q, self.kv, self.out = (
            nn.Linear(DIM, DIM),
            nn.Linear(DIM, 2 * kv_heads * DIM // HEADS),
            nn.Linear(DIM, DIM),
        )
        self.up, self.down = nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, x, mask):
        h = self.norm1(x)
        q = self.q(h).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        k, v = self.kv(h).unflatten(-1, (2, self.kv_heads, -1)).permute(2, 0, 3, 1, 4)
        shared = self.kv_heads != HEADS
        causal = self.causal and mask is None
        out = F.scaled_dot_product_attention(q, k, v, mask, is_causal=causal, enable_gqa=shared)
        x = x + F.dropout(self.out(out.transpose(1, 2).flatten(2)), self.dropout, self.training)
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Decoder(nn.Module):
    """A small GPT, or with causal=False an encoder, that is given the positions of its tokens."""

    def __init__(self, causal=True, kv_heads=HEADS, window=None, dropout=0.0, checkpoints=False, blocks=2):
        super().__init__()
        self.window, self.checkpoints = window, checkpoints
        self.embedding, self.position = nn.Embedding(VOCABULARY, DIM), nn.Embedding(64, DIM)
        self.blocks = nn.ModuleList(Block(causal, kv_heads, window, dropout) for _ in range(blocks))
        self.head = nn.Linear(DIM, VOCABULARY)

    def forward(self, tokens, positions, mask=None):
        x = self.embedding(tokens) + self.position(positions)
        for block in self.blocks:
            if self.checkpoints:
                x = torch.utils.checkpoint.checkpoint(block, x, mask, use_reentrant=False)
            else:
                x = block(x, mask)
        return self.head(x)


class Encoder(nn.Module):
    """torch's own encoder, with a mask of padding."""

    def __init__(self):
        super().__init__()
        self.embedding, self.position = nn.Embedding(VOCABULARY, DIM), nn.Embedding(64, DIM)
        layer = nn.TransformerEncoderLayer(DIM, HEADS, 2 * DIM, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.head = nn.Linear(DIM, VOCABULARY)

    def forward(self, tokens, positions, mask=None):
        x = self.embedding(tokens) + self.position(positions)
        return self.head(self.encoder(x, src_key_padding_mask=mask))


def of_transformers(kind, **options):
    transformers = package("transformers")
    options |= {"vocab_size": VOCABULARY, "hidden_size": DIM, "intermediate_size": 2 * DIM, "num_hidden_layers": 2}
    options |= {"num_attention_heads": HEADS, "max_position_embeddings": 64, "attn_implementation": "sdpa"}
    config = getattr(transformers, f"{kind}Config")(**options)
    return getattr(transformers, f"{kind}ForCausalLM")(config)


MODELS = {
    "gpt": Decoder,
    "gqa": lambda: Decoder(kv_heads=2),
    "mqa": lambda: Decoder(kv_heads=1),
    "bidirectional": lambda: Decoder(causal=False),
    "window": lambda: Decoder(window=WINDOW),
    "checkpointed": lambda: Decoder(checkpoints=True),
    "deep": lambda: Decoder(blocks=4),
    "checkpointed_deep": lambda: Decoder(checkpoints=True, blocks=4),
    "encoder": Encoder,
    "llama": lambda: of_transformers("Llama", num_key_value_heads=2),
    "mistral": lambda: of_transformers("Mistral", num_key_value_heads=2, sliding_window=WINDOW),
    "mixtral": lambda: of_transformers("Mixtral", num_key_value_heads=2, num_local_experts=4),
}


def batch_of(model, step, length):
    """The whole batch of a step: mappings for models of transformers, else tokens, positions, labels and what masks it has."""
    draw = torch.Generator().manual_seed(step)
    tokens = torch.randint(VOCABULARY, (BATCH, length + 1), generator=draw)
    labels = (tokens[:, :-1] * 3 + tokens[:, 1:]) % VOCABULARY
    labels[: BATCH // 2, length // 3 :] = -100  # few labels on some ranks
    tokens = tokens[:, :-1].contiguous()
    positions = torch.arange(length).expand(BATCH, -1)
    if model in ("llama", "mistral", "mixtral"):
        real = torch.ones_like(tokens)
        real[1, length - 3 :] = 0
        return {"input_ids": tokens, "labels": tokens.masked_fill(labels < 0, -100), "attention_mask": real}
    if model == "window":
        back = positions[0][:, None] - positions[0]
        mask = ((back >= 0) & (back < WINDOW)).expand(BATCH, 1, -1, -1)
        return (tokens, positions, mask, labels)
    if model == "encoder":
        padding = torch.zeros_like(tokens, dtype=torch.bool)
        padding[1, length - 3 :] = True
        return (tokens, positions, padding, labels)
    return (tokens, positions, labels)


@dataclass
class Trace:
    """What one rank saw: an entry for every step, and the weights at the end by name."""

    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    applied: list[bool] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)

    @property
    def sound(self):
        return all(weight.isfinite().all() for weight in self.weights.values())


def plugin_for(world_size, kind, **options):
    if world_size == 1:
        return SingleDevice()
    if kind == "fsdp":
        return TorchFSDPPlugin(**options)
    sizes = options.pop("tp_size", 1), options.pop("pp_size", 1)
    return HybridParallelPlugin(*sizes, zero_stage=int(kind == "zero"), **options)


def shared(batch, plugin, micro=None):
    """The sequences of this rank, all of their tokens."""
    size = BATCH // plugin.data_parallel_size
    rows = slice(plugin.data_parallel_rank * size, (plugin.data_parallel_rank + 1) * size)
    if isinstance(batch, dict):
        return {name: value[rows] for name, value in batch.items()}
    return tuple(value[rows] for value in batch)


def loss_on(booster, model, batch, **options):
    """The loss over all tokens of all ranks of the `batch` of this rank."""
    if isinstance(batch, dict):
        return model(**booster.shard_sequence(batch, shift_labels=True, **options)).loss
    *inputs, labels = booster.shard_sequence(batch, **options)
    losses = F.cross_entropy(model(*inputs).flatten(0, 1).float(), labels.flatten(), reduction="none")
    return booster.token_mean(losses, labels != -100)


def loss_in_stages(booster, model, batch, optimizer, **options):
    """The same by `execute_pipeline`, which runs backward as well."""

    def criterion(output, target):
        if isinstance(batch, dict):
            return output["loss"]
        losses = F.cross_entropy(output.flatten(0, 1).float(), target.flatten(), reduction="none")
        return booster.token_mean(losses, target != -100)

    cut = booster.shard_sequence(batch, **{"shift_labels": isinstance(batch, dict)} | options)
    return booster.execute_pipeline(iter([cut]), model, criterion, optimizer)["loss"]


def train(
    rank,
    world_size,
    model,
    precision="fp32",
    length=16,
    kind="hybrid",
    overflows=(),
    steps=STEPS,
    device="cpu",
    **options,
):
    """Train the job and return this rank's `Trace`."""
    torch.manual_seed(7)
    net = MODELS[model]()
    booster = Booster(device, PRECISIONS[precision](), plugin_for(world_size, kind, **options), skip_nonfinite=True)
    optimizer = torch.optim.AdamW(net.parameters(), lr=3e-3)
    net, optimizer, *_ = booster.boost(net, optimizer)
    draw, trace = random.Random(f"{model} {precision}"), Trace()
    for step in range(steps):
        if step in overflows:
            poison_next_backward(optimizer, draw)
        batch = tree_map(lambda each: each.to(device), batch_of(model, step, length))
        batch = shared(batch, booster.plugin)
        if world_size > 1 and {"num_micro_batches", "pp_size"} & set(options):
            loss = loss_in_stages(booster, net, batch, optimizer)
        else:
            loss = loss_on(booster, net, batch)
            booster.backward(loss, optimizer)
        optimizer.clip_grad_by_norm(0.5)
        result = optimizer.step()
        optimizer.zero_grad()
        trace.losses.append(float(booster.reduce(loss.detach())))
        trace.norms.append(result.grad_norm)
        trace.applied.append(result.applied)
        trace.scales.append(optimizer.loss_scale)
    named = net.module.own_parameters().items() if options.get("pp_size", 1) > 1 else net.named_parameters()
    for name, param in named:
        weight = param.detach()
        trace.weights[name] = (weight.full_tensor() if hasattr(weight, "full_tensor") else weight).float().clone()
    return trace


def several(rank, world_size, cases):
    """The traces of several cases, (arguments, options) of `train`, in one call."""
    return [train(rank, world_size, *args, **options) for args, options in cases]
