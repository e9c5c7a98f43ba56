"""What samples say of gradients and weights: magnitudes, underflow, room above, and weights that stand still."""

import json
import math
from xml.etree import ElementTree

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_job import backward, boost, train

from booster import Booster
from booster.mixed_precision import BF16NaiveMixedPrecision, FP16NaiveMixedPrecision, FP16TorchMixedPrecision
from booster.numerics import read_run, report
from booster.numerics.record.samples import Exponents, Underflow, best_scale, count_exponents, exponents_of

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]


def spread(values):
    return exponents_of(count_exponents(values).double().tolist())


def row(values, format="float16", scale=1.0, **more):
    finite = values[values.isfinite()].abs()
    largest = float(finite.max()) if finite.numel() else 0.0
    return Underflow("w", "gradient", "0", 1, 0, format, scale, spread(values), largest, **more)


# ---------------------------------------------------------------------- counting
@pytest.mark.parametrize("dtype", DTYPES)
def test_numbers_are_counted_by_the_exponent_that_frexp_gives(dtype):
    if dtype in (torch.float16, torch.bfloat16):
        values = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    else:
        values = torch.randn(5000, dtype=dtype) * torch.randn(5000, dtype=dtype).mul(20).exp2()
    found = spread(values)
    expected = {}
    for value in values.double().tolist():
        if value and math.isfinite(value):
            exponent = max(-127, math.frexp(value)[1] - 1)
            expected[exponent] = expected.get(exponent, 0) + 1
    assert {found.low + i: n for i, n in enumerate(found.counts) if n} == expected
    assert found.zeros == (values == 0).sum()
    assert found.nonfinite == values.numel() - values.isfinite().sum()
    assert found.total == values.numel()


def test_large_tensors_are_counted_in_chunks_and_any_layout(monkeypatch):
    monkeypatch.setattr("booster.numerics.record.samples._CHUNK", 1000)
    values = torch.randn(37, 211).t()
    assert spread(values) == spread(values.contiguous().flatten()[:5000]) + spread(values.contiguous().flatten()[5000:])
    assert spread(torch.zeros(0)).total == 0


magnitudes = st.lists(st.floats(-(2.0**99), 2.0**99, width=32), max_size=20)


@given(magnitudes, magnitudes, st.integers(-40, 40))
@settings(max_examples=50, deadline=None)
def test_spreads_add_up_and_count_what_lies_below(a, b, bound):
    one, other = torch.tensor(a, dtype=torch.float32), torch.tensor(b, dtype=torch.float32)
    both = torch.cat([one, other])
    assert spread(one) + spread(other) == spread(both)
    assert spread(both).below(bound) == ((both != 0) & (both.abs() < 2.0**bound)).sum()
    assert (spread(both) * 0.5).total == spread(both).total / 2
    assert Exponents.of(json.loads(json.dumps(spread(both).as_dict()))) == spread(both)


# ---------------------------------------------------------------------- what underflowed
NUMBERS = {
    "normal": lambda g: torch.randn(2**16, generator=g),
    "lognormal of 3 bits": lambda g: torch.randn(2**16, generator=g).mul(2).exp(),
    "lognormal of 4 bits": lambda g: torch.randn(2**16, generator=g).mul(3).exp(),
    "exponential": lambda g: torch.empty(2**16).exponential_(generator=g),
}


@pytest.mark.parametrize("numbers", NUMBERS)
@pytest.mark.parametrize("exponent", [-14, -17, -20])
def test_zeros_that_were_not_zero_are_told_from_those_that_were_within_a_factor_of_3(numbers, exponent):
    generator = torch.Generator().manual_seed(0)
    exact = torch.cat([NUMBERS[numbers](generator) * 2.0**exponent, torch.zeros(2**18)])
    half = exact.half()
    lost = float(((half == 0) & (exact != 0)).double().mean())
    assert lost / 3 < row(half).lost < lost * 3
    assert row(half).zeros == pytest.approx(lost + 0.8)
    assert row(half).subnormal == pytest.approx(float(((half != 0) & (half.abs() < 2.0**-14)).double().mean()))


def test_true_zeros_are_not_lost():
    half = torch.cat([torch.randn(1000).half() + 4, torch.zeros(1000)]).half()
    assert (row(half).zeros, row(half).lost) == (0.5, 0.0)
    assert row(torch.zeros(5).half()).lost == 0.0


def test_where_all_that_is_left_lies_at_the_edge_all_zeros_count_as_lost():
    half = torch.cat([torch.full((10,), 2.0**-24), torch.zeros(90)]).half()
    assert row(half).lost == 0.9


