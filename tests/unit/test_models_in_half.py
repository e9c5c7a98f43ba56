"""Models of transformers and timm under each precision: gradients, far positions, and what is served, against float64."""

import copy

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from booster import Booster
from booster.mixed_precision import (
    BF16MixedPrecision,
    FP8MixedPrecision,
    FP16NaiveMixedPrecision,
    FP16TorchMixedPrecision,
)

PRECISIONS = ["fp32", "bf16", "fp16", "bf16_naive", "fp16_naive"]
EPS = {"fp32": 2**-24, "bf16": 2**-9, "bf16_naive": 2**-9, "fp16": 2**-12, "fp16_naive": 2**-12}
ROTARY = ["llama", "gemma", "mixtral"]
MODELS = [*ROTARY, "gpt2", "t5", "convnext"]
LAYERS, SCALE = 2, 2.0**12
# One model of each precision, and each model once, beside those that are slow.
QUICK = {("llama", "bf16_naive"), ("gemma", "fp16_naive"), ("t5", "fp16_naive"), ("gpt2", "bf16")}


def strategy(precision):
    # A scale at which no gradient of these overflows, and those that matter are above float16's subnormal numbers.
    if precision == "fp16":
        return FP16TorchMixedPrecision(init_scale=SCALE)
    if precision == "fp16_naive":
        return FP16NaiveMixedPrecision(initial_scale=SCALE)
    return precision


@pytest.fixture
def build(request):
    """`build(name)` -> a random model, in eval so that nothing is dropped, and its inputs."""

    def make(name, length=12):
        torch.manual_seed(0)
        if name == "convnext":
            timm = request.getfixturevalue("timm")
            # The scale of layers begins at 1e-6 otherwise, which leaves of a branch's gradient what float16 cannot hold.
            sizes = {"depths": (1, 1, 1, 1), "dims": (8, 16, 16, 32), "num_classes": 10, "ls_init_value": 1.0}
            return timm.models.convnext.ConvNeXt(**sizes).eval(), {"x": torch.randn(2, 3, 64, 64)}
        transformers = request.getfixturevalue("transformers")
        sizes = {
            "vocab_size": 96,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 2,
            "num_key_value_heads": 2,
            "max_position_embeddings": 4096,
            # At far positions attention is to follow the angles, and not to be the mean of everything.
            "initializer_range": 0.02 if length < 100 else 0.3,
        }
        ids = torch.randint(1, 96, (2 if length < 100 else 1, length))
        inputs = {"input_ids": ids, "labels": ids}
        if name == "llama":
            model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
        elif name == "gemma":  # whose rotary embeddings hold frequencies of two kinds of layers, by names of their own
            kinds = ["sliding_attention", "full_attention"]
            config = transformers.Gemma3TextConfig(head_dim=16, sliding_window=8, layer_types=kinds, **sizes)
            model = transformers.Gemma3ForCausalLM(config)
        elif name == "mixtral":
            # Of as many experts as each token has, so that rounding does not choose others.
            config = transformers.MixtralConfig(num_local_experts=2, num_experts_per_tok=2, **sizes)
            model = transformers.MixtralForCausalLM(config)
        elif name == "gpt2":
            own = {"vocab_size": 96, "n_embd": 32, "n_layer": LAYERS, "n_head": 2, "n_positions": 64}
            model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**own))
        else:
            # Of a smooth activation: where rounding moves a number over the corner of ReLU its derivative is another one, so
            # that the error of a gradient goes as the root of eps.
            own = {"vocab_size": 96, "d_model": 32, "d_kv": 16, "d_ff": 64, "num_layers": LAYERS, "num_heads": 2}
            own["feed_forward_proj"] = "gated-gelu"
            model = transformers.T5ForConditionalGeneration(transformers.T5Config(decoder_start_token_id=0, **own))
        return model.eval(), inputs

    return make


def loss_of(name, output):
    # Logits of a few classes, squared: a loss whose gradient is not near zero.
    return output.float().pow(2).mean() if name == "convnext" else output.loss


