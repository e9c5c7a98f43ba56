"""Weights are read into a model in the dtype that they are to be stored in, and what does not fit is said before that."""

import json
import logging
import subprocess
import sys

import pytest
import torch
from comparing import same
from safetensors.torch import load_file, save_file
from torch import nn

import booster
from booster import Booster, load_weights
from booster.checkpoint import CheckpointError
from booster.frozen import FORMS, FrozenLinear, origins_of


class Net(nn.Module):
    """Norms with buffers, an embedding that shares its weight with the head, linear layers with and without bias."""

    def __init__(self, width=8, tied=True):
        super().__init__()
        self.embed = nn.Embedding(5, width)
        self.norm = nn.BatchNorm1d(width)
        self.up = nn.Linear(width, 3 * width)
        self.down = nn.Linear(3 * width, width, bias=False)
        self.head = nn.Linear(width, 5, bias=False)
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        x = self.norm(self.embed(tokens))
        return self.head(x + self.down(torch.relu(self.up(x))))


TOKENS = torch.arange(5)


def net(seed=0, **options):
    torch.manual_seed(seed)
    return Net(**options)


def on_meta(**options):
    with torch.device("meta"):
        return Net(**options)


def saved(model, path, dtype=None):
    state = {name: t.to(dtype) if dtype and t.is_floating_point() else t for name, t in model.state_dict().items()}
    state = {name: t.contiguous().clone() for name, t in state.items() if name != "head.weight" or not is_tied(model)}
    save_file(state, path)
    return path


def is_tied(model):
    return model.head.weight is model.embed.weight


@pytest.mark.parametrize("shard", [False, True])
@pytest.mark.parametrize("make", [on_meta, lambda: net(seed=1)], ids=["meta", "real"])
def test_a_file_or_a_folder_with_an_index_fills_the_model(tmp_path, make, shard):
    source = net()
    path = tmp_path / "model"
    if shard:
        wrapped, *_ = Booster("cpu").boost(net())
        Booster("cpu").save_model(wrapped, path, shard=True)
        (index,) = path.glob("*.index.json")
        assert "head.weight" in json.loads(index.read_text())["weight_map"] or is_tied(source)
    else:
        saved(source, path)
    model = make()
    assert load_weights(model, path, device="cpu") is model
    assert same(model.state_dict(), source.state_dict())
    assert is_tied(model)
    assert all(param.requires_grad for param in model.parameters())
    model(TOKENS).sum().backward()


def test_shards_are_read_as_transformers_writes_them(tmp_path):
    state = net(tied=False).state_dict()
    names = list(state)
    parts = {"model-00001-of-00002.safetensors": names[:4], "model-00002-of-00002.safetensors": names[4:]}
    for file, own in parts.items():
        save_file({name: state[name] for name in own}, tmp_path / file)
    where = {name: file for file, own in parts.items() for name in own}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": where}))
    model = load_weights(on_meta(tied=False), tmp_path, device="cpu")
    assert same(model.state_dict(), state)


def test_an_optimizer_of_a_real_model_keeps_its_parameters(tmp_path):
    model, source = net(seed=1), net()
    before = list(model.parameters())
    load_weights(model, saved(source, tmp_path / "w"), storage_dtype=torch.bfloat16)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}


def test_all_parameters_are_stored_in_the_floating_dtype_asked_for_and_buffers_as_they_are(tmp_path):
    source = net()
    model = load_weights(on_meta(), saved(source, tmp_path / "w"), storage_dtype=torch.bfloat16, device="cpu")
    for name, param in model.named_parameters():
        assert torch.equal(param, source.get_parameter(name).bfloat16()), name
    assert model.norm.running_var.dtype == torch.float32
    assert model.steps.dtype == torch.int64
    assert type(model.up) is nn.Linear


@pytest.mark.parametrize("form", FORMS)
def test_linear_layers_are_frozen_in_a_form_and_the_rest_stays_wide(tmp_path, form, caplog):
    source = net()
    with caplog.at_level(logging.INFO, "booster.checkpoint.streaming"):
        model = load_weights(on_meta(), saved(source, tmp_path / "w"), storage_dtype=form, device="cpu")
    assert caplog.messages == [f"2 linear layers of Net are stored in {form} and frozen; stored wide: head"]
    assert isinstance(model.up, FrozenLinear)
    assert torch.equal(model.up.weight, FORMS[form].pack(source.up.weight))
    assert model.up.bias.requires_grad
    assert type(model.head) is nn.Linear, "its weight is the embedding's"
    assert is_tied(model)
    expected = net()
    for layer in ("up", "down"):
        getattr(expected, layer).weight.detach().copy_(getattr(model, layer).unpacked())
    assert torch.equal(model(TOKENS), expected(TOKENS))


