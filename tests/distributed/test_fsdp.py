"""TorchFSDPPlugin on gloo ranks: training equals one process, and every rank holds its share and no more."""

import functools
import math

import pytest
import torch
import torch.nn.functional as F
from comparing import flat, whole
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from booster import Booster
from booster.common.torch_internals.fsdp_internals import fsdp_groups
from booster.mixed_precision import (
    BF16NaiveMixedPrecision,
    DtypePolicy,
    FP16NaiveMixedPrecision,
    FP16TorchMixedPrecision,
)
from booster.plugin import TorchFSDPPlugin
from booster.plugin.fsdp.shard_module import shard_module

DIM, VOCABULARY, LENGTH, BATCH, STEPS = 16, 11, 6, 16, 5
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

    def __init__(self, checkpointing=False, tied=False, num_blocks=3):
        super().__init__()
        self.checkpointing = checkpointing
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
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


def train(rank, world_size, precision, clip=None, options=None, model_options=None, make=adamw, seed=0, steps=STEPS):
    """Losses of the whole batch, norms, parameters at the end, loss scale."""
    model = transformer(seed + rank, **(model_options or {}))  # ranks must take rank 0's weights
    booster, model, optimizer = boost(world_size, precision, model, make, options)
    losses, norms = [], []
    for step in range(steps):
        loss, norm, result = one_step(booster, model, optimizer, step, rank, world_size, clip)
        assert result.applied
        losses.append(loss)
        norms.append(norm)
    return torch.stack(losses), torch.stack(norms), flat(model), optimizer.loss_scale


# ---- equal to one process ----


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


@pytest.mark.parametrize(
    "options", [{}, {"reshard_after_forward": False}, {"wrap_policy": 500}, {"cpu_offload": True}], ids=str
)
def test_parameters_equal_those_of_one_process_under_any_option(ranks2, options):
    losses, norms, params, _ = train(0, 1, "fp32", 0.5, make=sgd)
    for other_losses, other_norms, other_params, _ in ranks2(train, "fp32", 0.5, options, None, sgd):
        assert (other_losses - losses).abs().max() <= 2e-6
        assert (other_norms - norms).abs().max() <= 2e-6
        assert (other_params - params).abs().max() <= 2e-6


@pytest.mark.slow_cases("fp16")
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16_naive"])
def test_hybrid_sharding_on_two_by_two_ranks_equals_one_process(ranks4, precision):
    losses, norms, *_ = train(0, 1, precision, 0.5, steps=4)
    for other_losses, other_norms, *_ in ranks4(train, precision, 0.5, {"replicate_size": 2}, None, adamw, 0, 4):
        assert (other_losses - losses).abs().max() <= tolerance(precision)
        assert other_norms.tolist() == pytest.approx(norms.tolist(), rel=20 * tolerance(precision))


def offloaded(rank, world_size):
    _, model, _ = boost(world_size, options={"cpu_offload": True})
    # On CPU offloading changes nothing else that could be seen.
    return [
        type(group.offload_policy).__name__
        for group in fsdp_groups(module for module in model.modules() if isinstance(module, FSDPModule))
    ]


def test_cpu_offload_reaches_every_group(ranks2):
    assert ranks2(offloaded) == [["CPUOffloadPolicy"] * 4] * 2


def other_method(rank, world_size):
    model = transformer()
    expected = model.embedding.weight[:3].detach().clone()
    Transformer.rows = lambda self, count: self.embedding.weight[:count] * 1.0
    try:
        booster, model, _ = boost(world_size, "fp32", model)
        register_fsdp_forward_method(booster.unwrap(model), "rows")
        with torch.no_grad():
            return torch.equal(model.rows(3), expected)
    finally:
        del Transformer.rows


def test_a_method_that_torch_is_told_of_gathers_parameters(ranks2):
    assert ranks2(other_method) == [True, True]


def placements(rank, world_size, options):
    _, model, _ = boost(world_size, options=options)
    return {(str(param.placements), tuple(param.device_mesh.shape)) for param in model.parameters()}


def test_a_copy_of_the_model_is_sharded_over_the_ranks_of_its_replica(ranks4):
    whole_world = {(str((Shard(0),)), (4,))}
    assert ranks4(placements, {}) == [whole_world] * 4
    assert ranks4(placements, {"replicate_size": 2}) == [{(str((Replicate(), Shard(0))), (2, 2))}] * 4
    assert ranks4(placements, {"replicate_size": 4}) == [{(str((Replicate(), Shard(0))), (4, 1))}] * 4


