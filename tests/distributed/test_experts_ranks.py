"""Experts dealt to ranks train as on one device: losses, norms, skips, weights, and checkpoints between layouts."""

import random
from collections.abc import Mapping

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from choices import precisions
from comparing import assert_same, difference, weights
from experts import EXPERTS, TOP_K, WIDTH, Experts, Mixture, batches, made, results, steps
from sequences import several, train
from test_tensor_parallel import package
from torch import nn

from booster import Booster
from booster.mixed_precision import FP8MixedPrecision
from booster.plugin import HybridParallelPlugin, SingleDevice, TorchFSDPPlugin

PLACEMENTS = {
    "FSDP": lambda **options: TorchFSDPPlugin(ep_size=2, **options),
    "hybrid": lambda: HybridParallelPlugin(1, 1, ep_size=2),
    "hybrid, sharded": lambda: HybridParallelPlugin(1, 1, zero_stage=2, ep_size=2),
}
ON_FOUR = {
    "FSDP": PLACEMENTS["FSDP"],
    "FSDP, one rank an expert pair": lambda: TorchFSDPPlugin(ep_size=4),
    "copies": lambda: TorchFSDPPlugin(ep_size=2, replicate_size=2),
    "hybrid": PLACEMENTS["hybrid"],
    "hybrid, sharded": PLACEMENTS["hybrid, sharded"],
}
PRECISIONS = {
    **precisions("bf16", "fp16", "bf16_naive", "fp16_naive", "fp16_apex O2", "bf16_naive split24 8bit"),
    "fp32": lambda: "fp32",
    "fp8": lambda: FP8MixedPrecision(emulate=True, keep=()),
}
HALF = {"bf16": 2.0**-8, "fp16": 2.0**-11, "fp16_apex O2": 2.0**-11, "fp16_naive": 2.0**-11}
EPS = {**dict.fromkeys(PRECISIONS, 2.0**-8), **HALF, "fp32": 2.0**-24, "fp8": 2.0**-4}


def sgd(params, lr):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def apart(found, alone):
    """How far losses, norms and weights are from those of one device, relative."""
    losses, norms, taken, params = found
    assert taken == alone[2]
    far = [abs(one - other) / abs(other) for one, other in zip(losses + norms, alone[0] + alone[1], strict=True)]
    far += [float((params[name] - weight).norm() / weight.norm()) for name, weight in alone[3].items()]
    return max(far)


def compared(rank, world_size, names, precision, options):
    alone = results(SingleDevice(), PRECISIONS[precision](), optimizer=sgd, **options)
    plugins = ON_FOUR if world_size == 4 else PLACEMENTS
    return {
        name: apart(results(plugins[name](), PRECISIONS[precision](), optimizer=sgd, **options), alone)
        for name in names
    }


SLOW = pytest.mark.slow
IN_ALL = ("fp32", "bf16", "fp16_naive")


@pytest.mark.slow_cases("fp16_naive")
@pytest.mark.parametrize("precision", [name if name in IN_ALL else pytest.param(name, marks=SLOW) for name in EPS])
def test_two_ranks_train_as_one_device(ranks2, precision):
    for found in ranks2(compared, list(PLACEMENTS), precision, {}):
        # Four steps with momentum, of gradients that are sums of rounded terms in another order.
        assert max(found.values()) < 16 * EPS[precision], found


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16_naive", marks=SLOW)])
def test_four_ranks_train_as_one_device(ranks4, precision):
    for found in ranks4(compared, list(ON_FOUR), precision, {}):
        assert max(found.values()) < 16 * EPS[precision], found


@pytest.mark.parametrize(
    "options",
    [
        pytest.param({"micro_batches": 2}, marks=SLOW),
        pytest.param({"fused": False}, marks=SLOW),
        pytest.param({"recompute": True}, marks=SLOW),
        {"chosen": range(4)},  # tokens never go to rank 1
        pytest.param({"chosen": [7]}, marks=SLOW),  # all go to one expert
        {"fused": False, "chosen": [1, 2], "recompute": True},
    ],
    ids=str,
)
def test_ways_to_use_experts(ranks2, options):
    for found in ranks2(compared, list(PLACEMENTS), "fp32", options):
        assert max(found.values()) < 16 * EPS["fp32"], found


