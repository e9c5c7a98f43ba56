"""Small models of transformers and timm, and how far from float64 half precision may take their gradients."""

import copy

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from booster.mixed_precision import (
    FP8MixedPrecision,
    FP16NaiveMixedPrecision,
    FP16TorchMixedPrecision,
    Int8MixedPrecision,
    MXFP8MixedPrecision,
    NVFP4MixedPrecision,
)

EPS = {"fp32": 2**-24, "bf16": 2**-9, "bf16_naive": 2**-9, "fp16": 2**-12, "fp16_naive": 2**-12}
# What operands of products are rounded to, by at most eps of each: e4m3 has three bits behind the first, e5m2, which gradients
# have, two, e2m1 one, and its gradients, which are rounded stochastically, go a whole step. int8 has 127 steps of the largest
# of a row, 1 / 254 off, which is no more than 8 times the root of its mean square, rows of 32 and 64 numbers.
LOW = {
    "fp8": (lambda: FP8MixedPrecision(emulate=True), 2**-3),
    "fp8 rowwise": (lambda: FP8MixedPrecision("rowwise", emulate=True), 2**-4),
    "fp8 rowwise_with_gw_hp": (lambda: FP8MixedPrecision("rowwise_with_gw_hp", emulate=True), 2**-4),
    "fp8 bf16 weights": (lambda: FP8MixedPrecision(emulate=True, weights="bf16"), 2**-3),
    "mxfp8": (lambda: MXFP8MixedPrecision(emulate=True), 2**-4),
    "int8": (Int8MixedPrecision, 2**-5),
    "nvfp4": (lambda: NVFP4MixedPrecision(emulate=True), 2**-1),
}
PRODUCTS = {torch.ops.aten.mm.default, torch.ops.aten.addmm.default}
ROTARY = ["llama", "gemma", "mixtral"]
MODELS = [*ROTARY, "gpt2", "t5", "convnext"]
LAYERS, SCALE = 2, 2.0**12


def strategy(precision):
    # A scale at which no gradient of these overflows, and those that matter are above float16's subnormal numbers.
    if precision == "fp16":
        return FP16TorchMixedPrecision(init_scale=SCALE)
    if precision == "fp16_naive":
        return FP16NaiveMixedPrecision(initial_scale=SCALE)
    return LOW[precision][0]() if precision in LOW else precision


def make(name, package, length=12):
    """A random model, in eval so that nothing is dropped, and its inputs; package: `package(name)` imports one."""
    torch.manual_seed(0)
    if name == "convnext":
        timm = package("timm")
        # The scale of layers begins at 1e-6 otherwise, which leaves of a branch's gradient what float16 cannot hold.
        sizes = {"depths": (1, 1, 1, 1), "dims": (8, 16, 16, 32), "num_classes": 10, "ls_init_value": 1.0}
        return timm.models.convnext.ConvNeXt(**sizes).eval(), {"x": torch.randn(2, 3, 64, 64)}
    transformers = package("transformers")
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
    elif name == "gemma":  # its rotary embeddings hold frequencies of two kinds of layers, by names of their own
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


def loss_of(name, output):
    # Logits of a few classes, squared: a loss with a gradient that is not near zero.
    return output.float().pow(2).mean() if name == "convnext" else output.loss


def in_double(model, inputs):
    """A copy of the model in float64, and the same inputs."""
    model = copy.deepcopy(model)
    if hasattr(model, "config"):
        model.config._experts_implementation = "eager"  # torch's grouped product takes no float64
    return model.double(), {
        key: value.double() if value.is_floating_point() else value for key, value in inputs.items()
    }


class Roundings(TorchDispatchMode):
    """Every float64 result of an operation is off by up to `eps` of each of its numbers, evenly: as if it were rounded. And
    operands of matrix products by up to `operands` of each."""

    def __init__(self, eps, operands=0.0):
        super().__init__()
        self.eps, self.operands, self.bits = eps, operands, torch.Generator().manual_seed(1)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if self.operands and func in PRODUCTS:
            args = (*args[:-2], *(self.rounded(each, self.operands) for each in args[-2:]))
        out = func(*args, **(kwargs or {}))
        return out if func.is_view or func._schema.is_mutable else tree_map(self.rounded, out)

    def rounded(self, value, eps=None):
        if not isinstance(value, torch.Tensor) or value.dtype != torch.float64:
            return value
        random = torch.rand(value.shape, generator=self.bits, dtype=torch.float64)
        return value * (1 + (self.eps if eps is None else eps) * (2 * random - 1))


def off_by(model, run, eps, operands=0.0):
    """How far gradients and value of `run(model)` are off where weights, and every tensor on the way, are by eps, and operands
    of matrix products by `operands`: all of it in float64, without this library. By the name of a parameter, and "value"."""

    def passes(model):
        value = run(model)
        value.sum().backward()
        return {"value": value.detach()} | {key: param.grad for key, param in model.named_parameters()}

    right, off, roundings = passes(copy.deepcopy(model)), copy.deepcopy(model), Roundings(eps, operands)
    with torch.no_grad():
        for param in off.parameters():
            param.copy_(roundings.rounded(param))
    with roundings:
        found = passes(off)
    return {key: relative_error(found[key], value) for key, value in right.items()}


def widening(model, run, eps=2.0**-12):
    """As `off_by`, in eps."""
    return {key: error / eps for key, error in off_by(model, run, eps).items()}


def relative_error(found, right):
    return float((found.detach().double() - right).norm() / right.norm().clamp(min=1e-30))


# Every tensor on the way from the inputs to the loss and back to a gradient is rounded once, by at most eps = 2**-(bits + 1)
# of each of its numbers, where `bits` are those of the significand; weights are one more rounding of their own. Sums are made
# in float32 (`half_products`), so that their number of terms, below 2**7 here, adds no more than 2**7 * 2**-24 = 2**-17, below
# eps of both halves; of float32 itself that is what counts, as sums of n terms, and the bound is sqrt(n) times larger.
# What these roundings come to depends on the weights, as backward of norms and of softmax subtract a projection. No paper has
# that, but float64 does: `widening`. Two draws of the same roundings are compared, of what may be a few numbers, hence MARGIN.
MARGIN = 3
# Where there is no float64 of the same passes, a bound for all of these models. One layer makes K = 16 roundings in a row: norm
# (2), projection, rotation (2), scores, softmax, product, projection, residual, norm (2), two of the MLP, gate, residual.
# Forward and backward double it, by LAYERS layers and a head: N = 2 * K * (LAYERS + 1) = 96. Those that are independent add up
# as sqrt(N) * eps in the Frobenius norm, which `widening` finds 0.4 (GPT-2) to 1.35 (T5) times: C is MARGIN of the largest.
C = 4
NUM_ROUNDINGS = 2 * 16 * (LAYERS + 1)


def tolerance(precision, num_terms=1):
    return C * EPS[precision] * (NUM_ROUNDINGS * num_terms) ** 0.5