@pytest.mark.crossed
@pytest.mark.parametrize("precision", ["fp32", "bf16_naive"])
@pytest.mark.parametrize("model_options", [{"checkpointing": True}, {"tied": True}], ids=str)
def test_checkpointed_blocks_and_tied_weights_train_as_in_one_process(ranks2, precision, model_options):
    losses, *_ = train(0, 1, precision, 0.5, None, model_options)
    for other_losses, *_ in ranks2(train, precision, 0.5, {}, model_options):
        assert (other_losses - losses).abs().max() <= tolerance(precision)


# ---- equal to fully_shard by hand, in every bit ----


def by_hand(rank, world_size, dtype):
    model = transformer()
    policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=torch.float32)
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, fused=True)
    losses = []
    for step in range(STEPS):
        x, y = data(step, rank, world_size)
        loss = loss_of(model(x).float(), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses), flat(model)


def boosted(rank, world_size):
    model = transformer()
    booster = Booster("cpu", BF16NaiveMixedPrecision(), TorchFSDPPlugin(), half_products="native")
    model, optimizer, *_ = booster.boost(model, adamw(model.parameters()))
    losses = []
    for step in range(STEPS):
        x, y = data(step, rank, world_size)
        loss = loss_of(model(x), y)
        booster.backward(loss, optimizer)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return torch.stack(losses), flat(model)


def test_bf16_naive_is_fully_shard_with_a_policy_to_the_bit(ranks2):
    for (losses, params), (own_losses, own_params) in zip(
        ranks2(by_hand, torch.bfloat16), ranks2(boosted), strict=True
    ):
        assert torch.equal(own_losses, losses)
        assert torch.equal(own_params, params)