def program(seed, world_size):
    """A placement, and a model with batches for it."""
    draw = random.Random(seed)
    ep_size = draw.choice([2, world_size])
    options = {
        "count": ep_size * draw.randint(1, 3),
        "top_k": draw.randint(1, 3),
        "fused": draw.random() < 0.5,
        "recompute": draw.random() < 0.3,
        "micro_batches": draw.choice([1, 1, 2]),
        "clip": draw.choice([0.05, 10.0]),
    }
    options["chosen"] = [draw.randrange(options["count"]) for _ in range(draw.randint(1, 7))]
    samples = world_size * options["micro_batches"] * draw.randint(1, 2)
    options["given"] = batches(3, seed, samples, draw.randint(1, 6))
    kinds = [lambda: TorchFSDPPlugin(ep_size=ep_size, reshard_after_forward=draw.random() < 0.5)]
    kinds += [lambda z=z: HybridParallelPlugin(1, 1, zero_stage=z, ep_size=ep_size) for z in (0, 1)]
    if ep_size < world_size:
        kinds.append(lambda: TorchFSDPPlugin(ep_size=ep_size, replicate_size=world_size // ep_size))
    return draw.choice(kinds), options


def programs_run(rank, world_size, seeds):
    found = {}
    for seed in seeds:
        make, options = program(seed, world_size)
        alone = results(SingleDevice(), "fp32", optimizer=sgd, **options)
        found[seed] = apart(results(make(), "fp32", optimizer=sgd, **options), alone)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("first", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(10, 300, 10))])
def test_random_programs(ranks2, ranks4, first):
    seeds = range(first, first + (4 if first == 0 else 10))
    for found in (ranks2 if first % 20 else ranks4)(programs_run, seeds):
        assert max(found.values()) < 32 * EPS["fp32"], found


def skipped(rank, world_size, name):
    """An overflow in what rank 0 alone was given: every rank skips that step."""
    given = batches(3)
    given[1][0][0] = 1e30
    _, _, taken, params = results(PLACEMENTS[name](), "fp16", given, optimizer=sgd)
    _, _, alone_taken, alone = results(SingleDevice(), "fp16", given, optimizer=sgd)
    assert taken == alone_taken == [True, False, True]
    return max(float((params[key] - weight).norm() / weight.norm()) for key, weight in alone.items())


def test_an_overflow_on_one_rank_is_skipped_on_all(ranks2):
    for name in PLACEMENTS:
        assert max(ranks2(skipped, name)) < 16 * EPS["fp16"], name


def saved(rank, world_size, name, precision, folder):
    parts = made(ON_FOUR[name](), PRECISIONS[precision]())
    steps(parts, batches(2))
    parts[0].save(folder, *parts[1:3])
    parts[0].save_model(parts[1], f"{folder}.model")
    return steps(parts, batches(2, seed=2))[0], weights(parts[1])


def loaded(rank, world_size, name, precision, folder):
    plugin = {**PLACEMENTS, **ON_FOUR, "single": SingleDevice, "FSDP alone": TorchFSDPPlugin}[name]()
    parts = made(plugin, PRECISIONS[precision]())
    steps(parts, batches(1, seed=3))
    parts[0].load(folder, *parts[1:3])
    there = weights(parts[1])
    losses = steps(parts, batches(2, seed=2))[0]
    served = made(SingleDevice())
    served[0].load_model(served[1], f"{folder}.model")
    return losses, there, weights(served[1])


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16_naive split24 8bit", marks=SLOW)])
def test_checkpoints_move_between_numbers_of_ranks(ranks4, ranks2, tmp_path, precision):
    names = (
        ("FSDP, one rank an expert pair",)
        if precision == "fp32"
        else ("FSDP", "copies", "FSDP, one rank an expert pair")
    )
    for name in names:
        folder = str(tmp_path / name)
        losses, _ = ranks4(saved, name, precision, folder)[0]
        again = [ranks4(loaded, other, precision, folder)[0] for other in ("FSDP", "hybrid, sharded")]
        again += [ranks2(loaded, other, precision, folder)[0] for other in ("hybrid", "FSDP alone")]
        again.append(loaded(0, 1, "single", precision, folder))
        for found, there, served in again:
            assert found == pytest.approx(losses, rel=1e-5 if precision == "fp32" else 2e-2)
            assert difference(there, again[0][1]) is None
            assert_same(served, there)


class Shared(Experts):
    def __init__(self):
        super().__init__(True)
        self.norm = nn.LayerNorm(4)


