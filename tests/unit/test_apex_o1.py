"""O1: which functions run in which dtype, with weights used twice, recomputed, and changed between forward passes."""

import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from types import ModuleType

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from booster import Booster
from booster.mixed_precision import FP16ApexMixedPrecision
from booster.mixed_precision import apex_amp as amp

HALF, FLOAT = torch.float16, torch.float32


@pytest.fixture(autouse=True)
def no_session_left():
    yield
    amp.shutdown()


@pytest.fixture
def precision():
    return FP16ApexMixedPrecision(verbosity=0)


@pytest.fixture
def booster(precision):
    return Booster("cpu", precision)


def cross(x, y):
    return torch.cross(x, y, dim=-1)


@pytest.mark.parametrize("function", [torch.atan2, torch.mul, cross, torch.dot, torch.add])
def test_mixed_operands_are_widened(booster, function):
    shape = (3,) if function is torch.dot else (2, 3)
    half, wide = torch.ones(shape, dtype=HALF, requires_grad=True), torch.ones(shape, requires_grad=True)
    with booster.autocast():
        for operands in ((half, wide), (wide, half)):
            out = function(*operands)
            assert out.dtype == FLOAT
            out.sum().backward()
        assert function(half, half).dtype == HALF
        assert torch.cat([half, wide]).dtype == FLOAT
    assert (half.grad.dtype, wide.grad.dtype) == (HALF, FLOAT)


def test_in_place_forms_of_float32_functions_raise_on_half_and_others_stay_in_place(booster):
    half = torch.ones(2, dtype=HALF)
    with booster.autocast():
        with pytest.raises(NotImplementedError, match="Cannot call in-place method exp_ on fp16 Tensors"):
            half.exp_()
        same = half.add_(torch.ones(2))
        torch.ones(2).exp_()
    assert same is half
    assert half.dtype == HALF


@pytest.mark.parametrize("cell", [nn.RNNCell, nn.LSTMCell, nn.GRUCell])
@pytest.mark.parametrize("dtype", [HALF, FLOAT])
def test_recurrent_cells_compute_in_half(booster, cell, dtype):
    module = cell(4, 4)
    x = torch.ones(2, 4, dtype=dtype, requires_grad=True)
    with booster.autocast():
        out = module(x)
        out = module(x, out)
    first = out[0] if isinstance(out, tuple) else out
    assert first.dtype == HALF
    first.float().sum().backward()
    assert (x.grad.dtype, module.weight_ih.grad.dtype) == (dtype, FLOAT)


@pytest.mark.parametrize("layer", [nn.RNN, nn.LSTM, nn.GRU])
@pytest.mark.parametrize("dtype", [HALF, FLOAT])
def test_recurrent_layers_run_in_float32_on_cpu(booster, layer, dtype):
    module = layer(4, 4, num_layers=2, bidirectional=True)
    x = torch.ones(3, 2, 4, dtype=dtype)
    with booster.autocast():
        out = module(x)[0]
    torch.testing.assert_close(out, module(x.float())[0])


def test_packed_sequences_pass(booster):
    module = nn.LSTM(4, 4)
    packed = nn.utils.rnn.pack_padded_sequence(torch.ones(3, 2, 4), torch.tensor([3, 2]))
    with booster.autocast():
        assert module(packed)[0].data.dtype == FLOAT


class Twice(nn.Module):
    """A weight that is used twice, by functions of one list."""

    def __init__(self, use):
        super().__init__()
        self.weight = nn.Parameter(torch.tensor([[0.5, -0.25], [1.0, 0.75]]))
        self.use = use

    def forward(self, x):
        return self.use(self.use(x, self.weight), self.weight).float().sum()


