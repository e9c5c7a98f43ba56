"""Planted faults, each diagnosed: kind, module, operation and direction are right, and nothing is named where all is well."""

import pytest
import torch
from torch import nn
from zoo_second import ALL, FAULTS, PRECISIONS, SECOND, Cage, diagnose, judge

CASES = [(planted, precision) for planted in FAULTS for precision in planted.precisions]
# What another fault shows too, of the same kind and direction, by another operation: slow under every precision.
ALIKE = [
    "large_weights_in_the_head",
    "a_fourth_power",
    "exp_of_twelve_in_half",
    "a_running_sum_in_half",
    "a_residual_sum_in_half",
    "a_product_beyond_float32",
    "a_product_beyond_bfloat16",
    "one_third_of_a_fused_projection",
    "large_weights_in_the_first_block",
    "a_norm_in_half",
    "zero_by_zero_in_a_block",
    "root_of_a_negative_number",
    "the_deviation_of_one_sample",
    "the_mean_of_nothing",
    "reciprocal_root_of_zero",
    "a_broken_power_of_a_negative_number",
    "atanh_of_one",
    "acos_of_two",
    "one_over_zero",
    "log1p_of_minus_one",
    "a_factor_that_is_infinite",
    "a_running_variance_that_is_negative",
    "a_zero_vector_made_one_long",
    "a_masked_mean_of_a_sample_without_tokens",
    "an_auxiliary_output",
    "a_learned_power_of_a_negative_number",
    "a_layer_norm_of_equal_numbers_without_epsilon",
    "a_mask_that_is_all_false",
    "a_pre_hook_that_divides_by_zero",
    "one_sample_with_inf",
    "a_feature_that_is_the_log_of_zero",
    "a_keyword_input_with_nan",
    "a_weight_of_a_sample_that_is_nan",
    "a_bias_that_is_infinite",
    "a_norm_whose_weight_is_nan",
    "a_recurrent_bias_that_is_nan",
    "a_loss_that_divides_by_no_tokens",
    "all_targets_ignored",
    "an_exp_beyond_any_format",
    "a_divergence_from_a_zero_probability",
    "a_likelihood_of_variance_zero",
    "a_coefficient_that_is_nan",
    "a_target_longer_than_its_input",
    "a_log_sum_exp_by_hand",
    "the_exp_of_a_poisson_loss",
    "the_root_of_a_perfect_loss",
    "a_loss_that_is_summed",
    "the_slope_of_a_broken_power_at_zero",
    "the_slope_of_acos_at_one",
    "a_function_of_ones_own_whose_gradient_is_infinite",
    "a_length_by_hand_of_a_vector_of_zeros",
    "a_quotient_that_where_takes_out",
    "a_hook_that_damages_a_gradient_in_place",
    "a_window_whose_rows_keep_the_diagonal",
    "a_square_that_overflows_and_only_divides",
]
# Every other fault once, each precision in its turn.
QUICK = {
    (planted.name, planted.precisions[index % len(planted.precisions)])
    for index, planted in enumerate(FAULTS)
    if planted.name not in ALIKE
}


def marked(planted, precision):
    marks = [] if (planted.name, precision) in QUICK else [pytest.mark.slow]
    return pytest.param(planted, precision, marks=marks, id=f"{planted.name}-{precision}")


@pytest.mark.filterwarnings("ignore:.*degrees of freedom:UserWarning")
@pytest.mark.parametrize(("planted", "precision"), [marked(*case) for case in CASES])
def test_a_planted_fault_is_named(planted, precision):
    found = diagnose(planted, precision)
    assert judge(found, planted.truth(precision)) == {}, str(found)
    assert found.certain == (found.kind is not None)


def test_the_zoo_is_large_and_a_wrong_answer_is_noticed():
    assert len(FAULTS) >= 110
    assert len(SECOND) >= 30
    assert set(ALIKE) < {planted.name for planted in FAULTS}
    assert len({planted.name for planted in FAULTS}) == len(FAULTS)
    assert set(PRECISIONS) == set(ALL)
    found = diagnose(FAULTS[0], "fp16")
    assert judge(found, {**FAULTS[0].truth("fp16"), "module": "blocks.2.up"}) == {
        "module": ("blocks.0.up", "blocks.2.up")
    }


def test_bad_rows_are_the_samples():
    (planted,) = [each for each in FAULTS if each.name == "one_sample_with_nan"]
    for precision in ("fp32", "fp16"):
        assert diagnose(planted, precision).rows == (2,)


@pytest.mark.parametrize(("name", "remedy"), [
    ("a_loss_scale_that_is_too_large", "finite at scale 2**"),
    ("a_slope_beyond_half_at_this_scale", "finite at scale 2**"),
    ("attention_scores_without_scaling", "finite with keep_fp32='blocks.1.attn'"),
])  # fmt: skip
def test_a_remedy_that_is_named_helps(name, remedy):
    (planted,) = [each for each in FAULTS if each.name == name]
    (tried,) = [each for each in diagnose(planted, "fp16").remedies if each.startswith(remedy)]
    with_remedy(planted, tried)


def with_remedy(planted, tried):
    """Train a step of the planted fault with the remedy as the user would apply it; all must be finite."""
    from booster import Booster
    from booster.mixed_precision import FP16TorchMixedPrecision

    torch.manual_seed(3)
    cage = Cage("fp16")
    planted.plant(cage)
    options = {"init_scale": cage.scale}
    if "scale" in tried:
        options["init_scale"] = 2.0 ** float(tried.rpartition("**")[2])
    else:
        options["keep_fp32"] = tried.split("'")[1]
    booster = Booster("cpu", FP16TorchMixedPrecision(**options))
    optimizer = torch.optim.SGD(cage.model.parameters(), lr=0.1)
    model, optimizer, *_ = booster.boost(cage.model, optimizer)
    booster.backward(cage.loss(model(cage.x), cage), optimizer)
    assert optimizer.step().applied
    assert isinstance(model.unwrap(), nn.Module)