def refused(rank, world_size):
    found = {}
    for name, change in {
        "none": lambda model: [setattr(block, "experts", nn.Identity()) for block in model.blocks],
        "uneven": lambda model: setattr(model.blocks[1], "experts", odd()),
        "shared": lambda model: setattr(model.blocks[0], "experts", Shared()),
        "same": lambda model: setattr(model.blocks[0].experts, "down", model.blocks[1].experts.down),
    }.items():
        for place, make in PLACEMENTS.items():
            model = Mixture()
            change(model)
            before = [id(param) for param in model.parameters()]
            with pytest.raises(ValueError, match="ep_size") as error:
                Booster("cpu", "fp32", make()).boost(model, sgd(model.parameters(), 0.1))
            assert [id(param) for param in model.parameters()] == before, (name, place)
            found[name] = str(error.value)
    for make in (
        lambda: TorchFSDPPlugin(ep_size=3),
        lambda: TorchFSDPPlugin(ep_size=2, replicate_size=2),
        lambda: HybridParallelPlugin(2, 1, ep_size=2),
        lambda: TorchFSDPPlugin(ep_size="two"),
    ):
        with pytest.raises((ValueError, TypeError), match="ep_size"):
            make()
    return found


def odd():
    experts = Experts(True)
    experts.num_experts = 5
    for name, param in list(experts.named_parameters()):
        setattr(experts, name, nn.Parameter(param[:5].detach().clone()))
    return experts


def test_what_cannot_be_dealt_out_is_refused_before_anything_changes(ranks2):
    for found in ranks2(refused):
        assert "'blocks.1.experts' has 5 experts" in found["uneven"]
        assert "'norm.weight'" in found["shared"]
        assert "no module with num_experts" in found["none"]
        assert "another module" in found["same"]


def wrongly_called(rank, world_size):
    found = []
    for change in (
        lambda args: (args[0].unsqueeze(0), *args[1:]),
        lambda args: (args[0], args[1] + (5 if rank == 1 else 0), args[2]),
        lambda args: (args[0], args[1] - (5 if rank == 1 else 0), args[2]),
    ):
        _, model, _, _ = made(TorchFSDPPlugin(ep_size=2))
        model.blocks[0].experts.register_forward_pre_hook(lambda module, args, change=change: change(args))
        with pytest.raises(ValueError, match="under ep_size") as error:
            model(batches(1)[0][0])
        found.append(str(error.value))
    return found


def test_experts_that_are_called_otherwise_are_named_on_all_ranks(ranks2):
    for shapes, *numbers in ranks2(wrongly_called):
        assert "Experts was called with tensors of shapes [(1, 40, 16)" in shapes
        assert all("were given numbers of experts outside 0 to 7" in each for each in numbers)


def counted(rank, world_size):
    """Bytes that one forward and backward pass sends for experts, and elements of experts at rest."""
    booster, model, optimizer, criterion = made(TorchFSDPPlugin(ep_size=2))
    sent, real = [], dist.all_to_all_single

    def noted(out, given, *sizes, **group):
        sent.append((given.element_size(), given.numel()))
        return real(out, given, *sizes, **group)

    x, y = (each.chunk(2)[rank] for each in batches(1)[0])
    dist.all_to_all_single = noted
    try:
        booster.backward(criterion(model(x), y), optimizer)
    finally:
        dist.all_to_all_single = real
    at_rest = sum(param.to_local().numel() for name, param in model.named_parameters() if "experts" in name)
    return sum(size * count for size, count in sent), len(sent), at_rest


