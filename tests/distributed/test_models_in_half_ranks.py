"""Models of transformers and timm in half on two ranks: what a step makes of every weight, against gradients in float64."""

import warnings

import pytest
import torch
from models_in_half import EPS, LOW, MODELS, in_double, loss_of, make, off_by, strategy, tolerance
from test_pipeline_engine import packages
from torch import nn

from booster import Booster
from booster.plugin import HybridParallelPlugin, LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin

PLUGINS = {
    "ddp": TorchDDPPlugin,
    "zero1": LowLevelZeroPlugin,
    "zero2": lambda: LowLevelZeroPlugin(stage=2),
    "fsdp": lambda: TorchFSDPPlugin(wrap_policy={nn.Linear}),
    "fsdp offload": lambda: TorchFSDPPlugin(wrap_policy={nn.Linear}, cpu_offload=True),
    "tp": lambda: HybridParallelPlugin(tp_size=2, pp_size=1),
    "pp": lambda: HybridParallelPlugin(tp_size=1, pp_size=2, num_microbatches=2),
}
PRECISIONS = [name for name in EPS if name != "fp32"]
# A rate at which a weight is next to nothing compared with its step, and so is its own rounding.
RATES = dict.fromkeys(MODELS, 2.0**10) | {"convnext": 2.0**16}


def step_of(name, precision, plugin, rank):
    """What a step made of every weight, over the rate, the gradients in float64, and how far off the step may be of those."""
    model, inputs = make(name, lambda package: packages(package)[0])
    before = {key: param.detach().double() for key, param in model.named_parameters(remove_duplicate=False)}
    exact, exact_inputs = in_double(model, inputs)
    # The bounds of one device; two more roundings are the weight after the step and the mean over ranks.
    bounds = {}
    if precision in LOW:
        most = off_by(exact, lambda model: loss_of(name, model(**exact_inputs)), EPS["bf16"], LOW[precision][1])
        bounds = {key: 2 * error for key, error in most.items()}
    loss_of(name, exact(**exact_inputs)).backward()
    booster = Booster("cpu", strategy(precision), PLUGINS[plugin]())
    wrapped, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=RATES[name]))
    wrapped.eval()
    if plugin == "pp":
        booster.execute_pipeline(iter([inputs]), wrapped, lambda output, batch: loss_of(name, output), optimizer)
    else:
        divided = plugin not in ("tp", "pp")  # of two samples each rank has one, or both ranks have both
        own = {key: value[rank : rank + 1] if divided else value for key, value in inputs.items()}
        booster.backward(loss_of(name, wrapped(**own)), optimizer)
    assert optimizer.step().applied
    whole = {key: getattr(p, "full_tensor", lambda p=p: p)().detach() for key, p in wrapped.unwrap().named_parameters()}
    right = {key: param.grad for key, param in exact.named_parameters(remove_duplicate=False)}
    return {
        key: ((before[key] - value.double()) / RATES[name], right[key], bounds.get(key) or 1.02 * tolerance(precision))
        for key, value in whole.items()
    }


def errors(rank, world_size, cases):
    """Of each case the largest error of a step over the weights, in parts of what it may be, or the words of a refusal."""
    warnings.filterwarnings("ignore", "Grad strides do not match bucket view strides")  # of convolutions, by DDP
    found = {}
    for case in cases:
        try:
            steps = step_of(*case, rank)
        except (TypeError, ValueError) as error:
            found[case] = str(error)
        else:
            found[case] = max(float((step - grad).norm() / grad.norm()) / most for step, grad, most in steps.values())
    return found


QUICK = [("llama", "fp16_naive", "fsdp")]
REST = {name: [(name, precision, plugin) for precision in PRECISIONS for plugin in PLUGINS] for name in MODELS}
REST["low precision"] = [("llama", precision, plugin) for precision in LOW for plugin in PLUGINS]


@pytest.mark.slow
@pytest.mark.parametrize(
    "cases", [QUICK, *(pytest.param(cases, marks=pytest.mark.slow) for cases in REST.values())], ids=["few", *REST]
)
def test_steps_of_every_weight_are_those_of_float64_as_far_as_the_format_goes(ranks2, transformers, timm, cases):
    for found in ranks2(errors, cases):
        refused = {case: error for case, error in found.items() if isinstance(error, str)}
        assert not refused, refused
        assert {case: error for case, error in found.items() if not error <= 1} == {}
