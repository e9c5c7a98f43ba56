"""Losses of probabilities are refused in half, in forward or by the graph, on every road; models that name none pay nothing."""

import functools
from contextlib import nullcontext
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from booster import Booster
from booster.mixed_precision.half_products.probability_losses import names_probability_loss


@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16_naive", "fp16_naive"])
def test_losses_of_probabilities_are_refused_in_half_with_the_cure(precision):
    net = nn.Sequential(nn.Linear(4, 1), nn.Sigmoid())
    with pytest.raises(TypeError, match="nn.BCEWithLogitsLoss"):
        Booster("cpu", precision).boost(net, None, nn.BCELoss())
    booster = Booster("cpu", precision, half_products="float32")
    model, _, criterion, *_ = booster.boost(net, None, lambda out, target: F.binary_cross_entropy(out, target))
    with pytest.raises(RuntimeError, match="nn.BCEWithLogitsLoss"):
        criterion(model(torch.ones(2, 4)), torch.ones(2, 1))
    Booster("cpu", "fp32").boost(nn.Linear(4, 1), None, nn.BCELoss())


def _loss_of(found):
    return F.binary_cross_entropy(found, torch.ones_like(found))


class Probable(nn.Module):
    """A loss of probabilities in a function that forward calls; how: from the scores, as numbers of which dtype."""

    def __init__(self, how):
        super().__init__()
        self.layer, self.how = nn.Linear(4, 1), how

    def forward(self, x):
        scores = self.layer(x)
        if self.how == "without autocast":
            with torch.autocast(x.device.type, enabled=False):
                return _loss_of(scores.float().sigmoid())
        if self.how == "widened before":
            scores = scores.float()
        found = scores.sigmoid()
        if self.how == "widened after":
            found = found.float().clamp(1e-6, 1 - 1e-6).squeeze(1)[None]
        return found if self.how == "outside" else _loss_of(found)


@pytest.mark.parametrize("choice", ["native", "float32"])
@pytest.mark.parametrize("precision", ["bf16", "fp16", "bf16_naive", "fp16_naive"])
@pytest.mark.parametrize("how", ["half", "widened after", "widened before", "without autocast", "outside"])
def test_a_loss_of_half_probabilities_is_refused_wherever_it_is_computed(precision, how, choice):
    net = Probable(how)
    booster = Booster("cpu", precision, half_products=choice)
    model, optimizer, *_ = booster.boost(net, torch.optim.SGD(net.parameters(), lr=0.1))
    x, naive = torch.ones(2, 4), precision.endswith("naive")

    def step(own_optimizer):
        out = model(x)
        loss = F.binary_cross_entropy(out, torch.ones_like(out)) if how == "outside" else out
        optimizer.backward(loss) if own_optimizer else booster.backward(loss, optimizer)
        return optimizer.step()

    if how == "without autocast" or (how == "widened before" and naive):  # which is right
        assert step(own_optimizer=True) or precision.startswith("fp16")
        return
    for own_optimizer in (True, False):
        with pytest.raises(RuntimeError, match="nn.BCEWithLogitsLoss"):
            step(own_optimizer)
    assert net.layer.weight.grad is None
    if how == "outside":  # of which a backward pass by hand knows nothing
        return
    with pytest.raises(RuntimeError, match="nn.BCEWithLogitsLoss"):
        model(x)
    # Without a graph, nothing says that float32 was half before: outside of autocast, which refuses that as well.
    with (
        torch.no_grad(),
        nullcontext() if naive and how == "widened after" else pytest.raises(RuntimeError, match="Logits"),
    ):
        model(x)


def _of_others(probabilities):
    return LOSSES.of(probabilities)


class _Calls:
    """Objects that call, by attribute, property and as they are, a function that computes a loss of probabilities."""

    def __init__(self, function=None):
        self.function = function

    @property
    def loss(self):
        return _of_others

    def __call__(self, probabilities):
        return self.loss(probabilities)


LOSSES = ModuleType("losses")  # a file of the user's
LOSSES.of = _loss_of


@pytest.mark.parametrize(
    ("criterion", "found"),
    [
        (F.binary_cross_entropy, True),
        (functools.partial(_loss_of), True),
        (functools.partial(map, _loss_of), True),
        (_of_others, True),
        (_Calls(), True),
        (_Calls().__call__, True),
        (nn.Sequential(nn.Linear(4, 1), Probable("half")), True),
        (lambda found: [nn.BCELoss()(each, each) for each in found], True),
        (lambda found: getattr(F, "binary_cross_entropy")(found, found), True),  # noqa: B009
        (torch.no_grad()(_loss_of), True),
        (lambda found: F.binary_cross_entropy_with_logits(found, found) + nn.BCEWithLogitsLoss()(found, found), False),
        (F.cross_entropy, False),
        (nn.TransformerEncoderLayer(8, 2), False),
    ],
)
def test_a_loss_of_probabilities_is_found_in_code_that_calls_it_and_in_no_other(criterion, found):
    assert names_probability_loss([criterion]) is found
