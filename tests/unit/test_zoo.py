"""Planted faults, each diagnosed: kind, module, operation and direction are right, and nothing is named where all is well."""

import pytest
import torch
from torch import nn
from zoo_second import ALL, FAULTS, PRECISIONS, SECOND, Cage, diagnose, judge

CASES = [(planted, precision) for planted in FAULTS for precision in planted.precisions]
# Every fault once, each precision in its turn; the others are slow.
QUICK = {(planted.name, planted.precisions[index % len(planted.precisions)]) for index, planted in enumerate(FAULTS)}


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