def test_compute_dtype_is_what_frozen_layers_multiply_in_and_all_else_keeps_the_dtype_of_the_model(tmp_path):
    path = saved(net(), tmp_path / "w", torch.bfloat16)
    for storage, stored in (("nf4", torch.uint8), (torch.bfloat16, torch.bfloat16)):
        model = load_weights(on_meta(), path, storage_dtype=storage, compute_dtype=torch.float16, device="cpu")
        assert isinstance(model.up, FrozenLinear)
        assert model.up.compute_dtype == torch.float16
        assert model.up.weight.dtype == stored
        assert {model.up.bias.dtype, model.embed.weight.dtype, model.norm.weight.dtype} == {torch.float32}
        assert model(TOKENS).dtype == torch.float32
    model = load_weights(on_meta(), path, storage_dtype="nf4", keep="d*", device="cpu")
    assert (type(model.up), type(model.down)) == (FrozenLinear, nn.Linear)
    with pytest.raises(
        CheckpointError, match=r"norm.bias is float32 in the file and bfloat16 in the model, which would lose"
    ):
        load_weights(net().bfloat16(), saved(net(), tmp_path / "wide"), storage_dtype="nf4")


@pytest.mark.parametrize("storage", ["nf4", torch.bfloat16, None], ids=str)
def test_tensors_are_read_in_pieces_of_whole_rows(tmp_path, storage, monkeypatch):
    path = saved(net(), tmp_path / "w")
    whole = load_weights(on_meta(), path, storage_dtype=storage, device="cpu").state_dict()
    monkeypatch.setattr(
        "booster.checkpoint.tensor_file._BUFFER", 76
    )  # bytes: two rows and a part of one, or half of one
    assert same(load_weights(on_meta(), path, storage_dtype=storage, device="cpu").state_dict(), whole)


def test_a_model_that_is_one_layer_comes_back_as_another_object(tmp_path):
    torch.manual_seed(0)
    source = nn.Linear(4, 3)
    save_file(source.state_dict(), tmp_path / "w")
    model = load_weights(nn.Linear(4, 3, device="meta"), tmp_path / "w", storage_dtype="int8", device="cpu")
    assert isinstance(model, FrozenLinear)
    assert torch.equal(model.bias, source.bias)
    assert torch.equal(model.weight, FORMS["int8"].pack(source.weight))


def test_a_layer_that_stands_in_two_places_is_frozen_in_both(tmp_path):
    layer = nn.Linear(4, 4)
    model = nn.Sequential(layer, nn.ReLU(), layer)
    save_file({name: t for name, t in model.state_dict().items() if name.startswith("0")}, tmp_path / "w")
    load_weights(model, tmp_path / "w", storage_dtype="int8")
    assert isinstance(model[0], FrozenLinear)
    assert model[0] is model[2]


def test_weights_that_were_saved_in_a_form_are_read_as_they_are(tmp_path):
    path = saved(net(tied=False), tmp_path / "w")
    model = load_weights(on_meta(tied=False), path, storage_dtype="nf4", device="cpu")
    save_file(model.state_dict(), tmp_path / "packed")
    assert load_file(tmp_path / "packed")["up.weight_nf4"].dtype == torch.uint8
    again = load_weights(on_meta(tied=False), tmp_path / "packed", storage_dtype="nf4", device="cpu")
    assert same(again.state_dict(), model.state_dict())
    with pytest.raises(CheckpointError, match=r"(?s)up.weight: not in the file.*up.weight_nf4: not in the model"):
        load_weights(on_meta(tied=False), tmp_path / "packed", storage_dtype="int8", device="cpu")


def test_all_that_does_not_fit_is_listed_and_nothing_is_touched(tmp_path):
    state = {
        "embed.weight": torch.zeros(5, 8),
        "norm.weight": torch.zeros(9),
        "norm.bias": torch.zeros(8, dtype=torch.float16),
        "norm.running_mean": torch.zeros(8, dtype=torch.float64),
        "norm.running_var": torch.zeros(8, dtype=torch.bfloat16),
        "norm.num_batches_tracked": torch.zeros(()),
        "up.weight": torch.zeros(24, 8, dtype=torch.int8),
        "up.bias": torch.zeros(24),
        "head.weight": torch.ones(5, 8),
        "steps": torch.zeros((), dtype=torch.int64),
        "old": torch.zeros(1),
    }
    save_file(state, tmp_path / "w")
    model = net()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(CheckpointError) as raised:
        load_weights(model, tmp_path / "w")
    assert str(raised.value).splitlines()[1:] == [
        "  head.weight and embed.weight are one tensor in the model, and differ in the file",
        "  norm.weight has shape (9,) in the file and (8,) in the model",
        "  norm.bias is float16 in the file and float32 in the model; pass storage_dtype= to say in which to store it",
        "  norm.running_mean is float64 in the file and float32 in the model, which would lose bits",
        "  norm.num_batches_tracked is float32 in the file and int64 in the model",
        "  up.weight is int8 in the file and float32 in the model",
        "  down.weight: not in the file",
        "  old: not in the model",
    ]
    assert same(before, model.state_dict())


