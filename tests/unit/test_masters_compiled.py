"""fused_optimizer="compile" on master weights: the steps of the eager path, in one pass over each bucket."""

import copy
import logging

import pytest
import torch
from comparing import same
from prescribed import loss_with
from test_masters import BF16, ELEMENTWISE, FP16, SHAPES, weights
from test_packed_states import PACKABLE
from torch import nn, optim

import booster
from booster import Booster
from booster.interface.optimizer import OptimizerWrapper
from booster.loss_scaler import DynamicScale, NoScale
from booster.masters import MasterOptions, Masters, choose_master_update
from booster.masters.compiled import CompiledMasterStep, Kernel, can_compile_masters
from booster.masters.formats import (
    WEIGHTS,
    Float32Master,
    Kahan,
    Nearest,
    Same,
    Split24BFloat16,
    Split24Float16,
    SplitBFloat16,
    SplitFloat16,
)
from booster.masters.formats_compiled import (
    BFloat16Planes,
    Float16Planes,
    dequantize,
    join,
    quantize,
    round_float16,
    split,
)
from booster.masters.quantized_state import QuantizedState
from booster.masters.rounding import RoundingRNG
from booster.mixed_precision import BF16NaiveMixedPrecision
from booster.tensors import flat
from booster.update.context import UpdateContext

pytestmark = [
    # Torch's compiler warns about its own use of deprecated functions.
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

COMPILE = [name for name in ELEMENTWISE if name not in ("ASGD", "RAdam")]  # those branch on numbers in tensors
QUICK = {"AdamW"}
# Each size of bucket is its own kernel: one, and all that the eager path is tested with.
SIZES = pytest.mark.parametrize(
    "shapes",
    [pytest.param([(33,), (), (7, 5, 3)], id="one bucket"), pytest.param(SHAPES, id="all", marks=pytest.mark.slow)],
)


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch):
    """Of the eager path, too, which is compared bucket by bucket."""
    monkeypatch.setattr(flat, "SMALLEST_BUCKET", flat.SMALLEST_SPARING_BUCKET)


@pytest.fixture(scope="module")
def compiler():
    try:
        torch.compile(lambda x: x + 1)(torch.zeros(1))
    except Exception as error:
        pytest.skip(f"torch.compile finds no working compiler: {error}")


@pytest.fixture
def calls(monkeypatch):
    """The sizes of the buckets that compiled kernels stepped."""
    sizes, step = [], Kernel.step

    def counted(self, group, state, inverse, residual, weights, *others):
        step(self, group, state, inverse, residual, weights, *others)
        sizes.append(weights.numel())

    monkeypatch.setattr(Kernel, "step", counted)
    return sizes


class Run:
    """Half parameters and prescribed gradients, stepped by either path."""

    def __init__(self, make, dtype, form, *, compiled=True, scale=None, shapes=SHAPES, states="fp32"):
        self.sources = weights(shapes)
        self.params = [nn.Parameter(source.to(dtype, copy=True)) for source in self.sources]
        self.inner = make(self.params)
        names = {param: f"p{i}" for i, param in enumerate(self.params)}
        sources = dict(zip(self.params, self.sources, strict=True))
        options = MasterOptions(master_weights=form, states=states)
        self.masters = Masters(self.inner, names, options, sources=sources, compiled=compiled)
        self.optimizer = OptimizerWrapper(
            UpdateContext(
                optimizer=self.inner,
                scaler=NoScale() if scale is None else DynamicScale(init_scale=scale),
                names=names,
            ),
            lambda job: choose_master_update(job, masters=self.masters, compiled=compiled),
        )
        self.generator = torch.Generator().manual_seed(7)

    def train(self, steps, poison=None):
        for step in range(steps):
            grads = [torch.randn(p.shape, generator=self.generator).to(p.dtype) for p in self.params]
            if step == poison:
                grads[0].view(-1)[3] = float("inf")
            self.optimizer.zero_grad()
            self.optimizer.backward(loss_with(self.params, grads))
            self.optimizer.clip_grad_by_norm(1.0)
            assert self.optimizer.step().applied == (step != poison)

    def values(self):
        kept = set(self.masters.layouts)  # float32 parameters without dimensions lie in no bucket
        return [
            self.masters.values()[param].clone() if param in kept else param.detach().clone() for param in self.params
        ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "steps"),
    [("AdamW", 25), *(pytest.param(n, 100 if n in QUICK else 25, marks=pytest.mark.slow) for n in COMPILE)],
)
def test_compiled_split_masters_train_bit_for_bit_like_compiled_separate_ones(compiler, calls, name, steps):
    shapes = [(200, 82), (33,), (), (7, 5, 3)]  # a full bucket of two pieces, and a ragged one
    separate, split = (Run(ELEMENTWISE[name], BF16, form, shapes=shapes) for form in ("fp32", "split"))
    for run in (separate, split):
        run.train(steps)
    assert same(separate.values(), split.values())
    assert same(separate.params, split.params)
    assert len(calls) >= 2 * 2 * (steps - 1)
    eager = Run(ELEMENTWISE[name], BF16, "split", compiled=False, shapes=shapes)
    eager.train(steps)
    for ours, theirs in zip(split.values(), eager.values(), strict=True):
        # So many updates of a handful of float32 operations each, in another order.
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-5)


