"""Matrices rounded by kernels have the bits of those that torch's operations round, in the launches and bytes of the docs."""

from functools import partial
from unittest import mock

import pytest
import torch
from comparing import same
from interpreted import interpreted
from recipes import RECIPES
from test_rounded_once import drawn, results
from torch import nn
from torch.utils.checkpoint import checkpoint

from benchmarks.launches import Launches
from booster import Booster
from booster.kernels import matrices
from booster.mixed_precision import DelayedScaling, FP8MixedPrecision
from booster.mixed_precision.low_precision.linear import LowPrecisionLinear
from booster.mixed_precision.low_precision.operands import QuantizedWeights
from booster.mixed_precision.low_precision.recipes import (
    FP8_RECIPES,
)
from booster.number_formats.number_format import E2M1, E4M3, E5M2, INT8, noise_of
from booster.number_formats.scaling import Scaling, rotated, scale_to

pytestmark = interpreted
CPU = torch.device("cpu")
FORMATS = {each.name: each for each in (E4M3, E5M2, INT8)}
OVER = ["tensor", "row", (1, 32), (1, 128), (128, 128)]


@pytest.fixture
def taken(monkeypatch):
    """Matrices on the CPU are rounded by kernels, untried."""
    monkeypatch.setattr(matrices, "TAKEN_ON", ("cpu",))
    monkeypatch.setattr(matrices, "_differs", lambda *form: None)


def every_half():
    """All numbers of bfloat16, as a matrix."""
    return torch.arange(2**16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16).view(256, 256)


def check(x, target, scaling, multiple=1):
    got, _ = matrices.quantized(x, target, scaling, multiple)
    filled = nn.functional.pad(x, (0, -x.shape[1] % multiple))
    expected = scale_to(filled, target, scaling)
    assert got.values.dtype == target.dtype
    assert got.values.shape == expected.values.shape
    assert got.values.is_contiguous()
    assert got.scale.shape == expected.scale.shape
    assert matrices.same(got, expected, target)


@pytest.mark.parametrize("over", OVER, ids=str)
@pytest.mark.parametrize("name", FORMATS)
def test_all_finite_numbers_of_bfloat16_are_rounded_as_torch_does(name, over):
    """Under scales of all magnitudes: a row has all those of one exponent, in order, and so does half a column."""
    x = every_half()
    x = torch.where(x.isfinite(), x, 0.0)
    check(x, FORMATS[name], Scaling(over))
    if over != "tensor":
        check(x.t(), FORMATS[name], Scaling(over, "power_of_two"))


@pytest.mark.parametrize("scale", [1.0, 0.75, 3e-5, 2.0**-126, 1e30])
@pytest.mark.parametrize("name", ["e4m3fn", "e5m2"])
def test_all_numbers_of_bfloat16_under_a_scale_that_is_given(name, scale):
    """inf is cut off like any number too large, and NaN stays: the scale that is returned makes NaN of all."""
    target, x, given = FORMATS[name], every_half(), torch.tensor(scale)
    got, other = matrices.quantized(x, target, Scaling("tensor"), 1, transposed=True, given=given)
    expected = scale_to(x, target, Scaling("tensor"), scale=given)
    nan = expected.values.float().isnan()
    for found in (got.values, other.values.t()):
        assert torch.equal(found.float().isnan(), nan)
        assert torch.equal(*(each.view(torch.uint8)[~nan] for each in (found.contiguous(), expected.values)))
    assert got.scale.isnan()
    assert other.scale.isnan()


