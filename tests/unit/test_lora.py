"""`enable_lora`: adapters of peft train alone on a frozen base, in few bits too; they leave alone, or merged.

All but what needs no package is slow, and with peft itself: `make integrations` installs it.
"""

import json
import sys
from importlib import metadata

import pytest
import torch
from choices import precisions
from safetensors.torch import load_file
from torch import nn
from trainers import llama

from booster import Booster
from booster.frozen import FrozenLinear

pytestmark = pytest.mark.filterwarnings("ignore")  # of others, on their own code
WORDS = torch.arange(1, 33).view(4, 8)
PRECISIONS = precisions("fp32", "bf16", "fp16", "bf16_naive", "fp16_naive", scale=2.0**10)
STORED = {"as it is": None, "nf4": "nf4", "int8": "int8", "fp8": "fp8", "bfloat16": torch.bfloat16}
slow = pytest.mark.slow


@pytest.fixture
def peft(import_package):
    """The package, or a skip that says how to get it."""
    try:
        metadata.version("peft")
    except metadata.PackageNotFoundError:
        pytest.skip("needs peft: pip install peft")
    import_package("transformers")
    return import_package("peft")


def config(peft, **options):
    usual = {"r": 4, "lora_alpha": 16, "target_modules": ["q_proj", "v_proj", "down_proj"], "task_type": "CAUSAL_LM"}
    return peft.LoraConfig(**{**usual, **options})


def job(precision, model=None, **options):
    """A boosted model with adapters, and its optimizer; all parameters are given, as scripts do."""
    booster = Booster("cpu", PRECISIONS[precision]())
    torch.manual_seed(3)
    adapted = booster.enable_lora(llama() if model is None else model, **options)
    model, optimizer, *_ = booster.boost(adapted, torch.optim.AdamW(adapted.parameters(), 1e-2))
    return booster, model, optimizer


def train(booster, model, optimizer, steps=6):
    losses = []
    for _ in range(steps):
        loss = model(input_ids=WORDS, labels=WORDS).loss
        booster.backward(loss, optimizer)
        assert optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("stored", STORED)
def test_adapters_alone_train_have_masters_and_states_and_the_base_stays(peft, stored, precision):
    booster, model, optimizer = job(precision, lora_config=config(peft), storage_dtype=STORED[stored])
    own = booster.unwrap(model)
    frozen = {name: param.clone() for name, param in own.named_parameters() if not param.requires_grad}
    losses = train(booster, model, optimizer)
    assert losses[-1] < losses[0]
    assert all(torch.equal(own.get_parameter(name), value) for name, value in frozen.items())
    trained = {name for name, param in own.named_parameters() if param.requires_grad}
    assert len(trained) == 12
    assert all("lora_" in name for name in trained)
    # float32 masters and two states of what trains, and nothing of the base.
    numbers = sum(own.get_parameter(name).numel() for name in trained)
    assert booster.memory(model, optimizer).states <= 2.1 * 4 * numbers
    packed = [module for module in own.modules() if isinstance(module, FrozenLinear)]
    assert len(packed) == (0 if STORED[stored] is None else 14)
    if stored == "nf4":
        assert {module.weight.dtype for module in packed} == {torch.uint8}


@slow
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16_naive"])
@pytest.mark.parametrize("stored", ["as it is", "nf4"])
def test_adapters_leave_alone_and_train_on_in_another_run(peft, tmp_path, stored, precision):
    options = {"storage_dtype": STORED[stored]}
    booster, model, optimizer = job(precision, lora_config=config(peft), **options)
    train(booster, model, optimizer)
    booster.save_lora(model, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} >= {"adapter_model.safetensors", "adapter_config.json"}
    assert all("lora_" in name for name in load_file(tmp_path / "adapter_model.safetensors"))
    again, other, _ = job(precision, pretrained_dir=tmp_path, **options)
    ours, theirs = (b.unwrap(m).state_dict() for b, m in ((booster, model), (again, other)))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(theirs[name], value) for name, value in ours.items())
    assert any(param.requires_grad for param in other.parameters())
    plain = peft.PeftModel.from_pretrained(llama(), tmp_path)  # of peft's own code
    own = {name: value for name, value in plain.state_dict().items() if "lora_" in name}
    assert all(torch.equal(value, ours[name].float()) for name, value in own.items())


