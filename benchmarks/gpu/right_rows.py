"""Part 1: whether kernels are right, next to torch from the same numbers, and beside float64.

Most cases are those of tests/support/kernel_cases.py, on the card.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from itertools import product
from typing import Any, cast
from unittest import mock

import torch
from torch import nn

from benchmarks.gpu.rank_rows import kernel_rows
from benchmarks.gpu.row import Found, Place, Row
from benchmarks.gpu.worker import words
from booster import Booster
from booster.number_formats.number_format import E2M1, E4M3, E5M2, INT8
from booster.number_formats.scaling import Scaling, scale_to

LARGE = 2**27
_CLASSES = {"split": "Split{}", "split24": "Split24{}", "fp32": "Float32Master"}
_HALVES = {"bf16": "BFloat16", "fp16": "Float16"}


def rows(part: int, place: Place) -> list[Row]:
    """The rows of this part; of a rehearsal, where one is some seconds, every fifth of those that are many."""
    if find_spec("triton") is None:
        return [Row("kernels", lambda place: {"skipped": "Triton is not installed"})]
    import kernel_cases as cases

    crossed = list(_crossed(cases))
    found = [*_ours(cases), *_odd(cases), *_matrices(), *_faults(), *kernel_rows()]
    found += crossed[::40] if place.small else crossed
    return list({row.name: row for row in found}.values())  # a pair of values may come twice


def _case(name: str, run: Callable[[Place], object], judges: str = "", **row: Any) -> Row:
    """A row that is right unless `run` raises AssertionError."""

    def make(place: Place) -> Found:
        try:
            note = run(place)
        except AssertionError as error:
            return {"right": False, "why": words(error)}
        return {"right": True, **({"note": note} if isinstance(note, str) else {})}

    return Row(name, make, judges={judges: None} if judges else {}, **row)


def switch_of(half: str, form: str) -> str:
    """The switch of a form of half weights."""
    return f"weights {_CLASSES.get(form, form.capitalize()).format(_HALVES[half])}"


# ---------------------------------------------------------------------- steps


def _pair(make_model: Any, make: Any, precision: Any, place: Place, **options: Any) -> Any:
    from interpreted import pair

    return pair(make_model, make, precision, device=place.device, **options)


def _ours(cases: Any) -> Iterator[Row]:
    """Every rule on float32, every form, every form of states, release, and float64."""
    adamw = cases.RULES["AdamW"]

    def plain(rule: str, states: str, place: Place, **options: Any) -> None:
        steps = _pair(cases.make_model, cases.RULES[rule], "fp32", place, states=states, clip_grad_norm=0.05, **options)
        cases.one_after_another(steps, 3e-7, states)

    def half(half: str, form: str, place: Place, states: str = "fp32", **options: Any) -> None:
        _on_half_weights(cases, "AdamW", half, form, states, place, **options)

    for rule in cases.RULES:
        yield _case(f"{rule}, float32", partial(plain, rule, "fp32"), f"rule {rule.split()[0]}")
    for each, form in product(cases.HALVES, cases.FORMS):
        yield _case(f"AdamW, {each} {form}", partial(half, each, form), switch_of(each, form))
    for states in ("8bit", "bf16"):
        yield _case(f"AdamW, float32, {states} states", partial(plain, "AdamW", states), f"states {states}")
        yield _case(
            f"AdamW, bf16 split24, {states} states", partial(half, "bf16", "split24", states=states), f"states {states}"
        )
    yield _case("AdamW, float32, released", _released, "release")
    for rule in cases.RULES:
        if "Adagrad" not in rule:
            yield _case(
                f"{rule} beside float64", partial(_beside_float64, cases.RULES[rule]), f"rule {rule.split()[0]}"
            )
    yield _case("inf and NaN anywhere", partial(_nonfinite, adamw), "weights float32", seconds=20)


def _on_half_weights(cases: Any, rule: str, half: str, form: str, states: str, place: Place, **options: Any) -> None:
    from interpreted import pair

    cases.on_half_weights(pair, cases.make_model, rule, half, form, states, device=place.device, **options)


def _released(place: Place) -> None:
    """Gradients that are released at once, with an exact clip, lead where gradients that stay do."""
    import kernel_cases as cases
    from interpreted import gradients, step_on

    weights = []
    for fused, release in (("triton", "exact"), (False, "exact"), (False, False)):
        torch.manual_seed(0)
        net = cases.make_model()
        booster = Booster(place.device, "fp32", fused_optimizer=fused, release_gradients=release, clip_grad_norm=0.05)
        model, optimizer, *_ = booster.boost(net, cases.RULES["AdamW"](net.parameters()))
        for number in range(3):
            step_on(booster, model, optimizer, gradients(list(model.parameters()), number))
        weights.append([param.detach().clone() for param in model.parameters()])
    for one in weights[:2]:
        for own, other in zip(one, weights[2], strict=True):
            torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-7)


def _beside_float64(make: Any, place: Place) -> str:
    """Three steps in float32 by kernels, next to torch's loop in float64: in ulps of a weight and of what it moved."""
    import kernel_cases as cases
    from interpreted import gradients

    torch.manual_seed(0)
    net = cases.make_model()
    wide = [nn.Parameter(param.detach().double().to(place.device)) for param in net.parameters()]
    booster = Booster(place.device, "fp32", fused_optimizer="triton")
    model, optimizer, *_ = booster.boost(net, make(net.parameters()))
    reference = make(wide)
    for group in reference.param_groups:
        group["foreach"] = False
    worst, start = 0.0, [param.detach().clone() for param in wide]
    from interpreted import step_on

    for number in range(3):
        grads = gradients(list(model.parameters()), number)
        assert step_on(booster, model, optimizer, grads).applied
        for param, grad in zip(wide, grads, strict=True):
            param.grad = grad.double()
        reference.step()
    for own, other, first in zip(model.parameters(), wide, start, strict=True):
        unit = other.abs().double() + (other - first).abs() * 16 + 1e-8
        worst = max(worst, float(((own.double() - other).abs() / unit).max()) * 2.0**24)
    assert worst < 64, f"{worst:.1f} ulps from float64"
    return f"{worst:.1f} ulps from float64"


