"""Optimizer states in 16 and 8 bits of float32 weights: under autocast and in float32, `Booster(states=...)`."""

import copy
import io

import pytest
import torch
from comparing import same
from prescribed import loss_with
from test_masters import ELEMENTWISE
from test_packed_states import PACKABLE
from torch import nn, optim

from benchmarks import memory, mlp
from booster import Booster
from booster.masters.quantized_state import QuantizedState
from booster.memory import estimate
from booster.mixed_precision import (
    FP32,
    BF16MixedPrecision,
    BF16NaiveMixedPrecision,
    FP16ApexMixedPrecision,
    FP16TorchMixedPrecision,
    Int8MixedPrecision,
    MixedPrecision,
    TF32MixedPrecision,
    make,
)

WIDE = {
    "fp32": FP32,
    "bf16": BF16MixedPrecision,
    "fp16": lambda: FP16TorchMixedPrecision(init_scale=2.0**10),
    "tf32": lambda: TF32MixedPrecision(emulate=True),
    "int8": lambda: Int8MixedPrecision(emulate=True),
}
SHAPES = [(200, 101), (33,), (), (7, 5, 3), (40, 500)]


class Run:
    """Float32 parameters and prescribed gradients."""

    def __init__(self, make, precision="fp32", states="8bit", *, shapes=SHAPES, **options):
        generator = torch.Generator().manual_seed(3)
        self.model = nn.ParameterList(nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes)
        self.params, self.inner = list(self.model), make(self.model.parameters())
        self.start = [param.detach().clone() for param in self.params]
        self.booster = Booster("cpu", precision, states=states, **options)
        self.boosted, self.optimizer, *_ = self.booster.boost(self.model, self.inner)
        self.generator = torch.Generator().manual_seed(7)

    def train(self, steps, poison=()):
        results = []
        for step in range(steps):
            grads = [torch.randn(param.shape, generator=self.generator) for param in self.params]
            if step in poison:
                grads[0].view(-1)[3] = float("inf")
            self.optimizer.zero_grad()
            self.booster.backward(loss_with(self.params, grads), self.optimizer)
            results.append(bool(self.optimizer.step()))
        return results

    def way(self):
        return torch.cat([(p.detach() - s).flatten() for p, s in zip(self.params, self.start, strict=True)])

    def kept(self):
        return [
            t.clone()
            for own in self.inner.state.values()
            for v in own.values()
            if isinstance(v, QuantizedState)
            for t in v.tensors
        ]


# ---------------------------------------------------------------------- bytes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "peak"),
    [*(pytest.param(name, 10.9, marks=pytest.mark.slow) for name in ("fp32", "bf16")), ("fp16", 10.9)],
)
def test_adamw_on_float32_weights_and_8_bit_states_holds_ten_bytes_a_parameter(precision, peak, monkeypatch):
    monkeypatch.setattr(mlp, "WIDTH", 512)
    sizes = memory.measure(lambda device: memory.ours(device, precision, states="8bit"), "cpu")
    assert sizes["param"] == pytest.approx(4.0, abs=0.01)
    assert sizes["held"] <= 10.2
    assert sizes["peak"] <= peak


def test_what_a_booster_measures_is_what_was_estimated():
    model = nn.Sequential(nn.Linear(128, 256), nn.GELU(), nn.Linear(256, 10))
    batch = torch.randn(4, 128), torch.randint(0, 10, (4,))
    booster, criterion = Booster("cpu", "bf16", states="8bit"), nn.CrossEntropyLoss()
    optimizer = optim.AdamW(model.parameters())
    expected = booster.estimate_memory(model, optimizer, batch, criterion)
    assert (
        expected.states
        == estimate(model, optimizer, batch, criterion, precision=make("bf16").with_kept(states="8bit")).states
    )
    model, optimizer, criterion, *_ = booster.boost(model, optimizer, criterion)
    booster.backward(criterion(model(batch[0]), batch[1]), optimizer)
    optimizer.step()
    found = booster.memory(model, optimizer)
    assert found.states == pytest.approx(expected.states, rel=0.01)
    assert (found.weights, found.masters, found.gradients) == (expected.weights, 0, expected.gradients)


# ---------------------------------------------------------------------- training


