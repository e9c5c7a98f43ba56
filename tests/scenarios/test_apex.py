"""Scenarios of apex.amp: casts of O1, its cache, checkpoints, and models with several losses and optimizers."""

import copy
from functools import partial

import pytest
import torch
from scenarios import scenario
from small_job import batch, flat, net, sgd
from torch import nn
from torch.nn import functional as F

from booster import Booster
from booster.mixed_precision import FP16ApexMixedPrecision, FP16NaiveMixedPrecision
from booster.mixed_precision import apex_amp as amp

apex = partial(scenario, "NVIDIA apex")
CASTS, PROMOTION = "tests/L0/run_amp/test_basic_casts.py", "tests/L0/run_amp/test_promotion.py"
CACHE, CHECKPOINTS = "tests/L0/run_amp/test_cache.py", "tests/L0/run_amp/test_checkpointing.py"
SEVERAL = "tests/L0/run_amp/test_multiple_models_optimizers_losses.py"
GROUPS, LARC = "tests/L0/run_amp/test_add_param_group.py", "tests/L0/run_amp/test_larc.py"
RNN, UTIL = "tests/L0/run_amp/test_rnn.py", "tests/L0/run_fp16util/test_fp16util.py"
DDP = "tests/distributed/amp_master_params/compare.py"
HALF, FLOAT = torch.float16, torch.float32
LEVELS = ["O0", "O1", "O2", "O3"]


@pytest.fixture(autouse=True)
def no_session_left():
    yield
    amp.shutdown()


def start(level="O1", make=sgd, **options):
    model = net()
    return amp.initialize(model, make(model.parameters()), opt_level=level, verbosity=0, **options)


def run_step(model, optimizer, seed=1, bad=False):
    x, y = batch(seed)
    optimizer.zero_grad()
    with amp.scale_loss(F.cross_entropy(model(x), y) * (float("inf") if bad else 1.0), optimizer) as scaled:
        scaled.backward()
    optimizer.step()


def dtypes(function):
    """The dtype of the result and of the input's gradient, for half and for float32 input."""
    found = {}
    for dtype in (HALF, FLOAT):
        x = torch.rand(4, 4).to(dtype).requires_grad_()
        out = function(x)
        out.float().sum().backward()
        found[dtype] = (out.dtype, x.grad.dtype)
    return found


@apex(
    CASTS,
    "test_linear_is_half, test_conv2d_is_half, test_matmul_op_is_half",
    "products are half, gradients as the input",
)
@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.linear(x, torch.ones(4, 4)),
        lambda x: F.conv2d(x[None, None], torch.ones(1, 1, 3, 3)),
        lambda x: x @ torch.ones(4, 4),
        lambda x: x.matmul(torch.ones(4, 4)),
    ],
    ids=["linear", "conv2d", "@", "matmul"],
)
def test_products_are_half(function):
    start()
    assert dtypes(function) == {HALF: (HALF, HALF), FLOAT: (HALF, FLOAT)}


@apex(
    CASTS, "test_softmax_is_float, test_group_norm_is_float, test_mse_loss_is_float", "sensitive functions are float32"
)
@apex(CASTS, "test_pow_op_is_float, test_sum_is_float", "as are powers and sums")
@pytest.mark.parametrize(
    "function",
    [
        lambda x: F.softmax(x, dim=-1),
        lambda x: F.group_norm(x, 2),
        lambda x: F.mse_loss(x, torch.zeros(4, 4)),
        lambda x: x**2,
        lambda x: x.pow(2),
        lambda x: x.sum(),
    ],
    ids=["softmax", "group_norm", "mse_loss", "**", "pow", "sum"],
)
def test_sensitive_functions_are_float32(function):
    start()
    assert dtypes(function) == {HALF: (FLOAT, HALF), FLOAT: (FLOAT, FLOAT)}


@apex(CASTS, "test_relu_is_match, test_batch_norm_is_match", "others keep the dtype of their input")
@pytest.mark.parametrize(
    "function",
    [F.relu, lambda x: F.batch_norm(x, torch.zeros(4), torch.ones(4), training=True)],
    ids=["relu", "batch_norm"],
)
def test_other_functions_match_their_input(function):
    start()
    assert dtypes(function) == {HALF: (HALF, HALF), FLOAT: (FLOAT, FLOAT)}


