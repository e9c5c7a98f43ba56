"""Saving and loading a boosted optimizer and scheduler: bitwise the run that was never interrupted."""

import copy
import io
from typing import Any

import pytest
import torch
from comparing import same
from prescribed import loss_with
from torch import nn

from booster import Booster
from booster.mixed_precision import FP16TorchMixedPrecision

SCALER = {"init_scale": 2.0**13, "growth_interval": 5, "hysteresis": 2}
OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.02),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.01),
}
SCHEDULERS = {
    "cosine": lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40),
    "one cycle": lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.05, total_steps=40),
}


class Run:
    """One process of a training run: everything is built anew and then perhaps loaded."""

    def __init__(self, precision: str, optimizer: str = "AdamW", scheduler: str = "cosine") -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 3))
        inner = OPTIMIZERS[optimizer](model.parameters())
        strategy: Any = FP16TorchMixedPrecision(**SCALER) if precision == "fp16" else precision
        self.booster = Booster("cpu", strategy)
        self.model, self.optimizer, self.criterion, _, self.scheduler = self.booster.boost(
            model, inner, nn.CrossEntropyLoss(), None, SCHEDULERS[scheduler](inner)
        )
        data = torch.Generator().manual_seed(1)
        self.batches = [
            (torch.randn(4, 6, generator=data), torch.randint(0, 3, (4,), generator=data)) for _ in range(30)
        ]
        for step in (3, 4, 9, 16, 17):  # these overflow float16
            self.batches[step][0][0, 0] = 1e7

    def train(self, steps: range) -> list[float]:
        losses = []
        for step in steps:
            x, y = self.batches[step]
            self.optimizer.zero_grad()
            loss = self.criterion(self.model(x), y)
            self.booster.backward(loss, self.optimizer)
            self.optimizer.clip_grad_by_norm(1.0)
            self.optimizer.step()
            self.scheduler.step()
            losses.append(loss.item())
        return losses

    def save(self) -> dict[str, Any]:
        file = io.BytesIO()
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }
        torch.save(state, file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    def load(self, state: dict[str, Any], order: tuple[str, ...]) -> None:
        for name in order:
            getattr(self, name).load_state_dict(copy.deepcopy(state[name]))


ORDERS = [("model", "optimizer", "scheduler"), ("scheduler", "optimizer", "model")]


def test_the_state_dict_is_torchs_plus_one_key():
    run = Run("fp16")
    run.train(range(6))
    state = run.optimizer.state_dict()
    own = state.pop("booster")
    assert same(state, run.optimizer.unwrap().state_dict())
    assert set(own) == {"loss_scaler", "num_steps", "num_applied", "num_consecutive_skips"}
    assert own["num_steps"] == 6


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_plain_torch_state_dict_loads_and_leaves_the_scale_as_it_is(precision):
    run = Run(precision)
    run.train(range(3))
    plain = run.optimizer.unwrap().state_dict()
    fresh = Run(precision)
    fresh.load({"optimizer": plain}, ("optimizer",))
    expected = copy.deepcopy(plain)
    loaded = fresh.optimizer.state_dict()
    loaded.pop("booster")
    assert same(loaded, expected)
    assert fresh.optimizer.loss_scale == (SCALER["init_scale"] if precision == "fp16" else 1.0)
    assert fresh.train(range(3, 5))


def test_a_checkpoint_of_fp32_loads_into_fp16_and_the_scale_starts_over():
    run = Run("fp32")
    run.train(range(3))
    fresh = Run("fp16")
    fresh.load(run.save(), ORDERS[0])
    assert fresh.optimizer.loss_scale == SCALER["init_scale"]
    assert fresh.train(range(3, 5))


def test_a_checkpoint_of_fp16_into_fp32_is_refused_with_the_way_out():
    run = Run("fp16")
    run.train(range(3))
    fresh = Run("fp32")
    with pytest.raises(ValueError, match="this precision has no loss scaler; resume with the precision that wrote it"):
        fresh.load(run.save(), ("optimizer",))
    assert fresh.optimizer.state == {}


def test_loading_another_scale_keeps_the_meaning_of_gradients_that_are_there():
    run, trained = Run("fp16"), Run("fp16")
    trained.train(range(6))
    params = list(run.model.parameters())
    run.optimizer.backward(loss_with(params, [1.0] * len(params)))
    run.load(trained.save(), ("optimizer",))
    assert run.optimizer.loss_scale != SCALER["init_scale"]
    run.optimizer.backward(loss_with(params, [0.5] * len(params)))
    run.optimizer.unscale_grads()
    assert all(torch.equal(param.grad, torch.full_like(param, 1.5)) for param in params)
    assert run.optimizer.step()
