"""Optimizer states in the host's memory, `Booster(offload_states=True)`: on a CPU, where nothing has to move, and on one that
imitates a device with copies that run as late as they may, or at once."""

import copy
import itertools

import pytest
import torch
from comparing import assert_same, same
from fake_transfers import FakeTransfers, on_host
from prescribed import loss_with
from test_masters import ELEMENTWISE
from test_packed_states_wide import WIDE
from torch import nn, optim

from booster import Booster
from booster.masters import offload
from booster.masters.offload import tensors_of
from booster.memory import estimate
from booster.mixed_precision import (
    BF16NaiveMixedPrecision,
    FP16ApexMixedPrecision,
    FP16NaiveMixedPrecision,
    MixedPrecision,
    available,
    make,
)
from booster.model.optimizers import granularity_of
from booster.tensors import flat

SHAPES = [(50, 41), (33,), (), (7, 5, 3), (57, 40), (64,)]
NAIVE = {
    "split": lambda: BF16NaiveMixedPrecision(master_weights="split"),
    "split24": lambda: BF16NaiveMixedPrecision(master_weights="split24"),
    "separate": lambda: BF16NaiveMixedPrecision(master_weights="fp32"),
    "none": lambda: BF16NaiveMixedPrecision(master_weights="none"),
    "kahan": lambda: BF16NaiveMixedPrecision(master_weights="none", rounding="kahan"),
    "split24, 8bit": lambda: BF16NaiveMixedPrecision(master_weights="split24", states="8bit"),
    "split, bf16 states": lambda: BF16NaiveMixedPrecision(master_weights="split", states="bf16"),
    "fp16 split": lambda: FP16NaiveMixedPrecision(master_weights="split", initial_scale=2.0**10),
    "fp16 split24, 8bit": lambda: FP16NaiveMixedPrecision(
        master_weights="split24", states="8bit", initial_scale=2.0**10
    ),
}


@pytest.fixture(params=["as late as may be", pytest.param("at once", marks=pytest.mark.slow)])
def device(request, monkeypatch):
    """The CPU acts as a device that states have to travel to; buckets are small, so that there are several."""
    monkeypatch.setattr(flat, "SMALLEST_SPARING_BUCKET", 1024)
    monkeypatch.setitem(offload.TRANSFERS, "cpu", FakeTransfers)
    monkeypatch.setattr(FakeTransfers, "made", [])
    monkeypatch.setattr(FakeTransfers, "at_once", request.param == "at once")


class Run:
    """Parameters of several shapes and prescribed gradients."""

    def __init__(self, precision, make=ELEMENTWISE["AdamW"], *, shapes=SHAPES, **options):
        generator = torch.Generator().manual_seed(3)
        self.model = nn.ParameterList(nn.Parameter(torch.randn(shape, generator=generator)) for shape in shapes)
        self.inner = make(self.model.parameters())
        self.booster = Booster("cpu", precision, **options)
        self.boosted, self.optimizer, *_ = self.booster.boost(self.model, self.inner)
        self.params = list(self.model)
        self.generator = torch.Generator().manual_seed(7)

    def train(self, steps, poison=(), missing=()):
        results = []
        for step in range(steps):
            grads = [torch.randn(param.shape, generator=self.generator) for param in self.params]
            if step in poison:
                grads[0].view(-1)[3] = float("inf")
            self.optimizer.zero_grad()
            some = range(0, len(grads), 2) if step in missing else range(len(grads))
            loss = loss_with([self.params[i] for i in some], [grads[i] for i in some])
            self.booster.backward(loss, self.optimizer)
            results.append(bool(self.optimizer.step()))
        return results

    def everything(self):
        return [param.detach().clone() for param in self.params], copy.deepcopy(self.optimizer.state_dict())


def lies_where(run):
    return on_host(run.optimizer)


# ---------------------------------------------------------------------- on a CPU


@pytest.mark.parametrize("name", [*sorted(WIDE.keys() - {"int8"}), *NAIVE])
def test_on_a_cpu_every_precision_trains_to_the_same_bits_and_states_stay_where_they_are(name):
    make = {**WIDE, **NAIVE}[name]
    plain, offloaded = Run(make()), Run(make(), offload_states=True)
    assert offloaded.booster.precision.kept.offload
    assert plain.train(4, poison=[2]) == offloaded.train(4, poison=[2])
    assert_same(plain.everything(), offloaded.everything())
    own = [value for state in offloaded.inner.state.values() for value in state.values()]
    assert {tensor.device.type for value in own for tensor in tensors_of(value)} == {"cpu"}


# ---------------------------------------------------------------------- on an imitation of a device