@apex(CASTS, "test_bce_raises_by_default", "binary_cross_entropy of half probabilities is an error")
def test_bce_raises():
    start()
    with pytest.raises(NotImplementedError, match="binary_cross_entropy"):
        F.binary_cross_entropy(torch.rand(4).half(), torch.rand(4).half())


@apex(CASTS, "test_disabled_linear", "nothing is cast in disable_casts()")
def test_casts_can_be_disabled():
    start()
    with amp.disable_casts():
        assert F.linear(torch.ones(2, 2), torch.ones(2, 2)).dtype == FLOAT


@apex(
    PROMOTION, "test_atan2_matches_widest, test_mul_matches_widest, test_cat_matches_widest", "mixed inputs are widened"
)
@pytest.mark.parametrize(
    "function", [torch.atan2, torch.mul, lambda a, b: torch.cat([a, b])], ids=["atan2", "mul", "cat"]
)
def test_mixed_inputs_are_widened(function):
    start()
    assert function(torch.rand(3).half(), torch.rand(3)).dtype == FLOAT
    assert function(torch.rand(3).half(), torch.rand(3).half()).dtype == HALF


@apex(PROMOTION, "test_inplace_exp_is_error_for_half, test_inplace_add_matches_self", "in place: refused, or as self")
@pytest.mark.parametrize("dtype", [HALF, FLOAT])
def test_operations_in_place(dtype):
    start()
    x = torch.rand(3).to(dtype)
    assert x.clone().add_(torch.rand(3)).dtype == dtype
    if dtype == FLOAT:
        x.exp_()
    else:
        with pytest.raises(NotImplementedError, match="exp_"):
            x.exp_()


class Twice(nn.Module):
    """Uses one weight twice in a forward pass, by a function of one of the three lists."""

    def __init__(self, kind):
        super().__init__()
        self.kind = kind
        self.weight = nn.Parameter(torch.linspace(-1, 1, 16).view(4, 4))

    def forward(self, x):
        for _ in range(2):
            if self.kind == "half":
                x = F.linear(x, self.weight)
            elif self.kind == "float":
                x = x * torch.pow(self.weight, 2).sum().to(x.dtype)
            else:
                x = torch.mul(x, self.weight)
        return x


@apex(
    CACHE,
    "test_whitelist_module_fp32_weight, test_blacklist_module_fp32_weight, test_promote_module_fp32_weight",
    "a weight used twice, trained, evaluated and trained again has the gradients of float32",
)
@pytest.mark.parametrize("kind", ["half", "float", "promote"])
def test_a_weight_used_twice_has_the_gradients_of_float32(kind):
    x = torch.linspace(0, 1, 16).view(4, 4)
    model = Twice(kind)
    model, optimizer = amp.initialize(model, torch.optim.SGD(model.parameters(), lr=1.0), verbosity=0, loss_scale=8.0)
    plain = Twice(kind)
    reference = torch.optim.SGD(plain.parameters(), lr=1.0)
    for _ in range(2):
        optimizer.zero_grad()
        with amp.scale_loss(model(x).float().square().mean(), optimizer) as scaled:
            scaled.backward()
        with amp.disable_casts():
            reference.zero_grad()
            plain(x).square().mean().backward()
        torch.testing.assert_close(next(model.parameters()).grad, plain.weight.grad, rtol=2e-2, atol=2e-3)
        with torch.no_grad():
            model(x)


@apex(CHECKPOINTS, "test_restoring", "a resumed run is the run that was not interrupted, at every level")
@pytest.mark.parametrize("level", LEVELS)
def test_resuming_changes_nothing(level):
    model, optimizer = start(level, loss_scale="dynamic")
    for seed in (1, 2):
        run_step(model, optimizer, seed)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict(), amp.state_dict()))
    run_step(model, optimizer, 3)
    after = flat(model)
    model, optimizer = start(level, loss_scale="dynamic")
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    amp.load_state_dict(saved[2])
    run_step(model, optimizer, 3)
    assert level == "O0" or amp.state_dict()["loss_scaler0"]["loss_scale"] == saved[2]["loss_scaler0"]["loss_scale"]
    torch.testing.assert_close(flat(model), after, rtol=0, atol=0)


