"""A sampler that runs during training gets the weights that the forward reads, to the bit."""

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from booster import Booster
from booster.mixed_precision import FP16NaiveMixedPrecision, FP16TorchMixedPrecision

PRECISIONS = {
    "fp32": lambda: "fp32",
    "bf16": lambda: "bf16",
    "fp16": lambda: "fp16",
    "fp16, head kept": lambda: FP16TorchMixedPrecision(keep_fp32="head"),
    "bf16_naive": lambda: "bf16_naive",
    "fp16_naive": lambda: "fp16_naive",
    "fp16_naive, head kept": lambda: FP16NaiveMixedPrecision(keep_fp32="head"),
    "fp16_apex": lambda: "fp16_apex",
}


MOVES = {
    "_to_copy",
    "copy_",
    "t",
    "transpose",
    "view",
    "detach",
    "clone",
    "expand",
    "_unsafe_view",
    "reshape",
    "unsqueeze",
}


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.conv = nn.Conv1d(8, 8, 1)
        self.norm = nn.LayerNorm(8)
        self.up, self.down = nn.Linear(8, 24), nn.Linear(24, 8)
        self.head = nn.Linear(8, 16, bias=False)

    def forward(self, words):
        x = self.conv(self.embed(words).transpose(1, 2)).transpose(1, 2)
        return self.head(x + self.down(torch.relu(self.up(self.norm(x)))))


class Read(TorchDispatchMode):
    """Notes what operations are given that compute."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        if name not in MOVES:
            self.seen += [each.clone() for each in args if isinstance(each, torch.Tensor) and each.is_floating_point()]
        return func(*args, **(kwargs or {}))


def trained(precision, model=None, steps=2):
    torch.manual_seed(0)
    booster = Booster("cpu", PRECISIONS[precision]())
    model = model or Small()
    model, optimizer, criterion, *_ = booster.boost(
        model, torch.optim.AdamW(model.parameters(), 1e-2), nn.CrossEntropyLoss()
    )
    words = torch.arange(16).view(2, 8)
    for _ in range(steps):
        booster.backward(criterion(model(words).flatten(0, 1), words.flatten()), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return booster, model, words


@pytest.mark.parametrize("precision", PRECISIONS)
def test_each_weight_is_the_one_that_an_operation_of_the_forward_is_given(precision):
    booster, model, words = trained(precision)
    synced = dict(booster.sync_weights(model))
    with torch.no_grad(), Read() as read:
        model(words)

    def was_given(name, value):  # these numbers; a CPU without units for halves multiplies them in float32
        wide = value.float()
        matrices = (each[0] if each.dim() == 3 and name != "conv.weight" else each for each in read.seen)
        given = (v.float() for each in matrices for v in ((each, each.T) if each.dim() == 2 else (each,)))
        return any(each.shape == wide.shape and torch.equal(each, wide) for each in given)

    assert synced.keys() == model.state_dict().keys()
    assert [name for name, value in synced.items() if not was_given(name, value)] == []


@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16_naive", "fp16_naive"])
def test_a_sampler_of_half_weights_holds_the_rounded_weights(tmp_path, precision):
    booster, model, words = trained(precision)
    sampler = Small().to(torch.bfloat16 if "bf16" in precision else torch.float16)
    sampler.load_state_dict(dict(booster.sync_weights(model)))
    for name, value in sampler.state_dict().items():
        assert torch.equal(value, model.state_dict()[name].to(value.dtype)), name
    booster.save_model(model, tmp_path / "weights.safetensors", weights="bf16" if "bf16" in precision else "fp16")

    assert all(
        torch.equal(value, sampler.state_dict()[name])
        for name, value in load_file(tmp_path / "weights.safetensors").items()
    )


def test_tied_weights_come_under_each_name_and_buffers_too():
    model = Small()
    model.head.weight = model.embed.weight
    model.register_buffer("count", torch.tensor(3))
    booster, boosted, _ = trained("bf16_naive", model)
    synced = dict(booster.sync_weights(boosted))
    assert synced["head.weight"] is synced["embed.weight"]
    assert synced["count"].item() == 3


def test_what_is_no_boosted_model_is_refused():
    booster, model, _ = trained("bf16")
    with pytest.raises(TypeError, match="sync_weights needs the model that boost"):
        booster.sync_weights(booster.unwrap(model))
    with pytest.raises(ValueError, match="merge=True is for models with adapters"):
        booster.sync_weights(model, merge=True)