USES = {
    "half": lambda x, w: x @ w,
    "float": lambda x, w: F.softmax(w, dim=-1) * x,
    "promote": torch.mul,
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("through", ["booster", "amp"])
def test_a_weight_that_is_used_twice_follows_its_updates_also_after_an_evaluation(use, through):
    def train(model, backward, step):
        x = torch.tensor([[1.0, 2.0], [0.5, -1.0]])
        grads = []
        for _ in range(3):
            backward(model(x))
            grads.append(model.weight.grad.clone().float())
            step()
            with torch.no_grad():
                model(x)
        return grads

    reference = Twice(USES[use])
    plain = torch.optim.SGD(reference.parameters(), lr=0.125)
    expected = train(reference, torch.Tensor.backward, lambda: (plain.step(), plain.zero_grad()))

    model = Twice(USES[use])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.125)
    if through == "booster":
        booster = Booster("cpu", FP16ApexMixedPrecision(verbosity=0, max_loss_scale=16.0))
        model, optimizer, *_ = booster.boost(model, optimizer)
        got = train(
            model, lambda loss: booster.backward(loss, optimizer), lambda: (optimizer.step(), optimizer.zero_grad())
        )
    else:
        model, optimizer = amp.initialize(model, optimizer, verbosity=0, max_loss_scale=16.0)

        def backward(loss):
            with amp.scale_loss(loss, optimizer) as scaled:
                scaled.backward()

        got = train(model, backward, lambda: (optimizer.step(), optimizer.zero_grad()))
    for mine, theirs in zip(got, expected, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=4e-3, atol=4e-3)


def test_a_weight_that_a_ported_script_writes_is_the_one_that_the_next_forward_reads():
    model = amp.initialize(Twice(USES["half"]), verbosity=0)
    x = torch.ones(2, 2)
    first = model(x)
    with torch.no_grad():
        model.weight.mul_(2.0)
    assert model(x).item() == 4 * first.item()


class Recomputing(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.reentrant = reentrant

    def block(self, x):
        return F.softmax(self.second(F.gelu(self.first(x))), dim=-1)

    def forward(self, x):
        if self.reentrant is None:
            return self.block(x)
        return checkpoint(self.block, x, use_reentrant=self.reentrant)


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("through", ["booster", "amp"])
def test_activation_checkpointing_recomputes_in_the_same_dtypes(reentrant, through):
    def grads(reentrant):
        torch.manual_seed(0)
        model = Recomputing(reentrant)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = torch.linspace(-1, 1, 8).view(2, 4).requires_grad_()
        if through == "amp":
            boosted, optimizer = amp.initialize(model, optimizer, verbosity=0)
            with amp.scale_loss(boosted(x).pow(2).sum(), optimizer) as scaled:
                scaled.backward()
            amp.shutdown()
        else:
            booster = Booster("cpu", FP16ApexMixedPrecision(verbosity=0))
            boosted, optimizer, *_ = booster.boost(model, optimizer)
            booster.backward(boosted(x).pow(2).sum(), optimizer)
        return [param.grad for param in model.parameters()]

    for mine, theirs in zip(grads(reentrant), grads(None), strict=True):
        assert torch.equal(mine, theirs)


def test_the_criterion_runs_under_the_same_casts_and_its_loss_is_left_alone():
    booster = Booster("cpu", FP16ApexMixedPrecision(cast_model_outputs=HALF, verbosity=0))
    model, _, criterion, *_ = booster.boost(nn.Linear(4, 4), criterion=nn.CrossEntropyLoss())
    out = model(torch.ones(2, 4))
    assert out.dtype == HALF
    assert criterion(out, torch.tensor([0, 1])).dtype == FLOAT
    function = booster.boost(nn.Linear(4, 4), criterion=lambda out, y: F.cross_entropy(out, y))[2]
    assert function(out, torch.tensor([0, 1])).dtype == FLOAT


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, HALF),
        ({"cast_model_outputs": FLOAT}, FLOAT),
        ({"cast_model_type": FLOAT}, FLOAT),
        ({"cast_model_type": False}, HALF),
    ],
)
def test_the_output_of_a_model_keeps_its_dtype_unless_a_cast_is_asked_for(options, expected):
    booster = Booster("cpu", FP16ApexMixedPrecision(**options, verbosity=0))
    assert booster.boost(nn.Linear(4, 4))[0](torch.ones(1, 4)).dtype == expected


def test_casts_end_with_the_forward_pass_and_with_disable_casts(booster, precision):
    model = booster.boost(nn.Linear(4, 4))[0]
    with precision.disable_casts():
        assert model(torch.ones(1, 4)).dtype == FLOAT
    assert model(torch.ones(1, 4)).dtype == HALF
    assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == FLOAT
    assert F.softmax(torch.ones(2, dtype=HALF), -1).dtype == HALF
    with booster.autocast(), precision.disable_casts():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == FLOAT
        assert F.softmax(torch.ones(2, dtype=HALF), -1).dtype == HALF


