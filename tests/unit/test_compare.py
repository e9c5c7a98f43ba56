"""`compare`: runs that differ by rounding are alike; a planted difference is found in its step, with its parameter."""

import dataclasses
import json

import pytest
import torch
from small_job import batch
from torch import nn
from torch.nn import functional as F

from booster import Booster
from booster.cli import main
from booster.mixed_precision import FP16TorchMixedPrecision
from booster.numerics import compare, read_run

STEPS = 24
AT = 16  # where a fault is planted, from 1


def model_of(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.LayerNorm(32), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 4))


def run(folder, precision="fp32", *, seed=0, every=1, steps=STEPS, fault=None, lr=0.01, make=torch.optim.AdamW):
    """Record a training; `fault(model, optimizer, loss)` may change things in step AT and returns the loss."""
    booster, model = Booster("cpu", precision), model_of(seed)
    model, optimizer, *_ = booster.boost(model, make(model.parameters(), lr=lr))
    inner = booster.unwrap(model)
    with booster.record(folder, every=every):
        for step in range(1, steps + 1):
            x, y = batch(step, 64)
            loss = F.cross_entropy(model(x), y)
            if step == AT and fault is not None:
                loss = fault(inner, optimizer, loss)
            booster.backward(loss, optimizer)
            if step == AT and fault is not None and hasattr(fault, "after"):
                fault.after(inner, optimizer)
            optimizer.step()
            optimizer.zero_grad()
    return read_run(folder)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return run(tmp_path_factory.mktemp("fp32") / "reference")


def fp16():
    return FP16TorchMixedPrecision(init_scale=2.0**10)


@pytest.mark.slow_cases("bf16_naive", "bf16")
@pytest.mark.parametrize("precision", ["fp32", "bf16", fp16(), "fp16_naive", "bf16_naive"], ids=str)
def test_what_formats_explain_is_alike(reference, tmp_path, precision):
    found = compare(reference, run(tmp_path, precision))
    assert found.alike, str(found)
    assert (found.last_common, found.num_common) == (STEPS, STEPS)


class Gradient:
    """A gradient of one layer that comes out half as large."""

    def __call__(self, model, optimizer, loss):
        return loss

    def after(self, model, optimizer):
        model[3].weight.grad.mul_(0.5)


class Missing(Gradient):
    """A layer that gets no gradient."""

    def after(self, model, optimizer):
        model[3].weight.grad = None


def data(model, optimizer, loss):
    """A batch with other labels."""
    return loss * 1.5


def rate(model, optimizer, loss):
    optimizer.param_groups[0]["lr"] *= 2
    return loss


FAULTS = {
    "gradient": (Gradient(), "gradient", ["3.weight"]),
    "missing": (Missing(), "gradient", ["3.weight"]),
    "loss": (data, "forward", None),
    "rate": (rate, "update", None),
}


@pytest.mark.crossed
@pytest.mark.parametrize("precision", ["fp32", "bf16", fp16()], ids=str)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_in_its_step_with_its_kind_and_parameter(reference, tmp_path, precision, fault):
    plant, kind, parameters = FAULTS[fault]
    found = compare(reference, run(tmp_path, precision, fault=plant))
    assert (found.kind, found.step) == (kind, AT), str(found)
    if parameters is not None:
        assert [parted.name for parted in found.parameters] == parameters
    assert f"Step {AT}." in str(found)


def test_other_weights_to_begin_with_are_said(reference, tmp_path):
    found = compare(reference, run(tmp_path, seed=1, steps=3))
    assert (found.kind, found.step) == ("weights", 1)
    assert found.parameters


def test_another_learning_rate_from_the_start_is_an_update_that_parts_and_a_note(reference, tmp_path):
    found = compare(reference, run(tmp_path, lr=0.02, steps=3))
    assert (found.kind, found.step) == ("update", 1)
    assert found.notes == ["learning rates differ from step 1 on: 0.01 and 0.02"]


def test_a_step_that_one_run_skips_is_said_with_the_reason(tmp_path):
    def overflow(model, optimizer, loss):
        return loss * torch.tensor(1.0)

    class Bad(Gradient):
        def after(self, model, optimizer):
            model[5].bias.grad[0] = float("inf")

    whole = run(tmp_path / "whole", fp16(), every=1000, fault=overflow)
    found = compare(whole, run(tmp_path / "other", fp16(), every=1000, fault=Bad()))
    assert (found.kind, found.step) == ("skip", AT)
    assert "other skipped it: nonfinite_grad, 5.bias" in found.notes


def test_without_samples_the_step_is_found_a_little_later_and_the_way_to_the_parameter_is_said(tmp_path):
    whole = run(tmp_path / "whole", every=1000)
    found = compare(whole, run(tmp_path / "other", every=1000, fault=rate))
    assert (found.kind, found.step) == ("forward", AT + 1)
    assert found.parameters == []
    assert f"parameters were not sampled in each step up to {AT + 1}; record with every=1" in found.notes[-1]


def test_the_last_step_that_both_recorded_is_told_by_its_number(reference):
    later = dataclasses.replace(reference, steps={"0": reference.steps["0"][2:]}, samples={})
    found = compare(reference, later)
    assert (found.last_common, found.num_common) == (STEPS, STEPS - 2)
    assert f"Compared: {STEPS - 2} steps." in str(found)


def test_runs_without_a_common_step_are_refused(reference, tmp_path):
    empty = Booster("cpu").record(tmp_path)
    empty.close()
    with pytest.raises(ValueError, match="have no step in common"):
        compare(reference, read_run(tmp_path))


def test_an_optimizer_that_one_run_alone_has_is_said(reference):
    other = dataclasses.replace(reference, steps={**reference.steps, "1": reference.steps["0"]})
    found = compare(reference, other)
    assert found.alike
    assert found.notes == ["only one of the runs has the optimizers 1"]


def test_the_command_says_it_and_its_status_tells(reference, tmp_path, capsys):
    run(tmp_path / "b", "bf16", fault=Gradient())
    folder = str(reference.folder)
    assert main(["compare", folder, folder]) == 0
    assert "alike" in capsys.readouterr().out
    assert main(["compare", folder, str(tmp_path / "b")]) == 1
    said = capsys.readouterr().out
    assert said.startswith(f"Step {AT}. Gradients part")
    assert "3.weight" in said
    assert main(["compare", "--json", folder, str(tmp_path / "b")]) == 1
    assert json.loads(capsys.readouterr().out)["parameters"][0]["name"] == "3.weight"
    assert main(["compare", folder, str(tmp_path / "none")]) == 2
    assert "there is no record in" in capsys.readouterr().err


def test_a_run_whose_loss_and_weights_became_nan_is_read_compared_and_reported(reference, tmp_path, capsys):
    found = compare(reference, run(tmp_path, fault=lambda model, optimizer, loss: loss * float("nan"), steps=AT + 2))
    assert found.step == AT
    assert "and nan; the formats explain" in str(found)
    assert main(["report", "--html", str(tmp_path / "page.html"), str(tmp_path)]) == 0
    assert main(["report", "--json", str(tmp_path)]) == 0
    assert "weight_norm" in capsys.readouterr().out