def test_numbers_kept_in_a_wider_format_have_not_underflowed_in_it():
    values = torch.randn(10000) * 2.0**-24  # as float16 most of them would be gone
    found = row(values, "float16")
    assert found.wider
    assert (found.lost, found.subnormal) == (0.0, 0.0)


def test_headroom_is_in_bits_and_the_best_scale_keeps_one_of_them_free():
    loud, quiet = row(torch.tensor([1024.0, 1.0]), scale=256.0), row(torch.tensor([8.0]), scale=256.0)
    assert loud.headroom == pytest.approx(6, abs=0.001)
    assert row(torch.zeros(3)).headroom is None
    # 65504 / 1024 is just below 2**6, so that 2**5 more is the largest power of two; one bit is kept free.
    assert best_scale([loud, quiet]) == 256.0 * 2**4
    assert best_scale([row(torch.zeros(3))]) is None


# ---------------------------------------------------------------------- samples of a run
def samples(folder, step=None):
    rows = read_run(folder).samples["0"]
    return {r.name: r for r in rows if step is None or r.step == step}


def test_gradients_are_looked_at_in_the_first_step_and_every_so_many(tmp_path):
    booster, model, optimizer = boost("fp16")
    with booster.record(tmp_path / "some", every=4), booster.record(tmp_path / "none", every=None):
        train(booster, model, optimizer, steps=9)
    rows = read_run(tmp_path / "some").samples["0"]
    assert sorted({row.step for row in rows}) == [1, 4, 8]
    assert [row.name for row in rows[:4]] == ["0.weight", "0.bias", "2.weight", "2.bias"]
    assert read_run(tmp_path / "none").samples == {}


PRECISIONS = {
    "fp32": ("fp32", "float32", 1.0),
    "bf16": ("bf16", "bfloat16", 1.0),
    "fp16": (FP16TorchMixedPrecision(init_scale=2.0**8), "float16", 2.0**8),
    "fp16_naive": (FP16NaiveMixedPrecision(initial_scale=2.0**8), "float16", 2.0**8),
}


@pytest.mark.parametrize("unscaled", [False, True])
@pytest.mark.parametrize("precision", PRECISIONS)
def test_counted_is_the_gradient_as_the_backward_pass_left_it(tmp_path, precision, unscaled):
    strategy, format, scale = PRECISIONS[precision]
    booster, model, optimizer = boost(strategy)
    with booster.record(tmp_path, every=1):
        backward(booster, model, optimizer)
        scaled = {name: param.grad.clone() for name, param in booster.unwrap(model).named_parameters()}
        if unscaled:
            optimizer.unscale_grads()
        optimizer.step()
    found = samples(tmp_path)
    assert found.keys() == scaled.keys()
    for name, grad in scaled.items():
        assert found[name].exponents == spread(grad)
        assert (found[name].format, found[name].scale) == (format, scale)
        assert found[name].largest == grad.abs().max()
        assert found[name].norm == pytest.approx(float(grad.float().norm() / scale), rel=1e-5)


@pytest.mark.parametrize(
    ("rounding", "stored", "remains"), [("nearest", "bfloat16", True), ("kahan", "bfloat16 and its error", False)]
)
def test_weights_stand_still_where_updates_are_below_half_an_ulp_of_what_stores_them(
    tmp_path, rounding, stored, remains
):
    precision = BF16NaiveMixedPrecision(master_weights="none", rounding=rounding)
    booster, model, optimizer = boost(precision, lambda params: torch.optim.SGD(params, lr=1e-3))
    before = {name: p.detach().clone() for name, p in booster.unwrap(model).named_parameters()}
    with booster.record(tmp_path, every=1):
        backward(booster, model, optimizer)
        grads = {name: p.grad.clone() for name, p in booster.unwrap(model).named_parameters()}
        optimizer.step()
    found = samples(tmp_path)
    for name, param in booster.unwrap(model).named_parameters():
        still = ((param == before[name]) & (grads[name] != 0)).sum() / (grads[name] != 0).sum()
        assert found[name].stored == stored
        if remains:
            assert found[name].still == pytest.approx(float(still))
            assert found[name].still > 0.5
        else:
            assert found[name].still < 0.2 < still


@pytest.mark.parametrize("precision", ["fp32", "bf16", BF16NaiveMixedPrecision(), FP16NaiveMixedPrecision()])
def test_float32_weights_and_masters_of_any_form_do_not_stand_still(tmp_path, precision):
    booster, model, optimizer = boost(precision, lambda params: torch.optim.AdamW(params, lr=1e-4))
    with booster.record(tmp_path, every=1):
        train(booster, model, optimizer, steps=2)
    for found in samples(tmp_path, 2).values():
        assert found.stored == "float32"
        assert found.still < 0.05
        assert 0.5e-4 < found.update_norm / math.sqrt(found.exponents.total) < 2e-4  # Adam's step is lr


