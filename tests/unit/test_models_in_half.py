"""Models of transformers and timm under each precision: gradients, far positions, and what is served, against float64."""

import functools

import pytest
import torch
from models_in_half import (
    EPS,
    LOW,
    MARGIN,
    MODELS,
    NUM_ROUNDINGS,
    ROTARY,
    SCALE,
    C,
    Roundings,
    in_double,
    loss_of,
    make,
    off_by,
    relative_error,
    strategy,
    tolerance,
    widening,
)
from torch.utils._python_dispatch import TorchDispatchMode

from booster import Booster
from booster.mixed_precision import BF16MixedPrecision, FP8MixedPrecision
from booster.mixed_precision.low_precision.linear import LowPrecisionLinear

PRECISIONS = ["fp32", "bf16", "fp16", "bf16_naive", "fp16_naive"]
# One model of each precision, and each model once; others are slow.
QUICK = {("llama", "bf16_naive"), ("gemma", "fp16_naive"), ("t5", "fp16_naive"), ("gpt2", "bf16")}


@pytest.fixture
def build(request):
    return functools.partial(make, package=request.getfixturevalue)


def boosted(model, precision):
    booster = Booster("cpu", strategy(precision))
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    return booster, model.eval(), optimizer


def marked(name, precision):
    return pytest.param(name, precision, marks=[] if (name, precision) in QUICK else [pytest.mark.slow])


CASES = [marked(name, precision) for name in MODELS for precision in PRECISIONS]


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_gradients_of_every_parameter_are_those_of_float64_as_far_as_the_format_goes(build, name, precision):
    model, inputs = build(name)
    exact, exact_inputs = in_double(model, inputs)
    most = widening(exact, lambda model: loss_of(name, model(**exact_inputs)))
    assert max(most.values()) <= 1.02 * C / MARGIN * NUM_ROUNDINGS**0.5  # by which `tolerance` is derived
    loss_of(name, exact(**exact_inputs)).backward()
    booster, wrapped, optimizer = boosted(model, precision)
    loss = loss_of(name, wrapped(**inputs))
    booster.backward(loss, optimizer)
    scale = SCALE if precision in ("fp16", "fp16_naive") else 1.0
    eps = EPS[precision] * (2**3.5 if precision == "fp32" else 1)  # of sums of 2**7 terms
    errors = {
        key: relative_error(param.grad / scale, exact.get_parameter(key).grad)
        for key, param in model.named_parameters()
    }
    assert not {key: error / eps for key, error in errors.items() if not error <= MARGIN * most[key] * eps}


@pytest.mark.parametrize(
    "precision", [pytest.param(name, marks=[] if name == "mxfp8" else [pytest.mark.slow]) for name in LOW]
)
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "llama" else [pytest.mark.slow]) for name in MODELS]
)
def test_gradients_in_low_precision_are_as_far_off_as_its_roundings_of_operands_take_them(build, name, precision):
    model, inputs = build(name)
    exact, exact_inputs = in_double(model, inputs)
    if name == "gpt2":  # whose layers are Conv1D of transformers
        with pytest.raises(ValueError, match="finds no linear layer to convert"):
            boosted(model, precision)
        return
    most = off_by(exact, lambda model: loss_of(name, model(**exact_inputs)), EPS["bf16"], LOW[precision][1])
    loss_of(name, exact(**exact_inputs)).backward()
    booster, wrapped, optimizer = boosted(model, precision)
    assert any(isinstance(module, LowPrecisionLinear) for module in model.modules())
    booster.backward(loss_of(name, wrapped(**inputs)), optimizer)
    errors = {key: relative_error(param.grad, exact.get_parameter(key).grad) for key, param in model.named_parameters()}
    # Some layers stay in bfloat16, so that one draw more needs no margin but 2.
    assert not {key: error for key, error in errors.items() if not error <= 2 * most[key]}


def marked_half(name):
    marks = [] if name == "llama" else [pytest.mark.slow]
    return [pytest.param(name, precision, marks=marks) for precision in ("bf16_naive", "fp16_naive")]


LOW_ROWS = [pytest.param(name, precision, marks=pytest.mark.slow) for name in ROTARY for precision in LOW]


@pytest.mark.parametrize(("name", "precision"), [*(case for name in ROTARY for case in marked_half(name)), *LOW_ROWS])
def test_logits_at_far_positions_are_as_exact_as_at_the_first(build, name, precision):
    model, inputs = build(name, length=4096)
    exact, _ = in_double(model, inputs)
    booster, wrapped, _ = boosted(model, precision)
    rows = slice(-64, None), slice(0, 64)
    with torch.no_grad():
        found = wrapped(inputs["input_ids"], use_cache=False).logits.double()
        right = exact(inputs["input_ids"], use_cache=False).logits
        if precision in LOW:
            with Roundings(EPS["bf16"], LOW[precision][1]):
                rounded = exact(inputs["input_ids"], use_cache=False).logits
    for part in rows:
        error = relative_error(found[:, part], right[:, part])
        if precision in LOW:
            assert error <= 2 * relative_error(rounded[:, part], right[:, part])
        else:
            assert error <= tolerance(precision)  # of which only the forward is used


