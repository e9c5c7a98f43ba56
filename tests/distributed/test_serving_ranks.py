"""Weights leave ranks that hold parts of them as they leave one device: written for servers, and read by a sampler."""

from pathlib import Path

import pytest
import torch
from test_tensor_parallel import package

from booster import Booster
from booster.checkpoint.serving import SERVING_FORMATS
from booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, SingleDevice, TorchDDPPlugin, TorchFSDPPlugin

PLUGINS = {
    "DDP": TorchDDPPlugin,
    "ZeRO-2": lambda: LowLevelZeroPlugin(stage=2),
    "ZeRO, weights on their way": lambda: LowLevelZeroPlugin(stage=1, overlap_allgather=True),
    "FSDP": TorchFSDPPlugin,
    "TP": lambda: HybridParallelPlugin(tp_size=2, pp_size=1),
    "FSDP + TP": lambda: HybridParallelPlugin(tp_size=2, pp_size=1, zero_stage=1),
}


def llama(tied=False):
    package("transformers")
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=96, tie_word_embeddings=tied, **sizes))
    for param in model.parameters():
        # Between two numbers of bfloat16 masters behind half weights round away from zero, float32 shards to even.
        bits = param.data.view(torch.int32)
        bits[bits & 0xFFFF == 0x8000] += 1
    model.register_buffer("seen", torch.zeros(2))
    return model


def boosted(plugin, precision, tied=False, steps=1):
    booster = Booster("cpu", precision, plugin)
    model = llama(tied)
    model, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), 0.1))
    words = torch.arange(32).view(4, 8)
    for _ in range(steps):
        booster.backward(model(input_ids=words, labels=words).loss, optimizer)
        optimizer.step()
    return booster, model


def files_in(folder):
    return {file.name: file.read_bytes() for file in Path(folder).iterdir()}


def written(rank, world_size, folder, name, precision):
    booster, model = boosted(PLUGINS[name](), precision, steps=0)
    dict(booster.unwrap(model).named_buffers())["seen"].fill_(rank)  # of which the first rank's is written
    for weights in SERVING_FORMATS:
        booster.save_model(model, f"{folder}/{weights}", shard=True, weights=weights)


@pytest.mark.crossed
@pytest.mark.parametrize("precision", ["bf16_naive", "fp16", "fp16_naive"])
@pytest.mark.parametrize("name", ["FSDP", "DDP", "ZeRO-2", "TP"])
def test_files_for_servers_are_those_of_one_device_byte_for_byte(ranks2, tmp_path, name, precision):
    """Also under FSDP, where half weights lie in float32 shards."""
    ranks2(written, str(tmp_path / "ranks"), name, precision)
    booster, model = boosted(SingleDevice(), precision, steps=0)
    for weights in SERVING_FORMATS:
        booster.save_model(model, tmp_path / "one" / weights, shard=True, weights=weights)
        ours, theirs = (files_in(tmp_path / each / weights) for each in ("ranks", "one"))
        assert ours.keys() == theirs.keys()
        assert [file for file, data in ours.items() if data != theirs[file]] == [], weights


def synced(rank, world_size, name, precision, tied):
    booster, model = boosted(PLUGINS[name](), precision, tied)
    first = {key: value.clone() for key, value in booster.sync_weights(model)}
    stored = {}
    for key, value in model.state_dict().items():
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value
        stored[key] = torch.equal(whole.to(first[key].dtype), first[key])
    words = torch.arange(32).view(4, 8)
    sampler = llama(tied).to(booster.precision.half_dtype)
    sampler.load_state_dict(first)
    with torch.no_grad():
        off = (sampler(input_ids=words).logits.float() - model(input_ids=words).logits.float()).abs().max().item()
    return {key: (str(value.dtype), float(value.double().sum())) for key, value in first.items()}, stored, off


@pytest.mark.crossed
@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
@pytest.mark.parametrize("precision", ["fp16", "bf16", "fp16_naive", "bf16_naive"])
@pytest.mark.parametrize("name", ["DDP", "ZeRO, weights on their way", "FSDP", "TP"])
def test_a_sampler_on_every_rank_gets_whole_weights_as_the_forward_reads_them(ranks2, name, precision, tied):
    (first, stored, off), (second, _, _) = ranks2(synced, name, precision, tied)
    assert first == second
    assert all(stored.values())
    half = "torch.bfloat16" if "bf16" in precision else "torch.float16"
    wide = half if "naive" in precision else "torch.float32"
    dtypes = {key: dtype for key, (dtype, _) in first.items()}
    assert dtypes["model.layers.0.mlp.up_proj.weight"] == half
    assert dtypes["model.layers.0.input_layernorm.weight"] == wide
    assert off < 30 * (2**-8 if "bf16" in precision else 2**-11)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp16", "fp16_naive"])
def test_parts_of_parts_are_gathered_too(ranks4, precision):
    found = ranks4(synced, "FSDP + TP", precision, False)
    assert all(each[0] == found[0][0] and all(each[1].values()) for each in found)


def refused(rank, world_size):
    from torch import nn

    plugin = HybridParallelPlugin(tp_size=1, pp_size=2)
    booster = Booster("cpu", "bf16", plugin)
    model, *_ = booster.boost(nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)))
    with pytest.raises(RuntimeError, match=r"stages of a pipeline hold layers that others lack; .*save_model"):
        booster.sync_weights(model)
    return True


def test_stages_of_a_pipeline_are_refused_by_name(ranks2):
    assert ranks2(refused) == [True, True]
