"""Models of transformers in half on two ranks: what a step makes of every weight, against gradients in float64."""

import pytest
import torch
from test_pipeline_engine import packages
from torch import nn

from booster import Booster
from booster.mixed_precision import FP16NaiveMixedPrecision
from booster.plugin import LowLevelZeroPlugin, TorchDDPPlugin, TorchFSDPPlugin

PLUGINS = {
    "ddp": TorchDDPPlugin,
    "zero2": lambda: LowLevelZeroPlugin(stage=2),
    "fsdp": lambda: TorchFSDPPlugin(wrap_policy={nn.Linear}),
}
PRECISIONS = {
    "bf16": lambda: "bf16",
    "bf16_naive": lambda: "bf16_naive",
    "fp16_naive": lambda: FP16NaiveMixedPrecision(initial_scale=2.0**12),
}
EPS = {"bf16": 2.0**-9, "bf16_naive": 2.0**-9, "fp16_naive": 2.0**-12}
RATE = 2.0**10  # at which a weight is next to nothing beside its step, so that its own rounding is


def made(name):
    (transformers,) = packages("transformers")
    torch.manual_seed(0)
    if name == "t5":  # which keeps layers in float32 under float16
        own = {"vocab_size": 96, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": 2, "num_heads": 2}
        config = transformers.T5Config(decoder_start_token_id=0, feed_forward_proj="gated-gelu", **own)
        model = transformers.T5ForConditionalGeneration(config)
    else:  # which has frequencies in float buffers
        own = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
        config = transformers.LlamaConfig(num_attention_heads=2, num_key_value_heads=2, **own)
        model = transformers.LlamaForCausalLM(config)
    return model.eval(), torch.randint(1, 96, (2, 12))


def errors(rank, world_size, cases):
    """Of each case the largest relative error of a step over the weights, each rank having one of two sequences."""
    found = {}
    for name, precision, plugin in cases:
        model, ids = made(name)
        before = {key: param.detach().double() for key, param in model.named_parameters()}
        exact, _ = made(name)
        exact.double()(input_ids=ids, labels=ids).loss.backward()
        booster = Booster("cpu", PRECISIONS[precision](), PLUGINS[plugin]())
        wrapped, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=RATE))
        own = ids[rank : rank + 1]
        booster.backward(wrapped.eval()(input_ids=own, labels=own).loss, optimizer)
        assert optimizer.step().applied
        whole = {key: getattr(p, "full_tensor", lambda p=p: p)() for key, p in wrapped.unwrap().named_parameters()}
        right = {key: param.grad for key, param in exact.named_parameters()}
        each = {
            key: float(((before[key] - whole[key].detach().double()) / RATE - grad).norm() / grad.norm())
            for key, grad in right.items()
        }
        found[name, precision, plugin] = max(each.values())
    return found


QUICK = [("llama", "bf16_naive", "zero2"), ("t5", "fp16_naive", "fsdp")]
ALL = [(name, precision, plugin) for name in ("llama", "t5") for precision in PRECISIONS for plugin in PLUGINS]


@pytest.mark.parametrize(
    "cases",
    [QUICK, pytest.param([each for each in ALL if each not in QUICK], marks=pytest.mark.slow)],
    ids=["few", "all"],
)
def test_steps_of_every_weight_are_those_of_float64_as_far_as_the_format_goes(ranks2, transformers, cases):
    # As in tests/unit/test_models_in_half.py, whose bound it is: 96 roundings, independent, and a condition number of 4. Two
    # more are the weight after the step and the mean over ranks.
    for found in ranks2(errors, cases):
        assert {case: error for case, error in found.items() if not error <= 4 * EPS[case[1]] * 98**0.5} == {}