def test_another_strategy_in_the_same_process_is_not_touched(booster):
    booster.boost(nn.Linear(4, 4))[0](torch.ones(1, 4))
    plain = Booster("cpu", FP16ApexMixedPrecision("O0", verbosity=0)).boost(nn.Linear(4, 4))[0]
    assert plain(torch.ones(1, 4)).dtype == FLOAT


@amp.half_function
def halved(x, y=None):
    return x.dtype if y is None else (x.dtype, y.dtype)


@amp.float_function
def widened(x):
    return x.dtype


@amp.promote_function
def promoted(x, y):
    return x.dtype, y.dtype


def test_decorated_functions_cast_inside_a_region_and_nowhere_else(booster):
    half, wide = torch.ones(2, dtype=HALF), torch.ones(2)
    assert (halved(wide), widened(half), promoted(half, wide)) == (FLOAT, HALF, (HALF, FLOAT))
    with booster.autocast():
        assert (halved(wide), halved(wide, y=wide), widened(half)) == (HALF, (HALF, HALF), FLOAT)
        assert promoted(half, wide) == (FLOAT, FLOAT)
        assert promoted(half, half) == (HALF, HALF)


@pytest.fixture
def library():
    module = ModuleType("a_library")
    module.dtype_of = lambda x: x.dtype
    module.both = lambda x, y: (x.dtype, y.dtype)
    sys.modules[module.__name__] = module
    yield module
    del sys.modules[module.__name__]


def test_registered_functions_of_other_modules_cast_inside_a_region(booster, precision, library):
    precision.register_half_function(library, "dtype_of")
    precision.register_promote_function(library, "both")
    assert library.dtype_of(torch.ones(2)) == FLOAT
    with booster.autocast():
        assert library.dtype_of(torch.ones(2)) == HALF
        assert library.both(torch.ones(2), torch.ones(2, dtype=HALF)) == (FLOAT, FLOAT)
    precision.register_float_function(library, "dtype_of")
    with booster.autocast():
        assert library.dtype_of(torch.ones(2, dtype=HALF)) == FLOAT
    with pytest.raises(ValueError, match="No function named nothing in module a_library"):
        precision.register_half_function(library, "nothing")


def test_registered_functions_of_torch_change_their_rule_for_this_strategy_only(precision):
    precision.register_half_function(torch, "sigmoid")
    precision.register_float_function(torch, "bmm")
    before = torch.sigmoid
    booster, other = Booster("cpu", precision), Booster("cpu", FP16ApexMixedPrecision(verbosity=0))
    square = torch.ones(1, 2, 2)
    with booster.autocast():
        assert (torch.sigmoid(square).dtype, torch.bmm(square, square.half()).dtype) == (HALF, FLOAT)
    with other.autocast():
        assert (torch.sigmoid(square).dtype, torch.bmm(square, square).dtype) == (FLOAT, HALF)
    assert torch.sigmoid is before


def test_apex_amp_registers_for_the_next_initialize(library):
    amp.register_half_function(library, "dtype_of")
    amp.register_float_function(torch, "tanh")
    amp.initialize(nn.Linear(2, 2), verbosity=0)
    assert library.dtype_of(torch.ones(2)) == HALF
    assert torch.tanh(torch.ones(2, dtype=HALF)).dtype == FLOAT
    amp.initialize(nn.Linear(2, 2), verbosity=0)
    assert torch.tanh(torch.ones(2, dtype=HALF)).dtype == HALF
    with amp.disable_casts():
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == FLOAT