@slow
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16_naive"])
@pytest.mark.parametrize("stored", ["as it is", "nf4"])
def test_merged_weights_are_those_that_peft_merges_under_the_names_of_the_base(peft, tmp_path, stored, precision):
    import transformers

    options = {"lora_config": config(peft, modules_to_save=["lm_head"]), "storage_dtype": STORED[stored]}
    booster, model, optimizer = job(precision, **options)
    train(booster, model, optimizer)
    booster.save_model(model, tmp_path, shard=True, merge=True)
    synced = dict(booster.sync_weights(model, merge=True))
    own = booster.unwrap(model).float()
    for name, module in [*own.named_modules()]:  # as peft cannot add to packed weights
        if isinstance(module, FrozenLinear):
            plain = nn.Linear(module.in_features, module.out_features, bias=False)
            plain.weight = nn.Parameter(module.unpacked())
            own.set_submodule(name, plain)
    by_peft = own.merge_and_unload().state_dict()
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32).state_dict()
    assert opened.keys() == by_peft.keys() == synced.keys()
    half = 2**-8 if precision == "bf16" else 2**-11
    for name, value in by_peft.items():
        of_file = 2**-22 if precision == "fp32" or stored == "nf4" or precision == "bf16" else half
        assert torch.allclose(opened[name], value, rtol=0, atol=of_file * float(value.abs().max())), name
        of_sync = 2**-22 if precision == "fp32" else half
        assert torch.allclose(synced[name].float(), value, rtol=0, atol=of_sync * float(value.abs().max())), name


