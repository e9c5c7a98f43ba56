"""Steps by kernels and torch's, from the same numbers: every rule, form of weights and of states, and how near they are."""

import pytest
import torch
from interpreted import follow, gradients, held, packed, step_on
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW, RMSprop

from booster.mixed_precision import BF16NaiveMixedPrecision, FP16NaiveMixedPrecision

INF = float("inf")

RULES = {
    "SGD": lambda p: SGD(p, lr=1e-2),
    "SGD momentum": lambda p: SGD(p, lr=1e-2, momentum=0.9, weight_decay=0.1),
    "SGD nesterov": lambda p: SGD(p, lr=1e-2, momentum=0.9, nesterov=True, maximize=True),
    "Adam": lambda p: Adam(p, lr=1e-2, weight_decay=0.1),
    "AdamW": lambda p: AdamW(p, lr=1e-2),
    "AdamW amsgrad": lambda p: AdamW(p, lr=1e-2, amsgrad=True, maximize=True, betas=(0.3, 0.9)),
    "RMSprop": lambda p: RMSprop(p, lr=1e-3, weight_decay=0.1),
    "RMSprop momentum": lambda p: RMSprop(p, lr=1e-3, momentum=0.9, maximize=True),
    "RMSprop centered": lambda p: RMSprop(p, lr=1e-3, centered=True),
    "RMSprop centered momentum": lambda p: RMSprop(p, lr=1e-3, centered=True, momentum=0.9),
    "Adagrad": lambda p: Adagrad(p, lr=1e-2, lr_decay=0.1, weight_decay=0.1, initial_accumulator_value=0.1),
}
FORMS = {
    "fp32": {"master_weights": "fp32"},
    "split": {"master_weights": "split"},
    "split24": {"master_weights": "split24"},
    "nearest": {"master_weights": "none"},
    "stochastic": {"master_weights": "none", "rounding": "stochastic"},
    "kahan": {"master_weights": "none", "rounding": "kahan"},
}
HALVES = {"bf16": BF16NaiveMixedPrecision, "fp16": FP16NaiveMixedPrecision}
# What one step of a form is, of a weight's size: an update that is an ulp off may move a weight so far.
STEPS = {
    ("bf16", "split24"): 2.0**-15,
    ("bf16", "nearest"): 2.0**-7,
    ("bf16", "stochastic"): 2.0**-7,
    ("bf16", "kahan"): 2.0**-15,
    ("fp16", "split24"): 2.0**-18,
    ("fp16", "nearest"): 2.0**-10,
    ("fp16", "stochastic"): 2.0**-10,
    ("fp16", "kahan"): 2.0**-20,
}


def make_model():
    """Parameters of several shapes; one begins in the middle of a group of 32, and one fills more than a tile."""
    model = nn.Module()
    for index, shape in enumerate([(7, 5), (33,), (3, 700), (1,)]):
        model.register_parameter(f"p{index}", nn.Parameter(torch.randn(shape)))
    return model


def check(torch_step, kernel_step, rtol):
    for mine, theirs in zip(*(held(each[2]) for each in (kernel_step, torch_step)), strict=True):
        for own, other in zip(mine, theirs, strict=True):
            if isinstance(own, torch.Tensor):
                torch.testing.assert_close(own, other, rtol=rtol, atol=6.1e-8 if rtol > 3e-7 else 1e-8)
                continue
            assert own.keys() == other.keys()
            for name in own:
                scale = float(other[name].abs().max()) if other[name].numel() else 0.0
                torch.testing.assert_close(
                    own[name].to(other[name].device), other[name], rtol=1e-6, atol=1e-6 * scale, msg=name
                )


def one_after_another(both, rtol, states):
    torch_step, kernel_step = both
    for number, bad in enumerate((None, INF, None, None)):
        follow(torch_step, kernel_step)
        grads = gradients(list(torch_step[1].parameters()), number, bad)
        expected, found = step_on(*torch_step, grads), step_on(*kernel_step, grads)
        assert (found.applied, found.loss_scale, found.skipped_reason) == (
            expected.applied,
            expected.loss_scale,
            expected.skipped_reason,
        )
        assert found.culprit == expected.culprit
        assert found.applied is (bad is None)
        if expected.applied:
            assert found.grad_norm == pytest.approx(expected.grad_norm, rel=1e-6)
        assert kernel_step[2]._update.decision.steps.reason is None
        if states == "fp32":
            check(torch_step, kernel_step, rtol)
            continue
        differing = 0
        for param, other in zip(kernel_step[1].parameters(), torch_step[1].parameters(), strict=True):
            step = {torch.float32: rtol, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}[param.dtype]
            torch.testing.assert_close(param.float(), other.float(), rtol=step, atol=6.1e-8)
            differing += int((param != other).sum()) if param.dtype != torch.float32 else 0
        assert differing < 20  # of 2,169
        for (name, codes, scales), (same, theirs, others) in zip(
            *map(packed, (kernel_step[2], torch_step[2])), strict=True
        ):
            assert name == same
            if found.applied:
                assert (codes - theirs).abs().max() <= 1, name
                assert (codes != theirs).float().mean() < 0.02, name
                assert len(scales) == 0 or (scales - others).abs().max() <= 1, name


def refuses(rule, states):
    return states != "fp32" and "centered" in rule


def on_half_weights(pair, make_model, rule, half, form, states, **options):
    """Four steps of `rule` on weights in `half`, kept in `form`; options: of `pair`."""

    def precision():
        scale = {"initial_scale": 2.0**4, "hysteresis": 1} if half == "fp16" else {}
        return HALVES[half](**FORMS[form], states=states, keep_fp32=(), clip_grad_norm=0.05, **scale)

    rtol = STEPS.get((half, form), 3e-7)
    one_after_another(pair(make_model, RULES[rule], precision, **options), rtol, states)
