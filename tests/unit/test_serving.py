"""Weights leave for programs that serve them: rounded as asked, in 8 bits as transformers and compressed-tensors read them."""

import json
import logging
from importlib import metadata

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from booster import Booster, load_weights
from booster.checkpoint import CheckpointError
from booster.frozen import FORMS

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}


def llama(transformers, tied=False, width=128, seed=0):
    torch.manual_seed(seed)
    sizes = {"hidden_size": width, "intermediate_size": 2 * width, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.LlamaConfig(vocab_size=96, tie_word_embeddings=tied, attention_bias=True, **sizes)
    return transformers.LlamaForCausalLM(config)


def written(model, folder, weights, precision="bf16", **options):
    """All tensors of the files that `save_model` writes of `model`, and its configuration."""
    booster = Booster("cpu", precision)
    boosted, *_ = booster.boost(model)
    booster.save_model(boosted, folder, shard=True, size_per_shard=1, weights=weights, **options)
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert index["weight_map"].keys() == found.keys()
    assert index["metadata"]["total_size"] == sum(value.nbytes for value in found.values())
    config = folder / "config.json"
    return found, json.loads(config.read_text()) if config.exists() else None


# ---- halves ----


@pytest.mark.parametrize("weights", HALF)
@pytest.mark.parametrize("precision", ["fp32", "bf16", "fp16_naive"])
def test_halves_are_all_parameters_rounded_and_buffers_as_they_are(tmp_path, weights, precision):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Embedding(4, 8))
    booster = Booster("cpu", precision)
    boosted, *_ = booster.boost(model)
    booster.save_model(boosted, tmp_path / "one.safetensors", weights=weights)
    found, state = load_file(tmp_path / "one.safetensors"), boosted.state_dict()
    assert found.keys() == state.keys()
    for name, value in state.items():
        wanted = value if "running" in name or "num" in name else value.to(HALF[weights])
        assert found[name].dtype == wanted.dtype
        assert torch.equal(found[name], wanted)


def test_a_number_that_float16_does_not_hold_is_an_error_and_not_inf(tmp_path):
    booster = Booster("cpu")
    model, *_ = booster.boost(nn.Linear(2, 2))
    with torch.no_grad():
        model.weight[0, 0] = 70000.0
    with pytest.raises(CheckpointError, match=r"weight has numbers up to 7e\+04, which torch.float16 does not hold"):
        booster.save_model(model, tmp_path / "w.safetensors", weights="fp16")
    assert list(tmp_path.iterdir()) == []
    booster.save_model(model, tmp_path / "w.safetensors", weights="bf16")


@pytest.mark.crossed
@pytest.mark.parametrize("weights", [None, "bf16", "fp16"])
@pytest.mark.parametrize("kind", ["llama", "tied llama", "gpt2"])
def test_transformers_opens_halves_in_their_dtype_and_computes_what_the_weights_say(
    transformers, tmp_path, kind, weights
):
    torch.manual_seed(0)
    if kind == "gpt2":
        sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 96}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes))
    else:
        model = llama(transformers, tied=kind == "tied llama", width=32)
    dtype = HALF.get(weights, torch.float16)
    state = {name: value.to(dtype) for name, value in model.state_dict().items()}
    _, config = written(model, tmp_path, weights, precision="fp16_naive" if weights is None else "fp32")
    assert config["dtype"] == str(dtype).removeprefix("torch.")
    assert config["architectures"] == [type(model).__name__]
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype="auto").eval()
    assert opened.dtype == dtype
    by_hand = transformers.AutoModelForCausalLM.from_config(model.config, dtype=dtype).eval()
    by_hand.load_state_dict(state)
    words = torch.arange(1, 9)[None]
    with torch.no_grad():
        same = torch.equal(opened(input_ids=words).logits, by_hand(input_ids=words).logits)
    assert same


# ---- 8 bits ----


def decoded(found, name, weights):
    """What the codes and scales of a layer stand for, and half of the distance between numbers around each of them."""
    codes = found[f"{name}.weight"].float()
    if weights == "int8":
        scale = found[f"{name}.weight_scale"].expand_as(codes)
        return codes * scale, scale / 2
    scale = found[f"{name}.weight_scale_inv"].repeat_interleave(128, 0).repeat_interleave(128, 1)
    step = torch.exp2(codes.abs().clamp(min=2.0**-6).log2().floor() - 3)
    return codes * scale, scale * step / 2


