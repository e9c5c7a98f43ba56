"""Several backward passes before one step, on every parallelism that can run them, against one process."""

import pytest
import torch
from torch import nn

from booster import Booster
from booster.mixed_precision import FP16ApexMixedPrecision, FP16NaiveMixedPrecision, FP16TorchMixedPrecision
from booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin

PRECISIONS = {
    "fp32": lambda: "fp32",
    "fp16": lambda: FP16TorchMixedPrecision(init_scale=2.0**10),
    "fp16_naive": lambda: FP16NaiveMixedPrecision(initial_scale=2.0**10),
    "fp16_apex O2": lambda: FP16ApexMixedPrecision("O2", num_losses=2, max_loss_scale=2.0**10, verbosity=0),
}
PLUGINS = {
    "DDP": lambda: TorchDDPPlugin(find_unused_parameters=True),
    "ZeRO-1": lambda: LowLevelZeroPlugin(stage=1, find_unused_parameters=True),
}


class Sides(nn.Module):
    """Two layers of one size, so that ZeRO gives each of two ranks one of them; only the first is in the loss."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(8, 8, bias=False) for _ in range(2))

    def forward(self, x):
        return self.layers[0](x)


def norms_of_used_gradients(rank, world_size, plugin, precision, clip, fused):
    """The norms before two steps; the gradients of the first are not cleared."""
    torch.manual_seed(0)
    booster = Booster("cpu", PRECISIONS[precision](), PLUGINS[plugin](), fused_optimizer=fused)
    model = Sides()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer, *_ = booster.boost(model, optimizer)
    draw = torch.Generator().manual_seed(rank)
    norms = []
    for _ in range(2):
        booster.backward(model(torch.randn(4, 8, generator=draw)).float().square().mean(), optimizer)
        norms.append(float(optimizer.clip_grad_by_norm(clip)))
        optimizer.step()
    return norms


@pytest.mark.crossed
@pytest.mark.parametrize("fused", [True, False])
@pytest.mark.parametrize("clip", [1e-2, 100.0])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_rank_whose_part_has_no_gradient_adds_to_used_ones_as_the_others_do(ranks2, precision, clip, fused):
    (expected, _), (found, other) = (
        ranks2(norms_of_used_gradients, plugin, precision, clip, fused) for plugin in ("DDP", "ZeRO-1")
    )
    assert found == other == pytest.approx(expected, rel=1e-2)
