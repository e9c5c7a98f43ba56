"""Saving and loading with master weights: bitwise the run that was never interrupted, in torch's own format."""

import copy
import io
from itertools import product

import pytest
import torch
from comparing import same
from torch import nn

from booster import Booster
from booster.mixed_precision import BF16NaiveMixedPrecision, FP16ApexMixedPrecision, FP16NaiveMixedPrecision

SCALE = {"initial_scale": 2.0**13, "growth_interval": 5}
PRECISIONS = {
    "fp16, fp32 masters": lambda: FP16NaiveMixedPrecision(**SCALE),
    "fp16, split": lambda: FP16NaiveMixedPrecision(**SCALE, master_weights="split"),
    "bf16, fp32 masters": lambda: BF16NaiveMixedPrecision(master_weights="fp32"),
    "bf16, split": lambda: BF16NaiveMixedPrecision(),
    "bf16, none": lambda: BF16NaiveMixedPrecision(master_weights="none"),
    "bf16, stochastic": lambda: BF16NaiveMixedPrecision(master_weights="none", rounding="stochastic"),
}
OPTIMIZERS = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.02),
    "SGD": lambda params: torch.optim.SGD(params, lr=0.05, momentum=0.9),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=0.05),
    "ASGD": lambda params: torch.optim.ASGD(params, lr=0.05),
    "Adafactor": lambda params: torch.optim.Adafactor(params, lr=0.02),
}


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 80), nn.BatchNorm1d(80), nn.GELU(), nn.Linear(80, 300), nn.Linear(300, 3))


class Run:
    def __init__(self, precision="bf16, split", optimizer="AdamW", frozen=()):
        strategy = PRECISIONS[precision]() if precision in PRECISIONS else precision
        self.booster = Booster("cpu", strategy)
        net = model()
        for name in frozen:
            net.get_parameter(name).requires_grad_(False)
        self.model, self.optimizer, self.criterion, *_ = self.booster.boost(
            net, OPTIMIZERS[optimizer](net.parameters()), nn.CrossEntropyLoss()
        )
        data = torch.Generator().manual_seed(1)
        self.batches = [
            (torch.randn(4, 6, generator=data), torch.randint(0, 3, (4,), generator=data)) for _ in range(20)
        ]

    def train(self, steps):
        for step in steps:
            x, y = self.batches[step]
            self.optimizer.zero_grad()
            loss = self.criterion(self.model(x), y) * (1e4 if step in (3, 4, 9) else 1.0)  # those overflow float16
            self.booster.backward(loss, self.optimizer)
            self.optimizer.clip_grad_by_norm(1.0)
            self.optimizer.step()

    def save(self):
        file = io.BytesIO()
        torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}, file)
        file.seek(0)
        return torch.load(file, weights_only=True)

    def load(self, state, order=("model", "optimizer")):
        for name in order:
            getattr(self, name).load_state_dict(copy.deepcopy(state[name]))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_state_dict_has_the_format_of_the_optimizer_on_float32_parameters(optimizer):
    run = Run("bf16, fp32 masters", optimizer)
    run.train(range(2))
    plain = Run("fp32", optimizer)
    plain.train(range(2))
    ours, theirs = run.optimizer.state_dict(), plain.optimizer.state_dict()
    masters = ours.pop("booster")["masters"]["weights"]
    theirs.pop("booster")
    assert ours.keys() == theirs.keys()
    assert ours["state"].keys() == theirs["state"].keys()
    for index, state in theirs["state"].items():
        shapes = {key: (value.shape, value.dtype) for key, value in state.items() if isinstance(value, torch.Tensor)}
        assert {k: (v.shape, v.dtype) for k, v in ours["state"][index].items() if isinstance(v, torch.Tensor)} == shapes
    assert [group["params"] for group in ours["param_groups"]] == [[*range(8)]]
    half = {name: param for name, param in run.model.named_parameters() if param.dtype == torch.bfloat16}
    assert masters.keys() == half.keys()
    assert all(masters[name].dtype == torch.float32 and masters[name].shape == half[name].shape for name in half)


