"""Steps by kernels: what a skip leaves, the decision over many steps, layouts, groups, missing gradients, checkpoints, and what
a step launches, reads and moves."""

import copy
import random

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreted import gradients, held, interpreted, pair, step_on
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim import SGD, AdamW

from benchmarks.waits import HostReads
from booster.mixed_precision import BF16NaiveMixedPrecision, FP16NaiveMixedPrecision, FP16TorchMixedPrecision

pytestmark = interpreted
INF, NAN = float("inf"), float("nan")
FORMS = {
    "fp32": ("fp32", {}),
    "fp32, 8bit": ("fp32", {"states": "8bit"}),
    "masters": (lambda: FP16NaiveMixedPrecision(master_weights="fp32"), {}),
    "split": (lambda: BF16NaiveMixedPrecision(master_weights="split"), {}),
    "split24, 8bit": (lambda: BF16NaiveMixedPrecision(master_weights="split24", states="8bit"), {}),
    "split24, bf16": (lambda: FP16NaiveMixedPrecision(master_weights="split24", states="bf16"), {}),
    "kahan": (lambda: BF16NaiveMixedPrecision(master_weights="none", rounding="kahan"), {}),
}


def adamw(params):
    return AdamW(params, lr=1e-2)


def make_model():
    return nn.Sequential(nn.Linear(7, 33), nn.BatchNorm1d(33), nn.Linear(33, 5))


def everything(model, optimizer):
    """Copies of all bytes that a step may write."""
    tensors = list(model.parameters())
    update = optimizer._update
    if update.optimizer_state.has_masters:
        tensors += [bucket.residual for bucket in update.optimizer_state.masters.buckets if bucket.residual is not None]
    for own in optimizer.optimizer.state.values():
        for value in own.values():
            tensors += value.tensors if hasattr(value, "tensors") else [value]
    return [tensor.detach().reshape(-1).view(torch.uint8).clone() for tensor in tensors]


@pytest.mark.parametrize("bad", [INF, -INF, NAN])
@pytest.mark.parametrize("form", FORMS)
def test_a_skip_leaves_every_byte(form, bad):
    precision, options = FORMS[form]
    step = pair(make_model, adamw, precision, skip_nonfinite=True, **options)[1]
    params = list(step[1].parameters())
    assert step_on(*step, gradients(params, 0)).applied
    before = everything(*step[1:])
    assert not step_on(*step, gradients(params, 1, bad)).applied
    after = everything(*step[1:])
    assert len(before) == len(after) > len(params)
    assert all(map(torch.equal, before, after))


def test_a_loss_scale_moves_as_on_the_host():
    def precision():
        return FP16TorchMixedPrecision(growth_interval=2, init_scale=2.0**10)

    both = pair(make_model, adamw, precision)
    drawn = random.Random(0)
    for number in range(12):
        bad = INF if drawn.random() < 0.4 else None
        results = [step_on(*each, gradients(list(each[1].parameters()), number, bad)) for each in both]
        assert results[0].applied == results[1].applied == (bad is None)
        assert both[0][2].loss_scale == both[1][2].loss_scale
        assert results[0].loss_scale == results[1].loss_scale


def shaped(shapes, orders):
    model = nn.Module()
    for index, (shape, order) in enumerate(zip(shapes, orders, strict=True)):
        value = torch.randn(shape)
        if order and len(shape) > 1:
            value = value.transpose(0, -1).contiguous().transpose(0, -1)
        model.register_parameter(f"p{index}", nn.Parameter(value))
    return model


