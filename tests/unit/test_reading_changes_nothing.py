"""Whoever only reads a run leaves every bit of it, also while other weights stand in for the trained ones."""

import copy
import pickle

import pytest
import torch
from torch import nn

from booster import Booster, numerics
from booster.masters.quantized_state import QuantizedState
from booster.mixed_precision import BF16NaiveMixedPrecision, FP16ApexMixedPrecision, FP16NaiveMixedPrecision

HALVES = {"bf16": BF16NaiveMixedPrecision, "fp16": FP16NaiveMixedPrecision}
OPTIONS = {
    "fp32": {"master_weights": "fp32"},
    "split": {"master_weights": "split"},
    "split24": {"master_weights": "split24"},
    "none": {"master_weights": "none"},
    "stochastic": {"master_weights": "none", "rounding": "stochastic"},
    "kahan": {"master_weights": "none", "rounding": "kahan"},
    "8-bit states": {"master_weights": "fp32", "states": "8bit"},
}
FORMS = {
    **{f"{half}, {name}": (half, name, {}) for half in HALVES for name in OPTIONS},
    "bf16, fp32, offloaded": ("bf16", "fp32", {"offload_states": True}),
    "bf16, fp32, compiled": ("bf16", "fp32", {"fused_optimizer": "compile"}),
    "bf16, split, compiled": ("bf16", "split", {"fused_optimizer": "compile"}),
}


READERS = {
    "state_dict": lambda b, model, optimizer, folder: optimizer.state_dict(),
    "divided_state_dict": lambda b, model, optimizer, folder: optimizer.divided_state_dict(),
    "state": lambda b, model, optimizer, folder: [optimizer.state[p] for p in model.parameters()],
    "repr": lambda b, model, optimizer, folder: (repr(optimizer), repr(optimizer.state)),
    "save": lambda b, model, optimizer, folder: b.save(folder / "run", model, optimizer),
    "save_optimizer": lambda b, model, optimizer, folder: b.save_optimizer(optimizer, folder / "optimizer"),
    "save_model": lambda b, model, optimizer, folder: b.save_model(model, folder / "model"),
    "sync_weights": lambda b, model, optimizer, folder: list(b.sync_weights(model)),
    "memory": lambda b, model, optimizer, folder: b.memory(model, optimizer),
    "report": lambda b, model, optimizer, folder: reported(b, model, optimizer),
    "model's state_dict": lambda b, model, optimizer, folder: model.state_dict(),
    "a forward pass": lambda b, model, optimizer, folder: (model.eval()(torch.ones(2, 40)), model.train()),
    "parameter_names": lambda b, model, optimizer, folder: optimizer.parameter_names(),
    "deepcopy": lambda b, model, optimizer, folder: copy.deepcopy((model, optimizer)),
    "pickle": lambda b, model, optimizer, folder: pickle.dumps(optimizer.state_dict()),
}


def built(form):
    half, name, options = FORMS[form]
    given = {"initial_scale": 2.0**7} if half == "fp16" else {}
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(40, 30), nn.GELU(), nn.Linear(30, 50), nn.LayerNorm(50))
    b = Booster("cpu", HALVES[half](**OPTIONS[name], **given), **options)
    model, optimizer, *_ = b.boost(net, torch.optim.AdamW(net.parameters(), lr=1e-4))
    for step in range(3):
        train(b, model, optimizer, step)
    return b, model, optimizer


def backward(b, model, optimizer, step):
    x = torch.randn(8, 40, generator=torch.Generator().manual_seed(step))
    b.backward(model(x).float().square().mean(), optimizer)


def train(b, model, optimizer, step):
    backward(b, model, optimizer, step)
    assert optimizer.step().applied
    optimizer.zero_grad()


@torch.enable_grad()
def reported(b, model, optimizer):
    backward(b, model, optimizer, 9)
    str(numerics.report(optimizer))
    optimizer.zero_grad()


def bits(model, optimizer):
    """Every number of a run, by what it is."""
    kept = optimizer._update.optimizer_state
    found = {f"weight {name}": param for name, param in model.named_parameters()}
    found |= {f"kept with weights {place}": rest for place, rest in enumerate(kept.master_tensors())}
    for place, own in enumerate(optimizer.optimizer.state.values()):
        for name, value in own.items():
            for index, tensor in enumerate(
                value.tensors if isinstance(value, QuantizedState) else [torch.as_tensor(value)]
            ):
                found[f"state {place} {name} {index}"] = tensor
    found |= {f"rounding {name}": state for name, state in kept.rounding_state().items()}
    found["random numbers of the user"] = torch.get_rng_state()
    return {name: tensor.detach().clone().contiguous().flatten().view(torch.uint8) for name, tensor in found.items()}


def changed(before, after):
    assert before.keys() == after.keys()
    return [name for name in before if not torch.equal(before[name], after[name])]


@pytest.mark.slow_cases("bf16, fp32, compiled")
@pytest.mark.crossed
@pytest.mark.parametrize("swapped", [False, True], ids=["trained weights", "other weights put in"])
@pytest.mark.parametrize("form", FORMS)
def test_nothing_that_only_reads_changes_a_bit_of_a_run(form, swapped, tmp_path):
    b, model, optimizer = built(form)
    wrong = {}
    for name, read in READERS.items():
        before = bits(model, optimizer)
        kept = [param.detach().clone() for param in model.parameters()]
        with torch.no_grad():
            for param in model.parameters() if swapped else ():
                param.mul_(0.5).add_(0.01)  # such as an average, for a validation
        (folder := tmp_path / name.replace(" ", "_")).mkdir()
        with torch.no_grad():
            read(b, model, optimizer, folder)
            for param, value in zip(model.parameters(), kept, strict=True):
                param.copy_(value)
        if found := changed(before, bits(model, optimizer)):
            wrong[name] = found
    assert wrong == {}
    alone = built(form)
    for step in range(3, 5):
        train(b, model, optimizer, step)
        train(*alone, step)
    assert changed(bits(model, optimizer), bits(*alone[1:])) == []


def test_the_masters_that_apex_lists_are_not_rounded_by_reading_them_while_other_weights_are_put_in():
    b = Booster("cpu", FP16ApexMixedPrecision("O2", loss_scale=128.0, verbosity=0))
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(40, 30), nn.Linear(30, 50))
    model, optimizer, *_ = b.boost(net, torch.optim.SGD(net.parameters(), lr=1e-4))
    train(b, model, optimizer, 0)
    before, kept = bits(model, optimizer), [param.detach().clone() for param in model.parameters()]
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(0.5)
        optimizer.state_dict()
        list(optimizer._update.gradients.master_params())
        for param, value in zip(model.parameters(), kept, strict=True):
            param.copy_(value)
    assert changed(before, bits(model, optimizer)) == []
