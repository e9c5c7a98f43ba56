"""Steps on masters that are decided on the device: the numbers of steps decided on the host, nothing read on the host, and
nothing changed by a step that is skipped."""

import pytest
import torch
from prescribed import loss_with
from torch import nn
from torch.optim import SGD, Adagrad, Adam, AdamW

from benchmarks.waits import HostReads, as_on_a_gpu
from booster import Booster
from booster.masters.formats import (
    Float32Master,
    Kahan,
    Nearest,
    Split24BFloat16,
    Split24Float16,
    SplitBFloat16,
    SplitFloat16,
    Stochastic,
)
from booster.masters.rounding import RoundingRNG
from booster.mixed_precision import BF16NaiveMixedPrecision, FP16NaiveMixedPrecision

INF, NAN = float("inf"), float("nan")
OPTIMIZERS = {
    "AdamW": lambda params: AdamW(params, lr=1e-2),
    "Adam": lambda params: Adam(params, lr=1e-2),
    "SGD": lambda params: SGD(params, lr=1e-2),
    "SGD momentum": lambda params: SGD(params, lr=1e-2, momentum=0.9),
    "Adagrad": lambda params: Adagrad(params, lr=1e-2),
}
FORMS = {
    "fp32": {"master_weights": "fp32"},
    "split": {"master_weights": "split"},
    "split24": {"master_weights": "split24"},
    "none": {"master_weights": "none"},
    "stochastic": {"master_weights": "none", "rounding": "stochastic"},
    "kahan": {"master_weights": "none", "rounding": "kahan"},
    "8bit": {"master_weights": "split24", "states": "8bit"},
    "bf16 states": {"master_weights": "fp32", "states": "bf16"},
}
HALVES = {"fp16": FP16NaiveMixedPrecision, "bf16": BF16NaiveMixedPrecision}


def make_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 33), nn.BatchNorm1d(33), nn.Linear(33, 5), nn.Linear(5, 3))


def boosted(precision, make=OPTIMIZERS["AdamW"], **options):
    booster = Booster("cpu", precision, **options)
    net = make_model()
    model, optimizer, *_ = booster.boost(net, make(net.parameters()))
    return booster, model, optimizer


def gradients(params, step, bad=None):
    generator = torch.Generator().manual_seed(step)
    grads = [torch.randn(p.shape, generator=generator).to(p.dtype) * 1e-3 for p in params]
    if bad is not None:
        grads[2].view(-1)[1] = bad
    return grads


def train(booster, model, optimizer, bad_at=()):
    params, applied = list(model.parameters()), []
    for step in range(6):
        grads = gradients(params, step, INF if step in bad_at else None)
        booster.backward(loss_with(params, grads), optimizer)
        optimizer.clip_grad_by_norm(0.05)
        applied.append(optimizer.step().applied)
        optimizer.zero_grad()
    return applied, [param.detach().clone() for param in params]


def bits(value):
    """The same for what is the same to the bit."""
    if isinstance(value, torch.Tensor):
        return str(value.dtype), value.detach().clone().contiguous().view(
            torch.uint8
        ).tolist() if value.dim() else value.item()
    return value.codes.tolist() if hasattr(value, "codes") else value


def everything(model, optimizer):
    """Weights, what is kept with them, and the state, in the form in which they are kept."""
    buckets = optimizer._update.optimizer_state.masters.buckets
    # Between pieces is what was left in scratch. An error of minus zero, of Kahan's, may become zero.
    rests = [piece.tolist() for b in buckets if b.residual is not None for piece in b.pieces_of(b.residual)]
    state = [{key: bits(value) for key, value in own.items()} for own in optimizer.optimizer.state.values()]
    return [bits(p) for p in model.parameters()], rests, state


@pytest.mark.crossed
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("half", HALVES)
def test_a_step_decided_on_the_device_is_that_of_the_host_to_the_bit(half, form):
    made = HALVES[half](**FORMS[form])
    bad_at = (0, 3) if form != "stochastic" else ()  # a skip uses up its random numbers on a device
    expected = train(*boosted(made), bad_at)
    with as_on_a_gpu():
        booster, model, optimizer = boosted(made)
        assert optimizer._update.decision.on_device
        assert optimizer._update.optimizer_state.has_masters
        applied, weights = train(booster, model, optimizer, bad_at)
    assert applied == expected[0]
    tolerance = (
        {"rtol": 0, "atol": 0} if form not in ("8bit", "split24", "bf16 states") else {"rtol": 1e-2, "atol": 1e-3}
    )
    for param, other in zip(weights, expected[1], strict=True):
        torch.testing.assert_close(param, other, **tolerance)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_fused_optimizer_decides_on_the_device(name):
    made = FP16NaiveMixedPrecision()
    expected = train(*boosted(made, OPTIMIZERS[name]), (0, 3))
    with as_on_a_gpu():
        booster, model, optimizer = boosted(made, OPTIMIZERS[name])
        assert optimizer._update.decision.on_device
        assert optimizer._update.optimizer_state.has_masters
        assert train(booster, model, optimizer, (0, 3))[0] == expected[0]
    for param, other in zip(model.parameters(), expected[1], strict=True):
        assert torch.equal(param, other)


@pytest.mark.crossed
@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("half", HALVES)
def test_a_skip_on_the_device_writes_back_every_bit(half, form):
    with as_on_a_gpu():
        booster, model, optimizer = boosted(HALVES[half](**FORMS[form]))
        train(booster, model, optimizer)
        before = everything(model, optimizer)
        params = list(model.parameters())
        booster.backward(loss_with(params, gradients(params, 9, NAN)), optimizer)
        optimizer.clip_grad_by_norm(0.05)
        result = optimizer.step()
        assert everything(model, optimizer) == before
    assert not result.applied
    assert (result.skipped_reason, result.culprit) == ("nonfinite_grad", ("1.weight",))