class Product(nn.Module):
    """A matrix product and a listed function; notes their dtypes."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))

    def forward(self, x):
        product = x @ self.weight
        self.dtypes = (product.dtype,)
        self.dtypes += (torch.exp(product).dtype,)
        return product


OTHERS = {
    "O0": lambda: FP16ApexMixedPrecision("O0", verbosity=0),
    "O2": lambda: FP16ApexMixedPrecision("O2", verbosity=0),
    "O3": lambda: FP16ApexMixedPrecision("O3", verbosity=0),
    "fp32": lambda: "fp32",
    "fp16_naive": lambda: "fp16_naive",
    "fp16": lambda: "fp16",
    "bf16": lambda: "bf16",
}


@pytest.mark.parametrize("other", OTHERS)
@pytest.mark.parametrize("entered_by", ["autocast", "amp"])
def test_models_of_other_precisions_compute_in_an_o1_region_as_they_do_outside(booster, other, entered_by):
    product = Product()
    model = Booster("cpu", OTHERS[other]()).boost(product)[0]
    model(torch.ones(2, 2))
    outside = product.dtypes
    if entered_by == "amp":
        amp.initialize(nn.Linear(2, 2), verbosity=0)
    with booster.autocast() if entered_by == "autocast" else nullcontext():
        model(torch.ones(2, 2))
        here = (torch.ones(2, 2) @ torch.ones(2, 2)).dtype
    assert product.dtypes == outside
    assert here == HALF


def test_an_o1_model_in_the_region_of_another_o1_strategy_follows_its_own_rules(booster):
    own = FP16ApexMixedPrecision(verbosity=0)
    own.register_float_function(torch, "matmul")
    own.register_float_function(torch.Tensor, "matmul")
    product = Product()
    model = Booster("cpu", own).boost(product)[0]
    with booster.autocast():
        model(torch.ones(2, 2))
        assert product.dtypes == (FLOAT, FLOAT)
        assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype == HALF


def test_recomputed_activations_of_other_precisions_are_not_cast_either(booster):
    class Checkpointed(Product):
        def forward(self, x):
            return checkpoint(super().forward, x, use_reentrant=False)

    product = Checkpointed()
    other = Booster("cpu", "fp32")
    model, optimizer, *_ = other.boost(product, torch.optim.SGD(product.parameters(), lr=0.1))
    with booster.autocast():
        out = model(torch.ones(2, 2))
        product.dtypes = None
        other.backward(out.sum(), optimizer)
    assert product.dtypes[0] == FLOAT


def test_two_strategies_register_one_function_without_touching_each_other(precision, library):
    other, third = (FP16ApexMixedPrecision(verbosity=0) for _ in range(2))
    boosters = [Booster("cpu", strategy) for strategy in (precision, other, third)]
    precision.register_half_function(library, "dtype_of")
    other.register_float_function(library, "dtype_of")
    precision.register_half_function(library, "dtype_of")
    dtypes = []
    for booster in boosters:
        with booster.autocast():
            dtypes.append([library.dtype_of(torch.ones(2, dtype=dtype)) for dtype in (HALF, FLOAT)])
    assert dtypes == [[HALF, HALF], [FLOAT, FLOAT], [HALF, FLOAT]]
    with boosters[0].autocast(), boosters[2].autocast():
        assert library.dtype_of(torch.ones(2)) == FLOAT


OF_TORCH = {
    "linalg": (torch.linalg, "norm", torch.linalg.norm),
    "special": (torch.special, "expit", torch.special.expit),
    "functional sigmoid": (F, "sigmoid", F.sigmoid),
    "functional tanh": (F, "tanh", F.tanh),
    "functional hardswish": (F, "hardswish", F.hardswish),
    "max_pool1d": (F, "max_pool1d", lambda x: F.max_pool1d(x, 2)),
    "max_pool1d with indices": (F, "max_pool1d", lambda x: F.max_pool1d(x, 2, return_indices=True)[0]),
    "operator": (torch.Tensor, "__add__", lambda x: x + 1),
}


@pytest.mark.parametrize("case", OF_TORCH)
def test_functions_of_any_module_of_torch_get_their_rule_and_are_not_replaced(precision, case):
    module, name, call = OF_TORCH[case]
    before = getattr(module, name)
    precision.register_float_function(module, name)
    assert getattr(module, name) is before
    with Booster("cpu", precision).autocast():
        assert call(torch.ones(2, 4, dtype=HALF)).dtype == FLOAT
    with Booster("cpu", FP16ApexMixedPrecision(verbosity=0)).autocast():
        assert call(torch.ones(2, 4, dtype=HALF)).dtype == HALF


@pytest.mark.parametrize(
    ("module", "name"),
    [(nn.utils, "clip_grad_norm_"), (F, "upsample_bilinear"), (nn.Linear, "forward"), (nn, "Linear")],
)
def test_functions_of_torch_that_are_never_dispatched_are_refused(precision, module, name):
    before = getattr(module, name)
    with pytest.raises(ValueError, match=rf"{name} cannot be registered.*Register the function of torch that it calls"):
        precision.register_half_function(module, name)
    assert getattr(module, name) is before


def test_registered_static_and_class_methods_stay_what_they_are(booster, precision):
    class Library:
        @staticmethod
        def static(x):
            return x.dtype

        @classmethod
        def of_class(cls, x):
            return cls, x.dtype

    precision.register_half_function(Library, "static")
    precision.register_half_function(Library, "of_class")
    with booster.autocast():
        assert [holder.static(torch.ones(2)) for holder in (Library, Library())] == [HALF, HALF]
        assert [holder.of_class(torch.ones(2)) for holder in (Library, Library())] == [(Library, HALF)] * 2


def ones_of(dtype):
    return lambda *shape: torch.ones(*shape, dtype=dtype)


IN_PLACE = {
    "addmm_": lambda own, other: own(2, 2).addmm_(other(2, 2), own(2, 2)),
    "addmm_ keyword": lambda own, other: own(2, 2).addmm_(mat1=other(2, 2), mat2=other(2, 2)),
    "addmv_": lambda own, other: own(2).addmv_(other(2, 2), other(2)),
    "torch.addmv_": lambda own, other: torch.addmv_(own(2), other(2, 2), own(2)),
    "addr_": lambda own, other: own(2, 2).addr_(other(2), other(2)),
    "addbmm_": lambda own, other: own(2, 2).addbmm_(other(1, 2, 2), other(1, 2, 2)),
    "baddbmm_": lambda own, other: own(1, 2, 2).baddbmm_(other(1, 2, 2), own(1, 2, 2)),
    "addcmul_": lambda own, other: own(2).addcmul_(other(2), own(2)),
}


@pytest.mark.parametrize("name", IN_PLACE)
@pytest.mark.parametrize(("own", "other"), [(HALF, FLOAT), (FLOAT, HALF), (HALF, HALF), (FLOAT, FLOAT)])
def test_in_place_forms_take_other_arguments_in_the_dtype_of_the_tensor_that_changes(booster, name, own, other):
    with booster.autocast():
        out = IN_PLACE[name](ones_of(own), ones_of(other))
    assert out.dtype == own
    torch.testing.assert_close(out, IN_PLACE[name](ones_of(own), ones_of(own)))


CONTEXTS = {
    "autocast": lambda booster: torch.autocast("cpu", torch.bfloat16),
    "device": lambda booster: torch.device("cpu"),
    "region": lambda booster: booster.autocast(),
}


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_session_cannot_begin_inside_a_context_that_ends_before_it(booster, context):
    net = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with CONTEXTS[context](booster), pytest.raises(RuntimeError, match=r"inside another context.*call it outside"):
        amp.initialize(net, optimizer, verbosity=0)
    amp.initialize(net, optimizer, verbosity=0)
    amp.initialize(nn.Linear(2, 2), verbosity=0)
    amp.shutdown()
    with CONTEXTS[context](booster):
        amp.initialize(nn.Linear(2, 2), opt_level="O0", verbosity=0)


def test_a_session_may_begin_under_a_default_device():
    square = torch.ones(2, 2)
    torch.set_default_device("cpu")
    try:
        amp.initialize(nn.Linear(2, 2), verbosity=0)
    finally:
        torch.set_default_device(None)
    assert ((square @ square).dtype, torch.exp(square.half()).dtype) == (HALF, FLOAT)
    amp.shutdown()
    assert ((square @ square).dtype, torch.exp(square.half()).dtype) == (FLOAT, HALF)


def test_only_the_thread_that_casts_can_end_the_session():
    amp.initialize(nn.Linear(2, 2), verbosity=0)
    with ThreadPoolExecutor(1) as pool:
        for end in (amp.shutdown, lambda: amp.initialize(nn.Linear(2, 2), opt_level="O0", verbosity=0)):
            with pytest.raises(RuntimeError, match="only that thread can end them"):
                pool.submit(end).result()
    square = torch.ones(2, 2)
    assert (square @ square).dtype == HALF
    amp.shutdown()
    assert (square @ square).dtype == FLOAT
