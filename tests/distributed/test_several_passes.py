"""Several backward passes before one step, on every parallelism that can run them, against one process."""

import pytest
import torch
from torch import nn

from booster import Booster
from booster.mixed_precision import FP16ApexMixedPrecision, FP16NaiveMixedPrecision, FP16TorchMixedPrecision
from booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, SingleDevice, TorchDDPPlugin, TorchFSDPPlugin

PRECISIONS = {
    "fp32": lambda: "fp32",
    "fp16": lambda: FP16TorchMixedPrecision(init_scale=2.0**10),
    "bf16": lambda: "bf16",
    "fp16_naive": lambda: FP16NaiveMixedPrecision(initial_scale=2.0**10),
    "bf16_naive": lambda: "bf16_naive",
    **{
        f"fp16_apex {level}": lambda level=level: FP16ApexMixedPrecision(
            level, num_losses=2, max_loss_scale=2.0**10, verbosity=0
        )
        for level in ("O0", "O1", "O2", "O3")
    },
}
TRUE_AT_REST = {"fp32", "bf16", "fp16_apex O0", "fp16_apex O1"}
"""Where gradients between backward and step are unscaled, so that a bare backward may add to them."""
PLUGINS = {
    "single": SingleDevice,
    "DDP": lambda: TorchDDPPlugin(find_unused_parameters=True),
    "FSDP": TorchFSDPPlugin,
    "ZeRO-1": lambda: LowLevelZeroPlugin(stage=1, find_unused_parameters=True),
    "ZeRO-2": lambda: LowLevelZeroPlugin(stage=2),
    "TP": lambda: HybridParallelPlugin(tp_size=2, pp_size=1, tp_plan={"body.0": "colwise", "body.2": "rowwise"}),
}
# Relative to the largest weight change. Gradients are rounded to half once or twice.
TOLERANCE = {"fp32": 1e-5, "fp16_apex O0": 1e-5}


class TwoHeads(nn.Module):
    """A body and two heads, one of which a pass leaves without a gradient."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.LayerNorm(8))
        self.heads = nn.ModuleList(nn.Linear(8, 4) for _ in range(2))

    def forward(self, x, head):
        return self.heads[head](self.body(x))


def train(precision, plugin, how):
    """The change of every weight by one step after two or three backward passes."""
    torch.manual_seed(0)
    model = TwoHeads()
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=4.0)
    booster = Booster("cpu", PRECISIONS[precision](), PLUGINS[plugin]())
    model, optimizer, *_ = booster.boost(model, optimizer)
    ids = [0, 1] if precision.startswith("fp16_apex") else [0, 0]
    for number, (x, head) in enumerate(zip(torch.randn(3, 6, 8), (0, 1, 0), strict=True)):
        loss = model(x, head).square().mean() * (number + 1)
        if how == "bare" and number:
            loss.backward()
        else:
            booster.backward(loss, optimizer, loss_id=ids[head])
    if how == "torch's clip":
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
    elif how == "clip":
        optimizer.clip_grad_by_norm(0.5)
    assert optimizer.step().applied
    after = {
        n: p.detach().full_tensor() if hasattr(p, "full_tensor") else p.detach() for n, p in model.named_parameters()
    }
    return {name: after[name].float() - before[name] for name in before}


def cases(plugin):
    for precision in PRECISIONS:
        yield from ((precision, how) for how in ("losses", "clip"))
        if precision in TRUE_AT_REST and plugin != "ZeRO-2":  # where there is no .grad, a bare backward has no meaning
            yield precision, "bare"
            if plugin != "TP":  # torch cannot clip parameters of several meshes
                yield precision, "torch's clip"


def train_all(rank, world_size, plugin, tried):
    return {case: train(case[0], plugin, case[1]) for case in tried}


@pytest.fixture(scope="module")
def in_one_process():
    return train_all(0, 1, "single", cases("single"))


# Every other case of each plugin each time, so that each case runs on several.
HALVES = [
    pytest.param(plugin, first, marks=[] if first == index % 2 else [pytest.mark.slow])
    for index, plugin in enumerate(plugin for plugin in PLUGINS if plugin != "single")
    for first in (0, 1)
]


@pytest.mark.slow_cases("ZeRO-1")
@pytest.mark.parametrize(("plugin", "first"), HALVES)
def test_several_passes_before_a_step_add_up_as_in_one_process(ranks2, in_one_process, plugin, first):
    wrong = []
    for rank, traces in enumerate(ranks2(train_all, plugin, list(cases(plugin))[first::2])):
        for case, changes in traces.items():
            reference = in_one_process[case]
            size = max(float(change.abs().max()) for change in reference.values())
            error = max(float((changes[name] - reference[name]).abs().max()) for name in reference) / size
            if not error <= TOLERANCE.get(case[0], 2e-2):
                wrong.append(f"rank {rank}, {case[0]}, {case[1]}: off by {error:.2g}")
    assert wrong == []


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
@pytest.mark.parametrize("precision", ["fp32", "fp16", "fp16_naive", "fp16_apex O2"])
def test_a_rank_whose_part_has_no_gradient_adds_to_used_ones_as_the_others_do(ranks2, precision, clip, fused):
    (expected, _), (found, other) = (
        ranks2(norms_of_used_gradients, plugin, precision, clip, fused) for plugin in ("DDP", "ZeRO-1")
    )
    assert found == other == pytest.approx(expected, rel=1e-2)