class Normed(nn.Module):
    """Convolutions and BatchNorm, one of them inside a repeated block."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv1d(4, 8, 3, padding=1)
        self.bn = nn.BatchNorm1d(8)
        self.blocks = nn.Sequential(
            *(nn.Sequential(nn.Conv1d(8, 8, 3, padding=1), nn.BatchNorm1d(8)) for _ in range(2))
        )
        self.head = nn.Linear(8, 3)

    def forward(self, x):
        return self.head(self.blocks(self.bn(self.stem(x)).relu()).relu().mean(-1))


class ReadByNorm(TorchDispatchMode):
    """The dtypes of what normalisations read."""

    def __init__(self):
        super().__init__()
        self.dtypes = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "batch_norm" in func.overloadpacket.__name__:
            self.dtypes.add(args[0].dtype)
        return func(*args, **(kwargs or {}))


def normed(rank, world_size, manual):
    torch.manual_seed(0)
    model = Normed()
    generator = torch.Generator().manual_seed(5)
    x, y = torch.randn(8, 4, 10, generator=generator), torch.randint(3, (8,), generator=generator)
    x, y = x.chunk(world_size)[rank], y.chunk(world_size)[rank]
    if manual:
        norms = [model.bn, model.blocks[0][1], model.blocks[1][1]]
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        # Half in, half out, float32 statistics and affine parameters.
        fully_shard(norms)
        for block in model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        step = optimizer.step
        backward = torch.Tensor.backward
    else:
        # By hand torch multiplies; in float32, as where a CPU has no units, sums would be in another order.
        booster, model, optimizer = boost(world_size, "bf16_naive", model, sgd, half_products="native")
        backward = functools.partial(booster.backward, optimizer=optimizer)
        step = optimizer.step
    losses, read = [], ReadByNorm()
    for _ in range(8):
        with read:
            output = model(x if not manual else x.bfloat16())
        loss = F.cross_entropy(output.float(), y)
        backward(loss)
        step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    buffers = [buffer.clone() for buffer in model.buffers()]
    assert read.dtypes == {torch.bfloat16}  # without copies of all activations in float32
    return torch.stack(losses), buffers, {name: param.dtype for name, param in model.named_parameters()}


def test_batch_norm_stays_float32_and_its_losses_are_those_by_hand_to_the_bit(ranks2):
    for (losses, buffers, _), (own_losses, own_buffers, dtypes) in zip(
        ranks2(normed, True), ranks2(normed, False), strict=True
    ):
        assert torch.equal(own_losses, losses)
        assert own_losses[-1] < own_losses[0]
        for own, other in zip(own_buffers, buffers, strict=True):
            assert own.dtype == other.dtype
            assert (own - other).abs().max() <= 1e-6
        assert set(dtypes.values()) == {torch.float32}


# ---- pinned, frozen, mixed ----


def pinned(rank, world_size, name, master_weights):
    kind = {"fp16": FP16NaiveMixedPrecision, "bf16": BF16NaiveMixedPrecision}[name]
    strategy = kind(keep_fp32=("norm", "blocks.1", "blocks.*.norm1"), master_weights=master_weights)
    model = transformer()
    seen = {}
    for part in ("norm", "blocks.1", "blocks.1.up", "blocks.0.norm1", "blocks.0.up", "head"):
        model.get_submodule(part).register_forward_hook(
            lambda module, args, output, part=part: (
                seen.__setitem__(part, (module.weight.dtype, output.dtype))
                if hasattr(module, "weight")
                else seen.__setitem__(part, (None, output.dtype))
            )
        )
    booster = Booster("cpu", strategy, TorchFSDPPlugin() if world_size > 1 else None)
    model, optimizer, *_ = booster.boost(model, adamw(model.parameters()))
    losses = [one_step(booster, model, optimizer, step, rank, world_size)[0] for step in range(STEPS)]
    stored = {name: param.dtype for name, param in model.named_parameters()}
    return torch.stack(losses), seen, stored


@pytest.mark.crossed
@pytest.mark.parametrize("master_weights", ["auto", "split"])
@pytest.mark.parametrize("name", ["fp16", "bf16"])
def test_pinned_modules_compute_in_float32_and_the_rest_in_half(ranks2, name, master_weights):
    half = {"fp16": torch.float16, "bf16": torch.bfloat16}[name]
    losses, expected, _ = pinned(0, 1, name, master_weights)
    for other, seen, stored in ranks2(pinned, name, master_weights):
        assert (other - losses).abs().max() <= 1e-2
        assert seen == expected
        assert seen["blocks.1.up"][0] == seen["norm"][0] == seen["blocks.0.norm1"][0] == torch.float32
        assert seen["norm"][1] == seen["blocks.1"][1] == seen["blocks.0.norm1"][1] == torch.float32
        assert seen["head"] == seen["blocks.0.up"] == (half, half)
        assert stored["blocks.1.up.weight"] == stored["norm.weight"] == torch.float32
        assert stored["head.weight"] == (half if master_weights == "split" else torch.float32)


def frozen(rank, world_size, precision, half):
    model = transformer()
    for name, param in model.named_parameters():
        param.requires_grad = name.startswith("blocks.1") or "norm" in name
        if half and not param.requires_grad:
            param.data = param.data.bfloat16()
    booster, model, optimizer = boost(world_size, precision, model, sgd)
    before = {name: whole(param) for name, param in model.named_parameters()}
    losses = [one_step(booster, model, optimizer, step, rank, world_size)[0] for step in range(STEPS)]
    moved = {name for name, param in model.named_parameters() if not torch.equal(whole(param), before[name])}
    dtypes = {name: param.dtype for name, param in model.named_parameters()}
    return torch.stack(losses), moved, dtypes


@pytest.mark.crossed
@pytest.mark.parametrize("half", [False, True])
@pytest.mark.parametrize("precision", ["bf16", "bf16_naive"])
def test_frozen_parameters_stay_and_half_ones_take_half_the_memory(ranks2, precision, half):
    losses, moved, _ = frozen(0, 1, precision, half)
    for other, also_moved, dtypes in ranks2(frozen, precision, half):
        assert (other - losses).abs().max() <= 1e-2
        assert {name for name in also_moved if not (name.startswith("blocks.1") or "norm" in name)} == set()
        assert also_moved >= moved - {"blocks.1.qkv.bias"}
        assert dtypes["embedding.weight"] == (torch.bfloat16 if half else torch.float32)
        assert dtypes["blocks.1.up.weight"] == torch.float32


def nothing_to_train(rank, world_size):
    model = transformer().requires_grad_(False)
    expected = model(data(0)[0])
    booster = Booster("cpu", "fp32", TorchFSDPPlugin())
    model, *_ = booster.boost(model)
    return (model(data(0)[0]) - expected).abs().max(), isinstance(next(model.parameters()), DTensor)


def test_a_model_without_anything_to_train_is_sharded_too(ranks2):
    assert ranks2(nothing_to_train) == [(0.0, True)] * 2


def moved_weights(rank, world_size):
    _, model, _ = boost(world_size, "bf16", nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)))
    model.half()
    with pytest.raises(RuntimeError, match=r"model.half\(\) and model.to\(dtype\) do it too: leave the weights"):
        model(torch.ones(4, 8))


def test_weights_that_are_moved_to_another_dtype_are_named(ranks2):
    ranks2(moved_weights)


def mixed_dtypes(rank, world_size, way):
    model = transformer()
    if way == "modules":
        for block in model.blocks:
            block.up.bfloat16()
            block.up.register_forward_pre_hook(lambda module, args: (args[0].bfloat16(),))
            block.up.register_forward_hook(lambda module, args, output: output.float())
    else:
        model.blocks[0].up.bias.data = model.blocks[0].up.bias.data.bfloat16()
        with pytest.raises(ValueError, match=r"'blocks.0.up' have several dtypes \(torch.bfloat16, torch.float32\)"):
            boost(world_size, "fp32", model)
        assert not any(isinstance(param, DTensor) for param in model.parameters()), "raised, but changed the model"
        return None
    booster, model, optimizer = boost(world_size, "fp32", model)
    losses = [one_step(booster, model, optimizer, step, rank, world_size)[0] for step in range(STEPS)]
    return torch.stack(losses), model.blocks[0].up.weight.dtype


def test_trainable_parameters_of_two_dtypes_get_groups_of_their_own(ranks2):
    losses, dtype = mixed_dtypes(0, 1, "modules")
    for other, other_dtype in ranks2(mixed_dtypes, "modules"):
        assert (other - losses).abs().max() <= 1e-2
        assert other_dtype == dtype == torch.bfloat16
    ranks2(mixed_dtypes, "parameters")


class Complex(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.turn = nn.Parameter(torch.randn(DIM, DIM, dtype=torch.complex64) / DIM)
        self.linear = nn.Linear(DIM, DIM)

    def forward(self, x):
        return (self.linear(x).to(torch.complex64) @ self.turn).abs()


def train_complex(rank, world_size, precision):
    booster, model, optimizer = boost(world_size, precision, Complex())
    x = torch.randn(BATCH, DIM, generator=torch.Generator().manual_seed(1)).chunk(world_size)[rank]
    for _ in range(3):
        booster.backward(model(x).float().square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    turn = model.turn.detach()
    return turn.full_tensor() if isinstance(turn, DTensor) else turn.clone()


@pytest.mark.parametrize("precision", ["fp32", "bf16_naive"])
def test_complex_parameters_are_gathered_and_reduced_as_they_are(ranks2, precision):
    turn = train_complex(0, 1, precision)
    assert (turn - Complex().turn).imag.abs().max() > 0.005, "nothing was trained"
    for other in ranks2(train_complex, precision):
        assert (other - turn).abs().max() <= 1e-3


def hooked(rank, world_size):
    for way in ("register_hook", "register_post_accumulate_grad_hook"):
        model = transformer()
        getattr(model.head.weight, way)(lambda grad: None)
        with pytest.raises(ValueError, match=r"head\.weight has hooks of register_hook .* would never be called"):
            boost(world_size, "fp32", model)
        assert not any(isinstance(param, DTensor) for param in model.parameters()), "raised, but changed the model"


def test_hooks_on_parameters_whose_place_is_taken_are_refused(ranks2):
    ranks2(hooked)


def hooked_later(rank, world_size, precision):
    booster, model, optimizer = boost(world_size, precision)
    seen = []
    weight = dict(model.named_parameters())["head.weight"]
    weight.register_post_accumulate_grad_hook(lambda param: seen.append(param is weight and param.grad is not None))
    one_step(booster, model, optimizer, 0, rank, world_size)
    weight.register_hook(lambda grad: None)
    with pytest.raises(ValueError, match=r"^head\.weight has a hook of register_hook, which would never be called"):
        model(data(0)[0])
    return seen


@pytest.mark.parametrize("precision", ["fp32", "bf16_naive"])
def test_a_hook_on_a_part_is_called_where_torch_calls_it_and_refused_where_it_never_does(ranks2, precision):
    assert ranks2(hooked_later, precision) == [[True]] * 2


# ---- synchronisation ----


def accumulate(rank, world_size, precision, options=None):
    """Five micro-batches in groups of two; the last group is short."""
    booster, model, optimizer = boost(world_size, precision, make=sgd, options=options)
    for group in ((0, 1), (2, 3), (4,)):
        with booster.accumulate(model, optimizer, num_micro_batches=len(group)):
            for place, step in enumerate(group):
                x, y = data(step, rank, world_size)
                booster.backward(loss_of(model(x), y), optimizer)
                reduced = next(model.parameters()).grad is not None
                assert reduced == (place == len(group) - 1 or world_size == 1)
        assert optimizer.step().applied
        optimizer.zero_grad()
    return flat(model)


@pytest.mark.slow_cases("fp16")
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16_naive"])
def test_accumulation_reduces_once_and_equals_one_process(ranks2, precision):
    params = accumulate(0, 1, precision)
    for other in ranks2(accumulate, precision):
        assert (other - params).abs().max() <= tolerance(precision)


def test_accumulation_under_hybrid_sharding_equals_one_process(ranks4):
    params = accumulate(0, 1, "fp32")
    for other in ranks4(accumulate, "fp32", {"replicate_size": 2}):
        assert (other - params).abs().max() <= tolerance("fp32")


def forgotten(rank, world_size):
    """A group that is given up in the middle must not reach the next step."""
    flats = []
    for give_up in (False, True):
        booster, model, optimizer = boost(world_size, "bf16_naive", make=sgd)
        if give_up:
            x, y = data(9, rank, world_size)
            with booster.no_sync(model, optimizer):
                with booster.no_sync(model, optimizer):
                    booster.backward(loss_of(model(x), y), optimizer)
                booster.backward(loss_of(model(x), y), optimizer)  # still without synchronisation
            assert next(model.parameters()).grad is None
            optimizer.zero_grad()
        one_step(booster, model, optimizer, 0, rank, world_size)
        flats.append(flat(model))
    return torch.equal(*flats)


def test_zero_grad_forgets_gradients_that_were_never_reduced(ranks2):
    assert ranks2(forgotten) == [True, True]


# ---- what a rank holds ----


def holdings(rank, world_size, precision):
    booster, model, optimizer = boost(world_size, precision)
    x, y = data(0, rank, world_size)
    booster.backward(loss_of(model(x), y), optimizer)

    def held(tensors):
        local = [tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors]
        storages = {tensor.untyped_storage() for tensor in local if tensor.dim()}
        return sum(nbytes for _, nbytes in {(storage.data_ptr(), storage.nbytes()) for storage in storages})

    grads = held(param.grad for param in model.parameters())
    optimizer.step()
    params = held(model.parameters())
    states = held(value for state in optimizer.state.values() for value in state.values())
    weights = optimizer.state_dict()["booster"].get("masters", {}).get("weights", {})
    num = sum(param.numel() for param in model.parameters())
    return [round(number / num, 1) for number in (params, grads, states)], len(weights)


@pytest.mark.slow_cases("bf16", "fp16_naive")
@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_naive", "fp16_naive"])
def test_parameters_gradients_and_states_divide_by_the_ranks(ranks2, ranks4, precision):
    # 4 bytes of float32 shards, 4 of gradients and 8 of AdamW, divided; what padding costs is below a tenth here.
    for ranks, size in ((ranks2, 2), (ranks4, 4)):
        for (params, grads, states), num_masters in ranks(holdings, precision):
            assert params == pytest.approx(4 / size, abs=0.1)
            assert grads == pytest.approx(4 / size, abs=0.1)
            assert states == pytest.approx(8 / size, abs=0.1)
            assert num_masters == 0, "the float32 shard is the master"


# ---- checkpoints ----


def whole_checkpoint(rank, world_size):
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict

    source = transformer(3, tied=True)
    booster, model, optimizer = boost(world_size, "bf16_naive", transformer(0, tied=True))
    one_step(booster, model, optimizer, 0, rank, world_size)
    model(data(0)[0])  # gathered parameters must not stand in the way
    model.load_state_dict(source.state_dict())
    assert torch.equal(flat(model), flat(source))
    gathered = get_model_state_dict(booster.unwrap(model), options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        for name, value in source.state_dict().items():
            assert torch.equal(gathered[name], value)
    with pytest.raises(RuntimeError, match="size mismatch for head.weight"):
        model.load_state_dict({**source.state_dict(), "head.weight": torch.zeros(2, 2)})


def test_a_checkpoint_of_the_whole_model_loads_and_torch_writes_one(ranks2):
    ranks2(whole_checkpoint)


# ---- the meta device ----


def from_meta(rank, world_size, precision, replicate_size=1):
    torch.manual_seed(rank)
    with torch.device("meta"):
        model = Transformer(tied=True)
    booster, model, optimizer = boost(world_size, precision, model, options={"replicate_size": replicate_size})
    start = {name: whole(param) for name, param in model.named_parameters(remove_duplicate=False)}
    losses = [one_step(booster, model, optimizer, step, rank, world_size)[0] for step in range(STEPS)]
    return torch.stack(losses), start


@pytest.mark.slow_cases("fp32")
@pytest.mark.parametrize("precision", ["fp32", "bf16_naive"])
def test_a_model_on_the_meta_device_gets_equal_initial_values_on_all_ranks(ranks2, precision):
    (losses, start), (other_losses, other_start) = ranks2(from_meta, precision)
    assert torch.equal(losses, other_losses)
    assert losses[-1] < losses[0] - 0.3
    assert all(torch.equal(value, other_start[name]) for name, value in start.items())
    assert torch.equal(start["head.weight"], start["embedding.weight"])
    up = start["blocks.1.up.weight"]
    assert torch.equal(start["blocks.0.norm1.weight"], torch.ones(DIM))
    assert 0.9 / DIM**0.5 < up.abs().max() <= 1 / DIM**0.5  # the bound of Linear.reset_parameters
    assert not torch.equal(up[: DIM // 2], up[DIM // 2 : DIM]), "shards repeat the same values"


def test_a_model_on_the_meta_device_works_under_hybrid_sharding(ranks4):
    results = ranks4(from_meta, "fp32", 2)
    assert all(torch.equal(results[0][0], losses) for losses, _ in results)


# ---- a world of one, and misuse ----


def alone(rank, world_size, precision):
    booster = Booster("cpu", PRECISIONS[precision](), TorchFSDPPlugin())
    model = transformer()
    model, optimizer, *_ = booster.boost(model, adamw(model.parameters()))
    assert booster.plugin.group is None
    assert isinstance(booster.unwrap(model), FSDPModule)
    return torch.stack([one_step(booster, model, optimizer, step, 0, 1)[0] for step in range(STEPS)])


@pytest.mark.slow_cases("fp32", "bf16_naive")
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16_naive", "fp16_naive split"])
def test_a_world_of_one_equals_a_single_device(run_on_ranks, precision):
    losses, *_ = train(0, 1, precision)
    (other,) = run_on_ranks(alone, 1, precision)
    assert (other - losses).abs().max() <= tolerance(precision)


def misuse(rank, world_size):
    def refused(model, match, error=ValueError, **options):
        before = [(id(param), param.dtype) for param in model.parameters()]
        with pytest.raises(error, match=match):
            Booster("cpu", "bf16_naive", TorchFSDPPlugin(**options)).boost(model, adamw(model.parameters()))
        assert [(id(param), param.dtype) for param in model.parameters()] == before

    model = transformer()
    model.scale = nn.Parameter(torch.tensor(1.0))
    refused(model, r"without dimensions cannot be sharded: \['scale'\]")
    refused(
        transformer(), "wrap_policy names 'layers.*', which selects no module of Transformer", wrap_policy="layers.*"
    )
    refused(transformer(), "wrap_policy names 'Conv2d'", wrap_policy=[Block, nn.Conv2d])
    model = transformer()
    fully_shard(model)
    refused(model, "went through fully_shard already", RuntimeError)
    with torch.device("meta"):
        model = Transformer()
        model.position = nn.Parameter(torch.zeros(LENGTH, DIM))
    refused(model, r"no reset_parameters\(\) that would give them values: Transformer\.")
    for options in ({"replicate_size": 3}, {"replicate_size": 0}, {"replicate_size": True}):
        with pytest.raises(ValueError, match="must be a whole number that divides the world size, which is 2"):
            TorchFSDPPlugin(**options)
    for value in (2, 1, 0, -1, "yes"):
        with pytest.raises(
            ValueError, match="reshard_after_forward=.* is not legal; choose True, False, or a whole number"
        ):
            TorchFSDPPlugin(reshard_after_forward=value)
    with pytest.raises(ValueError, match="would be stepped on shards"):
        model = transformer()
        Booster("cpu", "fp32", TorchFSDPPlugin()).boost(model, torch.optim.LBFGS(model.parameters()))


def test_what_cannot_be_sharded_is_refused_before_anything_changes(ranks2):
    ranks2(misuse)


def test_parameters_reshard_to_fewer_ranks_after_forward(ranks4):
    losses, *_ = train(0, 1, "fp32", 0.5, steps=4)
    for other, *_ in ranks4(train, "fp32", 0.5, {"reshard_after_forward": 2}, None, adamw, 0, 4):
        assert (other - losses).abs().max() <= 2e-6


# ---- upon tensor parallelism ----


def upon_tensor_parallelism(rank, world_size, half, data_shape):
    """`shard_module` over the data-parallel ranks of a model that is divided over the tensor-parallel ones already."""
    mesh = init_device_mesh(
        "cpu", (*data_shape, 2), mesh_dim_names=("copies", "shards", "tensor")[-len(data_shape) - 1 :]
    )
    model = transformer()
    plan = {"blocks.*.up": ColwiseParallel(), "blocks.*.down": RowwiseParallel()}
    parallelize_module(model, mesh["tensor"], plan)
    policy = DtypePolicy(param=torch.bfloat16) if half else DtypePolicy()
    dimensions = mesh["shards"] if len(data_shape) == 1 else mesh["copies", "shards"]
    shard_module(
        model, policy, mesh=dimensions, device=torch.device("cpu"), blocks=["blocks.0", "blocks.1", "blocks.2"]
    )
    assert torch.equal(flat(model), flat(transformer()))
    assert {param.dtype for param in model.parameters()} == {torch.float32}
    model.load_state_dict(transformer(3).state_dict())
    assert torch.equal(flat(model), flat(transformer(3)))
    x, y = data(0)
    loss = loss_of(model(x).float(), y)
    loss.backward()
    return loss.detach(), whole(model.blocks[1].up.weight.grad), whole(model.embedding.weight.grad)


@pytest.mark.slow_cases("False-(2, 1)")
@pytest.mark.crossed
@pytest.mark.parametrize("data_shape", [(2,), (1,), (2, 1), (1, 2)], ids=str)
@pytest.mark.parametrize("half", [False, True])
def test_a_tensor_parallel_model_is_sharded_and_cast_and_loads(run_on_ranks, half, data_shape):
    model = transformer(3)
    loss = loss_of(model(data(0)[0]), data(0)[1])
    loss.backward()
    size = 2 * math.prod(data_shape)
    for other, up, embedding in run_on_ranks(upon_tensor_parallelism, size, half, data_shape):
        bound = 2e-2 if half else 1e-6
        assert abs(other - loss) <= bound
        assert (up - model.blocks[1].up.weight.grad).abs().max() <= bound
        assert (embedding - model.embedding.weight.grad).abs().max() <= bound


def norms_of_short_parameters(rank, world_size, precision):
    """Rank 1 holds nothing of the last layer."""
    booster = Booster("cpu", PRECISIONS[precision](), TorchFSDPPlugin())
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    booster.backward(model(torch.ones(2, 3)).square().mean(), optimizer)
    return [float(optimizer.clip_grad_by_norm(1e6, order)) for order in (1.0, 2.0, 3.0, math.inf)]


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16_naive"])
def test_norms_of_every_order_where_a_rank_holds_nothing_of_a_parameter(ranks2, precision):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))
    model(torch.ones(2, 3)).square().mean().backward()
    expected = [float(nn.utils.clip_grad_norm_(model.parameters(), 1e6, order)) for order in (1.0, 2.0, 3.0, math.inf)]
    for norms in ranks2(norms_of_short_parameters, precision):
        assert norms == pytest.approx(expected, rel=0.02 if precision != "fp32" else 1e-5)


class Calls(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(str(func.overloadpacket))
        return func(*args, **(kwargs or {}))


def calls_of_a_step(rank, world_size, precision):
    """Return the operations of a clipped step on shards."""
    booster = Booster("cpu", PRECISIONS[precision](), TorchFSDPPlugin())
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(8, 8) for _ in range(6)])
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters()))
    for _ in range(2):
        booster.backward(model(torch.ones(2, 8)).square().mean(), optimizer)
        optimizer.clip_grad_by_norm(1e-3)
        with Calls() as calls:
            assert optimizer.step().applied
        optimizer.zero_grad()
    return calls.names


@pytest.mark.parametrize("precision", ["fp16", "fp16_naive", "bf16_naive"])
def test_float32_shards_are_stepped_in_one_call_without_copies_of_gradients(ranks2, precision):
    for names in ranks2(calls_of_a_step, precision):
        assert names.count("aten._fused_adamw_") == 1
        assert not {"aten.clone", "aten._to_copy", "aten._foreach_mul_"} & set(names)


class Functions(TorchFunctionMode):
    """Counts the torch functions that it sees."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += 1
        return func(*args, **(kwargs or {}))