PACKED_CASES = [("AdamW", BF16, "split24", "8bit"), ("SGD momentum", torch.float32, "none", "bf16")]
PACKED_CASES += [
    pytest.param(name, *case, marks=pytest.mark.slow)
    for name in COMPILE
    for case in [(FP16, "split24", "8bit"), (torch.float32, "none", "8bit"), (BF16, "split", "8bit")]
]


@pytest.mark.parametrize(("name", "dtype", "form", "states"), PACKED_CASES)
def test_a_compiled_step_on_packed_states_is_that_of_the_eager_path(compiler, calls, name, dtype, form, states):
    shapes = [(100, 100), (63, 100), (), (63, 100), (100, 100)]  # two full buckets, with gaps at different places
    ours, theirs = (
        Run(PACKABLE[name], dtype, form, compiled=compiled, shapes=shapes, states=states) for compiled in (True, False)
    )
    for run in (ours, theirs):
        run.train(12)
    assert len(calls) >= 2 * 11
    moved = torch.cat([(a - b).flatten() for a, b in zip(theirs.values(), theirs.sources, strict=True)])
    off = torch.cat([(a - b).flatten() for a, b in zip(ours.values(), theirs.values(), strict=True)])
    # The same random numbers: codes differ only where the last bits of the optimizer's arithmetic meet a rounding.
    assert float(off.norm() / moved.norm()) < 2e-3
    for bucket, twin in zip(ours.masters.buckets, theirs.masters.buckets, strict=True):
        if bucket.whole:
            continue
        kept, other = ours.inner.state[bucket.handles[0]], theirs.inner.state[twin.handles[0]]
        for key, value in kept.items():
            assert type(value) is type(other[key])
            if isinstance(value, QuantizedState):
                agreeing = (value.codes.float() == other[key].codes.float()).float().mean()
                assert float(agreeing) > 0.99
                assert (value.scales is None) == (states == "bf16")
                if value.encoding != "unsigned":  # what another bucket left in the gaps is not in a scale
                    assert not value.dequantize(torch.empty(bucket.size))[~bucket.present()].any()
    again = Run(PACKABLE[name], dtype, form, shapes=shapes, states=states)
    again.optimizer.load_state_dict(copy.deepcopy(ours.optimizer.state_dict()))
    for param, twin in zip(again.params, ours.params, strict=True):
        param.data.copy_(twin.detach())
    again.generator.set_state(ours.generator.get_state())
    for run in (ours, again):
        run.train(2)
    assert same(ours.params, again.params)


def test_an_optimizer_whose_states_every_step_must_look_at_is_not_compiled_and_says_how_it_could_be(
    caplog, monkeypatch
):
    monkeypatch.setattr("booster.model.optimizers._registered", {})

    class Squares(optim.SGD):
        pass

    booster.register_elementwise(Squares)
    optimizer = Squares([nn.Parameter(torch.ones(3))], lr=0.1, momentum=0.9)
    assert can_compile_masters(optimizer, MasterOptions(states="8bit"))  # its one state is signed

    class Adaptive(optim.Adagrad):
        pass

    booster.register_elementwise(Adaptive)
    optimizer = Adaptive([nn.Parameter(torch.ones(3))])
    with caplog.at_level(logging.WARNING, "booster"):
        assert not can_compile_masters(optimizer, MasterOptions(states="8bit"))
    assert "register_elementwise(Adaptive, states={'sum': 'unsigned', ...})" in caplog.text
    booster.register_elementwise(Adaptive, states={"sum": "unsigned"})
    assert can_compile_masters(optimizer, MasterOptions(states="8bit"))