@apex(CHECKPOINTS, "test_loss_scale_decrease", "n overflows leave the scale at its start divided by 2**n")
@pytest.mark.parametrize("overflows", [1, 3])
def test_overflows_halve_the_scale(overflows):
    model, optimizer = start("O1")
    for _ in range(overflows):
        run_step(model, optimizer, bad=True)
    state = amp.state_dict()["loss_scaler0"]
    assert (state["loss_scale"], state["unskipped"]) == (2.0**16 / 2**overflows, 0)


@apex(CHECKPOINTS, "test_state_dict", "the model's state is float32 at O2, and the loss falls")
@pytest.mark.parametrize("level", ["O1", "O2"])
def test_the_state_of_the_model_is_float32(level):
    model, optimizer = start(level, lambda params: torch.optim.Adam(params, lr=1e-2))
    assert {value.dtype for value in model.state_dict().values()} == {FLOAT}
    x, y = batch()
    before = F.cross_entropy(model(x).float(), y).item()
    for _ in range(5):
        run_step(model, optimizer)
    assert F.cross_entropy(model(x).float(), y).item() < before


class Sum(nn.Module):
    """Several models as one, which adds their outputs."""

    def __init__(self, models):
        super().__init__()
        self.parts = nn.ModuleList(models)

    def forward(self, x):
        return sum(part(x) for part in self.parts)


@apex(
    SEVERAL,
    "test_2models2losses1optimizer, test_3models2losses2optimizers",
    "with an inf in either loss exactly that step is skipped, the rest is as in float32",
)
@pytest.mark.crossed
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("models", "optimizers"), [(2, 1), (3, 2)])
@pytest.mark.parametrize("bad", [None, 0, 1])
def test_several_losses_models_and_optimizers(level, models, optimizers, bad):
    def job(precision, applied=None):
        booster = Booster("cpu", precision)
        raw = [net() for _ in range(models)]
        pairs = []
        for group in [raw[:1], raw[1:]] if optimizers == 2 else [raw]:
            model = Sum(group)
            pairs.append(booster.boost(model, torch.optim.SGD(model.parameters(), lr=0.05))[:2])
        x, y = batch()
        steps = []
        for step in range(2):
            for number in range(2):
                loss = F.cross_entropy(sum(model(x) for model, _ in pairs), y) * (number + 1)
                if applied is None and step == 0 and number == bad:
                    loss = loss * float("inf")
                ids = number if applied is None else 0
                booster.backward(loss, [optimizer for _, optimizer in pairs], loss_id=ids)
            if applied is None or applied[step]:
                results = [optimizer.step().applied for _, optimizer in pairs]
                steps.append(all(results))
            for _, optimizer in pairs:
                optimizer.zero_grad()
        return steps, torch.cat([flat(model) for model, _ in pairs])

    options = {} if level == "O0" else {"loss_scale": "dynamic", "max_loss_scale": 2.0**8}
    precision = FP16ApexMixedPrecision(level, num_losses=2, verbosity=0, **options)
    steps, weights = job(precision)
    if level != "O0":
        assert steps == [bad is None, True]
        tolerance = 4e-3 if level == "O3" else 2e-3
        torch.testing.assert_close(weights, job("fp32", steps)[1], rtol=tolerance, atol=tolerance)
    elif bad is None:
        torch.testing.assert_close(weights, job("fp32", steps)[1])
    else:
        assert not weights.isfinite().all()  # level O0 is float32: nobody looks