def functions_of_a_block(rank, world_size):
    """How many torch functions a mode around a forward pass sees of one more block: of a plain model, and of a sharded one."""
    counts = []
    for sharded in (False, True):
        found = []
        for num_blocks in (3, 7):
            model = nn.Sequential(*(Block() for _ in range(num_blocks)))
            if sharded:
                model, *_ = Booster("cpu", "fp32", TorchFSDPPlugin()).boost(model)
            x = torch.randn(2, LENGTH, DIM)
            model(x)
            with Functions() as functions:
                model(x)
            found.append(functions.count)
        counts.append((found[1] - found[0]) / 4)
    return counts


def test_a_function_mode_around_a_forward_pass_sees_little_of_what_gathers_blocks(ranks2):
    for plain, sharded in ranks2(functions_of_a_block):
        assert sharded <= plain + 3  # whether an output is a view; gathering and freeing are 187


# ---- norms of one group, the last of which runs without gradients or not towards the loss ----


class Encoders(nn.Module):
    """Two encoders with norms that stay float32, and are gathered together."""

    def __init__(self, way):
        super().__init__()
        self.query, self.key = (nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)) for _ in range(2))
        self.way = way

    def forward(self, x):
        query = self.query(x)
        with torch.set_grad_enabled(self.way != "no_grad"):
            key = self.key(x)
        return query * (key.detach() if self.way == "detached" else 1.0 if self.way == "unused" else key)


