"""A load that raises has changed nothing, bit for bit, in every precision and for every way in which a state can be wrong."""

import pytest
import torch
from choices import precisions
from refusals import fingerprint, zoo
from torch import nn

from booster import Booster

PRECISIONS = precisions(
    "fp32",
    "bf16",
    "fp16",
    "O0",
    "O1",
    "O2",
    "O3",
    "fp16_naive",
    "fp16_naive, split",
    "bf16_naive",
    "bf16_naive, fp32",
    "bf16_naive, none",
    "bf16_naive, stochastic",
    "bf16_naive, kahan",
    scale=2.0**10,
)
OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
}


def trained(precision, optimizer, steps):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3))
    booster = Booster("cpu", PRECISIONS[precision]())
    model, made, *_ = booster.boost(model, OPTIMIZERS[optimizer](model.parameters()))
    for step in range(steps + 1):
        torch.manual_seed(step)
        booster.backward(model(torch.randn(4, 6)).square().mean(), made)
        if step < steps:
            made.step()
            made.zero_grad()
    made.clip_grad_by_norm(1e-3)  # pending, with gradients that wait
    return booster, model, made


@pytest.mark.crossed
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_refused_load_changes_nothing(precision, optimizer):
    _, model, made = trained(precision, optimizer, 2)
    good = trained(precision, optimizer, 4)[2].state_dict()
    before = fingerprint(made, model)
    wrong = []
    for name, state in zoo(good):
        try:
            made.load_state_dict(state)
        except (ValueError, TypeError) as error:
            if not str(error).strip():
                wrong.append(f"{name}: an error without a message")
        except Exception as error:
            wrong.append(f"{name}: {type(error).__name__}: {error}")
        else:
            wrong.append(f"{name}: loaded")
            _, model, made = trained(precision, optimizer, 2)
        if fingerprint(made, model) != before:
            wrong.append(f"{name}: something changed")
            _, model, made = trained(precision, optimizer, 2)
    assert not wrong, "\n".join(wrong)
    made.load_state_dict(good)
    assert fingerprint(made, model) != before