@pytest.mark.parametrize("over", OVER, ids=str)
@pytest.mark.parametrize("kind", ["float32", "power_of_two"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (1, 300), (67, 5), (70, 257)])
def test_matrices_of_odd_shapes_are_filled_up_and_their_infinities_and_nans_seen(over, kind, rows, columns):
    draw = torch.Generator().manual_seed(rows)
    for number, (target, dtype) in enumerate(
        zip(FORMATS.values(), (torch.bfloat16, torch.float32, torch.float16), strict=True)
    ):
        x = (
            torch.randn(rows, columns, generator=draw) * 10 ** torch.empty(columns).uniform_(-3, 3, generator=draw)
        ).to(dtype)
        check(x, target, Scaling(over, kind), 16)
        x[rows // 2, columns // 3] = (torch.inf, torch.nan, -torch.inf)[number]
        check(x, target, Scaling(over, kind), 32)
        check(x.t(), target, Scaling(over, kind), 32)
        if rows > 60:
            check(x[::3, ::2], target, Scaling(over, kind))


@pytest.mark.parametrize("rows", [3, 48, 70])
def test_what_backward_reads_is_written_in_the_same_pass(rows):
    x = torch.randn(rows, 80, generator=torch.Generator().manual_seed(rows), dtype=torch.bfloat16)
    got, other = matrices.quantized(x, E4M3, Scaling("tensor"), 16, transposed=True)
    expected = scale_to(x, E4M3, Scaling("tensor"))
    assert torch.equal(got.values.view(torch.uint8), expected.values.view(torch.uint8))
    filled = nn.functional.pad(expected.values.view(torch.uint8).t(), (0, -rows % 16))
    assert torch.equal(other.values.view(torch.uint8), filled)
    assert torch.equal(other.scale, expected.scale)


# ---- in four bits ----

FOURS = [
    (over, rotates, stochastic)
    for over in ((1, 16), (16, 16))
    for rotates in (False, True)
    for stochastic in (False, True)
]


def check_fours(x, over, rotates, stochastic, multiple=32):
    scaling = Scaling(over, "e4m3")
    laid = nn.functional.pad(x, (0, -x.shape[1] % multiple))
    laid = rotated(laid.float()) if rotates else laid
    expected = scale_to(laid, E2M1, scaling, noise=noise_of(laid) if stochastic else None)
    got = matrices.quantized_to_e2m1(x, scaling, multiple, rotates=rotates, stochastic=stochastic)
    assert got.values.dtype == torch.bfloat16
    assert got.values.shape == expected.values.shape
    assert got.scale.shape == expected.scale.shape
    assert torch.equal(got.scale.nan_to_num(-1.0), expected.scale.nan_to_num(-1.0))
    assert torch.equal(got.outer.nan_to_num(-1.0), expected.outer.nan_to_num(-1.0))
    nan = expected.values.isnan()
    assert torch.equal(got.values.isnan(), nan)
    assert torch.equal(
        *(torch.where(nan, 0.0, each.float()).view(torch.int32) for each in (got.values, expected.values))
    )


def hostile(rows=37, columns=70):
    """Numbers of all magnitudes, blocks of zeros and of subnormal numbers."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1)) * torch.logspace(-6, 3, columns)
    x[16:34, :32], x[3, 1], x[5] = 0.0, -0.0, 1e-41
    return x


@pytest.mark.parametrize(("over", "rotates", "stochastic"), FOURS, ids=str)
def test_four_bits_of_odd_shapes_zeros_subnormal_numbers_infinities_and_nans(over, rotates, stochastic):
    x = hostile()
    bad = x.clone()
    bad[20, 50] = torch.nan
    for each in (x.bfloat16(), x.t(), bad.half(), bad.nan_to_num(-torch.inf).bfloat16()[::3, ::2], x[:1] * 2.0**-120):
        check_fours(each, over, rotates, stochastic)


@pytest.mark.slow
@pytest.mark.parametrize(("over", "rotates", "stochastic"), FOURS, ids=str)
def test_all_finite_numbers_of_bfloat16_in_four_bits(over, rotates, stochastic):
    x = every_half()
    x = torch.where(x.isfinite(), x, 0.0)
    small = x * (x.abs() < 1)
    for each in (x, x.t(), small, small[:, 64:128], torch.zeros(3, 5)):
        check_fours(each, over, rotates, stochastic)


@pytest.mark.parametrize("rows", [1, 2, 3, 64])
def test_a_rotation_sums_in_order_whatever_the_number_of_rows(rows):
    x = torch.randn(rows, 16, generator=torch.Generator().manual_seed(rows)) * torch.logspace(-6, 6, 16)
    x[0, 3:7] = 1e-43
    signs = rotated(torch.eye(16)).sign()
    total = torch.zeros(rows, 16)
    for place in range(16):
        total = total + (x * 0.25)[:, place, None] * signs[place]
    assert torch.equal(rotated(x).view(torch.int32), total.view(torch.int32))


# ---- in layers ----


def passes(layer, x, g):
    x = x.clone().requires_grad_()
    layer.zero_grad()
    y = layer(x)
    y.backward(g)
    return [y.detach(), x.grad, *(param.grad.clone() for param in layer.parameters())]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 37, 64])
@pytest.mark.parametrize("name", RECIPES)
def test_layers_compute_the_same_bits(name, tokens, dtype, taken, monkeypatch):
    torch.manual_seed(0)
    layer = LowPrecisionLinear.of(nn.Linear(128, 256), RECIPES[name], kernels=False)
    x, g = torch.randn(tokens, 128).to(dtype), torch.randn(tokens, 256).to(dtype)
    quantized = []
    for each in ("quantized", "quantized_to_e2m1"):
        right = getattr(matrices, each)
        monkeypatch.setattr(matrices, each, lambda *a, right=right, **k: quantized.append(a) or right(*a, **k))
    found = passes(layer, x, g)
    assert len(quantized) == {"fp8": 4, "fp8 rowwise_with_gw_hp": 4}.get(name, 6)
    monkeypatch.setattr(matrices, "TAKEN_ON", ())
    assert all(torch.equal(a, b) for a, b in zip(found, passes(layer, x, g), strict=True))


def check_drawn(seed):
    """A random layer, called in whatever way, by kernels and without."""
    found = []
    for devices in (("cpu",), ()):
        with mock.patch.object(matrices, "TAKEN_ON", devices):
            layer, x, g, how, said = drawn(seed)
            if how == "reentrant" and not x.requires_grad:
                return
            reentrant = {"checkpoint": False, "reentrant": True}.get(how)
            run = layer if reentrant is None else partial(checkpoint, layer, use_reentrant=reentrant)
            found.append(results(layer, x, g, run))
    assert same(*found), said


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.parametrize("seed", range(6))
def test_a_random_layer_computes_the_same_bits(seed, taken):
    check_drawn(seed)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_300_random_layers_do(taken):
    for seed in range(6, 306):
        check_drawn(seed)


def boosted(delayed):
    torch.manual_seed(0)
    booster = Booster("cpu", FP8MixedPrecision(delayed_scaling=delayed, emulate=True, keep=()), skip_nonfinite=True)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 16))
    return booster, *booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-2))[:2]


def train(delayed, bad=None):
    booster, model, optimizer = boosted(delayed)
    for step in range(5):
        x = torch.randn(8, 32, generator=torch.Generator().manual_seed(step)) * (1 + step % 3)
        if step == 3 and bad is not None:
            x[0, 0] = bad
        with booster.accumulate(model, optimizer, 2):
            for part in x.chunk(2):
                booster.backward(model(part).square().mean(), optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("bad", [None, torch.inf, torch.nan])
@pytest.mark.parametrize("delayed", [False, DelayedScaling(amax_history_len=2)], ids=["own", "delayed"])
def test_runs_are_the_same_to_the_bit(delayed, bad, taken, monkeypatch):
    found = train(delayed, bad)
    monkeypatch.setattr(matrices, "TAKEN_ON", ())
    assert all(torch.equal(a, b) for a, b in zip(found, train(delayed, bad), strict=True))


# ---- what it costs ----


class Counted:
    """While entered: launches by name, and bytes that kernels load and store of what is a matrix and its bytes."""

    def __init__(self):
        self.launches, self.bytes = [], 0

    def __enter__(self):
        from triton.runtime import interpreter

        builder, launch = interpreter.interpreter_builder, interpreter.InterpretedFunction.__getitem__
        load, store = builder.create_masked_load, builder.create_masked_store

        def loaded(pointers, mask, *rest):
            self.bytes += int(mask.data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8
            return load(pointers, mask, *rest)

        def stored(pointers, value, mask, *rest):
            self.bytes += int(mask.data.sum()) * pointers.get_element_ty().primitive_bitwidth // 8
            return store(pointers, value, mask, *rest)

        def launched(this, grid):
            self.launches.append(this.fn.__name__)
            return launch(this, grid)

        self.patches = [
            mock.patch.object(builder, "create_masked_load", loaded),
            mock.patch.object(builder, "create_masked_store", stored),
            mock.patch.object(interpreter.InterpretedFunction, "__getitem__", launched),
        ]
        for each in self.patches:
            each.__enter__()
        return self

    def __exit__(self, *raised):
        for each in self.patches:
            each.__exit__(*raised)


# For each number of a matrix in bfloat16: read for its largest magnitude 2, read to be rounded 2, written by rows 1, turned 1.
# Blocks are rounded from what is read for their largest magnitude, and so is what has a scale from earlier steps.
COST = {
    "tensor": (["largest_of", "write"], 2 + 2 + 1, "tensor", {}),
    "tensor, turned as well": (["largest_of", "write"], 2 + 2 + 1 + 1, "tensor", {"transposed": True}),
    "row": (["largest_of", "write"], 2 + 2 + 1, "row", {}),
    "blocks": (["write"], 2 + 1, (1, 128), {}),
    "squares": (["write"], 2 + 1, (128, 128), {}),
    "delayed, the first step": (["largest_of", "write", "track_largest"], 2 + 2 + 1, "tensor", {"given": 0.0}),
    "delayed": (["largest_of", "write", "track_largest"], 2 + 1, "tensor", {"given": 0.5}),
    "delayed, turned as well": (
        ["largest_of", "write", "track_largest"],
        2 + 1 + 1,
        "tensor",
        {"given": 0.5, "transposed": True},
    ),
}


@pytest.mark.parametrize("way", COST)
def test_a_matrix_is_read_and_written_as_often_as_the_table_says(way):
    launches, each, over, options = COST[way]
    options = {name: torch.tensor(value) if name == "given" else value for name, value in options.items()}
    x = torch.randn(256, 384, dtype=torch.bfloat16)
    with Counted() as counted:
        matrices.quantized(x, E4M3, Scaling(over), 16, **options)
    assert counted.launches == launches
    scales = counted.bytes - each * x.numel()
    assert 0 <= scales < 0.15 * x.numel(), "and little for scales"


# A layer of the tensorwise recipe in bfloat16, forward and backward: launches for its input, its weight, and the gradient
# of its output.
ROUNDING = {False: 3 * ["largest_of", "write"], True: 3 * ["largest_of", "write", "track_largest"]}


@pytest.mark.parametrize("delayed", ROUNDING)
def test_a_layer_makes_as_many_launches_as_told(delayed, taken):
    _, model, _ = boosted(delayed)
    layer = next(each for each in model.modules() if isinstance(each, LowPrecisionLinear))
    layer.weights, layer.bias, layer.kernels = QuantizedWeights(), None, True
    x, g = (torch.randn(16, n, dtype=torch.bfloat16) for n in (32, 64))
    x.requires_grad_()
    with Counted() as counted, Launches() as launches:
        try:
            layer(x).backward(g)
        except NotImplementedError:
            pytest.skip(f"torch {torch.__version__} has no kernel of scaled_mm for CPUs")
    assert counted.launches == ROUNDING[delayed]
    # Besides: three products, the weight's bytes laid anew for backward, and its gradient in its dtype.
    rounding = {f"Triton: {name}": counted.launches.count(name) for name in counted.launches}
    assert dict(launches.found) == {**rounding, "_scaled_mm_v2": 3, "clone": 1, "_to_copy": 1}


# ---- where they are taken ----


def test_a_fault_in_a_kernel_is_found_told_once_and_rounded_around(monkeypatch, caplog):
    monkeypatch.setattr(matrices, "TAKEN_ON", ("cpu",))
    wrong = matrices.quantized

    def rounds_up(x, *form, **options):
        made, other = wrong(x, *form, **options)
        made.values.view(torch.uint8)[0, 0] += 1
        return made, other

    matrices._differs.cache_clear()
    monkeypatch.setattr(matrices, "quantized", rounds_up)
    x = torch.randn(16, 32)
    layer = LowPrecisionLinear.of(nn.Linear(32, 32), FP8_RECIPES["rowwise"], kernels=False)
    for _ in range(2):
        found = passes(layer, x, torch.ones(16, 32))
    (said,) = [record.message for record in caplog.records if record.levelname == "WARNING"]
    assert (
        "are rounded by torch's operations on cpu, and not by Triton kernels: bytes or scales, torch.float32, differ"
        in said
    )
    monkeypatch.setattr(matrices, "TAKEN_ON", ())
    assert all(torch.equal(a, b) for a, b in zip(found, passes(layer, x, torch.ones(16, 32)), strict=True))
    matrices._differs.cache_clear()


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ("transposed", "bytes of a transpose, written with, torch.float32, differ"),
        ("noted", "bytes, scales or magnitudes under a scale that is given, torch.float32, differ"),
    ],
)
def test_a_fault_in_what_is_written_beside_a_matrix_is_found_too(fault, said, monkeypatch):
    right = matrices.quantized

    def spoils(x, *form, largest=None, **options):
        made, other = right(x, *form, largest=largest, **options)
        if fault == "transposed" and other is not None:
            other.values.view(torch.uint8)[0, 0] += 1
        if fault == "noted" and largest is not None:
            largest.add_(1)
        return made, other

    matrices._differs.cache_clear()
    assert matrices._differs(E4M3, Scaling("tensor"), CPU, delayed=True) is None
    matrices._differs.cache_clear()
    monkeypatch.setattr(matrices, "quantized", spoils)
    assert matrices._differs(E4M3, Scaling("tensor"), CPU, delayed=True) == said
    matrices._differs.cache_clear()


def test_what_raises_in_a_trial_is_told_too(monkeypatch, caplog):
    def raises(*form, **options):
        raise RuntimeError("no such instruction")

    matrices._differs.cache_clear()
    monkeypatch.setattr(matrices, "quantized", raises)
    assert matrices._differs(E4M3, Scaling("row"), CPU) == "a trial raised RuntimeError: no such instruction"
    assert "no such instruction" in caplog.text
    matrices._differs.cache_clear()


def test_a_trial_without_a_fault_takes_the_kernels(monkeypatch):
    monkeypatch.setattr(matrices, "TAKEN_ON", ("cpu",))
    matrices._differs.cache_clear()
    x = torch.randn(4, 32)
    assert matrices.by_kernels(x, E4M3, Scaling("row", "power_of_two"))
    assert not matrices.by_kernels(x[:0], E4M3, Scaling("row", "power_of_two")), "nothing to round"
    assert not matrices.by_kernels(x, E4M3, Scaling((16, 16), "e4m3")), "a form that no kernel knows"
    assert not matrices.by_kernels(x, E4M3, Scaling("row", "power_of_two"), stochastic=True), "nor this"
    for over, rotates, stochastic in FOURS:
        assert matrices.by_kernels(x, E2M1, Scaling(over, "e4m3"), rotates=rotates, stochastic=stochastic)
    assert not matrices.by_kernels(x.double(), E4M3, Scaling("row", "power_of_two"))
    matrices._differs.cache_clear()