@settings(max_examples=12, deadline=None, derandomize=True)
@given(st.data())
def test_any_layout_with_any_gradients_missing_is_stepped_as_by_torch(data):
    shapes = data.draw(st.lists(st.lists(st.integers(0, 9), max_size=3).map(tuple), min_size=1, max_size=5))
    orders = data.draw(st.lists(st.booleans(), min_size=len(shapes), max_size=len(shapes)))
    half = data.draw(st.booleans())

    def precision():
        return BF16NaiveMixedPrecision(master_weights="split") if half else "fp32"

    def make(params):
        given = list(params)
        if len(given) == 1:
            return AdamW(given, lr=1e-2)
        return AdamW([{"params": given[:1], "lr": 1e-3, "betas": (0.8, 0.9)}, {"params": given[1:]}], lr=1e-2)

    made = precision() if not half else precision
    both = pair(lambda: shaped(shapes, orders), make, made, clip_grad_norm=0.5)
    for number in range(3):
        missing = data.draw(st.lists(st.booleans(), min_size=len(shapes), max_size=len(shapes)))
        turned = data.draw(st.booleans())
        for each in both:
            grads = gradients(list(each[1].parameters()), number, scale=1.0)
            if turned:
                grads = [g.t().contiguous().t() if g.dim() == 2 else g for g in grads]
            if all(missing):
                continue
            step_on(*each, [None if gone else grad for gone, grad in zip(missing, grads, strict=True)])
        (weights, states), (others, theirs) = (held(each[2]) for each in both)
        for own, other in zip(others, weights, strict=True):
            torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-6)
        for own, other in zip(theirs, states, strict=True):
            if "step" in other:
                assert float(own["step"]) == float(other["step"])


def test_a_run_goes_on_from_the_checkpoint_of_a_run_without_kernels_and_back():
    for form in ("split24, 8bit", "fp32"):
        precision, options = FORMS[form]
        first, second = pair(make_model, adamw, precision, **options)
        params = list(first[1].parameters())
        for number in range(2):
            step_on(*first, gradients(params, number))
        for source, target in ((first, second), (second, first)):
            target[1].load_state_dict(copy.deepcopy(source[1].state_dict()))
            target[2].load_state_dict(copy.deepcopy(source[2].state_dict()))
            mine, theirs = held(source[2]), held(target[2])
            assert all(map(torch.equal, mine[0], theirs[0]))
            for own, other in zip(mine[1], theirs[1], strict=True):
                assert all(torch.equal(own[name], other[name]) for name in own)
            step_on(*target, gradients(params, 5))


def test_accumulated_gradients_a_schedule_and_a_clip_of_the_users_are_as_without_kernels():
    both = pair(make_model, lambda p: SGD(p, lr=0.1, momentum=0.9), "fp16")
    for booster, model, optimizer in both:
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        torch.manual_seed(3)
        for _ in range(3):
            for _ in range(2):
                booster.backward(model(torch.randn(6, 7)).square().mean() / 2, optimizer)
            norm = optimizer.clip_grad_by_norm(0.01)
            result = optimizer.step()
            assert result.applied
            assert float(norm) == pytest.approx(result.grad_norm, rel=1e-6)
            schedule.step()
            optimizer.zero_grad()
    for own, other in zip(both[1][1].parameters(), both[0][1].parameters(), strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-6)


def test_a_weight_that_somebody_wrote_is_its_own_master():
    _, step = pair(make_model, adamw, lambda: BF16NaiveMixedPrecision(master_weights="fp32"))
    params = list(step[1].parameters())
    step_on(*step, gradients(params, 0))
    params[0].data.fill_(3.0)
    step_on(*step, [torch.zeros_like(p) for p in params])
    assert (step[2]._update.optimizer_state.masters.values()[params[0]].clone() - 3.0).abs().max() < 0.05


# ---- what a step costs ----


def launched(step, grads, monkeypatch, clip=None):
    """Names of the kernels that one step launches, after a clip of the user's."""
    from triton.runtime.interpreter import InterpretedFunction

    found = []
    before = InterpretedFunction.__getitem__

    def counted(self, grid):
        found.append((self.fn.__name__, grid))
        return before(self, grid)

    monkeypatch.setattr(InterpretedFunction, "__getitem__", counted)
    try:
        booster, model, optimizer = step
        booster.backward(loss := _loss(model, grads), optimizer)
        assert loss is not None
        with HostReads() as reads:
            if clip is not None:
                optimizer.clip_grad_by_norm(clip)
            optimizer.step()
        optimizer.zero_grad()
    finally:
        monkeypatch.undo()
    return [name for name, _ in found], reads.found


