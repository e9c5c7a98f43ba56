"""The average of weights of docs/guides/averages.md, on every plugin and in every precision, as the page promises."""

import runpy
from pathlib import Path

import pytest
import torch
from choices import plugins
from comparing import whole
from pages import as_script
from torch import nn

from booster import Booster

PAGE = (Path(__file__).parents[2] / "docs" / "guides" / "averages.md").read_text()
PLUGINS = plugins("ddp", "zero1", "zero2", "fsdp")
EPS = {"fp32": 2.0**-24, "bf16": 2.0**-9, "fp16_naive": 2.0**-12, "bf16_naive": 2.0**-9}


def averaged(rank, world_size, name, precision, page):
    """The worst error of the average against one in float64 of the same weights; whether evaluation with it changed nothing."""
    names = runpy.run_path(page)
    torch.manual_seed(0)
    b = Booster("cpu", precision, PLUGINS[name]())
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4))
    model, optimizer, *_ = b.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2))
    average = names["Average"](model, 0.9)
    expected = {key: whole(param).double() for key, param in model.named_parameters()}
    for _ in range(12):
        b.backward(model(torch.randn(8, 16)).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
        average.update(model)
        expected = {key: 0.9 * expected[key] + 0.1 * whole(param).double() for key, param in model.named_parameters()}
    errors = [
        ((whole(average.weights[key]) - value).abs() / value.abs().max()).max().item()
        for key, value in expected.items()
    ]
    state = {key: value.clone() for key, value in optimizer.state_dict()["state"][0].items() if value.dim()}
    inputs = torch.ones(2, 16)
    with torch.no_grad():
        trained = model(inputs)
    with torch.no_grad(), average.in_place_of(model):
        exact = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 4)).double()
        exact.load_state_dict(expected)
        off = ((model(inputs) - exact(inputs.double())).abs().max() / exact(inputs.double()).abs().max()).item()
    with torch.no_grad():
        same = torch.equal(model(inputs), trained)
    after = optimizer.state_dict()["state"][0]
    return max(errors), off, same and all(torch.equal(whole(value), whole(after[key])) for key, value in state.items())


@pytest.mark.crossed
@pytest.mark.parametrize("name", PLUGINS)
@pytest.mark.parametrize("precision", EPS)
def test_the_average_of_the_page_is_that_of_the_weights_and_evaluating_with_it_changes_nothing(
    ranks2, tmp_path, name, precision
):
    page = tmp_path / "average.py"
    page.write_text(as_script(PAGE).partition("\nb = Booster")[0])
    for error, off, same in ranks2(averaged, name, precision, str(page)):
        assert error <= 12 * 2 * 2.0**-24  # two roundings to float32 in each of 12 updates
        assert off <= 8 * EPS[precision]  # weights, inputs, activations and outputs of two layers, each rounded once
        assert same
