"""peft's adapters train on frozen weights of few bits."""

import pytest
import torch
from lora import base, boosted, loaded, steps, trained
from safetensors.torch import save_file

from booster import Booster


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


@pytest.mark.parametrize("precision", ["fp32", "bf16", "bf16_naive"])
def test_load_adapter_after_boost_trains_or_is_told_to_come_before(import_package, tmp_path, precision):
    peft = import_package("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(r=2, target_modules=["0"])
    adapted = peft.get_peft_model(torch.nn.Sequential(torch.nn.Linear(8, 4)), config)
    adapted.save_pretrained(tmp_path)
    b = Booster("cpu", precision)
    own = torch.optim.AdamW([p for p in adapted.parameters() if p.requires_grad], lr=0.1)
    model, optimizer, *_ = b.boost(adapted, own)
    adapted.load_adapter(str(tmp_path), "default", is_trainable=True)  # in half it makes new parameters
    before = {name: p.detach().clone() for name, p in adapted.named_parameters() if p.requires_grad}

    def step():
        b.backward(model(torch.ones(2, 8)).float().square().mean(), optimizer)
        return optimizer.step()

    if precision == "bf16_naive":
        with pytest.raises(RuntimeError, match=r"lora_A.* after boost\(\).* peft's load_adapter .* comes before boost"):
            step()
        return
    assert step().applied
    name = next(name for name in before if "lora_B" in name)
    assert not torch.equal(adapted.get_parameter(name), before[name])