def moved_by_one_step(rank, world_size, way):
    """How far the gradients of the query are from those of float32, relative, by name."""
    torch.manual_seed(0)
    reference = Encoders(way)
    rows = torch.randn(world_size, 16, 8, generator=torch.Generator().manual_seed(1))
    sum(reference(each).square().mean() / world_size for each in rows).backward()
    torch.manual_seed(0)
    model = Encoders(way)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    booster = Booster("cpu", "bf16_naive", TorchFSDPPlugin())
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1.0))
    booster.backward(model(rows[rank]).float().square().mean(), optimizer)
    optimizer.step()
    after = {name: param.full_tensor().detach() for name, param in booster.unwrap(model).named_parameters()}
    return {
        name: float((before[name] - after[name] - param.grad).norm() / param.grad.norm())
        for name, param in reference.named_parameters()
        # Of a bias before a norm it is 0 but for rounding.
        if name.startswith("query") and name != "query.0.bias"
    }


@pytest.mark.parametrize("way", ["no_grad", "detached", "unused"])
def test_norms_of_one_group_are_gathered_for_backward_though_the_last_of_them_has_none(ranks2, way):
    for found in ranks2(moved_by_one_step, way):
        # Three products and their sums of 8 to 32 numbers, each rounded by at most 2**-8: about 3 * 2**-8 by chance.
        assert max(found.values()) < 6 * 2**-8, found