@pytest.mark.slow_cases("Adamax", "RAdam", "NAdam")
@pytest.mark.crossed
@pytest.mark.parametrize("states", [pytest.param("bf16", marks=pytest.mark.slow), "8bit"])
@pytest.mark.parametrize("name", PACKABLE)
def test_every_elementwise_optimizer_steps_float32_weights_on_packed_states_as_on_wide_ones(name, states):
    wide, few = Run(PACKABLE[name], states="fp32"), Run(PACKABLE[name], states=states)
    wide.train(20)
    few.train(20)
    assert float((few.way() - wide.way()).norm() / wide.way().norm()) < (0.35 if name == "Rprop" else 0.1)
    if name not in ("SGD", "ASGD"):
        assert few.kept()


@pytest.mark.parametrize("precision", WIDE)
def test_every_precision_of_float32_weights_trains_on_packed_states(precision):
    losses = {}
    for states in (None, "8bit"):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(3)))
        booster = Booster("cpu", WIDE[precision](), states=states, clip_grad_norm=1.0)
        model, optimizer, criterion, *_ = booster.boost(model, optim.AdamW(model.parameters(), lr=1e-2), nn.MSELoss())
        x, y = torch.randn(32, 64), torch.randn(32, 64)
        for _ in range(12):
            loss = criterion(model(x), y)
            booster.backward(loss, optimizer)
            assert optimizer.step()
            optimizer.zero_grad()
        losses[states] = float(loss.detach())
        packed = [v for own in optimizer.unwrap().state.values() for v in own.values() if isinstance(v, QuantizedState)]
        assert bool(packed) == (states == "8bit")
    assert losses["8bit"] == pytest.approx(losses[None], rel=0.05)
    assert losses[None] < 1.0


def test_loss_scale_and_clip_reach_the_step_as_they_do_without_packing():
    runs = [Run(ELEMENTWISE["SGD"], WIDE["fp16"](), states, clip_grad_norm=0.5) for states in ("fp32", "8bit")]
    for run in runs:  # SGD without momentum has no state: nothing may differ but the last bits
        assert run.train(4) == [True] * 4
    torch.testing.assert_close(runs[0].way(), runs[1].way(), rtol=1e-4, atol=1e-6)


def test_an_overflow_leaves_weights_and_packed_states_as_they_are_to_the_bit():
    run = Run(ELEMENTWISE["AdamW"], WIDE["fp16"]())
    run.train(3)
    before = run.kept(), [param.detach().clone() for param in run.params]
    assert run.train(1, poison=(0,)) == [False]
    assert same(before[0], run.kept())
    assert same(before[1], run.params)
    assert run.train(1) == [True]


def test_half_weights_in_float32_precision_keep_no_masters_and_are_rounded_to():
    model = nn.Linear(64, 64).bfloat16()
    booster = Booster("cpu", "fp32", states="8bit")
    boosted, optimizer, *_ = booster.boost(model, optim.AdamW(model.parameters(), lr=1e-2))
    before = model.weight.detach().clone()
    booster.backward(boosted(torch.randn(8, 64, dtype=torch.bfloat16)).float().pow(2).mean(), optimizer)
    optimizer.step()
    assert model.weight.dtype == torch.bfloat16
    assert not torch.equal(before, model.weight)
    assert not optimizer._update.optimizer_state.master_tensors()


def test_a_parameter_that_is_frozen_and_one_that_comes_later_keep_their_states():
    run = Run(ELEMENTWISE["AdamW"], shapes=[(64, 40), (64, 40)])
    run.train(2)
    run.params[1].requires_grad_(False)
    frozen = run.optimizer.state[run.params[1]]["exp_avg"].clone()
    run.optimizer.zero_grad()
    run.booster.backward(loss_with(run.params[:1], [torch.ones(64, 40)]), run.optimizer)
    run.optimizer.step()
    assert torch.equal(run.optimizer.state[run.params[1]]["exp_avg"], frozen)
    late = nn.Parameter(torch.ones(64, 64))
    run.optimizer.add_param_group({"params": [late]})
    run.booster.backward(loss_with([late], [torch.ones(64, 64)]), run.optimizer)
    run.optimizer.step()
    assert run.optimizer.state[late]["exp_avg"].shape == (64, 64)
    assert float(late.detach().max()) < 1.0


# ---------------------------------------------------------------------- state dicts and checkpoints