@pytest.mark.crossed
@pytest.mark.parametrize("tied", [False, True], ids=["own head", "tied head"])
@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16_naive"])
@pytest.mark.parametrize("weights", ["fp8", "int8"])
def test_linear_layers_are_the_nearest_numbers_under_scales_and_all_else_is_half(
    transformers, tmp_path, caplog, weights, precision, tied
):
    model = llama(transformers, tied)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    if precision == "bf16_naive":
        state = {name: value.bfloat16() for name, value in state.items()}
    with caplog.at_level(logging.INFO, logger="booster.checkpoint.serving"):
        found, config = written(model, tmp_path, weights, precision)
    assert "not in 8 bits" not in caplog.text
    assert "lm_head" in caplog.text
    layers = {name for name, module in model.named_modules() if isinstance(module, nn.Linear)} - {"lm_head"}
    assert len(layers) == 14
    half = torch.float16 if precision == "fp16" else torch.bfloat16
    for name in layers:
        value, off = decoded(found, name, weights)
        assert found[f"{name}.weight"].dtype == (torch.int8 if weights == "int8" else torch.float8_e4m3fn)
        # Half a step of the format, and the rounding of a division in float32.
        assert bool(((value - state[f"{name}.weight"].float()).abs() <= off * (1 + 2**-10)).all()), name
        assert float(value.abs().max() / state[f"{name}.weight"].float().abs().max()) == pytest.approx(1, abs=2**-20)
    scales = {name for name in found if "_scale" in name}
    assert len(scales) == 14
    assert all(found[name].dtype == torch.float32 for name in scales)
    rest = found.keys() - scales - {f"{name}.weight" for name in layers}
    assert all(found[name].dtype == half and torch.equal(found[name], state[name].to(half)) for name in rest)
    said = config["quantization_config"]
    if weights == "fp8":
        assert said["quant_method"] == "fp8"
        assert said["weight_block_size"] == [128, 128]
        assert said["modules_to_not_convert"] == ["lm_head"]
    else:
        assert said["quant_method"] == "compressed-tensors"
        assert said["format"] == "int-quantized"
        assert said["ignore"] == ["lm_head"]
    assert config["dtype"] == str(half).removeprefix("torch.")


def test_layers_that_blocks_do_not_divide_stay_wide_in_fp8_and_are_named(transformers, tmp_path):
    model = llama(transformers)
    model.model.layers[0].mlp.up_proj = nn.Linear(128, 200, bias=False)
    model.model.layers[0].mlp.gate_proj = nn.Linear(128, 200, bias=False)
    model.model.layers[0].mlp.down_proj = nn.Linear(200, 128, bias=False)
    found, config = written(model, tmp_path / "fp8", "fp8")
    left = {f"model.layers.0.mlp.{name}_proj" for name in ("up", "gate", "down")}
    assert set(config["quantization_config"]["modules_to_not_convert"]) == {"lm_head", *left}
    assert all(found[f"{name}.weight"].dtype == torch.bfloat16 for name in left)
    model = llama(transformers)
    model.model.layers[0].mlp.up_proj = nn.Linear(128, 200, bias=False)
    assert written(model, tmp_path / "int8", "int8")[0]["model.layers.0.mlp.up_proj.weight"].dtype == torch.int8


def test_frozen_layers_of_few_bits_leave_as_matrices(transformers, tmp_path):
    model = llama(transformers)
    save_file(model.state_dict(), tmp_path / "base.safetensors")
    model = load_weights(llama(transformers), tmp_path / "base.safetensors", storage_dtype="nf4", keep="lm_head")
    layer = model.model.layers[0].mlp.up_proj
    matrix = FORMS["nf4"].unpack(layer.weight, 128, torch.float32)
    found, _ = written(model, tmp_path / "out", "bf16")
    assert torch.equal(found["model.layers.0.mlp.up_proj.weight"], matrix.bfloat16())
    assert not any("nf4" in name for name in found)


@pytest.mark.parametrize(
    ("weights", "options", "message"),
    [
        ("fp32", {}, r"weights='fp32' is not legal; choose one of \[None, 'bf16', 'fp16', 'fp8', 'int8'\]"),
        ("fp8", {"shard": False}, "weights='fp8' needs a folder of safetensors files"),
        ("int8", {"use_safetensors": False}, "weights='int8' needs a folder of safetensors files"),
        ("bf16", {"merge": True}, "merge=True is for models with adapters"),
    ],
)
def test_what_cannot_be_written_so_is_refused_by_name(transformers, tmp_path, weights, options, message):
    booster = Booster("cpu")
    model, *_ = booster.boost(llama(transformers, width=32))
    with pytest.raises(ValueError, match=message):
        booster.save_model(model, tmp_path / "w", **{"shard": True, "weights": weights, **options})
    assert list(tmp_path.iterdir()) == []


