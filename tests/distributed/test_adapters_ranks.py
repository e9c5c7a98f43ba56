"""Adapters on a frozen base of few bits under every data-parallel plugin train as on plain frozen layers there."""

import pytest
import torch
from choices import plugins, precisions
from comparing import whole
from lora import TOLERANCES, adapted, base, boosted, differs, loaded, quantised_by_others, steps, trained, widened
from safetensors.torch import save_file

from booster import describe
from booster.common.torch_internals.fsdp_internals import shards_integers
from booster.mixed_precision import FP16ApexMixedPrecision
from booster.plugin import HybridParallelPlugin, TorchFSDPPlugin

PLUGINS = plugins("DDP", "ZeRO-1", "ZeRO-2", "FSDP")
PRECISIONS = {
    **precisions("fp32", "fp16", "bf16", "fp16_naive", "bf16_naive", scale=2.0**10, hysteresis=1),
    "fp16_apex O2": lambda: FP16ApexMixedPrecision("O2", loss_scale=2.0**10, verbosity=0),
}
BITS = {name: torch.bfloat16 if "bf16" in name else torch.float16 for name in PRECISIONS} | {"fp32": torch.float32}


def train(rank, world_size, path, plugin, precisions):
    """What differs between frozen layers and plain ones, by precision; None where nothing does."""
    found = {}
    for precision in precisions:
        model = adapted(loaded(path, storage_dtype="nf4"))
        before = {name: p.clone() for name, p in model.named_parameters() if p.dtype == torch.uint8}
        overflow = (1,) if precision in ("fp16", "fp16_naive") else ()
        job = boosted(model, PRECISIONS[precision](), PLUGINS[plugin]())
        got = steps(job, 4, rank=rank, world_size=world_size, overflow=overflow)
        plain = boosted(adapted(widened(loaded(path, storage_dtype="nf4"))), PRECISIONS[precision](), PLUGINS[plugin]())
        start, tolerance = trained(plain), TOLERANCES[BITS[precision]]
        expected = steps(plain, 4, rank=rank, world_size=world_size, overflow=overflow)
        found[precision] = {
            "losses": got[0] == pytest.approx(expected[0], rel=tolerance),
            "skips of both": got[1] == expected[1],
            "skips": [step for step, done in enumerate(got[1]) if not done] == list(overflow),
            "falls": got[0][-1] < got[0][0],
            "adapters": not differs(trained(job), trained(plain), start, tolerance),
            "base": all(torch.equal(whole(model.get_parameter(name)), value) for name, value in before.items()),
        }
        if plugin == "FSDP":
            whole_rows = sum(value.numel() for value in before.values())
            held = sum(p.to_local().numel() for n, p in model.named_parameters() if n in before)
            found[precision]["divided"] = held == whole_rows // world_size
    return found


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    path = tmp_path_factory.mktemp("base") / "base.safetensors"
    save_file(base().state_dict(), path)
    return str(path)


QUICK = {"DDP": "fp16", "ZeRO-1": "bf16_naive", "ZeRO-2": "fp16", "FSDP": "bf16_naive"}
NOT_SHARDED = pytest.mark.skipif(not shards_integers(), reason="of torch 2.13: before, fully_shard takes no integers")
SHARDING = pytest.param("FSDP", marks=NOT_SHARDED)


def kept_as_it_was(rank, world_size, path):
    model = adapted(loaded(path, storage_dtype="nf4"))
    before = {name: (id(param), param.dtype) for name, param in model.named_parameters()}
    refusal = "does not shard parameters of integers, such as blocks.0.up.base_layer.*2.13 or newer"
    with pytest.raises(ValueError, match=refusal):
        boosted(model, "bf16", TorchFSDPPlugin())
    return {name: (id(param), param.dtype) for name, param in model.named_parameters()} == before


@pytest.mark.skipif(shards_integers(), reason="of torch before 2.13")
def test_parameters_of_integers_are_refused_by_name_where_torch_cannot_shard_them(ranks2, path):
    assert ranks2(kept_as_it_was, path) == [True, True]