def test_a_plain_float32_checkpoint_of_torch_loads_and_its_weights_are_the_masters():
    plain = Run("fp32")
    plain.train(range(3))
    state = plain.save()
    state["optimizer"].pop("booster")
    for precision, order in product(
        ("bf16, fp32 masters", "bf16, split"), (("model", "optimizer"), ("optimizer", "model"))
    ):
        run = Run(precision)
        run.load(state, order)
        loaded = run.optimizer.state_dict()
        assert same(loaded["state"], state["optimizer"]["state"])
        for name, master in loaded["booster"]["masters"]["weights"].items():
            weight = state["model"][name]
            assert torch.equal(master, weight)
            nearest = (weight.bfloat16().float() - weight).abs()  # or the other one, half way between two
            assert torch.equal((run.model.get_parameter(name).float() - weight).abs(), nearest)
        run.train(range(3, 5))


@pytest.mark.parametrize(
    ("writer", "reader"), [("bf16, split", "bf16, fp32 masters"), ("bf16, fp32 masters", "bf16, split")]
)
def test_separate_and_split_masters_read_each_others_checkpoints_bitwise(writer, reader):
    first = Run(writer)
    first.train(range(6))
    second = Run(reader)
    second.load(first.save())
    for run in (first, second):
        run.train(range(6, 12))
    assert same(first.save(), second.save())


def test_loading_another_models_weights_alone_moves_the_masters():
    run, other = Run("bf16, fp32 masters"), Run("bf16, fp32 masters")
    other.train(range(5))
    run.load(other.save(), ("model",))
    for name, master in run.optimizer.state_dict()["booster"]["masters"]["weights"].items():
        assert torch.equal(master.bfloat16(), other.model.get_parameter(name))


def O2():
    return FP16ApexMixedPrecision("O2", loss_scale=2.0**7, verbosity=0)


FROZEN = [name for name in PRECISIONS if "none" not in name and "stochastic" not in name]


@pytest.mark.crossed
@pytest.mark.parametrize("order", [("model", "optimizer"), ("optimizer", "model")], ids=" then ".join)
@pytest.mark.parametrize("precision", [*FROZEN, "O2"])
def test_a_checkpoint_loads_where_a_parameter_was_frozen_since_and_its_master_waits(precision, order):
    first, second = (Run(O2() if precision == "O2" else precision, frozen=names) for names in ((), ["3.weight"]))
    first.train(range(3))
    saved = first.save()
    second.load(saved, order)
    assert same(second.save(), saved)
    before = second.model.get_parameter("3.weight").detach().clone()
    second.train(range(3, 5))
    assert torch.equal(second.model.get_parameter("3.weight"), before)
    kept = second.optimizer.state_dict()["booster"]["masters"]["weights"]["3.weight"]
    assert torch.equal(kept, saved["optimizer"]["booster"]["masters"]["weights"]["3.weight"])
    assert not torch.equal(kept, before.float())
    second.model.get_parameter("3.weight").requires_grad_(True)
    second.train(range(5, 7))
    assert not torch.equal(second.model.get_parameter("3.weight"), before)


@pytest.mark.parametrize("precision", FROZEN)
def test_state_of_a_frozen_parameter_keeps_float32(precision):
    plain = Run("fp32")
    plain.train(range(3))
    state = plain.save()
    run = Run(precision, frozen=["3.weight"])
    run.load(state, ("optimizer",))
    assert same(run.optimizer.state_dict()["state"], state["optimizer"]["state"])


def test_a_frozen_parameters_master_does_not_write_its_weights():
    first = Run("fp16, fp32 masters")
    first.train(range(3))
    second = Run("fp16, fp32 masters", frozen=["3.weight"])
    with torch.no_grad():
        second.model.get_parameter("3.weight").fill_(0.5)
    second.load(first.save(), ("optimizer",))
    assert (second.model.get_parameter("3.weight") == 0.5).all()
    assert (second.optimizer.state_dict()["booster"]["masters"]["weights"]["3.weight"] == 0.5).all()