@pytest.mark.parametrize("form", ["split", *(pytest.param(form, marks=pytest.mark.slow) for form in ("fp32", "none"))])
@SIZES
def test_a_compiled_step_in_float16_is_that_of_the_eager_path(compiler, calls, form, shapes):
    ours, theirs = (
        Run(ELEMENTWISE["SGD momentum"], FP16, form, compiled=compiled, scale=2.0**7, shapes=shapes)
        for compiled in (True, False)
    )
    for run in (ours, theirs):
        run.train(10)
    assert calls
    for a, b in zip(ours.values(), theirs.values(), strict=True):
        torch.testing.assert_close(a, b, rtol=2e-3 if form == "none" else 1e-6, atol=1e-6)


def test_equal_buckets_share_a_graph_and_a_schedule_compiles_nothing(compiler, calls):
    run = Run(ELEMENTWISE["SGD momentum"], BF16, "split", shapes=[(4, 2**14), (33,)])
    assert [bucket.size for bucket in run.masters.buckets] == [2**14] * 4 + [64]
    run.train(2)
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    for step in range(12):
        run.inner.param_groups[0]["lr"] = 0.01 / (step + 1)
        run.train(1)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
    assert len(run.optimizer._update.decision.application.master_step._kernels) == 2
    assert len(calls) == 13 * 5


def test_a_skipped_step_leaves_weights_masters_and_state_as_they_were(compiler, calls):
    # What another test compiles too.
    run = Run(ELEMENTWISE["AdamW"], BF16, "split", scale=2.0**7, shapes=[(200, 82), (33,), (), (7, 5, 3)])
    run.train(3)
    before = copy.deepcopy((run.values(), run.params, run.optimizer.state_dict()["state"]))
    stepped = len(calls)
    run.train(1, poison=0)
    assert len(calls) == stepped > 0
    assert same(before[0], run.values())
    assert same(before[1], run.params)
    for key, value in run.optimizer.state_dict()["state"][0].items():
        assert torch.equal(before[2][0][key], value)


@pytest.mark.parametrize("dtype", [BF16, FP16])
@SIZES
def test_checkpoints_of_the_compiled_and_the_eager_path_load_into_each_other(compiler, dtype, shapes):
    runs = {
        compiled: Run(ELEMENTWISE["SGD momentum"], dtype, "split", compiled=compiled, shapes=shapes)
        for compiled in (True, False)
    }
    for compiled in (True, False):
        run, other = runs[compiled], runs[not compiled]
        run.train(3)
        other.optimizer.load_state_dict(copy.deepcopy(run.optimizer.state_dict()))
        assert same(run.values(), other.values())
        assert same(run.params, other.params)
        for param, twin in zip(run.params, other.params, strict=True):
            ours, theirs = run.optimizer.state[param], other.optimizer.state[twin]
            assert torch.equal(ours["momentum_buffer"], theirs["momentum_buffer"])


