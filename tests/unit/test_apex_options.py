"""The options of `fp16_apex`: what each level means, what may be overridden, and which error comes first."""

import inspect
import logging

import pytest
import torch
from torch import nn

from booster import Booster
from booster.mixed_precision import FP16ApexMixedPrecision, make
from booster.mixed_precision import apex_amp as amp
from booster.mixed_precision.apex.apex_options import resolve

LEVELS = {
    "O0": (torch.float32, False, None, False, 1.0),
    "O1": (None, True, None, None, "dynamic"),
    "O2": (torch.float16, False, True, True, "dynamic"),
    "O3": (torch.float16, False, False, False, 1.0),
}


@pytest.fixture(autouse=True)
def no_session_left():
    yield
    amp.shutdown()


def fields(options):
    return (
        options.cast_model_type,
        options.patch_torch_functions,
        options.keep_batchnorm_fp32,
        options.master_weights,
        options.loss_scale,
    )


@pytest.mark.parametrize("level", LEVELS)
def test_the_defaults_of_a_level(level):
    assert fields(resolve(level)) == LEVELS[level]


def test_the_constructor_has_the_documented_options_in_order():
    parameters = inspect.signature(FP16ApexMixedPrecision).parameters
    assert {name: parameter.default for name, parameter in parameters.items()} == {
        "opt_level": "O1",
        "cast_model_type": None,
        "patch_torch_functions": None,
        "keep_batchnorm_fp32": None,
        "master_weights": None,
        "loss_scale": None,
        "cast_model_outputs": None,
        "num_losses": 1,
        "verbosity": 1,
        "min_loss_scale": None,
        "max_loss_scale": 2.0**24,
        "scale_window": 2000,
        "backend": "auto",
    }
    assert type(make("fp16_apex")) is FP16ApexMixedPrecision


@pytest.mark.parametrize(
    ("level", "override", "value"),
    [
        ("O1", {"cast_model_type": torch.float32}, torch.float32),
        ("O1", {"cast_model_type": False}, False),
        ("O0", {"cast_model_type": False}, False),
        ("O3", {"cast_model_type": torch.bfloat16}, torch.bfloat16),
        ("O1", {"patch_torch_functions": False}, False),
        ("O2", {"patch_torch_functions": False}, False),
        ("O2", {"keep_batchnorm_fp32": "False"}, False),
        ("O3", {"keep_batchnorm_fp32": "True"}, True),
        ("O3", {"master_weights": True}, True),
        ("O1", {"loss_scale": "128.0"}, 128.0),
        ("O0", {"loss_scale": "dynamic"}, "dynamic"),
        ("O2", {"loss_scale": 4}, 4.0),
    ],
)
def test_an_override_that_a_level_allows_replaces_its_default(level, override, value):
    (name,) = override
    options = resolve(level, **override)
    assert getattr(options, name) == value
    changed = [mine for mine, default in zip(fields(options), LEVELS[level], strict=True) if mine != default]
    assert len(changed) <= 1


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"opt_level": "o1"}, RuntimeError, "Unexpected optimization level o1.*the letter O, not the number zero"),
        (
            {"opt_level": "O1", "cast_model_type": torch.float16},
            RuntimeError,
            "O1 inserts casts around Torch functions",
        ),
        ({"opt_level": "O1", "cast_model_type": torch.bfloat16}, RuntimeError, "O1 inserts casts"),
        ({"opt_level": "O1", "keep_batchnorm_fp32": False}, RuntimeError, "With opt_level O1, batchnorm functions are"),
        (
            {"opt_level": "O1", "keep_batchnorm_fp32": "False"},
            RuntimeError,
            "With opt_level O1, batchnorm functions are",
        ),
        (
            {"opt_level": "O1", "master_weights": False},
            RuntimeError,
            "It doesn't make sense to use master_weights with O1",
        ),
        (
            {"opt_level": "O0", "patch_torch_functions": True},
            RuntimeError,
            "should only be set by selecting opt_level='O1'",
        ),
        (
            {"opt_level": "O2", "patch_torch_functions": True},
            RuntimeError,
            "should only be set by selecting opt_level='O1'",
        ),
        ({"opt_level": "O2", "keep_batchnorm_fp32": "yes"}, AssertionError, "keep_batchnorm_fp32 must be a boolean"),
        ({"opt_level": "O2", "loss_scale": "big"}, ValueError, "loss_scale='big'"),
        ({"loss_scale": 0}, ValueError, "loss_scale=0 is not legal; a static one must be a finite number above 0"),
        ({"loss_scale": "nan"}, ValueError, "loss_scale='nan'"),
        (
            {"opt_level": "O1", "loss_scale": 0, "master_weights": True},
            RuntimeError,
            "It doesn't make sense to use master_weights with O1",
        ),
    ],
)
def test_an_illegal_option_raises_what_apex_raises(arguments, error, message):
    with pytest.raises(error, match=message):
        FP16ApexMixedPrecision(**arguments)


