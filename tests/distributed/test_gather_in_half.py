"""gather_in_half: weights that only products read are gathered in half, and training does not change by a bit."""

import pytest
import torch
import torch.nn.functional as F
from matrix import BATCH, LENGTH, TP_PLAN, VOCABULARY, Transformer, loss_of
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from booster import Booster
from booster.mixed_precision import BF16MixedPrecision, FP16TorchMixedPrecision
from booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin

DIM, ENTRIES = 8, VOCABULARY + VOCABULARY % 2  # an even number of rows, so that no shard is padded
KINDS = {"fp16": FP16TorchMixedPrecision, "bf16": BF16MixedPrecision}


class Block(nn.Module):
    """Norms, attention that calls no projection, and perhaps a scale of the block's own."""

    def __init__(self, scaled):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attention = nn.MultiheadAttention(DIM, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))
        self.scale = nn.Parameter(torch.full((DIM,), 0.5)) if scaled else None

    def forward(self, x):
        y = self.norm1(x)
        x = x + self.attention(y, y, y, need_weights=False)[0]
        y = self.mlp(self.norm2(x))
        return x + (y if self.scale is None else self.scale * y)


class Model(nn.Module):
    def __init__(self, scaled=False, tied=False, checkpointed=False):
        super().__init__()
        self.checkpointed = checkpointed
        self.table = nn.Embedding(ENTRIES, DIM)
        self.blocks = nn.ModuleList(Block(scaled) for _ in range(2))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, ENTRIES, bias=False)
        if tied:
            self.head.weight = self.table.weight

    def forward(self, tokens):
        x = self.table(tokens)
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False) if self.checkpointed else block(x)
        return self.head(self.norm(x))


class Gathered(TorchDispatchMode):
    """Adds up the bytes that every all-gather makes on this rank."""

    bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket.__name__ == "_allgather_base_":
            self.bytes += args[0].nbytes
        return func(*args, **(kwargs or {}))


def batch(step, share, index):
    tokens = torch.randint(VOCABULARY, (BATCH, LENGTH), generator=torch.Generator().manual_seed(step))
    return tokens.chunk(share)[index]


def train(booster, model, accumulated=1, steps=2):
    """Losses, weights at the end, loss scale, and bytes gathered by one forward and backward pass."""
    # Not Adam, which makes a step of the noise that is the gradient of a key's bias.
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    model, optimizer, *_ = booster.boost(model, optimizer)
    losses, counted = [], 0
    for step in range(steps):
        tokens = batch(step, booster.plugin.data_parallel_size, booster.plugin.data_parallel_rank)
        with Gathered() as gathered, booster.accumulate(model, optimizer, num_micro_batches=accumulated):
            for part in tokens.chunk(accumulated):
                loss = F.cross_entropy(model(part).flatten(0, 1), (part * 3 + 1).flatten() % VOCABULARY)
                booster.backward(loss, optimizer)
                losses.append(loss.detach())
        counted = gathered.bytes
        optimizer.clip_grad_by_norm(0.5)
        assert optimizer.step().applied
        optimizer.zero_grad()
    weights = [
        getattr(param, "full_tensor", lambda param=param: param)().detach().clone() for param in model.parameters()
    ]
    return torch.stack(losses), weights, optimizer.loss_scale, counted


# kind, options of the model, the precision and the plugin, micro-batches
CASES = {
    "clipped": ("fp16", {}, {}, {}, 1),
    "checkpointed": ("fp16", {"checkpointed": True}, {}, {}, 1),
    "accumulated": ("fp16", {}, {}, {}, 2),
    "tied": ("bf16", {"tied": True}, {}, {}, 1),
    "scaled": ("bf16", {"scaled": True}, {"cache_enabled": False}, {}, 1),
    "kept": ("bf16", {}, {"keep_fp32": ("head", "blocks.1.mlp")}, {}, 1),
    "not resharded": ("bf16", {}, {}, {"reshard_after_forward": False}, 1),
}


def compare(rank, world_size, case):
    """Bytes gathered in a step without and with the option."""
    kind, model_options, options, plugin_options, accumulated = CASES[case]
    found = []
    for gather_in_half in (False, True):
        torch.manual_seed(3)
        start = Model(**model_options).table.weight.detach()
        torch.manual_seed(3)
        booster = Booster(
            "cpu", KINDS[kind](gather_in_half=gather_in_half, **options), TorchFSDPPlugin(**plugin_options)
        )
        found.append(train(booster, Model(**model_options), accumulated))
    (losses, weights, scale, whole), (own_losses, own_weights, own_scale, half) = found
    assert not torch.equal(weights[0], start)
    assert torch.equal(own_losses, losses)
    assert own_scale == scale
    assert all(torch.equal(own, other) for own, other in zip(own_weights, weights, strict=True))
    return whole, half