class Twice(nn.Module):
    """A block that runs twice, from inputs without gradients on: its group is reduced once more when backward ends.

    use_reentrant: of the checkpoints around both runs; None: there are none."""

    def __init__(self, use_reentrant):
        super().__init__()
        self.block, self.head = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)), nn.Linear(8, 4)
        self.use_reentrant = use_reentrant

    def forward(self, x):
        for _ in range(2):
            if self.use_reentrant is None:
                x = self.block(x)
            else:
                # Without gradients of inputs, reentrant checkpointing computes none.
                x = torch.utils.checkpoint.checkpoint(self.block, x.requires_grad_(), use_reentrant=self.use_reentrant)
        return self.head(x)


def trained_twice(rank, world_size, steps, use_reentrant=None):
    torch.manual_seed(0)
    model = Twice(use_reentrant)
    booster = Booster("cpu", "fp32", TorchFSDPPlugin(wrap_policy=nn.Sequential) if world_size > 1 else None)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(steps):
        rows = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        booster.backward(model(rows.chunk(world_size)[rank]).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return [param.full_tensor().detach() if world_size > 1 else param.detach() for param in model.parameters()]


class HandsOn(nn.Linear):
    def forward(self, state):
        x = super().forward(state["x"]).tanh()
        state["x"] = x + 0.5
        state["seen"].append(x)


class Passing(nn.Module):
    """Blocks that hand on what they compute in a dict, and a list in it, which they write to."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.blocks = nn.ModuleList(HandsOn(8, 8) for _ in range(2))

    def forward(self, x):
        state = {"x": self.first(x), "seen": []}
        for block in self.blocks:
            block(state)
        return self.head(state["x"] + sum(state["seen"]))


def handed_on(rank, world_size, plugin):
    torch.manual_seed(0)
    model = Passing()
    booster = Booster("cpu", "fp32", plugin() if world_size > 1 else None)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for step in range(5):
        rows = torch.randn(8, 8, generator=torch.Generator().manual_seed(step))
        booster.backward(model(rows.chunk(world_size)[rank]).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return [param.full_tensor().detach() if world_size > 1 else param.detach() for param in model.parameters()]


@pytest.mark.parametrize("reshard_after_forward", [False, True])
def test_what_a_block_writes_into_a_dict_reaches_the_next(ranks2, reshard_after_forward):
    plugin = functools.partial(TorchFSDPPlugin, reshard_after_forward=reshard_after_forward)
    expected = handed_on(0, 1, plugin)
    for found in ranks2(handed_on, plugin):
        for own, other in zip(found, expected, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("use_reentrant", [None, False, True])
def test_a_block_that_runs_twice_from_the_data_on_trains_after_the_first_passes_too(ranks2, use_reentrant):
    expected = trained_twice(0, 1, 7)  # ranks compare all groups in the first four passes, and later leave it
    for found in ranks2(trained_twice, 7, use_reentrant):
        for own, other in zip(found, expected, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)
