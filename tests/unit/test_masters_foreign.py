"""Weights that somebody else writes between two steps are what the next step starts from, however they are written."""

import pytest
import torch
from comparing import same
from torch import nn

from booster import Booster
from booster.masters.rounding import accept_foreign_writes
from booster.mixed_precision import BF16NaiveMixedPrecision, FP16ApexMixedPrecision, FP16NaiveMixedPrecision

PRECISIONS = {
    "fp16, fp32 masters": lambda **kw: FP16NaiveMixedPrecision(initial_scale=2.0**7, **kw),
    "fp16, split": lambda **kw: FP16NaiveMixedPrecision(initial_scale=2.0**7, master_weights="split", **kw),
    "fp16, kahan": lambda **kw: FP16NaiveMixedPrecision(
        initial_scale=2.0**7, master_weights="none", rounding="kahan", **kw
    ),
    "bf16, fp32 masters": lambda **kw: BF16NaiveMixedPrecision(master_weights="fp32", **kw),
    "bf16, split": lambda **kw: BF16NaiveMixedPrecision(**kw),
    "bf16, none": lambda **kw: BF16NaiveMixedPrecision(master_weights="none", **kw),
    "bf16, stochastic": lambda **kw: BF16NaiveMixedPrecision(master_weights="none", rounding="stochastic", **kw),
    "bf16, kahan": lambda **kw: BF16NaiveMixedPrecision(master_weights="none", rounding="kahan", **kw),
    "O2": lambda **kw: FP16ApexMixedPrecision("O2", loss_scale=128.0, verbosity=0, **kw),
}


class WithEmpty(nn.Linear):
    """A layer with a parameter that has no elements."""

    def __init__(self, *args):
        super().__init__(*args)
        self.nothing = nn.Parameter(torch.zeros(0, 4))


class Run:
    def __init__(self, precision, *, lr=0.01, fused=True, layer=nn.Linear, make=torch.optim.SGD):
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(40, 300), nn.ReLU(), nn.Linear(300, 50), layer(50, 30))
        net[2].bias.requires_grad_(False)
        self.booster = Booster("cpu", PRECISIONS[precision](), fused_optimizer=fused)
        self.model, self.optimizer, *_ = self.booster.boost(net, make(net.parameters(), lr=lr))
        self.generator = torch.Generator().manual_seed(1)
        self.params = list(self.model.parameters())

    def step(self, lr=None):
        if lr is not None:
            for group in self.optimizer.param_groups:
                group["lr"] = lr
        self.optimizer.zero_grad()
        loss = (self.model(torch.randn(8, 40, generator=self.generator)) - 1).square().mean()
        self.booster.backward(loss, self.optimizer)
        assert self.optimizer.step().applied

    def weights(self):
        return [param.detach().clone() for param in self.params]


def new_weights(param, seed=5):
    generator = torch.Generator().manual_seed(seed)
    return (0.05 * torch.randn(param.shape, generator=generator)).to(param.dtype)


def _load(run):
    run.model.load_state_dict({name: new_weights(p) for name, p in run.model.named_parameters()})


def _each(write):
    def write_all(run):
        with torch.no_grad():
            for param in run.params:
                write(param)

    return write_all


def _set_data(param):
    param.data = new_weights(param)


def _swap_there_and_back(param):
    kept, param.data = param.data, new_weights(param)
    param.data = kept


WRITES = {
    "load_state_dict": _load,
    "copy_": _each(lambda p: p.copy_(new_weights(p))),
    "data.copy_": _each(lambda p: p.data.copy_(new_weights(p))),
    "data =": _each(_set_data),
    "data.clamp_": _each(lambda p: p.data.clamp_(-0.01, 0.01)),
    "data.neg_": _each(lambda p: p.data.neg_()),
    "a mask": _each(lambda p: p.data.mul_(new_weights(p) > 0)),
    "zeros": _each(lambda p: p.zero_()),
    "one element": _each(lambda p: p.data.view(-1)[-1:].fill_(0.5)),
    "two elements change places": _each(lambda p: p.data.copy_(p.data.roll(1, 0))),
    "there and back": _each(_swap_there_and_back),
}


@pytest.mark.crossed
@pytest.mark.parametrize("write", WRITES)
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_step_without_an_update_leaves_what_was_written(precision, write):
    run = Run(precision)
    run.step()
    run.step()
    before = run.weights()
    WRITES[write](run)
    written = run.weights()
    assert same(before, written) == (write == "there and back")
    run.step(lr=0.0)
    assert same(run.weights(), written)


def _unfreeze(run):
    run.model[2].bias.requires_grad_(True)


def _add_group(run):
    extra = nn.Parameter(torch.ones(8, dtype=run.params[0].dtype))
    run.optimizer.add_param_group({"params": [extra]})