@pytest.mark.parametrize("name", ["RAdam", "ASGD"])
def test_an_optimizer_that_the_compiler_does_not_understand_is_stepped_eagerly_after_one_warning(
    compiler, caplog, name
):
    ours, theirs = (Run(ELEMENTWISE[name], BF16, "split", compiled=compiled) for compiled in (True, False))
    with caplog.at_level(logging.WARNING, "booster"):
        for run in (ours, theirs):
            run.train(4)
    # torch's compiler has its own warnings, once in a process.
    (said,) = [record.message for record in caplog.records if record.name.startswith("booster")]
    assert "does not understand" in said
    for a, b in zip(ours.values(), theirs.values(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("make", "options", "reason"),
    [
        (lambda p: optim.Adafactor(p, lr=0.01), {}, "not known to treat every element by itself"),
        (lambda p: optim.LBFGS(p), {}, "not known to treat every element by itself"),
        (lambda p: optim.AdamW(p), {"master_weights": "none", "rounding": "stochastic"}, "random numbers"),
    ],
)
def test_what_cannot_be_compiled_says_so_in_one_warning(make, options, reason, caplog):
    model = nn.Linear(4, 4)
    with caplog.at_level(logging.WARNING, "booster"):
        b = Booster("cpu", BF16NaiveMixedPrecision(**options), fused_optimizer="compile")
        _, optimizer, *_ = b.boost(model, make(model.parameters()))
    assert len(caplog.records) == 1
    assert reason in caplog.text
    assert not isinstance(optimizer._update.decision.application.master_step, CompiledMasterStep)


def test_boost_compiles_an_elementwise_optimizer(compiler, calls):
    model = nn.Linear(64, 64)
    b = Booster("cpu", "bf16_naive", fused_optimizer="compile")
    model, optimizer, *_ = b.boost(model, optim.SGD(model.parameters(), lr=0.1))
    b.backward(model(torch.ones(2, 64)).sum(), optimizer)
    assert optimizer.step()
    assert calls == [64 * 64 + 64]  # without state there is nothing to create first
    assert optimizer.param_groups[0]["lr"] == 0.1


@pytest.mark.parametrize(
    ("dtype", "eager", "planes"), [(BF16, SplitBFloat16(), BFloat16Planes()), (FP16, SplitFloat16(), Float16Planes())]
)
def test_two_planes_hold_what_int16_holds(dtype, eager, planes):
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-(2**31), 2**31, (2**18,), generator=generator, dtype=torch.int64).to(torch.int32)
    values = values.view(torch.float32).nan_to_num(0.0)
    values[: 2**17] = torch.randn(2**17, generator=generator)
    read = []
    for form in (eager, planes):
        working = torch.zeros(len(values), dtype=dtype)
        residual = form.allocate(len(values), dtype, values.device)
        assert residual.nbytes == 2 * len(values)
        form.write([working], residual, values.clone(), values.clone())
        joined = values.clone()
        form.read([working], residual, joined, values.clone())
        read.append((working, joined))
    assert torch.equal(read[0][0], read[1][0])
    assert torch.equal(read[0][1], read[1][1])


def test_float16_is_rounded_in_float32_as_torch_rounds_it():
    half = torch.arange(-(2**15), 2**15).to(torch.int16).view(FP16).float()
    half = half[half.isfinite()].sort().values
    between = (half[1:] + half[:-1]) / 2
    for values in (
        half,
        between,
        between * (1 + 2.0**-20),
        between * (1 - 2.0**-20),
        torch.tensor([65519.9, 65520.0, 1e9]),
    ):
        assert torch.equal(round_float16(values), values.half().float())


def test_a_strategy_that_does_not_compile_keeps_the_int16_layout():
    run = Run(ELEMENTWISE["SGD"], BF16, "split", compiled=False)
    assert {bucket.residual.dtype for bucket in run.masters.buckets} == {torch.int16}


@pytest.mark.parametrize("present", [False, True])
@pytest.mark.parametrize("encoding", ["bf16", "signed", "unsigned", "root_ratio", "ratio"])
def test_packing_without_side_effects_is_that_in_place(encoding, present):
    generator, rng = torch.Generator().manual_seed(0), RoundingRNG()
    rng.next()
    lanes = rng.lanes("state", torch.device("cpu"))
    values = torch.randn(2**14, generator=generator).pow(3) * torch.exp2(torch.randn(2**14, generator=generator) * 20)
    values = values.abs() if encoding == "unsigned" else values
    values[64:128], values[200] = 0.0, 1e-38
    here = torch.rand(2**14, generator=generator) < 0.9 if present else None
    kept = QuantizedState(encoding, len(values), torch.device("cpu"))
    divisor = QuantizedState("unsigned", len(values), torch.device("cpu")) if "ratio" in encoding else None
    if divisor is not None:
        divisor.codes.copy_(torch.arange(len(values)) % 256)
    kept.quantize(
        values.clone() if here is None else torch.where(here, values, 0.0),
        rng.random_bits("state", torch.device("cpu")),
        divisor=divisor,
    )
    codes, scales = quantize(encoding, values, lanes, here, None if divisor is None else divisor.codes)
    assert torch.equal(codes.to(kept.codes.dtype).view(torch.uint8), kept.codes.view(torch.uint8))
    again = QuantizedState(encoding, len(values), torch.device("cpu"))
    again.codes.copy_(codes)
    if scales is not None:
        again.scales.copy_(scales)
    assert same(again.tensors, kept.tensors)
    wide = dequantize(encoding, kept.codes, kept.factors(), None if divisor is None else divisor.codes)
    assert torch.equal(wide, kept.dequantize(values.clone(), divisor=divisor))


