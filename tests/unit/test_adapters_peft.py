"""peft's adapters train on frozen weights of few bits."""

import pytest
import torch
from lora import base, boosted, loaded, steps, trained
from safetensors.torch import save_file


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16", "bf16_naive"])
@pytest.mark.parametrize("form", ["nf4", "int8", "fp8"])
def test_lora_of_peft_trains_on_a_frozen_base_and_leaves_it_as_it_is(import_package, tmp_path, form, precision):
    peft = import_package("peft")
    save_file(base().state_dict(), tmp_path / "base.safetensors")
    model = loaded(tmp_path / "base.safetensors", storage_dtype=form)
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model, peft.LoraConfig(r=8, lora_alpha=16, target_modules=["up", "down"]))
    before = {name: p.clone() for name, p in adapted.named_parameters() if p.dtype == torch.uint8}
    assert len(before) == 5
    job = boosted(adapted, precision)
    losses, applied = steps(job, 8)
    assert all(applied)
    assert losses[-1] < losses[0]
    assert all("lora_" in name for name in trained(job))
    assert len(trained(job)) == 8
    assert all(torch.equal(adapted.get_parameter(name), value) for name, value in before.items())