def test_a_state_dict_is_torchs_loads_into_torch_and_goes_on_to_the_bit():
    run, again = Run(ELEMENTWISE["AdamW"]), Run(ELEMENTWISE["AdamW"])
    run.train(3)
    state = run.optimizer.state_dict()
    plain = optim.AdamW([param.detach().clone() for param in run.params])
    plain.load_state_dict({key: state[key] for key in ("state", "param_groups")})
    assert {value["exp_avg"].dtype for value in plain.state.values()} == {torch.float32}
    buffer = io.BytesIO()
    torch.save(state, buffer)
    buffer.seek(0)
    again.boosted.load_state_dict(run.boosted.state_dict())
    again.optimizer.load_state_dict(torch.load(buffer, weights_only=True))
    again.generator.set_state(run.generator.get_state())
    for each in (run, again):
        each.train(3)
    assert same(run.params, again.params)
    assert same(run.kept(), again.kept())


@pytest.mark.parametrize(("source", "target"), [("fp32", "8bit"), ("8bit", "fp32"), ("8bit", "bf16"), ("8bit", "8bit")])
def test_a_checkpoint_moves_between_ways_to_keep_states(source, target, tmp_path):
    old, new = Run(ELEMENTWISE["AdamW"], states=source), Run(ELEMENTWISE["AdamW"], states=target)
    old.train(3)
    old.booster.save(tmp_path, old.boosted, old.optimizer, step=3)
    new.booster.load(tmp_path, new.boosted, new.optimizer)
    assert same(old.params, new.params)
    for a, b in zip(old.params, new.params, strict=True):
        for key, value in old.optimizer.state[a].items():
            scale = float(value.abs().max())
            torch.testing.assert_close(new.optimizer.state[b][key], value, rtol=0.05, atol=0.02 * scale)
    if source == target:
        new.generator.set_state(old.generator.get_state())
        for each in (old, new):
            each.train(2)
        assert same(old.params, new.params)
        assert same(old.kept(), new.kept())


# ---------------------------------------------------------------------- what is refused, before anything is changed


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda p: optim.LBFGS(p), "LBFGS"),
        (lambda p: optim.Adafactor(p), "needs whole tensors"),
        (lambda p: optim.RMSprop(p, centered=True), "centered=True"),
    ],
)
def test_an_optimizer_whose_states_cannot_be_packed_is_refused_before_anything_changes(make, reason):
    for precision in ("fp32", "bf16_naive"):
        model = nn.Linear(4, 4)
        optimizer = make(model.parameters())
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(ValueError, match=reason):
            Booster("cpu", precision, states="8bit").boost(model, optimizer)
        assert model.weight.dtype == torch.float32
        assert same(before.values(), model.state_dict().values())
        Booster("cpu", precision).boost(model, optimizer)


def test_states_are_given_once_and_legal():
    with pytest.raises(
        ValueError, match="states is 'bf16' for Booster and '8bit' for BF16NaiveMixedPrecision; give it once"
    ):
        Booster("cpu", BF16NaiveMixedPrecision(states="8bit"), states="bf16")
    with pytest.raises(ValueError, match="states='4bit' is not legal"):
        Booster("cpu", states="4bit")
    precision = BF16NaiveMixedPrecision(states="8bit")
    assert Booster("cpu", precision, states="8bit").precision is precision
    assert Booster("cpu", "bf16_naive", states="8bit").precision.kept.states == "8bit"
    plain = BF16MixedPrecision()
    assert Booster("cpu", plain, states="8bit").precision.kept.states == "8bit"
    assert plain.kept.states == "fp32"
    for given in (BF16NaiveMixedPrecision(), Int8MixedPrecision(emulate=True)):
        assert Booster("cpu", given, states="8bit").precision.kept.states == "8bit"
        assert given.kept.states == "fp32"


def test_a_precision_with_an_update_of_its_own_refuses_packed_states():
    class Own(MixedPrecision):
        def make_update(self, optimizer, names, weights, *, compiled):
            return None

    for precision in (Own(), FP16ApexMixedPrecision("O1"), FP16ApexMixedPrecision("O2")):
        with pytest.raises(ValueError, match="in its own way, which keeps states as they are; leave out states='8bit'"):
            Booster("cpu", precision, states="8bit")