AGREEING = [
    (BF16, Float32Master),
    (BF16, Kahan),
    (FP16, Float32Master),
    (FP16, Kahan),
    (BF16, BFloat16Planes),
    (FP16, Float16Planes),
    (BF16, lambda: Split24BFloat16(DITHER)),
    (FP16, lambda: Split24Float16(DITHER)),
    (torch.float32, Same),
]
DITHER = RoundingRNG()
LANES = DITHER.lanes(WEIGHTS, torch.device("cpu"))
IN_PLACE = {BFloat16Planes: SplitBFloat16, Float16Planes: SplitFloat16}


@pytest.mark.parametrize(("dtype", "form"), AGREEING)
def test_arithmetic_without_side_effects_is_that_in_place_also_after_somebody_wrote_weights(dtype, form):
    generator = torch.Generator().manual_seed(0)
    values = torch.exp2(torch.empty(2**18).uniform_(-30, 15.5, generator=generator))
    values *= torch.where(torch.rand(2**18, generator=generator) < 0.5, -1.0, 1.0)
    values[:2] = torch.tensor([0.0, -0.0])
    eager = IN_PLACE.get(form, form)()
    weights, scratch = torch.zeros(len(values), dtype=dtype), torch.empty(len(values))
    kept = eager.allocate(len(values), dtype, torch.device("cpu"))
    eager.write([weights], kept, values.clone(), scratch)
    rounded, residual = split(form(), values, dtype, LANES)
    assert torch.equal(rounded.to(dtype).view(torch.int16), weights.view(torch.int16))
    residual = [row.to(torch.uint8 if form in IN_PLACE else kept.dtype) for row in residual]
    if residual and form not in IN_PLACE:
        assert torch.equal(residual[0], kept)
    foreign = torch.rand(len(values), generator=generator) < 0.3
    weights[foreign] = torch.randn(int(foreign.sum()), generator=generator).to(dtype)
    weights[::7] = 0.0
    weights[::11] = -0.0
    read = kept if form is Float32Master else torch.empty(len(values))
    eager.read([weights], kept, read, scratch)
    joined = join(form(), weights, residual)
    assert torch.equal(joined.view(torch.int32), read.view(torch.int32))
    assert torch.equal(rounded_to(joined, dtype), weights)


def rounded_to(values, dtype):
    weights = torch.zeros(len(values), dtype=dtype)
    Nearest().write([weights], None, values.clone(), torch.empty(len(values)))
    return weights


@pytest.mark.parametrize(("dtype", "form"), [(FP16, "fp32")])
@SIZES
def test_a_compiled_step_starts_from_weights_that_somebody_else_wrote(compiler, calls, dtype, form, shapes):
    run = Run(lambda p: optim.SGD(p, lr=1e-2), dtype, form, shapes=[shape for shape in shapes if shape])
    run.train(2)
    for param in run.params:
        param.data.clamp_(-0.25, 0.25)
        param.data[:3] = 0.0
    written = [param.detach().clone() for param in run.params]
    run.inner.param_groups[0]["lr"] = 0.0
    before = len(calls)
    run.train(1)
    assert len(calls) > before
    assert same(run.params, written)


def test_a_schedule_that_was_made_before_boost_leaves_the_update_compiled(compiler, calls, caplog):
    model = nn.Linear(8, 4)
    optimizer = optim.RMSprop(model.parameters(), lr=0.01)
    schedule = optim.lr_scheduler.StepLR(optimizer, 2)  # which puts its own `step` before the optimizer's
    b = Booster("cpu", "bf16_naive", fused_optimizer="compile")
    with caplog.at_level(logging.WARNING, logger="booster"):
        model, optimizer, *_ = b.boost(model, optimizer, lr_scheduler=schedule)
        for _ in range(3):
            b.backward(model(torch.ones(4, 8)).float().square().mean(), optimizer)
            assert optimizer.step().applied
            optimizer.zero_grad()
    # The first, which makes the states, is not compiled.
    assert (len(calls), [record.message for record in caplog.records]) == (2, [])