def _loss(model, grads):
    from prescribed import loss_with

    return loss_with(list(model.parameters()), grads)


COSTS = {
    "fp32": ["measure", "decide", "update"],
    "fp32, 8bit": ["measure", "decide", "update"],
    "masters": ["measure", "decide", "update", "update"],  # and float32 weights of the normalisation
    "split": ["measure", "decide", "update", "update"],
    "split24, 8bit": ["measure", "decide", "update", "update"],
    "kahan": ["measure", "decide", "update", "update"],
}


@pytest.mark.parametrize("form", COSTS)
def test_a_step_is_three_launches_and_one_more_for_another_kind_and_reads_nothing_on_the_host(form, monkeypatch):
    precision, options = FORMS[form]
    step = pair(make_model, adamw, precision, clip_grad_norm=1.0, **options)[1]
    params = list(step[1].parameters())
    for number in range(2):
        step_on(*step, gradients(params, number))
    step[2].sync()
    names, reads = launched(step, gradients(params, 3), monkeypatch)
    assert names == COSTS[form]
    assert reads == {}


def test_a_step_that_looks_at_no_gradients_is_two_launches(monkeypatch):
    step = pair(make_model, adamw, "fp32")[1]
    params = list(step[1].parameters())
    step_on(*step, gradients(params, 0))
    assert launched(step, gradients(params, 1), monkeypatch)[0] == ["decide", "update"]


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_a_clip_of_the_users_costs_two_small_launches(precision, monkeypatch):
    step = pair(make_model, adamw, precision)[1]
    params = list(step[1].parameters())
    step_on(*step, gradients(params, 0))
    step[2].sync()
    names, reads = launched(step, gradients(params, 1), monkeypatch, clip=0.5)
    assert names == ["measure", "norm_of", "clip_by", "decide", "update"]
    assert reads == {}


BYTES = {  # of a parameter: what a step reads and writes, its gradients a second time for the norm included
    "fp32": (4 + 4, 4 * 2, 8 * 2, 0),
    "masters": (2 + 2, 2 * 2 + 4 * 2, 8 * 2, 0),
    "split": (2 + 2, 2 * 2 + 2 * 2, 8 * 2, 0),
    "split24, 8bit": (2 + 2, 2 * 2 + 1 * 2, 2 * (1 + 2 / 32) * 2, 0),
    "kahan": (2 + 2, 2 * 2 + 2 * 2, 8 * 2, 0),
}


@pytest.mark.parametrize("form", BYTES)
def test_a_step_moves_the_bytes_of_the_formula(form):
    precision, options = FORMS[form]
    step = pair(lambda: nn.Linear(64, 64, bias=False), adamw, precision, clip_grad_norm=1.0, **options)[1]
    step_on(*step, gradients(list(step[1].parameters()), 0))
    table = step[2]._update.decision.steps._sets[0].tables.first
    assert table.bytes_of_a_step == pytest.approx(64 * 64 * sum(BYTES[form]))


