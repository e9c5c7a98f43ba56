"""How many functions of this library a warm step calls, in how many files, how deep. Bounds on counts, never on times."""

import pytest
import torch
from counts import calls, whole
from torch import nn

from booster import Booster
from booster.mixed_precision import BF16NaiveMixedPrecision

pytestmark = pytest.mark.usefixtures("nothing_compiled")


def warm(precision, num_layers=1, make=torch.optim.AdamW, half_products="native"):
    """Counts of the third forward, backward, step and zero_grad.

    half_products: where a CPU has no units for halves, each product of theirs costs some calls more.
    """
    torch.manual_seed(0)
    layers = nn.Sequential(*(nn.Linear(8, 8) for _ in range(num_layers)))
    model, optimizer, *_ = (b := Booster("cpu", precision, half_products=half_products)).boost(
        layers, make(layers.parameters(), lr=1e-3)
    )
    x, found, loss, steps = torch.randn(4, 8), {}, [], []
    for _ in range(3):
        found = {
            "forward": calls(lambda: loss.append(1e-3 * model(x).mean())),
            "backward": calls(lambda: b.backward(loss.pop(), optimizer)),
            "step": calls(lambda: steps.append(optimizer.step())),
            "zero_grad": calls(optimizer.zero_grad),
        }
    assert steps[-1].applied
    return found


# (calls, files) of all that a user does in a step; here is where it is seen if the road becomes longer.
WHOLE = {
    "fp32": ("fp32", 40, 13),
    "bf16": ("bf16", 40, 13),
    "fp16": ("fp16", 46, 15),
    "bf16_naive, split": (lambda: BF16NaiveMixedPrecision(master_weights="split"), 82, 21),
}


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_step_stays_within_its_calls_and_files(name):
    precision, most_calls, most_files = WHOLE[name]
    found = whole(precision)
    assert found[0] <= most_calls, found
    assert found[1] <= most_files, found


# Calls that products in float32 add, of two layers, around forward and criterion; and those of one layer more.
# The loss of classes, which is summed in float32 too, is one of them.
WIDENED = {"bf16": (17, 3), "fp16": (17, 3), "bf16_naive": (13, 3)}


@pytest.mark.parametrize("precision", WIDENED)
def test_products_in_float32_add_few_calls_to_a_step_and_to_each_layer(precision):
    most, most_of_one = WIDENED[precision]
    native, few, many = (
        whole(precision, depth=depth, half_products=choice)[0]
        for choice, depth in (("native", 1), ("float32", 1), ("float32", 5))
    )
    assert few - native <= most, (native, few)
    assert (many - few) / 4 <= most_of_one, (few, many)


# All calls of a step with five norms and an embedding: of native products, and of those in float32 of 8 rows and of 512, which
# are too many for casts. A norm costs two calls, or four. Where a CPU widens less, there are fewer.
NORMED = {"bf16": (44, 85, 295), "fp16": (47, 88, 301), "bf16_naive": (88, 125, 331), "fp16_naive": (90, 127, 338)}


@pytest.mark.parametrize("choice", ["native", "auto", "float32"])
@pytest.mark.parametrize("precision", NORMED)
def test_norms_and_embeddings_add_few_calls_to_a_step(precision, choice):
    native, few, many = NORMED[precision]
    for rows, most in ((8, few), (512, many)):
        found = whole(precision, depth=5, norms=True, rows=rows, half_products=choice)[0]
        assert found <= (native if choice == "native" else most), (rows, found)


# (calls, files, depth). One call is the guard's on the user's own model, in the first 100 steps.
FORWARD = {
    "fp32": (6, 4, 3),
    "bf16": (6, 4, 3),
    "fp16": (6, 4, 3),
    "fp16_naive": (7, 4, 3),
    "bf16_naive": (7, 4, 3),
}


@pytest.mark.parametrize("precision", FORWARD)
def test_a_warm_forward_stays_within_its_calls_files_and_depth(precision):
    found = warm(precision)["forward"]
    assert all(now <= bound for now, bound in zip(found, FORWARD[precision], strict=True)), found


# (calls, files, depth). One call is the guard's on the user's own optimizer, where that is what steps.
STEP = {
    "fp32": (11, 7, 5),
    "bf16": (11, 7, 5),
    "fp16": (23, 10, 9),
    "fp16_naive": (65, 17, 12),
    "bf16_naive": (52, 14, 12),
}


@pytest.mark.parametrize("precision", STEP)
def test_a_warm_step_stays_within_its_calls_files_and_depth(precision):
    found = warm(precision)["step"]
    assert all(now <= bound for now, bound in zip(found, STEP[precision], strict=True)), found


@pytest.mark.parametrize("make", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop])
@pytest.mark.parametrize("precision", STEP)
def test_the_calls_of_a_step_do_not_grow_with_the_number_of_parameters(precision, make):
    few, many = warm(precision, 2, make), warm(precision, 20, make)
    assert few["step"] == many["step"]
    assert few["zero_grad"] == many["zero_grad"]
    assert few["backward"] == many["backward"]
