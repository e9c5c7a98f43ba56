"""Steps by kernels are those of torch: every rule in every form of weights and states, from the same numbers, to an ulp."""

import pytest
import torch
from interpreted import interpreted, pair
from kernel_cases import FORMS, HALVES, RULES, STEPS, make_model, on_half_weights, one_after_another, refuses
from kernel_places import SIZES, Anywhere, anywhere

from booster.mixed_precision import BF16NaiveMixedPrecision

pytestmark = interpreted


@pytest.mark.parametrize("rule", RULES)
def test_a_step_on_float32_weights_is_that_of_torch(rule):
    one_after_another(pair(make_model, RULES[rule], "fp32", clip_grad_norm=0.05), 3e-7, "fp32")


@pytest.mark.parametrize("states", ["bf16", "8bit"])
@pytest.mark.parametrize("rule", [rule for rule in RULES if not refuses(rule, "8bit")])
def test_a_step_on_packed_states_is_that_of_torch(rule, states):
    one_after_another(pair(make_model, RULES[rule], "fp32", states=states, clip_grad_norm=0.05), 3e-7, states)


@pytest.mark.parametrize("states", ["fp32", "bf16", "8bit"])
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("half", HALVES)
@pytest.mark.parametrize("rule", RULES)
def test_a_step_on_half_weights_is_that_of_torch(rule, half, form, states):
    if refuses(rule, states):
        pytest.skip("such states cannot be packed")

    on_half_weights(pair, make_model, rule, half, form, states)


@pytest.mark.parametrize("form", ["fp32", *FORMS])
def test_parameters_and_gradients_lie_anywhere_and_are_of_any_size(form):
    options, dtype = (
        {"clip_grad_norm": 0.5, "skip_nonfinite": True},
        torch.float32 if form == "fp32" else torch.bfloat16,
    )

    def precision():
        return BF16NaiveMixedPrecision(**FORMS[form], states="8bit" if "split" in form else "fp32", keep_fp32=())

    made = "fp32" if form == "fp32" else precision
    both = pair(lambda: Anywhere(SIZES, dtype, "cpu"), RULES["AdamW"], made, **options)
    anywhere(both, SIZES, STEPS.get(("bf16", form), 3e-7) if "split" not in form else 2.0**-7)
