"""The plugin of examples/extending trains under every precision, equal to TorchDDPPlugin."""

import importlib.util
from pathlib import Path

import pytest
import torch
from matrix import PRECISIONS
from torch import nn

from booster import Booster
from booster.mixed_precision.policy import Placement
from booster.plugin import (
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    PlacedModule,
    SingleDevice,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "extending" / "plugin.py"


def averaging_plugin():
    spec = importlib.util.spec_from_file_location("extending_plugin", EXAMPLE)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.AveragingPlugin()


def trained(plugin, precision, rank):
    torch.manual_seed(rank)  # ranks start from rank 0's weights
    booster, model = (
        Booster("cpu", PRECISIONS[precision](), plugin),
        nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 2)),
    )
    names = [name for name, _ in model.named_parameters()]
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=0.01))
    norms = []
    for step in range(4):
        with booster.accumulate(model, optimizer, num_micro_batches=2):
            for part in range(2):
                x = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * rank + 10 * step + part))
                booster.backward(model(x).float().square().mean(), optimizer)
        optimizer.clip_grad_by_norm(0.05)
        norms.append(float(optimizer.step().grad_norm))
        optimizer.zero_grad()
    assert [name for name, _ in model.named_parameters()] == names == list(model.state_dict())
    return norms, torch.cat([param.detach().float().flatten() for param in model.parameters()])


def against_ddp(rank, world_size, precision):
    plugin = averaging_plugin()
    norms, weights = trained(plugin, precision, rank)
    expected_norms, expected = trained(TorchDDPPlugin(), precision, rank)
    assert norms == pytest.approx(expected_norms, rel=1e-3)
    return weights, float((weights - expected).abs().max())


@pytest.mark.slow_cases("nvfp4", "int8", "tf32", "bf16", "fp16_apex O1", "mxfp8")
@pytest.mark.parametrize("precision", list(PRECISIONS))
def test_the_plugin_of_the_example_trains_as_ddp(ranks2, precision):
    (weights, distance), (other, _) = ranks2(against_ddp, precision)
    assert torch.equal(weights, other)
    assert distance < 1e-6


def placements(rank, world_size):
    plugins = [
        SingleDevice(),
        TorchDDPPlugin(),
        LowLevelZeroPlugin(),
        TorchFSDPPlugin(),
        HybridParallelPlugin(1, 1),
        averaging_plugin(),
    ]
    return [isinstance(plugin, Placement) for plugin in plugins]


def test_every_plugin_is_a_placement(ranks2):
    assert all(map(all, ranks2(placements)))


class Wrapper(nn.Module):
    def __init__(self, module):
        super().__init__()
        self.module = module

    def forward(self, x):
        return self.module(x)


class Wrapping(SingleDevice):
    """Wraps a model in `wrapper`."""

    def __init__(self, wrapper):
        self._wrapper = wrapper

    def place(self, module, policy, device):
        return self._wrapper(super().place(module, policy, device))


class Looking(PlacedModule):
    def forward(self, x):
        return self.module(x)


def test_a_plugin_may_wrap_in_a_placed_module_and_in_nothing_else():
    def boost(wrapper):
        model = nn.Linear(2, 2)
        return Booster("cpu", None, Wrapping(wrapper)).boost(model, torch.optim.SGD(model.parameters(), lr=0.1))[0]

    assert list(boost(Looking).state_dict()) == ["weight", "bias"]
    with pytest.raises(RuntimeError, match="booster.plugin.PlacedModule"):
        boost(Wrapper)


def test_what_is_no_placement_is_refused():
    with pytest.raises(TypeError, match="placement must be a booster.plugin.Plugin"):
        Booster("cpu").precision.configure(nn.Linear(2, 2), placement=torch.device("cpu"))