def boosted(model, precision):
    booster = Booster("cpu", strategy(precision))
    model, optimizer, *_ = booster.boost(model, torch.optim.AdamW(model.parameters(), lr=1e-3))
    return booster, model.eval(), optimizer


def in_double(model, inputs):
    """A copy of the model in float64, and the same inputs."""
    model = copy.deepcopy(model)
    if hasattr(model, "config"):
        model.config._experts_implementation = "eager"  # torch's grouped product takes no float64
    return model.double(), {
        key: value.double() if value.is_floating_point() else value for key, value in inputs.items()
    }


def marked(name, precision):
    return pytest.param(name, precision, marks=[] if (name, precision) in QUICK else [pytest.mark.slow])


CASES = [marked(name, precision) for name in MODELS for precision in PRECISIONS]


# Every tensor on the way from the inputs to the loss and back to a gradient is rounded once, by at most eps = 2**-(bits + 1)
# of each of its numbers, where `bits` are those of the significand; weights are one more rounding of their own. Sums are made
# in float32 (`half_products`), so that their number of terms, below 2**7 here, adds no more than 2**7 * 2**-24 = 2**-17, below
# eps of both halves; of float32 itself that is what counts, as sums of n terms, and the bound is sqrt(n) times larger.
# One layer makes K = 16 roundings in a row at most: norm (2), projection, rotation (2), scores, softmax, product, projection,
# residual, norm (2), two of the MLP, gate, residual. Forward and backward double it, and both go by LAYERS layers and a head:
# N = 2 * K * (LAYERS + 1) roundings = 96. Those that are independent add up as sqrt(N) * eps in the Frobenius norm.
# C is what is not derived: how much layers widen a relative error that they are given, a condition number, as backward of
# norms and of softmax subtract a projection. For these weights it was measured, up to 2.1 (convnext); the bound is twice that.
C = 4
NUM_ROUNDINGS = 2 * 16 * (LAYERS + 1)


def tolerance(precision, num_terms=1):
    return C * EPS[precision] * (NUM_ROUNDINGS * num_terms) ** 0.5


@pytest.mark.parametrize(("name", "precision"), CASES)
def test_gradients_of_every_parameter_are_those_of_float64_as_far_as_the_format_goes(build, name, precision):
    model, inputs = build(name)
    exact, exact_inputs = in_double(model, inputs)
    loss_of(name, exact(**exact_inputs)).backward()
    booster, wrapped, optimizer = boosted(model, precision)
    loss = loss_of(name, wrapped(**inputs))
    booster.backward(loss, optimizer)
    scale = SCALE if precision in ("fp16", "fp16_naive") else 1.0
    expected = dict(exact.named_parameters())
    terms = 2**7 if precision == "fp32" else 1
    errors = {}
    for key, param in model.named_parameters():
        right = expected[key].grad
        errors[key] = float((param.grad.double() / scale - right).norm() / right.norm().clamp(min=1e-30))
    wrong = {key: error for key, error in errors.items() if not error <= tolerance(precision, terms)}
    assert not wrong


def marked_half(name):
    marks = [] if name == "llama" else [pytest.mark.slow]
    return [pytest.param(name, precision, marks=marks) for precision in ("bf16_naive", "fp16_naive")]


@pytest.mark.parametrize(("name", "precision"), [case for name in ROTARY for case in marked_half(name)])
def test_logits_at_far_positions_are_as_exact_as_at_the_first(build, name, precision):
    model, inputs = build(name, length=4096)
    exact, _ = in_double(model, inputs)
    booster, wrapped, _ = boosted(model, precision)
    rows = slice(-64, None), slice(0, 64)
    with torch.no_grad():
        found = wrapped(inputs["input_ids"], use_cache=False).logits.double()
        right = exact(inputs["input_ids"], use_cache=False).logits
    for part in rows:
        error = (found[:, part] - right[:, part]).norm() / right[:, part].norm()
        assert error <= tolerance(precision)  # of which only the forward is used


@pytest.mark.parametrize(
    ("name", "precision"),
    [case for name in MODELS if name != "convnext" for case in marked_half(name)],
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
    # The served model computes in float32 with the weights that forward read.
    assert (found - served).norm() / served.norm() <= tolerance(precision)
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