@pytest.mark.parametrize(
    ("plugin", "precisions"),
    [
        pytest.param(
            plugin,
            [name for name in PRECISIONS if (name == QUICK[plugin]) != rest],
            id=f"{plugin}-{'rest' if rest else QUICK[plugin]}",
            marks=[pytest.mark.slow] * rest + [NOT_SHARDED] * (plugin == "FSDP"),
        )
        for plugin in PLUGINS
        for rest in (False, True)
    ],
)
def test_adapters_train_as_on_plain_layers_in_every_precision(ranks2, path, plugin, precisions):
    for found in ranks2(train, path, plugin, precisions):
        wrong = {name: [what for what, right in checks.items() if not right] for name, checks in found.items()}
        assert wrong == {name: [] for name in precisions}


def foreign(rank, world_size, precision):
    """By plugin: whether a model quantised by others keeps its integers, learns, and ranks agree on what it learnt."""
    found = {}
    for name, plugin in PLUGINS.items():
        model = quantised_by_others()
        codes = [block.up.qweight.clone() for block in model.blocks]
        job = boosted(model, PRECISIONS[precision](), plugin())
        losses, _ = steps(job, 4, rank=rank, world_size=world_size)
        kept = all(torch.equal(block.up.qweight, code) for block, code in zip(model.blocks, codes, strict=True))
        found[name] = (kept, losses[-1] < losses[0], trained(job)["head.weight"].float().sum().item())
    return found


@pytest.mark.parametrize("precision", ["fp16", "bf16_naive"])
def test_models_that_arrive_quantised_by_others_train_under_every_plugin(ranks2, precision):
    first, second = ranks2(foreign, precision)
    assert first == {name: (True, True, second[name][2]) for name in PLUGINS}


def resume(rank, world_size, path, folder, plugin):
    job = boosted(adapted(loaded(path, storage_dtype="nf4")), "bf16", PLUGINS[plugin]())
    steps(job, 2, rank=rank, world_size=world_size)
    job.booster.save(folder, job.model, job.optimizer)
    expected, _ = steps(job, 2, first=2, rank=rank, world_size=world_size)
    other = adapted(loaded(path, storage_dtype="nf4"))
    for name, param in other.named_parameters():
        if param.dtype == torch.uint8:
            other.get_parameter(name).zero_()
    other = boosted(other, "bf16", PLUGINS[plugin]())
    other.booster.load(folder, other.model, other.optimizer)
    return steps(other, 2, first=2, rank=rank, world_size=world_size)[0] == expected


@pytest.mark.parametrize("plugin", ["ZeRO-2", SHARDING])
def test_a_run_is_saved_and_goes_on_to_the_bit(ranks2, path, tmp_path, plugin):
    assert ranks2(resume, path, str(tmp_path), plugin) == [True, True]


def described(rank, world_size, path):
    model = adapted(loaded(path, storage_dtype="nf4"))
    rows = {row.name: row for row in describe(model).rows}
    job = boosted(model, "bf16_naive", TorchFSDPPlugin())
    if rank == 1:
        return None  # it is no collective: rank 0 does not wait
    return {
        name: (row.bytes, rows[name].bytes, row.stored, row.computes, row.gradient)
        for row in describe(job.model).rows
        if (name := row.name) in ("blocks.0.up.base_layer", "blocks.0.up.lora_A.default")
    }


@NOT_SHARDED
def test_a_description_of_what_is_divided_counts_this_rank_s_part_and_asks_no_other_rank(ranks2, path):
    rows, nothing = ranks2(described, path)
    assert nothing is None
    packed, bias = 64 * (32 // 2 + 4), 64 * 4
    assert rows["blocks.0.up.base_layer"] == (
        (packed + bias) // 2,
        packed + bias,
        "nf4, float32",
        "bfloat16",
        "",
    )
    assert rows["blocks.0.up.lora_A.default"] == (8 * 32 * 4 // 2, 8 * 32 * 4, "float32", "bfloat16", "float32")


def refused(rank, world_size, path):
    model = adapted(loaded(path, storage_dtype="nf4"))
    plugin = HybridParallelPlugin(tp_size=2, pp_size=1, tp_plan={"blocks.*.up.base_layer": "colwise"})
    try:
        boosted(model, "fp32", plugin)
    except ValueError as error:
        return str(error)
    return None


def test_tensor_parallelism_refuses_stored_weights_by_name(ranks2, path):
    for message in ranks2(refused, path):
        assert "'blocks.0.up.base_layer'" in message
        assert "weight is stored in nf4, which tensor parallelism does not divide" in message
