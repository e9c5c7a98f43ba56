"""Each shape of linear layer is timed once against bfloat16, and those that gain nothing are named for keep=."""

import json
import runpy

import pytest
import torch
from torch import nn

from booster import Booster
from booster.cli.planning_commands import advise
from booster.mixed_precision import Ends, Int8MixedPrecision
from booster.mixed_precision.low_precision.linear import LowPrecisionLinear
from booster.numerics import time_layers
from booster.numerics.choosing import timed_layers

SCRIPT = """
import torch
from torch import nn

def model_fn():
    layers = [nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 64), nn.Linear(64, 6)]
    return nn.Sequential(*layers)

batch = torch.randn(5, 7, 16), torch.zeros(5, 7, 6)
criterion = nn.MSELoss()

def optimizer_fn(model):
    return torch.optim.SGD(model.parameters(), lr=0.1)
"""


@pytest.fixture
def script(tmp_path):
    (tmp_path / "train.py").write_text(SCRIPT)
    return runpy.run_path(str(tmp_path / "train.py")), str(tmp_path / "train.py")


@pytest.fixture
def prescribed(monkeypatch):
    """bf16 takes 2 us, int8 1 us, but for the layer of 32 -> 64 features, where it takes 3; notes what was timed."""
    seen = []

    def seconds(layer, x, g):
        seen.append((type(layer).__name__, *x.shape, g.shape[1]))
        if type(layer) is nn.Linear:
            return 2e-6
        return 3e-6 if layer.out_features == 64 else 1e-6

    monkeypatch.setattr(timed_layers, "seconds", seconds)
    return seen


def test_a_shape_is_timed_once_and_says_who_is_slower(script, prescribed):
    names, _ = script
    state = torch.get_rng_state()
    found = time_layers(names["model_fn"], names["batch"], device="cpu", rounds=3)
    assert torch.equal(torch.get_rng_state(), state)
    assert [(each.names, each.tokens, each.in_features, each.out_features) for each in found.shapes] == [
        (("0",), 35, 16, 32),
        (("2", "3"), 35, 32, 32),
        (("4",), 35, 32, 64),
        (("5",), 35, 64, 6),
    ]
    assert found.precisions == ("int8",), "what a CPU runs, and does not emulate"
    assert [each.bf16 for each in found.shapes] == [2e-6] * 4
    assert [dict(each.low) for each in found.shapes] == [{"int8": 1e-6}, {"int8": 1e-6}, {"int8": 3e-6}, {}]
    assert found.slower("int8") == ("4", "5"), "and what cannot be converted"
    assert prescribed.count(("LowPrecisionLinear", 35, 32, 32)) == 4
    with pytest.raises(ValueError, match="precision='fp8 rowwise' is not legal"):
        found.slower("fp8 rowwise")


def test_a_precision_keeps_what_is_slower(script, prescribed, caplog):
    names, _ = script
    found = time_layers(names["model_fn"], names["batch"], device="cpu")
    booster = Booster("cpu", Int8MixedPrecision(keep=(Ends(), *found.slower("int8"))))
    model, *_ = booster.boost(names["model_fn"]())
    converted = [name for name, each in model.unwrap().named_modules() if isinstance(each, LowPrecisionLinear)]
    assert converted == ["2", "3"]


def test_the_table_has_a_line_a_shape_and_a_sentence_a_precision(script, prescribed, capsys):
    _, file = script
    assert advise(["--device", "cpu", "--layers", file]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines[:3]] == [
        ["layers", "tokens", "in", "out", "bf16", "us", "int8", "us"],
        ["0", "35", "16", "32", "2", "1"],
        ["2", "and", "1", "more", "35", "32", "32", "2", "1"],
    ]
    assert lines[4].split()[-2:] == ["2", "-"]
    assert lines[-1].startswith("int8: 2 layers are no faster than in bfloat16; keep=(Ends(), *slower('int8'))")
    assert advise(["--device", "cpu", "--layers", "--json", file]) == 0
    assert json.loads(capsys.readouterr().out)["slower"] == {"int8": ["4", "5"]}


def test_real_times_are_above_zero_and_models_without_linear_layers_are_refused(script):
    names, _ = script
    found = time_layers(names["model_fn"], names["batch"], device="cpu", rounds=1)
    assert all(each.bf16 > 0 and all(time > 0 for time in each.low.values()) for each in found.shapes)
    with pytest.raises(ValueError, match="meets no linear layer of ReLU"):
        time_layers(nn.ReLU, names["batch"], device="cpu")
    with pytest.raises(TypeError, match=r"what model_fn\(\) returned"):
        time_layers(lambda: None, names["batch"], device="cpu")
