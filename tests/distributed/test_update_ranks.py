"""What updates ask of ranks, and what they refuse on each of them alike."""

import pytest
import torch
from matrix import TP_PLAN, Transformer, loss_of
from test_hybrid import batch

from booster import Booster
from booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin

PLUGINS = {
    "ddp": TorchDDPPlugin,
    "fsdp": TorchFSDPPlugin,
    "zero1": LowLevelZeroPlugin,
    "zero2": lambda: LowLevelZeroPlugin(stage=2),
    "tp": lambda: HybridParallelPlugin(2, 1, tp_plan=TP_PLAN),
    "pp": lambda: HybridParallelPlugin(1, 2),
}


def loads_a_state_of_other_shapes(rank, world_size, name, precision):
    torch.manual_seed(7)
    model = Transformer()
    booster = Booster("cpu", precision, PLUGINS[name]())
    params = list(model.parameters())
    whole = {
        "param_groups": [{"lr": 0.01, "momentum": 0.9, "params": list(range(len(params)))}],
        "state": {i: {"momentum_buffer": torch.ones(*param.shape, 2)} for i, param in enumerate(params)},
    }
    made = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    model, made, criterion, _, _ = booster.boost(model, made, loss_of)
    booster.execute_pipeline(iter([batch(0, booster)]), model, criterion, made)
    made.step()
    before = str(made.state_dict())
    try:
        made.load_state_dict(whole)
    except ValueError as error:
        return str(error), str(made.state_dict()) == before
    return "loaded", False


@pytest.mark.parametrize("precision", ["fp32", "bf16_naive"])
@pytest.mark.parametrize("name", PLUGINS)
def test_state_of_other_shapes_is_refused_on_every_rank(ranks2, name, precision):
    for message, unchanged in ranks2(loads_a_state_of_other_shapes, name, precision):
        assert "the optimizer state is of another model: 'momentum_buffer' of" in message
        assert unchanged