@pytest.mark.parametrize("form", ["fp32", "split", "masters"])
def test_a_dampened_momentum_begins_with_the_first_step_that_is_made(form):
    precision, options = FORMS[form]

    def make(params):
        return SGD(params, lr=1e-2, momentum=0.9, dampening=0.3)

    torchs, ours = pair(make_model, make, precision, skip_nonfinite=True, **options)
    count = len(list(ours[1].parameters()))
    for number, missing in enumerate((0, 0, 1, 0, 0)):  # the last parameter begins late
        for step in (torchs, ours):
            grads = gradients(list(step[1].parameters()), number, INF if number == 0 else None)
            applied = step_on(*step, [*grads[: count - missing], *[None] * missing]).applied
            assert applied is (number > 0)
        by_torch = ours[2]._update.decision.steps.reason is not None
        assert by_torch is (number < 2), number
    for own, other in zip(*map(held, (ours[2], torchs[2])), strict=True):
        for one, wanted in zip(own, other, strict=True):
            pairs = zip(one.values(), wanted.values(), strict=True) if isinstance(one, dict) else [(one, wanted)]
            for values in pairs:
                torch.testing.assert_close(*values, rtol=1e-6, atol=1e-8)


@pytest.fixture
def counted(monkeypatch):
    """How many tables are made, and copies to the device."""
    from booster.common.devices import DeviceCopies
    from booster.kernels import steps

    found, copy_there = {"tables": 0, "copies": 0}, DeviceCopies.__call__

    class Table(steps.Table):
        def __init__(self, *given):
            found["tables"] += 1
            super().__init__(*given)

    def counting(copies, values, device):
        found["copies"] += 1
        return copy_there(copies, values, device)

    monkeypatch.setattr(steps, "Table", Table)
    monkeypatch.setattr(DeviceCopies, "__call__", counting)
    return found


@pytest.mark.parametrize("form", ["fp32", "masters"])
def test_a_table_is_made_once_for_a_set_of_gradients_and_copied_once_where_they_moved(form, counted):
    precision, options = FORMS[form]
    booster, model, optimizer = pair(make_model, adamw, precision, **options)[1]
    params = list(model.parameters())
    grads = gradients(params, 0)

    def step(chosen, grads):
        booster.backward(sum(param.float().sum() for param in params) * 0.0, optimizer)
        for param, grad in zip(params, grads, strict=True):
            param.grad = grad if id(param) in chosen else None
        before = dict(counted)
        optimizer.step()
        return counted["tables"] - before["tables"], counted["copies"] - before["copies"]

    everything = set(map(id, params))
    sets = [everything] if form == "masters" else [everything, set(map(id, params[:2])), set(map(id, params[3:]))]
    for chosen in sets:
        assert step(chosen, grads)[0] == 1
    for chosen in sets * 3:
        assert step(chosen, grads) == (0, 0)
    moved = [grad.clone() for grad in grads]
    for chosen in sets:
        assert step(chosen, moved) == (0, 1)
        assert step(chosen, moved) == (0, 0)


def test_states_that_were_replaced_are_not_kept_by_sets_that_are_stepped_no_more():
    _, model, optimizer = step = pair(make_model, adamw, "fp32")[1]
    params = list(model.parameters())
    step_on(*step, gradients(params, 0))
    step_on(*step, [grad if place < 2 else None for place, grad in enumerate(gradients(params, 1))])
    old = StorageWeakRef(optimizer.optimizer.state[params[-1]]["exp_avg"].untyped_storage())
    assert not old.expired()
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step_on(*step, [grad if place < 2 else None for place, grad in enumerate(gradients(params, 2))])
    assert old.expired()


def test_gradients_are_let_go_with_zero_grad_where_one_has_to_be_laid_otherwise():
    def make_images():
        return nn.Sequential(nn.Conv2d(2, 3, 2).to(memory_format=torch.channels_last), nn.Flatten(), nn.Linear(12, 5))

    booster, model, optimizer = pair(make_images, adamw, "fp32")[1]
    images = torch.randn(4, 2, 3, 3)
    refs = []
    for _ in range(3):
        booster.backward(model(images).square().mean(), optimizer)
        first = next(model.parameters())
        first.grad = first.grad.contiguous()  # which is to be copied
        refs += [StorageWeakRef(param.grad.untyped_storage()) for param in model.parameters()]
        assert optimizer.step().applied
        optimizer.zero_grad()
    assert optimizer._update.decision.steps.reason is None
    assert all(ref.expired() for ref in refs)