def _nonfinite(make: Any, place: Place) -> None:
    """A step with an inf or a NaN at any place writes nothing, and the next one does."""
    from interpreted import gradients, held, step_on

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.all = nn.ParameterList(nn.Parameter(torch.randn(size)) for size in (1, 33, 2048, 4097))

    places = [
        (index, at) for index, size in enumerate((1, 33, 2048, 4097)) for at in {0, size // 2, size - 1, 2047, 2048}
    ]
    places = [(index, at) for index, at in places if at < (1, 33, 2048, 4097)[index]]
    step = _pair(Net, make, "fp16", place, clip_grad_norm=0.1)[1]
    params = list(step[1].parameters())
    step_on(*step, gradients(params, 0))
    for index, at in places[:: 5 if place.small else 1]:
        for bad in (float("inf"), -float("inf"), float("nan")):
            grads, before = gradients(params, 1), held(step[2])
            grads[index].view(-1)[at] = bad
            assert not step_on(*step, grads).applied, (index, at, bad)
            for own, other in zip(*map(_flat, (held(step[2]), before)), strict=True):
                assert torch.equal(own, other), (index, at, bad)
    before = held(step[2])[0]
    assert step_on(*step, gradients(params, 2)).applied
    assert not all(map(torch.equal, held(step[2])[0], before))


def _flat(kept: Any) -> list[torch.Tensor]:
    weights, states = kept
    return [*weights, *(value for own in states for value in own.values())]


# ---------------------------------------------------------------------- sizes and alignments


def _odd(cases: Any) -> Iterator[Row]:
    for form in ("float32", *cases.FORMS):
        switch = "weights float32" if form == "float32" else switch_of("bf16", form)
        yield _case(f"all sizes and alignments, {form}", partial(_anywhere, cases, form), switch, seconds=20)
    for precision, gib in (("fp32", 6.5), ("bf16_naive", 6.0), ("8bit", 5.0)):
        yield _case(f"2^27 elements, {precision}", partial(_large, precision), "", seconds=15, gib=gib)


def _anywhere(cases: Any, form: str, place: Place) -> None:
    """Tensors of all sizes and alignments, with memory of others around them; one step of four is not finite."""
    import kernel_places as places

    dtype = torch.float32 if form == "float32" else torch.bfloat16
    options = {"clip_grad_norm": 0.5, "skip_nonfinite": True}

    def precision() -> Any:
        return "fp32" if form == "float32" else cases.HALVES["bf16"](**cases.FORMS[form], states="8bit", keep_fp32=())

    both = _pair(
        lambda: places.Anywhere(places.SIZES, dtype, place.device), cases.RULES["AdamW"], precision, place, **options
    )
    places.anywhere(both, places.SIZES, 3e-7 if form == "float32" else 2.0**-7)


def _large(precision: str, place: Place) -> None:
    """One tensor whose bytes go beyond 2^29, next to torch's step; and every tile of it is written."""
    size, found = 2**14 if place.small else LARGE, []
    states: dict[str, Any] = {"states": "8bit"} if precision == "8bit" else {}
    for fused in (False, "triton"):
        torch.manual_seed(0)
        net = nn.Module()
        net.register_parameter("p", nn.Parameter(torch.randn(size, device=place.device)))
        booster = Booster(place.device, "fp32" if states else precision, fused_optimizer=fused, **states)
        model, optimizer, *_ = booster.boost(net, torch.optim.AdamW(net.parameters(), lr=1e-2))
        before = model.p.detach().clone()
        booster.backward((model.p * 2.0).float().sum(), optimizer)
        assert optimizer.step().applied
        assert bool((model.p != before).view(-1, 2048).any(1).all()), "a tile is as it was"
        found.append(model.p.detach())
        del net, booster, model, optimizer, before
    for own, other in zip(*(each.chunk(16) for each in found), strict=True):
        torch.testing.assert_close(
            own.float(), other.float(), rtol=2.0**-7 if precision == "bf16_naive" else 1e-6, atol=1e-6
        )


# ---------------------------------------------------------------------- matrices


def _matrices() -> Iterator[Row]:
    for target, over in product((E4M3, INT8, E5M2), ("tensor", "row", (1, 32), (128, 128))):
        for kind in ("float32", "power_of_two"):
            name = over if isinstance(over, str) else "blocks"
            scaling: Any = Scaling(over, kind)  # type: ignore[arg-type]
            run = partial(_rounds, target, scaling, {})
            yield _case(f"{target}, {over}, {kind}", run, f"matrices {target} {name}", seconds=5)
    delayed = partial(_rounds, E4M3, Scaling("tensor"), {"delayed": True})
    yield _case("e4m3fn, tensor, delayed", delayed, "matrices delayed")
    for rotates, stochastic in product((False, True), repeat=2):
        options = {"rotates": rotates, "stochastic": stochastic}
        name = f"e2m1, blocks{', rotated' * rotates}{', stochastic' * stochastic}"
        yield _case(name, partial(_rounds, E2M1, Scaling((1, 16), "e4m3"), options), "matrices e2m1 blocks")
    yield _case("large matrices in e4m3fn", _large_matrices, "matrices e4m3fn tensor", seconds=20, gib=4)


def _rounds(target: Any, scaling: Any, options: dict[str, bool], place: Place) -> None:
    from booster.kernels import matrices

    own = {"rotates": False, "stochastic": False, "delayed": False, **options}
    found = matrices._tried(target, scaling, torch.device(place.device), *own.values())
    assert found is None, found


def _large_matrices(place: Place) -> None:
    from booster.kernels import matrices

    for shape in (
        ((64, 48), (130, 1)) if place.small else ((16384, 4096), (32768, 2048), (1, 65536), (65536, 1), (4096, 50304))
    ):
        x = torch.randn(*shape, device=place.device, dtype=torch.bfloat16)
        found, other = cast(Any, matrices.quantized)(x, E4M3, Scaling("tensor"), 1, transposed=True)
        assert matrices.same(found, scale_to(x, E4M3, Scaling("tensor")), E4M3), f"{shape}"
        assert matrices._is_turned(other, found, x.shape), f"{shape}, its transpose"


# ---------------------------------------------------------------------- faults


def _faults() -> Iterator[Row]:
    """Kernels with a fault, which must fall back by name."""
    for name, said in (
        ("slow_body", "are not like torch's, which makes them: a weight of shape"),
        ("no_corrections", "are not like torch's, which makes them: a weight of shape"),
        ("raises", "are not like torch's, which makes them: a trial raised"),
    ):
        yield _case(f"planted {name}", partial(_planted, name, said), seconds=10)


def _planted(name: str, said: str, place: Place) -> str:
    import interpreted_faults as faults

    from booster.kernels import eligibility, probe, rules

    part = "prepare" if name == "no_corrections" else "body"
    rule = dataclasses.replace(rules._RULES[torch.optim.AdamW], **{part: getattr(faults, name)})
    heard: list[str] = []
    listener = logging.Handler(logging.WARNING)
    listener.emit = lambda record: heard.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("booster.kernels.eligibility")
    level = logger.level
    logger.setLevel(logging.WARNING)
    logger.addHandler(listener)
    try:
        with (
            mock.patch.dict(rules._RULES, {torch.optim.AdamW: rule}),
            mock.patch.object(eligibility, "TAKEN_BY_TRUE", (place.device,)),
        ):
            probe._tried.cache_clear()
            net = nn.Linear(6, 12)
            optimizer = Booster(place.device, "fp32").boost(net, torch.optim.AdamW(net.parameters(), lr=1e-2))[1]
    finally:
        logger.removeHandler(listener)
        logger.setLevel(level)
        probe._tried.cache_clear()
    assert type(optimizer._update.decision).__name__ != "KernelDecision", "the kernel was taken"
    assert len(heard) == 1, heard
    assert said in heard[0], heard
    return heard[0][:120]


# ---------------------------------------------------------------------- all combinations


def _crossed(cases: Any) -> Iterator[Row]:
    """Each rule on each form of weights and states."""
    for states, form, half, rule in product(("fp32", "8bit", "bf16"), cases.FORMS, cases.HALVES, cases.RULES):
        if not cases.refuses(rule, states) and (rule != "AdamW" or states != "fp32"):

            def run(place: Place, own: Any = (rule, half, form, states)) -> None:
                _on_half_weights(cases, *own, place)

            yield _case(f"{rule}, {half} {form}, {states} states", run, seconds=8)