@slow
def test_merged_weights_leave_in_8_bits(peft, tmp_path):
    import transformers

    torch.manual_seed(0)
    sizes = {"hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(vocab_size=64, **sizes))
    booster, model, optimizer = job("bf16", model, lora_config=config(peft), storage_dtype="nf4")
    train(booster, model, optimizer, 2)
    booster.save_model(model, tmp_path, shard=True, merge=True, weights="fp8")
    found = load_file(next(tmp_path.glob("*.safetensors")))
    assert found["model.layers.0.self_attn.q_proj.weight"].dtype == torch.float8_e4m3fn
    assert not any("lora" in name or "base_layer" in name or "nf4" in name for name in found)
    said = json.loads((tmp_path / "config.json").read_text())
    assert said["architectures"] == ["LlamaForCausalLM"]
    assert said["quantization_config"]["modules_to_not_convert"] == ["lm_head"]


@slow
def test_a_run_is_saved_and_goes_on_to_the_bit(peft, tmp_path):
    booster, model, optimizer = job("bf16_naive", lora_config=config(peft), storage_dtype="nf4")
    train(booster, model, optimizer, 3)
    booster.save(tmp_path, model, optimizer)
    expected = train(booster, model, optimizer, 3)
    again, other, its_optimizer = job("bf16_naive", lora_config=config(peft), storage_dtype="nf4")
    again.load(tmp_path, other, its_optimizer)
    assert train(again, other, its_optimizer, 3) == expected


@slow
def test_what_cannot_be_is_refused_by_name(peft, tmp_path):
    booster = Booster("cpu", "bf16")
    lora = config(peft)
    with pytest.raises(ValueError, match="one of them, got neither"):
        booster.enable_lora(llama())
    with pytest.raises(ValueError, match="one of them, got both"):
        booster.enable_lora(llama(), tmp_path, lora)
    with pytest.raises(TypeError, match=r"lora_config must be a peft\.LoraConfig, got dict"):
        booster.enable_lora(llama(), lora_config={"r": 4})
    with pytest.raises(ValueError, match="storage_dtype='nf8' is not legal"):
        booster.enable_lora(llama(), lora_config=lora, storage_dtype="nf8")
    with pytest.raises(
        ValueError, match="use_dora=True reads the weights of the base, which storage_dtype='nf4' packs"
    ):
        booster.enable_lora(llama(), lora_config=config(peft, use_dora=True), storage_dtype="nf4")
    with pytest.raises(ValueError, match="init_lora_weights='pissa' reads the weights"):
        booster.enable_lora(llama(), lora_config=config(peft, init_lora_weights="pissa"), storage_dtype="int8")
    with pytest.raises(ValueError, match="no linear layer to store in nf4"):
        booster.enable_lora(nn.Sequential(nn.Embedding(4, 4)), lora_config=lora, storage_dtype="nf4")
    adapted = booster.enable_lora(llama(), lora_config=lora)
    with pytest.raises(ValueError, match="has adapters already"):
        booster.enable_lora(adapted, lora_config=lora)
    dora = booster.enable_lora(llama(), lora_config=config(peft, use_dora=True))
    boosted, *_ = booster.boost(dora)
    with pytest.raises(ValueError, match="merge=True adds products of two matrices"):
        booster.save_model(boosted, tmp_path / "w", merge=True)


# By kind: what is made of peft, and whether its products can be merged into the weights of the base.
KINDS = {
    "plain": (lambda peft: config(peft), True),
    "all biases": (lambda peft: config(peft, bias="all"), True),
    "biases of layers": (lambda peft: config(peft, bias="lora_only"), True),
    "ranks by layer": (lambda peft: config(peft, rank_pattern={"q_proj": 2}, use_rslora=True), True),
    "head copied": (lambda peft: config(peft, modules_to_save=["lm_head"]), True),
    "both ends copied": (lambda peft: config(peft, modules_to_save=["lm_head", "embed_tokens"]), True),
    "head adapted": (lambda peft: config(peft, target_modules=["q_proj", "lm_head"]), True),
    "embedding adapted": (lambda peft: config(peft, target_modules=["q_proj", "embed_tokens"]), False),
    "tokens": (lambda peft: config(peft, trainable_token_indices=[1, 5, 9]), False),
    "tokens alone": (
        lambda peft: peft.TrainableTokensConfig(token_indices=[1, 5], target_modules=["embed_tokens"]),
        False,
    ),
    "its own biases": (lambda peft: config(peft, lora_bias=True), False),
    "magnitudes": (lambda peft: config(peft, use_dora=True), False),
    "parameters": (lambda peft: config(peft, target_modules=[], target_parameters=["q_proj.weight"]), False),
    "AdaLora": (
        lambda peft: peft.AdaLoraConfig(
            target_modules=["q_proj"], init_r=4, target_r=2, tinit=1, tfinal=1, total_step=9
        ),
        False,
    ),
    "IA3": (
        lambda peft: peft.IA3Config(target_modules=["q_proj", "down_proj"], feedforward_modules=["down_proj"]),
        False,
    ),
    "LoHa": (lambda peft: peft.LoHaConfig(target_modules=["q_proj"], r=4), False),
    "LoKr": (lambda peft: peft.LoKrConfig(target_modules=["q_proj"], r=4), False),
    "OFT": (lambda peft: peft.OFTConfig(target_modules=["q_proj"], r=0, oft_block_size=4), False),
    "VeRA": (lambda peft: peft.VeraConfig(target_modules=["q_proj"], r=4), False),
    "norms": (lambda peft: peft.LNTuningConfig(target_modules=["input_layernorm"]), False),
    "prompts": (lambda peft: peft.PromptTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"), False),
    "encoded prompts": (
        lambda peft: peft.PromptEncoderConfig(num_virtual_tokens=3, task_type="CAUSAL_LM", encoder_hidden_size=8),
        False,
    ),
    "prefixes": (lambda peft: peft.PrefixTuningConfig(num_virtual_tokens=3, task_type="CAUSAL_LM"), False),
}


def adapted(peft, kind, *, tied=False, precision="fp32"):
    """A trained job with adapters of that kind; those that are no LoRA are put on by hand, as the refusal of others says."""
    base = llama(tied=tied)
    booster = Booster("cpu", PRECISIONS[precision]())
    torch.manual_seed(3)
    model = peft.get_peft_model(base, KINDS[kind][0](peft))
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), 3e-2))
    train(booster, model, optimizer, 4)
    model.eval()
    return booster, model