@pytest.mark.crossed
@pytest.mark.parametrize("event", [_unfreeze, _add_group, None], ids=["unfrozen", "group added", "an empty parameter"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_loaded_weights_stay_whatever_else_changes_before_the_next_step(precision, event):
    run = Run(precision, layer=nn.Linear if event else WithEmpty)
    run.step()
    _load(run)
    if event is not None:
        event(run)
    written = run.weights()
    run.step(lr=0.0)
    assert same(run.weights(), written)


def _backward(run):
    loss = (run.model(torch.randn(8, 40, generator=run.generator)) - 1).square().mean()
    run.booster.backward(loss, run.optimizer)


@pytest.mark.crossed
@pytest.mark.parametrize("event", [_unfreeze, _add_group, None], ids=["unfrozen", "group added", "trained before"])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_parameter_frozen_after_its_backward_is_clipped_and_stepped_as_any_with_a_gradient(precision, event):
    def train(freezes):
        run = Run(precision)
        run.step()
        run.optimizer.zero_grad()
        if event is not None:
            event(run)
        late = run.optimizer.param_groups[-1]["params"][-1] if event is _add_group else run.model[2].bias
        late = late if event is not None else run.model[0].weight
        norms = []
        for number in range(2):
            _backward(run)
            if event is _add_group:
                run.optimizer.backward((late * torch.linspace(0.1, 1.7, 8, dtype=late.dtype)).sum())
            late.requires_grad_(not (freezes and number == 0))
            norms.append(run.optimizer.clip_grad_by_norm(0.05))
            assert run.optimizer.step().applied
            late.requires_grad_(True)
            run.optimizer.zero_grad()
        return [*run.weights(), late.detach().clone(), torch.tensor(norms)]

    assert same(train(freezes=True), train(freezes=False))


@pytest.mark.parametrize("precision", PRECISIONS)
def test_masters_of_weights_that_nobody_wrote_keep_every_bit(precision):
    run = Run(precision)
    run.step()
    before = run.optimizer.state_dict()["booster"].get("masters", {"weights": {}})["weights"]
    _each(_swap_there_and_back)(run)
    with torch.no_grad():
        run.params[0].data[0].fill_(0.25)
    after = run.optimizer.state_dict()["booster"].get("masters", {"weights": {}})["weights"]
    for name, master in before.items():
        rows = slice(1, None) if master.shape == run.params[0].shape else slice(None)
        assert torch.equal(after[name][rows], master[rows])


@pytest.mark.parametrize("precision", [name for name in PRECISIONS if name != "bf16, none"])
def test_weights_that_were_set_to_zero_go_on_training(precision):
    run = Run(precision, make=torch.optim.AdamW)
    for _ in range(3):
        run.step()
    with torch.no_grad():
        run.params[-1].zero_()
        run.params[-2].data.zero_()
    for _ in range(3):
        run.step()
    for param in run.params[-2:]:
        assert int((param == 0).sum()) <= 0.05 * param.numel()
        assert param.isfinite().all()


@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_parameter_that_became_something_else_raises(precision):
    run = Run(precision)
    run.step()
    run.params[0].data = run.params[0].data[:10].clone()
    with pytest.raises(RuntimeError, match=r"became one of \(10, 40\).*Convert the model before boost"):
        run.optimizer.state_dict()


@pytest.mark.parametrize("precision", [name for name in PRECISIONS if name not in ("bf16, none", "bf16, stochastic")])
def test_a_model_that_was_cast_after_boost_raises(precision):
    run = Run(precision)
    run.step()
    for param in run.params:
        param.data = param.data.float()
    with pytest.raises(RuntimeError, match="after boost"):
        run.optimizer.state_dict()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_foreign_weights_are_found_alike_in_large_pieces_and_in_small_ones(dtype):
    """Every half number, with masters as far from it as still round to it, and a bit further; more than fit into one chunk."""
    half_step = 0x8000 if dtype == torch.bfloat16 else 0x1000
    distances = [-half_step - 1, -half_step, 1 - half_step, 0, half_step - 1, half_step, half_step + 1]
    weights = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).repeat(len(distances))
    away = torch.tensor(distances, dtype=torch.int32).repeat_interleave(2**16)
    masters = (weights.float().view(torch.int32) + away).view(torch.float32)
    if dtype == torch.bfloat16:
        rounds_to = ((masters.view(torch.int32) + 0x8000) >> 16).to(torch.int16)
    else:
        rounds_to = masters.to(dtype).view(torch.int16)
    believed = rounds_to == weights.view(torch.int16)
    assert 0.2 < believed.float().mean() < 0.8
    expected = torch.where(believed, masters, weights.float()).view(torch.int32)
    for working in ([weights], list(weights.split(64))):
        values = masters.clone()
        accept_foreign_writes(working, values, torch.empty_like(values))
        assert torch.equal(values.view(torch.int32), expected)


@pytest.mark.parametrize("precision", ["bf16, split", "fp16, fp32 masters"])
def test_a_parameter_that_is_taken_out_of_its_group_is_not_stepped_on_in_silence(precision):
    run = Run(precision)
    run.step()
    (group,) = run.optimizer.param_groups
    before, bias = run.weights(), group["params"].pop()
    with pytest.raises(RuntimeError, match=r"3\.bias was taken out of the groups of the optimizer.*put it back"):
        run.step()
    assert all(map(torch.equal, run.weights(), before)), "raised, but stepped"
    group["params"].append(bias)
    run.step()
    assert not torch.equal(bias, before[-1])