@apex(GROUPS, "test_add_param_group", "a group added in mid-run trains with the rest, momentum included")
@pytest.mark.parametrize("level", LEVELS)
def test_a_group_may_be_added(level):
    def job(precision):
        booster, model = Booster("cpu", precision), net()
        model, optimizer, *_ = booster.boost(model, sgd(model[0].parameters()))
        x, y = batch()
        for step in range(4):
            booster.backward(F.cross_entropy(model(x), y), optimizer)
            optimizer.step()
            optimizer.zero_grad()
            model.zero_grad()
            if step == 1:
                optimizer.add_param_group({"params": list(model.unwrap()[2].parameters()), "lr": 0.2})
        return flat(model)

    torch.testing.assert_close(
        job(FP16ApexMixedPrecision(level, verbosity=0, loss_scale=64.0)),
        job("fp32"),
        rtol=5e-3,
        atol=4e-3 if level == "O3" else 2e-3,
    )


@apex(
    LARC,
    "test_larc_mixed_precision",
    "a wrapper around an optimizer that rescales gradients is refused by name, with what to use",
    differs="there the wrapper's step reads unscaled gradients. Here they are unscaled inside the step, and divided "
    "among ranks under some plugins; timm's Lars has the same ratio inside the step",
)
@pytest.mark.parametrize("level", LEVELS)
def test_larc_is_refused(level):
    class LARC:
        def __init__(self, optimizer):
            self.optim = optimizer
            self.param_groups = optimizer.param_groups

        def step(self):
            self.optim.step()

    model = net()
    with pytest.raises(TypeError, match=r"LARC.*(?s:.)*Lars"):
        Booster("cpu", FP16ApexMixedPrecision(level, verbosity=0)).boost(model, LARC(sgd(model.parameters())))


@apex(RNN, "test_rnn_cell_is_half, test_gru_cell_is_half, test_lstm_cell_is_half", "cells compute in half")
@pytest.mark.parametrize("cell", [nn.RNNCell, nn.GRUCell, nn.LSTMCell])
def test_recurrent_cells_are_half(cell):
    model = cell(4, 4)
    model, _ = amp.initialize(model, sgd(model.parameters()), verbosity=0)
    x = torch.rand(2, 4, requires_grad=True)
    out = model.unwrap()(x)
    out = out[0] if isinstance(out, tuple) else out
    assert out.dtype == HALF
    out.float().sum().backward()
    assert x.grad.dtype == FLOAT


@apex(UTIL, "test_params_and_buffers", "BatchNorm's parameters and buffers stay float32, all else is half")
@apex(UTIL, "test_output_is_half", "and the output is half where asked for")
def test_half_models_keep_batch_norm_in_float32():
    model = nn.Sequential(nn.Linear(8, 4), nn.BatchNorm1d(4))
    model, *_ = Booster("cpu", FP16NaiveMixedPrecision(output_to_fp32=False)).boost(model, sgd(model.parameters()))
    found = {name: value.dtype for name, value in [*model.named_parameters(), *model.named_buffers()]}
    assert {name: dtype for name, dtype in found.items() if name.startswith("0.")} == {"0.weight": HALF, "0.bias": HALF}
    assert {found[f"1.{name}"] for name in ("weight", "bias", "running_mean", "running_var")} == {FLOAT}
    assert model(torch.rand(4, 8)).dtype == HALF


def masters_on_ranks(rank, world_size):
    model = net()
    model, optimizer = amp.initialize(model, sgd(model.parameters()), opt_level="O2", verbosity=0)
    parallel = nn.parallel.DistributedDataParallel(model)
    for seed in (1, 2, 3):
        x, y = batch(seed + 10 * rank)
        optimizer.zero_grad()
        with amp.scale_loss(F.cross_entropy(parallel(x), y), optimizer) as scaled:
            scaled.backward()
        optimizer.step()
    masters = torch.cat([master.detach().flatten() for master in amp.master_params(optimizer)])
    weights = torch.cat([p.detach().flatten() for p in model.parameters()])
    amp.shutdown()
    return masters, weights


@apex(DDP, "compare.py (a script)", "masters are equal on all ranks, and rounded they are the weights")
def test_masters_are_equal_on_ranks_and_round_to_the_weights(ranks2):
    (masters, weights), (others, _) = ranks2(masters_on_ranks)
    assert masters.dtype == FLOAT
    assert torch.equal(masters, others)
    assert torch.equal(masters.half(), weights)