@pytest.mark.parametrize("name", NAIVE)
def test_masters_and_states_that_travel_train_to_the_same_bits_as_those_that_stay(device, name):
    plain, moved = Run(NAIVE[name]()), Run(NAIVE[name](), offload_states=True)
    assert plain.train(5, poison=[2]) == moved.train(5, poison=[2])
    assert len(moved.optimizer._update.optimizer_state.masters.buckets) > 4
    assert all(lies_where(moved))
    assert len(lies_where(moved)) >= 8
    assert_same(plain.everything(), moved.everything())


def test_the_only_bucket_of_a_model_is_fetched_after_the_step_before_has_sent_it(device):
    runs = [Run(NAIVE["split"](), shapes=[(40,), (64,)], offload_states=on) for on in (False, True)]
    for run in runs:
        run.train(3)
    assert len(runs[1].optimizer._update.optimizer_state.masters.buckets) == 1
    assert_same(*(run.everything() for run in runs))


def test_weights_that_are_loaded_after_a_step_join_masters_that_it_still_sends(device):
    runs = [Run(NAIVE["split"](), shapes=[(40,), (64,)], offload_states=on) for on in (False, True)]
    for run in runs:
        run.train(2)
        run.boosted.load_state_dict({**run.boosted.state_dict(), "0": torch.linspace(-1, 1, 40)})
        run.train(1)
    assert_same(*(run.everything() for run in runs))


@pytest.mark.parametrize("states", ["fp32", "8bit"])
@pytest.mark.parametrize("name", ["fp32", "fp16"])
def test_states_of_float32_weights_travel_too(device, name, states):
    """In multiples of 64, where no kernel comes to a remainder, which it would round otherwise."""
    shapes = [(64, 32), (64,), (16, 100), ()]
    runs = [Run(WIDE[name](), shapes=shapes, states=states, offload_states=on) for on in (False, True)]
    for run in runs:
        assert run.train(4)[-1]
    assert lies_where(runs[1])
    assert all(lies_where(runs[1]))
    (weights, state), (others, moved) = (run.everything() for run in runs)
    assert same(weights, others)
    assert same((state["state"], state["param_groups"]), (moved["state"], moved["param_groups"]))
    for run, saved in zip(runs, (moved, state), strict=True):  # each loads what the other saved
        run.optimizer.load_state_dict(saved)
        run.train(1)
    assert all(map(torch.equal, runs[0].everything()[0], runs[1].everything()[0]))


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_every_elementwise_optimizer_finds_its_states_again(device, name):
    plain, moved = (Run(NAIVE["split"](), ELEMENTWISE[name], offload_states=on) for on in (False, True))
    for run in (plain, moved):
        run.train(4)
    assert_same(plain.everything(), moved.everything())


@pytest.mark.parametrize("name", ["split24, 8bit", "separate", "fp16 split"])
def test_a_checkpoint_has_the_same_form_and_a_resume_is_to_the_bit(device, name):
    plain, moved, resumed = (Run(NAIVE[name](), offload_states=on) for on in (False, True, True))
    for run in (plain, moved):
        run.train(3)
    saved = plain.everything()
    assert same(saved, moved.everything())
    with torch.no_grad():
        for param, value in zip(resumed.params, saved[0], strict=True):
            param.copy_(value)
    resumed.optimizer.load_state_dict(copy.deepcopy(saved[1]))
    resumed.generator.set_state(plain.generator.get_state())
    assert all(lies_where(resumed))
    for run in (plain, moved, resumed):
        run.train(3)
    assert_same(plain.everything(), moved.everything())
    assert_same(plain.everything(), resumed.everything())


def test_buckets_that_are_divided_and_weights_that_others_write_are_followed(device):
    plain, moved = (Run(NAIVE["split24, 8bit"](), offload_states=on) for on in (False, True))
    for run in (plain, moved):
        run.train(3, missing=[1])
        with torch.no_grad():
            run.params[4].mul_(0.5)
            run.params[0].data = run.params[0].data.t().contiguous().t()
        run.train(2)
    assert all(lies_where(moved))
    assert_same(plain.everything(), moved.everything())


@pytest.mark.parametrize("mode", ["exact", False])
@pytest.mark.parametrize("name", ["split24, 8bit", "fp16 split"])
def test_released_gradients_and_offloaded_states_go_together(device, name, mode):
    plain, moved = (
        Run(NAIVE[name](), release_gradients=mode, offload_states=on, clip_grad_norm=1.0) for on in (False, True)
    )
    for run in (plain, moved):
        run.train(4, poison=[1])
    assert all(lies_where(moved))
    assert_same(plain.everything(), moved.everything())


