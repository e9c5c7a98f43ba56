"""Several models that one optimizer trains, as the critics of an actor-critic: `boost` takes a list and returns one."""

from itertools import product

import pytest
import torch
from comparing import whole
from torch import nn

from booster import Booster
from booster.mixed_precision import (
    Autopilot,
    FP16ApexMixedPrecision,
    FP16NaiveMixedPrecision,
    FP16TorchMixedPrecision,
    MXFP8MixedPrecision,
    PrecisionSchedule,
)
from booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, SingleDevice, TorchDDPPlugin, TorchFSDPPlugin

PLUGINS = {
    "single": SingleDevice,
    "ddp": TorchDDPPlugin,
    "zero1": LowLevelZeroPlugin,
    "zero2": lambda: LowLevelZeroPlugin(stage=2),
    "fsdp": TorchFSDPPlugin,
    "tp": lambda: HybridParallelPlugin(2, 1, tp_plan={"0": "colwise", "2": "rowwise"}),
}
MILD = {  # scales at which the first steps do not overflow
    "fp16": lambda: FP16TorchMixedPrecision(init_scale=16.0),
    "fp16_naive": lambda: FP16NaiveMixedPrecision(initial_scale=16),
    "fp16_apex": lambda: FP16ApexMixedPrecision(loss_scale=16.0),
}
PRECISIONS = ["fp32", "bf16", "fp16", "bf16_naive", "fp16_naive", "fp16_apex"]
STEPS, BATCH = 6, 16


def critics(seed=1):
    made = []
    for place in range(2):
        torch.manual_seed(seed + place)
        made.append(nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1)))
    return made, torch.optim.AdamW([param for each in made for param in each.parameters()], lr=1e-2)


def batches(booster=None):
    gen = torch.Generator().manual_seed(0)
    rank, size = (0, 1) if booster is None else (booster.plugin.data_parallel_rank, booster.plugin.data_parallel_size)
    for _ in range(STEPS):
        inputs = torch.randn(BATCH, 8, generator=gen)
        own = slice(rank * BATCH // size, (rank + 1) * BATCH // size)
        yield inputs[own], inputs.sum(1, keepdim=True)[own]


def loss_of(models, inputs, targets):
    first, second = (nn.functional.mse_loss(model(inputs).float(), targets) for model in models)
    return first + 2 * second


def by_hand():
    """The weights of plain float32 training, by name, and where they started."""
    models, optimizer = critics()
    start = {name: param.detach().clone() for name, param in nn.ModuleList(models).named_parameters()}
    for inputs, targets in batches():
        loss_of(models, inputs, targets).backward()
        optimizer.step()
        optimizer.zero_grad()
    return dict(nn.ModuleList(models).named_parameters()), start


def boosted(plugin, precision, seed=1):
    booster = Booster("cpu", MILD.get(precision, lambda: precision)(), plugin())
    models, optimizer = critics(seed)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, 1.0)
    models, optimizer, _, _, schedule = booster.boost(models, optimizer, None, None, schedule)
    assert isinstance(models, list)
    return booster, models, optimizer


def step(booster, models, optimizer, inputs, targets):
    booster.backward(loss_of(models, inputs, targets), optimizer)
    applied = optimizer.step()
    optimizer.zero_grad()
    return applied


def trained(rank, world_size, name, precision, folder):
    """How far the weights end from those by hand, of their way; whether a resumed job goes on to the same bits."""
    booster, models, optimizer = boosted(PLUGINS[name], precision)
    for inputs, targets in batches(booster):
        step(booster, models, optimizer, inputs, targets)
    (want, start), ends = by_hand(), {}
    for place, model in enumerate(models):
        ends |= {f"{place}.{key}": whole(param).float() for key, param in model.named_parameters()}
    assert [name for name, _ in optimizer.parameter_names()[0]] == list(want)
    off = max(((ends[key] - want[key]).norm() / (want[key] - start[key]).norm()).item() for key in want)
    booster.save(folder, models, optimizer, step=1)
    again, others, their = boosted(PLUGINS[name], precision, seed=7)
    again.load(folder, others, their)
    for parts in ((booster, models, optimizer), (again, others, their)):
        step(*parts, inputs, targets)
    pairs = zip(nn.ModuleList(models).parameters(), nn.ModuleList(others).parameters(), strict=True)
    return off, all(torch.equal(whole(one), whole(other)) for one, other in pairs)