@pytest.mark.parametrize(
    ("name", "precision"),
    [
        *(case for name in MODELS if name != "convnext" for case in marked_half(name)),
        *LOW_ROWS,
        *(pytest.param("t5", precision, marks=pytest.mark.slow) for precision in LOW),
    ],
)
def test_a_served_model_gives_the_logits_of_the_trained_one(build, tmp_path, name, precision):
    model, inputs = build(name)
    booster, wrapped, optimizer = boosted(model, precision)
    for _ in range(3):
        booster.backward(wrapped(**inputs).loss, optimizer)
        assert optimizer.step().applied
        optimizer.zero_grad()
    booster.save_model(wrapped, tmp_path / "model.safetensors")
    model.config.save_pretrained(tmp_path)
    opened = type(model).from_pretrained(tmp_path, dtype=torch.float32).eval()
    with torch.no_grad():
        found, served = wrapped(**inputs).logits, opened(**inputs).logits
    # The served model computes in float32 with the weights that forward read, or rounded.
    if precision in LOW:
        exact, exact_inputs = in_double(opened, inputs)
        most = off_by(exact, lambda model: model(**exact_inputs).logits, EPS["bf16"], LOW[precision][1])
    bound = 2 * most["value"] if precision in LOW else tolerance(precision)
    assert relative_error(found, served.double()) <= bound
    for (key, buffer), other in zip(model.named_buffers(), opened.buffers(), strict=True):
        assert torch.equal(buffer, other), key


class ProductsOfGroups(TorchDispatchMode):
    """Notes the dtypes in which they are computed, in both passes, and whether they read nothing but numbers of `half`."""

    def __init__(self, half):
        super().__init__()
        self.half, self.dtypes, self.read_halves = half, set(), True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._grouped_mm.default:
            self.dtypes.add(args[0].dtype)
            self.read_halves &= all(torch.equal(each, each.to(self.half).to(each.dtype)) for each in args[:2])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("kind", ["mixtral", "qwen"])
@pytest.mark.parametrize("half_products", ["native", "float32"])
def test_experts_that_are_multiplied_together_compute_as_one_by_one_under_autocast(transformers, kind, half_products):
    sizes = {"vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    if kind == "mixtral":
        make = transformers.MixtralForCausalLM
        config = transformers.MixtralConfig(intermediate_size=64, num_key_value_heads=2, num_local_experts=4, **sizes)
    else:
        make = transformers.Qwen3MoeForCausalLM
        own = {"moe_intermediate_size": 64, "num_experts": 4, "num_experts_per_tok": 2, "head_dim": 16}
        config = transformers.Qwen3MoeConfig(num_key_value_heads=2, **own, **sizes)
    ids = torch.randint(0, 64, (2, 8))
    for precision, dtype in [("bf16", torch.bfloat16), ("fp16", torch.float16), (None, torch.bfloat16)]:
        found = []
        for way in ("grouped_mm", "eager"):
            torch.manual_seed(0)
            model = make(config)
            model.set_experts_implementation(way)
            own = FP8MixedPrecision(emulate=True) if precision is None else strategy(precision)
            booster = Booster("cpu", own, half_products=half_products)
            wrapped, optimizer, *_ = booster.boost(model, torch.optim.SGD(model.parameters(), lr=1e-3))
            with ProductsOfGroups(dtype) as products:
                loss = wrapped(input_ids=ids, labels=ids).loss
                booster.backward(loss, optimizer)
            computed = torch.float32 if half_products == "float32" else dtype
            assert products.dtypes == ({computed} if way == "grouped_mm" else set())
            assert products.read_halves
            found.append((loss.detach(), {name: param.grad for name, param in model.named_parameters()}))
        (together, grads), (alone, expected) = found
        # What experts give a token is added in float32 here and in half there: a rounding more or less of each number.
        assert (together - alone).abs() <= torch.finfo(dtype).eps * alone
        for name, grad in grads.items():
            error = (grad - expected[name]).norm() / expected[name].norm()
            assert error <= 4 * torch.finfo(dtype).eps, (precision, name)


def test_the_product_of_groups_that_transformers_takes_under_torch_compile_runs_in_half(transformers):
    class Compiled(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weights = torch.nn.Parameter(torch.randn(2, 8, 8))

        def forward(self, x, ends):
            return torch.ops.transformers.grouped_mm_fallback(x, self.weights, ends)

    x, ends = torch.randn(5, 8), torch.tensor([2, 5], dtype=torch.int32)
    for choice in ("native", "float32"):
        model = Compiled()
        wrapped, *_ = Booster("cpu", BF16MixedPrecision(output_dtype=None), half_products=choice).boost(model)
        (out := wrapped(x, ends)).float().square().sum().backward()
        weights = model.weights.detach().bfloat16().double()
        exact = torch.cat([x[:2].bfloat16().double() @ weights[0], x[2:].bfloat16().double() @ weights[1]])
        assert out.dtype == torch.bfloat16
        # One rounding, and a sum of 8 products in float32.
        torch.testing.assert_close(out.double(), exact, rtol=2**-8, atol=8 * 2**-24 * 8)
        assert torch.equal(model.weights.grad.bfloat16().float(), model.weights.grad)