def test_models_that_have_nothing_to_be_in_8_bits_are_refused_by_name(transformers, tmp_path):
    booster = Booster("cpu")
    sizes = {"n_embd": 128, "n_layer": 1, "n_head": 4, "vocab_size": 96}
    gpt2, *_ = booster.boost(transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)))  # of Conv1D
    with pytest.raises(ValueError, match="this model has none that can be in 8 bits: lm_head: it makes the logits"):
        booster.save_model(gpt2, tmp_path / "w", shard=True, weights="int8")
    narrow, *_ = booster.boost(llama(transformers, width=32))
    with pytest.raises(ValueError, match="64 x 32 is not in blocks of 128 x 128"):
        booster.save_model(narrow, tmp_path / "w", shard=True, weights="fp8")
    own, *_ = booster.boost(nn.Linear(128, 128))
    with pytest.raises(ValueError, match="this Linear has none; write weights='bf16'"):
        booster.save_model(own, tmp_path / "w", shard=True, weights="fp8")
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 4}
    config = transformers.MixtralConfig(vocab_size=96, num_key_value_heads=4, num_local_experts=2, **sizes)
    experts, *_ = booster.boost(transformers.MixtralForCausalLM(config))
    with pytest.raises(ValueError, match=r"experts\.\w+.* hold matrices of several experts"):
        booster.save_model(experts, tmp_path / "w", shard=True, weights="int8")
    infinite, *_ = booster.boost(llama(transformers))
    with torch.no_grad():
        infinite.model.layers[0].mlp.up_proj.weight[3, 3] = torch.inf
    with pytest.raises(CheckpointError, match="up_proj.weight holds inf or NaN"):
        booster.save_model(infinite, tmp_path / "w", shard=True, weights="int8")


# ---- read by other packages' own code ----


@pytest.fixture
def readers(import_package):
    """The packages, or a skip that says how to get them."""
    for package in ("accelerate", "compressed-tensors"):
        try:
            metadata.version(package)
        except metadata.PackageNotFoundError:
            pytest.skip(f"needs {package}: pip install {package}")
        import_package(package.replace("-", "_"))
    return import_package("transformers")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("weights", ["fp8", "int8", "int8, inputs in 8 bits"])
def test_readers_of_transformers_and_compressed_tensors_compute_what_the_codes_stand_for(readers, tmp_path, weights):
    transformers, form = readers, weights[:4].rstrip(",")
    model = llama(transformers)
    words = torch.randint(0, 96, (4, 24), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        exact = model(input_ids=words).logits
    found, _ = written(model, tmp_path, form, precision="fp32")
    kinds = {"fp8": transformers.FineGrainedFP8Config, "int8": transformers.CompressedTensorsConfig}
    options = {"quantization_config": kinds[weights](dequantize=True)} if weights in kinds else {}
    dtype = torch.bfloat16  # of all else, in the files; transformers multiplies in 8 bits on a GPU alone
    opened = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype, **options).eval()
    by_hand = transformers.AutoModelForCausalLM.from_config(model.config, dtype=dtype).eval()
    state = {name: value for name, value in found.items() if "_scale" not in name}
    for name in [name for name, value in state.items() if value.dtype.itemsize == 1]:
        state[name] = decoded(found, name.removesuffix(".weight"), form)[0]
    by_hand.load_state_dict(state)
    with torch.no_grad():
        read, meant = (each(input_ids=words).logits.float() for each in (opened, by_hand))
    spread = float(exact.std())
    # A rounding to the 4 bits of e4m3 or the 7 of int8, and to the 8 of bfloat16, which 14 products add up at random.
    step = (2**-4 if form == "fp8" else 2**-7) + 2**-8
    off, from_codes = (float((read - other).square().mean().sqrt()) / spread for other in (exact, meant))
    print(f"{weights}: logits off by {off:.4f} of their standard deviation, from those by hand by {from_codes:.4f}")
    assert off < 14**0.5 * step
    assert (from_codes == 0) if weights in kinds else (0 < from_codes < 14**0.5 * step)