def keeps_gradients(booster, model, optimizer):
    """Weights after steps between which gradients are not cleared."""
    params = list(model.parameters())
    for step in range(4):
        booster.backward(loss_with(params, gradients(params, step)), optimizer)
        if step == 1:
            optimizer.clip_grad_by_norm(0.01)
        assert optimizer.step().applied
    return [param.detach().clone() for param in params]


@pytest.mark.parametrize("half", HALVES)
def test_gradients_that_outlive_a_step_are_what_they_are_where_the_host_decides(half):
    expected = keeps_gradients(*boosted(HALVES[half](), OPTIMIZERS["SGD"]))
    with as_on_a_gpu():
        weights = keeps_gradients(*boosted(HALVES[half](), OPTIMIZERS["SGD"]))
    for weight, other in zip(weights, expected, strict=True):
        torch.testing.assert_close(weight, other, rtol=2.0**-7, atol=1e-6)


# ---------------------------------------------------------------------- what is read on the host

PRECISIONS = {
    "fp32": lambda: "fp32",
    "bf16": lambda: "bf16",
    "fp16": lambda: "fp16",
    **{
        f"{half}_naive {form}": lambda half=half, form=form: HALVES[half](**FORMS[form])
        for half in HALVES
        for form in FORMS
    },
}


@pytest.mark.crossed
@pytest.mark.parametrize("clip", [0.0, 0.05])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_a_step_reads_nothing_on_the_host(precision, clip):
    with as_on_a_gpu():
        booster, model, optimizer = boosted(PRECISIONS[precision]())
        assert optimizer._update.decision.on_device
        params = list(model.parameters())
        for step in range(3):
            optimizer.sync()
            # Fused steps of a CPU read the scale that they divide by; a device's do not.
            with HostReads() as reads:
                booster.backward(loss_with(params, gradients(params, step)), optimizer)
                if clip:
                    optimizer.clip_grad_by_norm(clip)
                result = optimizer.step()
                optimizer.zero_grad()
        assert not reads.found
    assert result.applied


@pytest.mark.parametrize(("options", "most"), [({"verbose": True}, 3), ({"log_num_zeros_in_grad": True}, 3)])
def test_what_a_host_must_know_is_decided_there(options, most):
    with as_on_a_gpu():
        booster, model, optimizer = boosted(FP16NaiveMixedPrecision(**options))
        assert not optimizer._update.decision.on_device


def test_an_optimizer_without_a_fused_kernel_reads_one_number_a_step():
    booster, model, optimizer = boosted("bf16_naive", lambda params: AdamW(params, lr=1e-2, foreach=True))
    params = list(model.parameters())
    with as_on_a_gpu():
        for step in range(2):
            with HostReads() as reads:
                booster.backward(loss_with(params, gradients(params, step)), optimizer)
                optimizer.clip_grad_by_norm(0.05)
                optimizer.step()
    assert reads.found["__float__"] == 1, reads.found  # "item" is of torch's step counts, which lie on the CPU


# ---------------------------------------------------------------------- formats

FORMATS = {
    "separate": (Float32Master, (torch.float16, torch.bfloat16)),
    "split bfloat16": (SplitBFloat16, (torch.bfloat16,)),
    "split float16": (SplitFloat16, (torch.float16,)),
    "split24 bfloat16": (lambda: Split24BFloat16(RoundingRNG()), (torch.bfloat16,)),
    "split24 float16": (lambda: Split24Float16(RoundingRNG()), (torch.float16,)),
    "nearest": (Nearest, (torch.float16, torch.bfloat16)),
    "stochastic": (Stochastic, (torch.float16, torch.bfloat16)),
    "kahan": (Kahan, (torch.float16, torch.bfloat16)),
}


@pytest.mark.parametrize("gpu", [False, True])
@pytest.mark.parametrize(
    ("name", "dtype"), [(name, dtype) for name, (_, dtypes) in FORMATS.items() for dtype in dtypes]
)
def test_what_is_read_of_a_format_is_written_back_as_it_was(name, dtype, gpu):
    """For masters around every half number: on it, on the ties next to it, next to those, and anywhere between."""
    form = FORMATS[name][0]()
    halves = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    halves = halves[halves.isfinite()]
    wide, ulp = halves.float(), torch.frexp(halves.float())[1]
    ulp = torch.ldexp(torch.ones_like(wide), (ulp - (11 if dtype == torch.float16 else 8)).clamp(min=-148))
    generator = torch.Generator().manual_seed(0)
    shares = [0.0, 0.5, -0.5, 0.25, -0.25, 2.0**-14, 0.5 - 2.0**-13, torch.rand(len(wide), generator=generator) - 0.5]
    masters = torch.cat([wide + ulp * share for share in shares])
    size = len(masters) // 128 * 128
    masters = masters[:size]
    residual = form.allocate(size, dtype, masters.device)
    working = [torch.zeros(size, dtype=dtype)]
    scratch = torch.zeros(size)
    with_gpu = as_on_a_gpu() if gpu else torch.no_grad()
    with with_gpu:
        form.write(working, residual, (residual if name == "separate" else masters).copy_(masters), scratch)
        kept = working[0].clone(), None if residual is None else residual.clone()
        if isinstance(form, Split24BFloat16 | Split24Float16):
            form._rng.next()
        values = residual if name == "separate" else torch.zeros(size)
        form.read(working, residual, values, scratch)
        form.write(working, residual, values, scratch)
    assert torch.equal(working[0].view(torch.int16), kept[0].view(torch.int16))
    assert residual is None or torch.equal(residual, kept[1])