def test_a_buffer_on_meta_that_no_file_holds_is_named(tmp_path):
    class Rotary(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("angles", torch.ones(3), persistent=False)

    path = tmp_path / "w"
    save_file({"none": torch.zeros(1)}, path)
    with torch.device("meta"):
        model = Rotary()
    with pytest.raises(
        CheckpointError, match="angles is a buffer that no file holds.*: build the Rotary that holds it"
    ):
        load_weights(model, path)


@pytest.mark.parametrize(
    "damage", [lambda data: data[:-1], lambda data: b"\xff" * 8 + data[8:], lambda data: data[:40], lambda data: b""]
)
def test_damaged_files_are_refused(tmp_path, damage):
    path = saved(net(), tmp_path / "w.safetensors")
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(CheckpointError, match="not a whole safetensors file"):
        load_weights(net(), path)


def test_wrong_use_is_told_apart(tmp_path):
    path = saved(net(), tmp_path / "w")
    with pytest.raises(
        ValueError, match=r"storage_dtype='int4' is not legal; choose one of \[None, torch.float32, .*'nf4'\]"
    ):
        load_weights(net(), path, storage_dtype="int4")
    with pytest.raises(ValueError, match=r"compute_dtype=torch.bfloat16 needs storage_dtype"):
        load_weights(net(), path, compute_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match=r"keep='up' says which linear layers are not frozen, and none would be"):
        load_weights(net(), path, storage_dtype=torch.bfloat16, keep="up")
    with pytest.raises(ValueError, match=r"keep='nothing' selects no module of Net"):
        load_weights(net(), path, storage_dtype="nf4", keep="nothing")
    boosted, *_ = Booster("cpu").boost(net())
    with pytest.raises(RuntimeError, match=r"models before boost\(\); Booster.load_model"):
        load_weights(boosted, path)
    torch.save(net().state_dict(), tmp_path / "w.bin")
    with pytest.raises(CheckpointError, match=r"w.bin is not a safetensors file"):
        load_weights(net(), tmp_path / "w.bin")
    bad = net()
    bad.up.weight.detach()[0, 0] = torch.nan
    with pytest.raises(CheckpointError, match=r"up.weight: int8 has no code for inf or NaN.*keep="):
        load_weights(net(), saved(bad, tmp_path / "bad"), storage_dtype="int8")


@pytest.mark.parametrize("form", FORMS)
def test_weights_that_have_no_code_leave_the_model_as_it_was(form, tmp_path):
    bad, model = net(), net(seed=1)
    bad.up.weight.detach()[-1, -1] = torch.inf  # the last that is read
    before = {name: (tensor, tensor.clone()) for name, tensor in model.state_dict(keep_vars=True).items()}
    with pytest.raises(CheckpointError, match="no code for inf or NaN"):
        load_weights(model, saved(bad, tmp_path / "bad"), storage_dtype=form)
    after = model.state_dict(keep_vars=True)
    assert after.keys() == before.keys()
    assert all(after[name] is tensor and torch.equal(tensor, was) for name, (tensor, was) in before.items())


def test_each_module_knows_the_dtype_that_it_was_loaded_from(tmp_path):
    path = saved(net(), tmp_path / "w", torch.bfloat16)
    model = load_weights(on_meta(), path, storage_dtype="nf4", device="cpu")
    assert origins_of(model.up) == {"weight_nf4": torch.bfloat16, "bias": torch.bfloat16}
    assert origins_of(model.norm)["running_var"] == torch.bfloat16
    assert origins_of(nn.Linear(1, 1)) == {}


@pytest.mark.slow
def test_a_model_of_transformers_is_read_as_save_pretrained_writes_it(transformers, tmp_path):
    config = transformers.LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    torch.manual_seed(0)
    source = transformers.LlamaForCausalLM(config).eval()
    source.save_pretrained(tmp_path, max_shard_size="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    tokens, outputs = torch.arange(8)[None], {}
    for storage in (None, "nf4"):
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(config).eval()
        with pytest.raises(CheckpointError, match=r"inv_freq is a buffer that no file holds.*LlamaRotaryEmbedding"):
            load_weights(model, tmp_path, device="cpu")
        model.model.rotary_emb = type(model.model.rotary_emb)(config)
        load_weights(model, tmp_path, storage_dtype=storage, keep="lm_head" if storage else (), device="cpu")
        outputs[storage] = model(tokens).logits.detach()
    expected = source(tokens).logits.detach()
    assert torch.equal(outputs[None], expected)
    assert 0.01 < float((outputs["nf4"] - expected).norm() / expected.norm()) < 0.25


PEAK = """
import sys, threading
import torch
from torch import nn
from booster import load_weights
import booster.checkpoint.streaming, booster.number_formats

def resident(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) * 1024

with torch.device("meta"):
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(int(sys.argv[2]))))
form = getattr(torch, sys.argv[3], sys.argv[3]) if sys.argv[3] != "int8" else "int8"
load_weights(nn.Sequential(nn.Linear(8, 8)), sys.argv[4], storage_dtype=form)  # what imports and threads take
open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
before = resident("VmRSS")
load_weights(model, sys.argv[1], storage_dtype=form, device="cpu")
stored = sum(t.numel() * t.element_size() for t in model.state_dict().values())
print(stored, resident("VmHWM") - before)
"""


@pytest.mark.slow
@pytest.mark.parametrize("form", ["bfloat16", "float32", "int8", "fp8", "nf4"])
def test_the_peak_of_memory_is_a_tenth_above_what_is_stored(tmp_path, form):
    layers = {"bfloat16": 100, "float32": 50, "int8": 190, "fp8": 190, "nf4": 340}[form]  # about 200 MB each
    half = torch.randn(1024, 1024, dtype=torch.bfloat16)
    state = {f"{i}.{name}": t.clone() for i in range(layers) for name, t in (("weight", half), ("bias", half[0]))}
    if form not in ("bfloat16", "float32"):
        state = {name: t.float() if "bias" in name else t for name, t in state.items()}
    save_file(state, tmp_path / "large")
    del state
    small = {f"0.{name}": t for name, t in nn.Linear(8, 8).state_dict().items()}
    save_file(small, tmp_path / "small")
    arguments = [str(tmp_path / "large"), str(layers), form, str(tmp_path / "small")]
    done = subprocess.run(
        [sys.executable, "-c", PEAK, *arguments], capture_output=True, text=True, check=True, timeout=600
    )
    stored, peak = map(int, done.stdout.split())
    print(f"{form}: stored {stored / 2**20:.1f} MiB, peak {peak / 2**20:.1f} MiB, ratio {peak / stored:.4f}")
    assert stored > 190e6
    assert peak <= 1.1 * stored


ABOVE = """
import sys
import torch
from torch import nn
from booster import Booster, load_weights

def resident(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key)) // 1024

def above(load):
    open("/proc/self/clear_refs", "w").write("5")
    before = resident("VmRSS")
    load()
    return resident("VmHWM") - before

def check(model):
    return all(torch.equal(p, torch.full_like(p, 0.5 + int(name.split(".")[0]))) for name, p in model.named_parameters())

small, large = sys.argv[1:3]
for path, layers, width in ((small, 1, 8), (large, 24, 1024)):
    def make(dtype=None):
        with torch.device("meta"):
            model = nn.Sequential(*(nn.Linear(width, width, dtype=dtype) for _ in range(layers))).to_empty(device="cpu")
        for param in model.parameters():  # their memory is there now
            nn.init.zeros_(param)
        return model

    plain, half, b = make(), make(torch.bfloat16), Booster("cpu")
    model, *_ = b.boost(make())
    halved, *_ = b.boost(make(torch.bfloat16))
    found = [
        above(lambda: load_weights(plain, path)),
        above(lambda: load_weights(plain, path, storage_dtype=torch.bfloat16)),
        above(lambda: load_weights(half, path, storage_dtype=torch.bfloat16)),
        above(lambda: b.load_model(model, path)),
        above(lambda: b.load_model(halved, path)),
    ]
    assert all(map(check, (plain, half, b.unwrap(model), b.unwrap(halved))))
print(*found)
"""


KEYS = (("weight", 2), ("bias", 1))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="counts memory as Linux does")
def test_a_load_into_a_model_that_is_there_takes_no_memory_beside_it(tmp_path):
    """Of files in any dtype: straight into the weights, or some MB at a time."""
    for name, layers, width in (("small", 1, 8), ("large", 24, 1024)):
        (tmp_path / name).mkdir()
        state = {f"{n}.{key}": torch.full((width, width)[:dim], 0.5 + n) for n in range(layers) for key, dim in KEYS}
        where = {key: str(int(key.partition(".")[0]) // 12) for key in state}
        for file in set(where.values()):
            save_file({key: value for key, value in state.items() if where[key] == file}, tmp_path / name / file)
        (tmp_path / name / "model.safetensors.index.json").write_text(json.dumps({"weight_map": where}))
    done = subprocess.run(
        [sys.executable, "-c", ABOVE, str(tmp_path / "small"), str(tmp_path / "large")],
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert done.returncode == 0, done.stderr
    assert max(map(int, done.stdout.split())) < 24, done.stdout  # MiB, of 96


def test_booster_has_it():
    assert "load_weights" in booster.__all__