def test_a_bucket_is_fetched_while_the_one_before_is_stepped_and_at_most_two_are_there(device):
    moved = Run(NAIVE["split"](), offload_states=True)
    moved.train(2)
    host = next(iter(moved.optimizer._update.optimizer_state.masters.hosts.values()))
    seen, step = [], moved.inner.__class__.step

    class Watching(moved.inner.__class__):
        def step(self, *args):
            fetched = {place for place, what in enumerate(host.transfers.into.order) if what == "copy"}
            seen.append((len(fetched), host.transfers.out.order.count("copy")))
            return step(self, *args)

    into, out = host.transfers.into.order, host.transfers.out.order
    into.clear()
    out.clear()
    moved.inner.__class__ = Watching
    moved.train(1)
    each = 3  # a remainder and two moments
    travelling = [bucket for bucket in moved.optimizer._update.optimizer_state.masters.buckets if not bucket.whole]
    ahead = [count for count, _ in seen if count][: len(travelling)]
    assert ahead[0] == 2 * each
    assert max(ahead) == each * len(travelling)
    assert all(fetched - saved <= 2 * each for fetched, saved in seen)


def test_where_a_step_raises_states_and_masters_are_what_they_were(device):
    run = Run(NAIVE["split24, 8bit"](), offload_states=True)
    run.train(2)
    before, calls = copy.deepcopy(run.optimizer.state_dict()), itertools.count()
    own = type(run.inner)

    class Failing(own):
        def step(self, *args):
            if next(calls) == 3:
                raise MemoryError("no room")
            return own.step(self, *args)

    run.inner.__class__ = Failing
    with pytest.raises(MemoryError):
        run.train(1)
    assert all(lies_where(run))
    after = run.optimizer.state_dict()
    last = max(before["state"])
    assert same(before["state"][last], after["state"][last])
    run.inner.__class__ = own
    assert run.train(1) == [True]


def test_a_copy_of_an_optimizer_has_states_of_its_own(device):
    run = Run(NAIVE["split"](), offload_states=True)
    run.train(2)
    twin, saved = copy.deepcopy(run.optimizer), copy.deepcopy(run.optimizer.state_dict())
    run.train(2)
    assert same(twin.state_dict(), saved)
    assert not same(run.optimizer.state_dict(), saved)


# ---------------------------------------------------------------------- what is refused


@pytest.mark.parametrize("precision", ["fp32", "bf16_naive"])
def test_optimizers_that_need_whole_tensors_are_refused_before_anything_changes(precision):
    model = nn.Linear(4, 4)
    before = copy.deepcopy(model.state_dict())
    optimizer = optim.Adafactor(model.parameters())
    assert granularity_of(optimizer) == "per tensor"
    with pytest.raises(
        ValueError, match=r"offload_states=True steps flat buckets, but Adafactor needs whole tensors; leave it False"
    ):
        Booster("cpu", precision, offload_states=True).boost(model, optimizer)
    assert same(before, model.state_dict())


def test_a_precision_with_an_update_of_its_own_is_refused_when_the_booster_is_made():
    with pytest.raises(ValueError, match="FP16ApexMixedPrecision steps parameters in its own way"):
        Booster("cpu", FP16ApexMixedPrecision(), offload_states=True)

    class Own(MixedPrecision):
        def make_update(self, *args, **options):
            raise AssertionError

    with pytest.raises(ValueError, match="Own steps parameters in its own way.*leave out offload_states=True"):
        Booster("cpu", Own(), offload_states=True)


def test_every_other_precision_takes_it():
    for name in sorted(set(available()) - {"fp16_apex"}):
        assert make(name).with_kept(offload=True).kept.offload


# ---------------------------------------------------------------------- what it takes of memory


@pytest.mark.parametrize(("precision", "states", "masters"), [("bf16", 8, 0), ("bf16_naive", 8, 2)])
def test_the_estimate_has_states_and_masters_on_the_host_and_two_buckets_of_them_on_the_device(
    device, precision, states, masters
):
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))
    parts = model, optim.AdamW(model.parameters()), (torch.randn(2, 256), torch.randn(2, 256)), nn.MSELoss()
    count = sum(p.numel() for p in model.parameters())
    stays, moved = (estimate(*parts, precision=precision, offload_states=on) for on in (False, True))
    assert stays.host == moved.masters == 0
    assert moved.states < 200  # counters
    assert moved.host == pytest.approx(count * (states + masters), rel=0.01)
    scratch = max(stays.masters - count * masters, 0)  # which a step of so small a model keeps where nothing moves
    assert moved.host + moved.held == pytest.approx(stays.held - scratch, rel=0.01)
    assert moved.peak < stays.peak - 0.7 * count * (states + masters)
    assert moved.as_dict()["host"] == moved.host


def test_on_a_cpu_the_estimate_is_what_it_is_without():
    model = nn.Linear(256, 256)
    parts = model, optim.AdamW(model.parameters()), (torch.randn(2, 256), torch.randn(2, 256)), nn.MSELoss()
    found = [estimate(*parts, precision="bf16_naive", offload_states=on) for on in (False, True)]
    assert found[0] == found[1]
