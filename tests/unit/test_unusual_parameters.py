"""Parameters that are complex, in float64 together with half ones, or of no elements."""

import math

import pytest
import torch
from torch import nn

from booster import Booster
from booster.mixed_precision import BF16NaiveMixedPrecision, FP16ApexMixedPrecision, FP16NaiveMixedPrecision

OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.01),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.01, momentum=0.9),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.01, initial_accumulator_value=0.25),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=0.01),
    "Adafactor": lambda params: torch.optim.Adafactor(params),
}
HALVES = {
    "fp16_naive": lambda: FP16NaiveMixedPrecision(initial_scale=2.0**4),
    "bf16_naive": BF16NaiveMixedPrecision,
    "bf16_naive split": lambda: BF16NaiveMixedPrecision(master_weights="split"),
    "bf16_naive none": lambda: BF16NaiveMixedPrecision(master_weights="none"),
    "bf16_naive 8bit": lambda: BF16NaiveMixedPrecision(states="8bit"),
}
EVERY = {**HALVES, "fp32": lambda: "fp32", "fp16": lambda: "fp16", "bf16": lambda: "bf16"}


def steppable(precisions):
    """Pairs of a precision and an optimizer; one of whole tensors needs masters of whole tensors."""
    return [(name, make) for name in precisions for make in OPTIMIZERS if make != "Adafactor" or " " not in name]


class Waves(nn.Module):
    """A half layer, a complex parameter, one of float64 and, where asked for, some of no elements."""

    def __init__(self, dtype, empty=False):
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.Linear(4, 4)
        self.other = nn.Parameter(torch.randn(3, dtype=dtype))
        if empty:
            self.none, self.row = nn.Parameter(torch.zeros(0, 3)), nn.Parameter(torch.zeros(4, 0))

    def forward(self, x):
        loss = self.layer(x).float().square().mean() + self.other.abs().square().sum().float()
        return loss + sum(param.sum() for name, param in self.named_parameters() if name in ("none", "row"))


def train(precision, make, dtype, clip=None, steps=3, **options):
    booster, model = Booster("cpu", precision), Waves(dtype, **options)
    model, optimizer, *_ = booster.boost(model, make(model.parameters()))
    norms = []
    for step in range(steps):
        inputs = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
        booster.backward(model(inputs), optimizer)
        if clip is not None:
            norms.append(float(optimizer.clip_grad_by_norm(*clip)))
        assert optimizer.step().applied
        optimizer.zero_grad()
    return booster, model, optimizer, norms


@pytest.mark.crossed
@pytest.mark.parametrize("clip", [None, (0.5,), (0.5, 1.0), (0.5, math.inf)])
@pytest.mark.parametrize("precision", EVERY)
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_complex_parameters_train_and_are_clipped_by_their_absolute_values(dtype, precision, clip):
    _, model, _, norms = train(EVERY[precision](), OPTIMIZERS["SGD"], dtype, clip)
    plain = Waves(dtype)
    optimizer = OPTIMIZERS["SGD"](plain.parameters())
    for step in range(3):
        plain(torch.randn(8, 4, generator=torch.Generator().manual_seed(step))).backward()
        if clip is not None:
            expected = float(nn.utils.clip_grad_norm_(plain.parameters(), *clip))
            assert norms[step] == pytest.approx(expected, rel=2e-2)
        optimizer.step()
        optimizer.zero_grad()
    assert model.module.other.dtype == dtype
    torch.testing.assert_close(model.module.other.detach(), plain.other.detach(), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("precision", ["fp32", "bf16_naive"])
def test_complex_gradients_have_no_interval_to_be_clamped_to(precision):
    booster, model = Booster("cpu", EVERY[precision]()), Waves(torch.complex64)
    model, optimizer, *_ = booster.boost(model, OPTIMIZERS["SGD"](model.parameters()))
    booster.backward(model(torch.ones(2, 4)), optimizer)
    before = [param.grad.clone() for param in model.parameters()]
    with pytest.raises(TypeError, match="complex gradients have no order.* clip_grad_by_norm"):
        optimizer.clip_grad_by_value(1e-3)
    assert all(torch.equal(param.grad, grad) for param, grad in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize(("precision", "make"), steppable(HALVES))
def test_a_float64_parameter_trains_beside_half_ones(precision, make):
    _, model, optimizer, _ = train(HALVES[precision](), OPTIMIZERS[make], torch.float64, (1.0,))
    states = [value for own in optimizer.state_dict()["state"].values() for value in own.values()]
    assert all(value.dtype == torch.float32 for value in states if isinstance(value, torch.Tensor) and value.dim())


@pytest.mark.slow_cases("fp16_naive-Adagrad", "fp16_naive-SGD", "bf16_naive-SGD", "bf16_naive-RMSprop")
@pytest.mark.parametrize(("precision", "make"), steppable(["fp16_naive", "bf16_naive", "bf16_naive split", "O2"]))
def test_a_checkpoint_with_parameters_of_no_elements_loads(precision, make, tmp_path):
    of = {**HALVES, "O2": lambda: FP16ApexMixedPrecision("O2", max_loss_scale=16.0, verbosity=0)}[precision]
    booster, model, optimizer, _ = train(of(), OPTIMIZERS[make], torch.float32, empty=True)
    booster.save(tmp_path, model, optimizer)
    booster, other, its_optimizer, _ = train(of(), OPTIMIZERS[make], torch.float32, steps=1, empty=True)
    booster.load(tmp_path, other, its_optimizer)
    for one, loaded in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(one, loaded)
    masters, loaded = (each.state_dict()["booster"]["masters"]["weights"] for each in (optimizer, its_optimizer))
    assert masters.keys() == loaded.keys()
    assert not {"none", "row"} & masters.keys()
    assert all(torch.equal(masters[name], loaded[name]) for name in masters)