def copies(rank, world_size):
    """Bytes that autograd holds of weights of `mlp` between forward and backward, without and with the option."""
    held = []
    for gather_in_half in (False, True):
        precision = BF16MixedPrecision(gather_in_half=gather_in_half)
        booster = Booster("cpu", precision, TorchFSDPPlugin(), half_products="native")
        model, *_ = booster.boost(Model())
        saved = []
        with torch.autograd.graph.saved_tensors_hooks(
            lambda tensor, saved=saved: saved.append(tensor) or tensor, lambda x: x
        ):
            loss = model(batch(0, world_size, rank)).sum()
        weights = [tensor for tensor in saved if tuple(tensor.shape) in ((DIM, 2 * DIM), (2 * DIM, DIM))]
        assert {tensor.dtype for tensor in weights} == {torch.bfloat16}
        held.append(sum(tensor.untyped_storage().nbytes() for tensor in weights))
        loss.backward()  # frees what the next model would meet
    return held


def test_no_half_copies_of_weights_wait_for_backward(ranks2):
    assert ranks2(copies) == [[2 * 4 * 2 * DIM * DIM, 0]] * 2


def numbers(model, names):
    return sum(param.numel() for name in names for param in model.get_submodule(name).parameters())


def gathered_bytes(case):
    """Bytes that a step gathers, by the shapes, without the option and with it: 4 for a number, 2 for those of products."""
    _, model_options, _, plugin_options, passes = CASES[case]
    model = Model(**model_options)
    whole = sum(param.numel() for param in model.parameters())
    outside = whole - numbers(model, ["blocks"])
    # What is outside blocks stays until backward; blocks are gathered again.
    again = 1 if plugin_options else 2
    products = numbers(model, ["blocks.0.mlp"] if case == "kept" else ["blocks.0.mlp", "blocks.1.mlp"])
    if case != "scaled":  # else attention stays with the block, which holds a scale that is no product
        products += numbers(model, ["blocks.0.attention", "blocks.1.attention"])
    saved = again * products + (0 if case in ("tied", "kept") else numbers(model, ["head"]))
    every = again * (whole - outside) + outside
    return 4 * every * passes, (4 * every - 2 * saved) * passes


@pytest.mark.slow_cases("checkpointed", "tied", "scaled", "not resharded", "kept")
@pytest.mark.parametrize("case", CASES)
def test_training_is_the_same_to_the_bit_and_products_are_gathered_in_half(ranks2, case):
    assert ranks2(compare, case) == [gathered_bytes(case)] * 2


def hybrid(rank, world_size, kind, options):
    found = []
    for gather_in_half in (False, True):
        torch.manual_seed(7)
        plugin = HybridParallelPlugin(**{"tp_plan": TP_PLAN} | options)
        booster = Booster("cpu", KINDS[kind](gather_in_half=gather_in_half), plugin)
        model = Transformer()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model, optimizer, criterion, *_ = booster.boost(model, optimizer, loss_of)
        gathered, losses = Gathered(), []
        for step in range(2):
            tokens = batch(step, plugin.data_parallel_size, plugin.data_parallel_rank)
            with gathered:
                out = booster.execute_pipeline(iter([(tokens, tokens * 3 % VOCABULARY)]), model, criterion, optimizer)
            losses.append(booster.reduce(out["loss"]))
            assert optimizer.step().applied
            optimizer.zero_grad()
        weights = [param.full_tensor().detach().clone() for param in model.parameters()]
        found.append((torch.stack(losses), weights, gathered.bytes))
    (losses, weights, whole), (own_losses, own_weights, half) = found
    assert torch.equal(own_losses, losses)
    assert all(torch.equal(own, other) for own, other in zip(own_weights, weights, strict=True))
    return whole, half


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"tp_size": 2, "pp_size": 1, "zero_stage": 2},
        pytest.param({"tp_size": 1, "pp_size": 2, "zero_stage": 1}, marks=pytest.mark.slow),
        pytest.param({"tp_size": 2, "pp_size": 1, "zero_stage": 0}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_hybrid_parallelism_gathers_divided_layers_and_stages_in_half_too(ranks4, options):
    for whole, half in ranks4(hybrid, "bf16", options):
        assert half < 0.8 * whole if options["zero_stage"] else half == whole


def others(rank, world_size):
    precision = BF16MixedPrecision(gather_in_half=True)
    with pytest.raises(
        ValueError, match=r"LowLevelZeroPlugin.*keeps what it gathered.*gather_in_half=False.*TorchFSDPPlugin"
    ):
        Booster("cpu", precision, LowLevelZeroPlugin()).boost(Model())
    found = []
    for gather_in_half in (False, True):
        torch.manual_seed(3)
        found.append(
            train(Booster("cpu", BF16MixedPrecision(gather_in_half=gather_in_half), TorchDDPPlugin()), Model())
        )
    assert torch.equal(found[0][0], found[1][0])


def test_who_keeps_what_it_gathers_refuses_and_who_gathers_nothing_does_the_same(ranks2):
    ranks2(others)