def test_what_is_sent_and_kept(ranks2):
    found = ranks2(counted)
    rows = 8 * 5 * TOP_K  # of both ranks
    a_layer = rows * (WIDTH * 4 * 4 + 4 * 2) + 2 * 8 * 2 * (
        EXPERTS // 2 + 1
    )  # rows there and back, twice; weights; counts
    assert sum(each for each, _, _ in found) == 2 * a_layer
    assert {calls for _, calls, _ in found} == {2 * 6 + 2}
    assert {rest for _, _, rest in found} == {2 * EXPERTS // 2 * (2 * 32 * WIDTH + WIDTH)}


HYBRID = {
    "layers and experts": lambda: HybridParallelPlugin(2, 1, zero_stage=1, ep_size=2),
    "layers and experts, states whole": lambda: HybridParallelPlugin(2, 1, ep_size=2),
    "stages and experts": lambda: HybridParallelPlugin(1, 2, zero_stage=1, ep_size=2, num_micro_batches=2),
    "stages and experts, states whole": lambda: HybridParallelPlugin(1, 2, ep_size=2, num_micro_batches=2),
    "FSDP": lambda: TorchFSDPPlugin(ep_size=4),
}


def mixture(kind):
    transformers = package("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    torch.manual_seed(0)
    if kind == "Mixtral":
        config = transformers.MixtralConfig(vocab_size=64, intermediate_size=48, num_local_experts=4, **sizes)
        return transformers.MixtralForCausalLM(config)
    config = transformers.Qwen3MoeConfig(
        vocab_size=64,
        intermediate_size=48,
        moe_intermediate_size=32,
        head_dim=8,
        num_experts=8,
        num_experts_per_tok=2,
        **sizes,
    )
    return transformers.Qwen3MoeForCausalLM(config)


def next_token_loss(output, labels):
    logits = output["logits"] if isinstance(output, Mapping) else output
    return F.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def language_run(plugin, precision, kind):
    model = mixture(kind)
    booster = Booster("cpu", PRECISIONS[precision](), plugin)
    model, optimizer, criterion, *_ = booster.boost(model, sgd(model.parameters(), 0.1), next_token_loss)
    rank, size = booster.plugin.data_parallel_rank, booster.plugin.data_parallel_size
    draw, found = torch.Generator().manual_seed(2), []
    for _ in range(3):
        ids = torch.randint(0, 64, (8, 10), generator=draw, dtype=torch.int64)
        given = ids.chunk(size)[rank], ids.roll(-1, 1).chunk(size)[rank]
        loss = booster.execute_pipeline(iter([given]), model, criterion, optimizer)["loss"]
        found += [float(booster.reduce(loss)), float(optimizer.clip_grad_by_norm(1.0))]
        optimizer.step()
        optimizer.zero_grad()
    return torch.tensor(found, dtype=torch.float64)


def languages_compared(rank, world_size, name, precision, kind):
    found, alone = (language_run(make(), precision, kind) for make in (HYBRID[name], SingleDevice))
    return float(((found - alone) / alone).abs().max())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["Mixtral", "Qwen3Moe"])
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16_naive"])
@pytest.mark.parametrize("name", list(HYBRID))
def test_mixtures_of_transformers_with_layers_and_stages_on_four_ranks(ranks4, transformers, name, precision, kind):
    assert max(ranks4(languages_compared, name, precision, kind)) < 16 * EPS[precision]


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["all_to_all", "ring_attn"])
def test_experts_and_shared_sequences(ranks2, ranks4, mode):
    expected = train(0, 1, "mixtral", length=17)
    shared = {"length": 17, "sp_size": 2, "sequence_parallelism_mode": mode, "ep_size": 2}
    for run, kinds in ((ranks2, ("fsdp", "hybrid")), (ranks4, ("fsdp", "zero"))):
        for found in run(several, [(("mixtral",), {"kind": kind, **shared}) for kind in kinds]):
            for trace in found:
                assert trace.losses == pytest.approx(expected.losses, rel=1e-5), (mode, kinds)
                assert trace.norms == pytest.approx(expected.norms, rel=1e-5), (mode, kinds)


def balanced(kind, plugin, coefficient=1.0):
    """Loss and weights after a step on 4 sequences, of which some tokens do not count; alone by the model's own loss."""
    alone = isinstance(plugin, SingleDevice)
    model = mixture(kind)
    model.router_aux_loss_coef = coefficient if alone else 0.0
    booster = Booster("cpu", "fp32", plugin)
    model, optimizer, *_ = booster.boost(model, sgd(model.parameters(), 0.1))
    ids = torch.randint(0, 64, (4, 12), generator=torch.Generator().manual_seed(3), dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}
    batch["attention_mask"][0, 5:] = 0
    size, rank = booster.plugin.data_parallel_size, booster.plugin.data_parallel_rank
    batch = booster.shard_sequence({name: x.chunk(size)[rank] for name, x in batch.items()}, shift_labels=True)
    output = model(**batch, output_router_logits=True)
    loss = output.loss
    if not alone:
        shares = booster.balancing_loss(output.router_logits, 2, batch["attention_mask"])
        own = output.aux_loss.detach()
        assert (
            abs(float(booster.reduce(own)) - float(shares.detach())) > 1e-4
        )  # the mean of ranks' own losses is another number
        loss = loss + coefficient * shares
    booster.backward(loss, optimizer)
    optimizer.step()
    return float(booster.reduce(loss.detach())), weights(model)


def balanced_beside_one_device(rank, world_size, kind):
    loss, expected = balanced(kind, SingleDevice())
    ring = {"sp_size": 2, "sequence_parallelism_mode": "ring_attn", "ep_size": 2}
    for plugin in (TorchFSDPPlugin(ep_size=2), HybridParallelPlugin(1, 1, **ring)):
        found, params = balanced(kind, plugin)
        assert found == pytest.approx(loss, rel=1e-6)
        for name, weight in expected.items():
            torch.testing.assert_close(params[name], weight, rtol=0, atol=1e-6)


@pytest.mark.parametrize("kind", [pytest.param("Mixtral", marks=SLOW), "Qwen3Moe"])
def test_balancing_losses_are_over_the_tokens_of_all_ranks(ranks2, transformers, kind):
    ranks2(balanced_beside_one_device, kind)
