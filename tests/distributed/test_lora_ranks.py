"""Adapters of peft on several ranks: they learn what they learn on one device, and leave whole. Slow, and with peft itself."""

from pathlib import Path

import pytest
import torch
from choices import plugins
from safetensors.torch import load_file
from trainers import llama, needed

from booster import Booster
from booster.common.torch_internals.fsdp_internals import shards_integers
from booster.plugin import HybridParallelPlugin

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
PLUGINS = plugins("one device", "DDP", "ZeRO-2", "FSDP", "TP", "FSDP + TP")
WORDS = torch.arange(1, 33).view(4, 8)
EVERY = ["q_proj", "v_proj", "o_proj", "up_proj", "down_proj"]


packages = needed("peft", "transformers")


def train(rank, world_size, name, precision, stored, folder, options=None):
    """Losses, and what is written: adapters alone, merged weights, and a checkpoint that goes on."""
    from peft import LoraConfig

    def job():
        booster = Booster("cpu", precision, PLUGINS[name]())
        usual = {"r": 4, "lora_alpha": 16, "target_modules": EVERY, "task_type": "CAUSAL_LM"}
        torch.manual_seed(3)
        config = LoraConfig(**{**usual, **(options or {})})
        model = booster.enable_lora(llama(), lora_config=config, storage_dtype=stored)
        return booster, *booster.boost(model, torch.optim.AdamW(model.parameters(), 1e-2))[:2]

    def steps(booster, model, optimizer, count):
        data, losses = booster.plugin, []
        words = WORDS.chunk(data.data_parallel_size)[rank // (world_size // data.data_parallel_size)]
        for _ in range(count):
            loss = model(input_ids=words, labels=words).loss
            booster.backward(loss, optimizer)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(booster.reduce(loss.detach()).item())
        return losses

    first = job()
    losses = steps(*first, 4)
    booster, model, optimizer = first
    booster.save_lora(model, f"{folder}/lora")
    booster.save_model(model, f"{folder}/merged.safetensors", merge=True)
    synced = {key: float(value.float().abs().sum()) for key, value in booster.sync_weights(model, merge=True)}
    booster.save(f"{folder}/run", model, optimizer, frozen=False)
    expected = steps(*first, 2)
    again = job()
    again[0].load(f"{folder}/run", *again[1:])
    return losses, steps(*again, 2) == expected, synced


NOT_SHARDED = pytest.mark.skipif(not shards_integers(), reason="of torch 2.13: before, fully_shard takes no integers")
CASES = [
    *(
        (name, precision, None)
        for name in ("DDP", "ZeRO-2", "FSDP", "TP")
        for precision in ("fp32", "fp16", "bf16_naive")
    ),
    ("DDP", "bf16", "nf4"),
    ("DDP", "bf16_naive", torch.bfloat16),
    pytest.param("FSDP", "bf16", "nf4", marks=NOT_SHARDED),
    ("FSDP", "fp16", torch.bfloat16),
]


@pytest.mark.parametrize(("name", "precision", "stored"), CASES, ids=str)
def test_adapters_learn_on_several_ranks_what_they_learn_on_one(ranks2, tmp_path, name, precision, stored):
    ours = ranks2(train, name, precision, stored, str(tmp_path / "ranks"))
    theirs = train(0, 1, "one device", precision, stored, str(tmp_path / "one"))
    unit = {"fp32": 1e-5, "fp16": 2**-10, "bf16": 2**-7, "bf16_naive": 2**-7}[precision]
    for losses, resumed, synced in ours:
        assert losses == pytest.approx(theirs[0], rel=4 * unit)
        assert resumed
        assert synced == ours[0][2]
    files = [Path("lora") / "adapter_model.safetensors", Path("merged.safetensors")]
    for file in files:
        mine, its = (load_file(tmp_path / each / file) for each in ("ranks", "one"))
        assert mine.keys() == its.keys()
        for key, value in its.items():
            # What ranks hold of half weights under fully_shard is float32, their masters.
            assert mine[key].dtype == (torch.float32 if name == "FSDP" and "naive" in precision else value.dtype)
            # Adam moves each number by the rate, whatever the size of its gradient: some may go elsewhere.
            off = (mine[key].float() - value.float()).abs().mean()
            assert off <= 4 * 1e-2 * 0.1 + 0.05 * value.float().abs().mean(), key


def merged(rank, world_size, name, folder):
    from peft import LoraConfig

    booster = Booster("cpu", "bf16_naive", PLUGINS[name]())
    torch.manual_seed(3)
    config = LoraConfig(r=4, target_modules=EVERY, task_type="CAUSAL_LM", init_lora_weights=False)
    model = booster.enable_lora(llama(), lora_config=config)
    for param in model.parameters():  # no number between two of bfloat16, where masters round away from zero
        bits = param.data.view(torch.int32)
        bits[bits & 0xFFFF == 0x8000] += 1
    model, *_ = booster.boost(model, torch.optim.SGD([p for p in model.parameters() if p.requires_grad], 0.1))
    booster.save_model(model, f"{folder}/merged.safetensors", merge=True, weights="bf16")
    return {key: float(value.double().square().sum()) for key, value in booster.sync_weights(model, merge=True)}


def test_merged_half_weights_are_those_of_one_device_also_from_float32_shards(ranks2, tmp_path):
    ours = ranks2(merged, "FSDP", str(tmp_path / "ranks"))
    theirs = merged(0, 1, "one device", str(tmp_path / "one"))
    assert ours == [theirs, theirs]
    files = [(tmp_path / each / "merged.safetensors").read_bytes() for each in ("ranks", "one")]
    assert files[0] == files[1]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_parts_of_parts(ranks4, tmp_path, precision):
    ours = ranks4(train, "FSDP + TP", precision, None, str(tmp_path / "ranks"))
    theirs = train(0, 1, "one device", precision, None, str(tmp_path / "one"))
    for losses, resumed, _ in ours:
        assert losses == pytest.approx(theirs[0], rel=4 * (1e-5 if precision == "fp32" else 2**-10))
        assert resumed


def refused(rank, world_size):
    from peft import LoraConfig

    found = []
    for options, plugin in (
        ({"lora_dropout": 0.1}, {}),
        ({}, {"sequence_parallelism": True}),
        ({}, {"tp_plan": {"**.q_proj": "replicate"}}),
    ):
        booster = Booster("cpu", "bf16", HybridParallelPlugin(tp_size=2, pp_size=1, **plugin))
        usual = {"r": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
        model = booster.enable_lora(llama(), lora_config=LoraConfig(**{**usual, **options}))
        with pytest.raises(ValueError) as raised:
            booster.boost(model)
        found.append(str(raised.value))
    return found


def test_what_tensor_parallelism_cannot_divide_is_refused_by_name(ranks2):
    for dropout, sequence, whole in ranks2(refused):
        assert "q_proj': lora_dropout goes with no adapters under tensor parallelism" in dropout
        assert "q_proj': sequence_parallelism=True goes with no adapters under tensor parallelism" in sequence
        assert "q_proj' has adapters, which go with 'colwise' and 'rowwise', and tp_plan gives it a Region" in whole