# Of the way of a whole matrix: AdamW turns a gradient's rounding of 2**-9 (bf16) or 2**-12 (fp16) into as much of a step where
# the gradient is not near zero, and into more where it is.
TOLERANCES = {"fp32": 1e-5, "bf16": 0.1, "bf16_naive": 0.1}
CASES = [*product(PLUGINS, PRECISIONS)]


@pytest.mark.slow_cases("zero1")
@pytest.mark.crossed
@pytest.mark.parametrize(("name", "precision"), CASES)
def test_two_models_train_by_one_optimizer_as_by_hand_and_resume_to_the_bit(ranks2, tmp_path, name, precision):
    if name == "single":
        results = [trained(0, 1, name, precision, tmp_path)]
    else:
        results = ranks2(trained, name, precision, tmp_path)
    for off, same in results:
        assert off <= TOLERANCES.get(precision, 0.02)
        assert same


def loaded_elsewhere(rank, world_size, folder):
    booster, models, optimizer = boosted(PLUGINS["zero1"], "bf16_naive", seed=9)
    booster.load(folder, models, optimizer)
    return [whole(param).clone() for model in models for param in model.parameters()]


def test_a_checkpoint_of_two_models_moves_to_ranks(ranks2, tmp_path):
    booster, models, optimizer = boosted(SingleDevice, "bf16_naive")
    for inputs, targets in batches():
        step(booster, models, optimizer, inputs, targets)
    booster.save(tmp_path, models, optimizer, step=1)
    for weights in ranks2(loaded_elsewhere, tmp_path):
        assert all(map(torch.equal, weights, (param for model in models for param in model.parameters())))


def test_an_overflow_in_one_of_two_models_skips_both():
    booster, models, optimizer = boosted(SingleDevice, "fp16")
    before = [param.clone() for model in models for param in model.parameters()]
    inputs, targets = next(batches())
    booster.backward(models[0](inputs).sum() + models[1](inputs).sum() * float("inf"), optimizer)
    result = optimizer.step()
    assert not result
    assert any(name.startswith("1.") for name in result.culprit)
    assert not any(name.startswith("0.") for name in result.culprit)
    assert all(map(torch.equal, before, (param for model in models for param in model.parameters())))


def test_records_and_diagnoses_see_every_model_of_a_list(tmp_path):
    booster = Booster("cpu", "fp16", diagnose="every")
    models, optimizer = critics()
    models, optimizer, *_ = booster.boost(models, optimizer)
    with booster.record(tmp_path / "run.jsonl", every=1):
        inputs, targets = next(batches())
        booster.backward(loss_of(models, inputs, targets) * float("inf"), optimizer)
        assert not optimizer.step()
    assert booster.diagnoses


def test_lists_that_cannot_be_are_refused_before_anything_changes():
    models, optimizer = critics()
    booster = Booster("cpu", "bf16_naive")
    with pytest.raises(ValueError, match="model is an empty list"):
        booster.boost([], optimizer)
    with pytest.raises(TypeError, match="model must be a torch.nn.Module, got"):
        booster.boost([models[0], 3], optimizer)
    with pytest.raises(
        ValueError, match="model 1 of the list has the parameter '0.weight', which is '0.weight' of model 0 too"
    ):
        booster.boost([models[0], models[0]], optimizer)
    stranger = torch.optim.SGD(nn.Linear(2, 2).parameters())
    with pytest.raises(ValueError, match="none of the optimizer's 2 parameters belong"):
        booster.boost(models, stranger)
    assert all(param.dtype == torch.float32 for model in models for param in model.parameters())
    for changing in (PrecisionSchedule({0: "bf16", 10: "fp32"}), Autopilot(MXFP8MixedPrecision(emulate=True))):
        with pytest.raises(ValueError, match="boost got a list of models, and a PrecisionSchedule or an Autopilot"):
            Booster("cpu", changing).boost(*critics())


def test_models_of_a_list_cannot_switch_and_say_so():
    booster = Booster("cpu", "bf16")
    booster.boost(*critics())
    booster, models, optimizer = boosted(SingleDevice, "bf16")
    with pytest.raises(ValueError, match="several were boosted as a list with one optimizer"):
        booster.switch("fp32")