@slow
@pytest.mark.parametrize("tied", [False, True], ids=["untied", "tied"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_adapters_is_written_as_it_trained_and_merged_right_or_refused(peft, tmp_path, kind, tied):
    import transformers

    booster, model = adapted(peft, kind, tied=tied)
    with torch.no_grad():
        trained = model(input_ids=WORDS).logits
        before = llama(tied=tied)(input_ids=WORDS).logits
        assert (
            trained[:, -8:] - before
        ).abs().max() > 1e-4  # it learned what can be lost; prompts come before the words
    booster.save_lora(model, tmp_path / "adapters")
    opened = peft.PeftModel.from_pretrained(llama(tied=tied), tmp_path / "adapters").eval()
    assert torch.allclose(opened(input_ids=WORDS).logits, trained, rtol=0, atol=1e-5)
    if not KINDS[kind][1]:
        for merging in (
            lambda: booster.save_model(model, tmp_path / "merged", shard=True, merge=True),
            lambda: dict(booster.sync_weights(model, merge=True)),
        ):
            with pytest.raises(ValueError, match="merge=True adds products of two matrices"):
                merging()
        return
    booster.save_model(model, tmp_path / "merged", shard=True, merge=True)
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "merged").eval()
    assert torch.allclose(opened(input_ids=WORDS).logits, trained, rtol=0, atol=1e-5)
    apart = tied and kind in ("head copied", "both ends copied", "head adapted")
    assert json.loads((tmp_path / "merged" / "config.json").read_text())["tie_word_embeddings"] is (tied and not apart)
    sampler = llama(tied=tied and not apart)
    sampler.load_state_dict(dict(booster.sync_weights(model, merge=True)))
    assert torch.allclose(sampler(input_ids=WORDS).logits, trained, rtol=0, atol=1e-5)


@slow
@pytest.mark.parametrize("precision", ["fp32", "bf16_naive"])
def test_what_peft_has_merged_already_is_not_added_twice(peft, tmp_path, precision):
    booster, model = adapted(peft, "plain", precision=precision)
    own = booster.unwrap(model)
    own.merge_adapter()
    expected = {name: module.base_layer.weight for name, module in own.named_modules() if hasattr(module, "lora_A")}
    synced = dict(booster.sync_weights(model, merge=True))
    booster.save_model(model, tmp_path, shard=True, merge=True)
    written = load_file(next(tmp_path.glob("*.safetensors")))
    for name, value in expected.items():
        own_name = f"{name.removeprefix('base_model.model.')}.weight"
        assert torch.equal(synced[own_name], value)
        assert torch.equal(written[own_name], value)


@slow
def test_copies_of_an_adapter_that_is_not_active_leave_the_original_in_a_merged_file(peft):
    model = peft.get_peft_model(llama(), config(peft, modules_to_save=["lm_head"]))
    model.add_adapter("other", config(peft))
    model.set_adapter("other")
    booster = Booster("cpu")
    model, *_ = booster.boost(model)
    assert torch.equal(dict(booster.sync_weights(model, merge=True))["lm_head.weight"], llama().lm_head.weight)


@slow
def test_a_parameter_that_trains_beside_adapters_and_is_in_no_file_of_theirs_is_named(peft, tmp_path):
    model = peft.get_peft_model(llama(), config(peft))
    model.base_model.model.model.norm.weight.requires_grad_(True)
    booster = Booster("cpu")
    model, *_ = booster.boost(model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], 1e-2))
    with pytest.raises(ValueError, match=r"writes nothing of base_model\.model\.model\.norm\.weight, which train"):
        booster.save_lora(model, tmp_path)
    assert not [*tmp_path.iterdir()]


def test_without_peft_the_line_that_installs_it_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "peft", None)
    with pytest.raises(ImportError, match="pip install peft"):
        Booster("cpu").enable_lora(nn.Linear(2, 2))


def test_models_without_adapters_are_told_apart(tmp_path):
    booster = Booster("cpu")
    model, *_ = booster.boost(nn.Linear(2, 2))
    with pytest.raises(ValueError, match="save_lora is for models with adapters, .*save_model writes all weights"):
        booster.save_lora(model, tmp_path)
    with pytest.raises(TypeError, match="save_lora needs the model that boost"):
        booster.save_lora(nn.Linear(2, 2), tmp_path)