def test_of_large_parameters_an_even_share_of_the_weights_is_compared(tmp_path, monkeypatch):
    monkeypatch.setattr("booster.numerics.record.samples._MOST_WEIGHTS", 16)
    for precision in ("fp32", BF16NaiveMixedPrecision()):
        booster, model, optimizer = boost(precision)
        with booster.record(tmp_path / str(precision), every=1):
            train(booster, model, optimizer, steps=1)
        lines = [
            json.loads(line) for line in (tmp_path / str(precision) / "rank-00000.jsonl").read_text().splitlines()[2:]
        ]
        assert [line["looked"] for line in lines] == [16, 16, 16, 4]
        found = samples(tmp_path / str(precision))
        exact = [float(p.detach().float().norm()) for p in booster.unwrap(model).parameters()]
        for one, norm in zip(found.values(), exact, strict=True):
            assert one.weight_norm == pytest.approx(norm, rel=0.5)


def test_a_skipped_step_has_the_gradients_and_says_nothing_of_weights(tmp_path):
    booster, model, optimizer = boost(FP16TorchMixedPrecision(init_scale=2.0**8))
    with booster.record(tmp_path, every=1):
        loss = model(torch.ones(2, 8)).square().sum() * 1e30
        booster.backward(loss, optimizer)
        assert not optimizer.step()
    found = samples(tmp_path)["0.weight"]
    assert found.exponents.nonfinite > 0
    assert (found.still, found.stored, found.headroom) == (None, None, None)


def test_sparse_gradients_are_counted_by_their_values(tmp_path):
    table = torch.nn.Embedding(10, 4, sparse=True)
    booster = Booster("cpu")
    model, optimizer, *_ = booster.boost(table, torch.optim.SGD(table.parameters(), lr=0.1))
    with booster.record(tmp_path, every=1):
        booster.backward(model(torch.tensor([1, 1, 3])).sum(), optimizer)
        optimizer.step()
    assert samples(tmp_path)["weight"].exponents == Exponents(0, 0, 0, (4, 4))


# ---------------------------------------------------------------------- numerics.report
def test_a_report_of_an_optimizer_is_of_its_gradients_now_and_changes_nothing():
    booster, model, optimizer = boost(FP16TorchMixedPrecision(init_scale=2.0**8))
    backward(booster, model, optimizer)
    grads = {name: p.grad.clone() for name, p in booster.unwrap(model).named_parameters()}
    found = report(optimizer)
    assert [row.name for row in found.rows] == list(grads)
    for row in found.rows:
        assert row.exponents == spread(grads[row.name])
        assert (row.format, row.scale) == ("float16", 2.0**8)
    assert all(torch.equal(p.grad, grads[name]) for name, p in booster.unwrap(model).named_parameters())
    largest = max(grad.abs().max() for grad in grads.values())
    assert found.best_scale <= 2.0**8 * 65504 / largest / 2 < found.best_scale * 2


def test_a_report_is_a_table_a_picture_and_plain_numbers(tmp_path):
    booster, model, optimizer = boost(BF16NaiveMixedPrecision(master_weights="none"))
    optimizer.param_groups[0]["lr"] = 1e-6
    with booster.record(tmp_path, every=1):
        train(booster, model, optimizer, steps=2)
    found = report(tmp_path)
    assert [row.step for row in found.rows] == [2] * 4
    head, first, *_ = str(found).splitlines()
    assert head.split() == ["name", "format", "headroom", "still", "stored", "as"]
    assert first.split()[0] == "0.weight"
    assert first.split()[-2:] == ["100.0%", "bfloat16"]
    found.plot(tmp_path / "exponents.svg")
    picture = ElementTree.parse(tmp_path / "exponents.svg").getroot()
    assert picture.tag == "{http://www.w3.org/2000/svg}svg"
    assert "0.weight" in "".join(picture.itertext())
    json.dumps(found.as_dict())
    assert report(read_run(tmp_path)) == found


def test_what_cannot_be_reported_says_so(tmp_path):
    booster, model, optimizer = boost("fp32")
    with pytest.raises(ValueError, match="there is nothing to draw"):
        report(optimizer).plot(tmp_path / "x.svg")
    with pytest.raises(
        TypeError, match="source=3 is not legal; it must be a boosted optimizer, the folder of a record"
    ):
        report(3)
    with pytest.raises(ValueError, match="format is for a boosted optimizer"):
        report(tmp_path, format=torch.float16)