def test_errors_come_in_the_order_of_apex(monkeypatch):
    wrong = {
        "opt_level": "O1",
        "cast_model_type": torch.float16,
        "keep_batchnorm_fp32": True,
        "master_weights": True,
        "loss_scale": "big",
    }
    expected = ["O1 inserts casts", "With opt_level O1", "It doesn't make sense", "loss_scale='big'"]
    for name, message in zip(list(wrong)[1:], expected, strict=True):
        with pytest.raises((RuntimeError, ValueError), match=message):
            FP16ApexMixedPrecision(**wrong)
        del wrong[name]
    model = nn.Linear(2, 2).half()
    monkeypatch.setattr(torch.backends.cudnn, "enabled", False)
    assert amp.initialize(model, enabled=False, opt_level="nonsense") is model
    with pytest.raises(RuntimeError, match=r"torch.backends.cudnn.enabled = True"):
        amp.initialize(model, opt_level="nonsense")
    monkeypatch.undo()
    with pytest.raises(RuntimeError, match="Unexpected optimization level"):
        amp.initialize((model,), (), opt_level="nonsense", loss_scale="big")
    with pytest.raises(ValueError, match="loss_scale"):
        amp.initialize((model,), (), loss_scale="big")
    with pytest.raises(TypeError, match="optimizers must be either a single optimizer or a list"):
        amp.initialize((model,), ())
    with pytest.raises(TypeError, match="models must be either a single model or a list"):
        amp.initialize((model,), [])
    with pytest.raises(RuntimeError, match=r"Incoming model is an instance of .*AFTER"):
        amp.initialize([model, nn.DataParallel(nn.Linear(2, 2))], [])
    with pytest.raises(RuntimeError, match=r"Found param weight with type .*float16.*do not need to call .half"):
        amp.initialize([model], [])


def test_half_parameters_and_buffers_are_refused_and_other_widths_are_not():
    booster = Booster("cpu", FP16ApexMixedPrecision("O0", verbosity=0))
    norm = nn.BatchNorm1d(2)
    norm.running_mean = norm.running_mean.half()
    with pytest.raises(RuntimeError, match="Found buffer running_mean"):
        booster.boost(norm)
    with pytest.raises(RuntimeError, match="Found param weight"):
        booster.boost(nn.Linear(2, 2).half())
    for dtype in (torch.bfloat16, torch.float64):
        boosted = booster.boost(nn.Linear(2, 2).to(dtype))[0]
        assert boosted.weight.dtype == torch.float32


@pytest.mark.parametrize("level", ["O1", "O2"])
def test_parameters_that_a_scaled_update_cannot_step_raise_type_error(level):
    cast = {"O1": None, "O2": torch.bfloat16}[level]
    booster = Booster("cpu", FP16ApexMixedPrecision(level, cast_model_type=cast, verbosity=0))
    model = nn.Linear(2, 2).to(torch.bfloat16 if level == "O1" else torch.float32)
    with pytest.raises(TypeError, match=r"must be either torch.float16 or torch.float32.*bfloat16"):
        booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))


def test_verbosity_0_reports_neither_options_nor_skips(caplog):
    with caplog.at_level(logging.INFO):
        booster = Booster("cpu", FP16ApexMixedPrecision(verbosity=0))
        model = nn.Linear(2, 2)
        boosted, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
        booster.backward(boosted(torch.ones(1, 2)).sum() * torch.inf, optimizer)
        assert not optimizer.step()
    assert "optimization level" not in caplog.text
    assert "Skipping" not in caplog.text


def test_each_departure_from_the_usual_rules_is_said_once(caplog):
    def warnings():
        return [r.getMessage() for r in caplog.records if r.levelno == logging.WARNING]

    booster = Booster("cpu", FP16ApexMixedPrecision("O3", verbosity=0))
    assert ["static" in text for text in warnings()] == [True]
    caplog.clear()
    model = nn.Linear(2, 2)
    booster.boost(model, torch.optim.Adam(model.parameters(), fused=False))
    assert ["eps=1e-08 rounds to zero" in text for text in warnings()] == [True]
    caplog.clear()
    FP16ApexMixedPrecision("O0", verbosity=0)
    assert warnings() == []
    dynamic = Booster("cpu", FP16ApexMixedPrecision(verbosity=0, max_loss_scale=2.0), max_consecutive_skips=None)
    model = nn.Linear(2, 2)
    boosted, optimizer, *_ = dynamic.boost(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(4):
        dynamic.backward(boosted(torch.ones(1, 2)).sum() * torch.inf, optimizer)
        optimizer.step()
    assert optimizer.loss_scale == 0.125
    assert ["fell below 1" in text for text in warnings()] == [True]
