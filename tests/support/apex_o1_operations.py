"""The operations with recorded dtypes under O1, and where ours differ on purpose."""

import torch
from torch import nn
from torch.nn import functional as F

from booster import Booster
from booster.mixed_precision import FP16ApexMixedPrecision

f32, f64 = torch.float32, torch.float64


def like(x, dtype):
    return torch.ones_like(x, dtype=dtype)


def square(x):
    return torch.ones(4, 4, dtype=x.dtype)


def image(x):
    return torch.ones(2, 4, 6, 6, dtype=x.dtype)


def weight(*shape):
    return torch.full(shape, 0.1)


def unit(x):
    return torch.full((4, 4), 0.5, dtype=x.dtype)


def labels():
    return torch.tensor([0, 1, 2, 3])


def sequence(x):
    return torch.ones(3, 2, 4, dtype=x.dtype)


def in_place(x, other):
    x *= other
    return x


# Each takes a (4, 4) tensor of ones in one of the recorded dtypes, and may make another of its dtype.
OPERATIONS = {
    "F.conv1d": lambda x: F.conv1d(torch.ones(1, 4, 8, dtype=x.dtype), weight(4, 4, 3)),
    "F.conv2d": lambda x: F.conv2d(image(x), weight(4, 4, 3, 3)),
    "F.conv_transpose2d": lambda x: F.conv_transpose2d(image(x), weight(4, 4, 3, 3)),
    "F.prelu": lambda x: F.prelu(x, weight(4)),
    "torch.matmul": lambda x: torch.matmul(x, weight(4, 4)),
    "Tensor.matmul": lambda x: x.matmul(weight(4, 4)),
    "Tensor.mm": lambda x: x.mm(weight(4, 4)),
    "x @ w": lambda x: x @ weight(4, 4),
    "torch.mv": lambda x: torch.mv(x, weight(4)),
    "torch.bmm": lambda x: torch.bmm(x[None], weight(1, 4, 4)),
    "torch.baddbmm": lambda x: torch.baddbmm(x[None], x[None], weight(1, 4, 4)),
    "torch.einsum": lambda x: torch.einsum("ij,jk->ik", x, x),
    "torch.tensordot": lambda x: torch.tensordot(x, x, dims=1),
    "F.scaled_dot_product_attention": lambda x: F.scaled_dot_product_attention(x[None], x[None], x[None]),
    "F.bilinear": lambda x: F.bilinear(x, x, torch.ones(2, 4, 4, dtype=x.dtype)),
    "torch.acos": lambda x: torch.acos(unit(x)),
    "torch.asin": lambda x: torch.asin(unit(x)),
    "torch.cosh": torch.cosh,
    "torch.exp": torch.exp,
    "torch.expm1": torch.expm1,
    "torch.log": torch.log,
    "torch.log2": torch.log2,
    "torch.log1p": torch.log1p,
    "torch.reciprocal": torch.reciprocal,
    "torch.sinh": torch.sinh,
    "torch.tan": torch.tan,
    "torch.sigmoid": torch.sigmoid,
    "torch.sqrt": torch.sqrt,
    "torch.erf": torch.erf,
    "torch.sin": torch.sin,
    "torch.atan": torch.atan,
    "torch.abs": torch.abs,
    "torch.pow": lambda x: torch.pow(x, 2),
    "2 ** x": lambda x: 2**x,
    "torch.sum": torch.sum,
    "torch.mean": torch.mean,
    "torch.std": torch.std,
    "torch.var": torch.var,
    "torch.norm": torch.norm,
    "torch.max": torch.max,
    "torch.cumsum": lambda x: torch.cumsum(x, 0),
    "torch.cumprod": lambda x: torch.cumprod(x, 0),
    "Tensor.sum": lambda x: x.sum(),
    "torch.dist": lambda x: torch.dist(x, x),
    "torch.cdist": lambda x: torch.cdist(x, x),
    "Tensor.cpu": lambda x: x.cpu(),
    "F.softmax": lambda x: F.softmax(x, -1),
    "F.log_softmax": lambda x: F.log_softmax(x, -1),
    "F.relu": F.relu,
    "F.gelu": F.gelu,
    "F.silu": F.silu,
    "F.elu": F.elu,
    "F.leaky_relu": F.leaky_relu,
    "F.hardtanh": F.hardtanh,
    "F.logsigmoid": F.logsigmoid,
    "F.layer_norm": lambda x: F.layer_norm(x, (4,)),
    "F.layer_norm(w fp32)": lambda x: F.layer_norm(x, (4,), weight(4), weight(4)),
    "F.group_norm": lambda x: F.group_norm(image(x), 2),
    "F.batch_norm(w fp32)": lambda x: F.batch_norm(x, weight(4), weight(4), weight(4), weight(4)),
    "F.instance_norm": lambda x: F.instance_norm(image(x)),
    "F.normalize": F.normalize,
    "F.cosine_similarity": lambda x: F.cosine_similarity(x, x),
    "F.dropout": F.dropout,
    "F.avg_pool2d": lambda x: F.avg_pool2d(image(x), 2),
    "F.interpolate(nearest)": lambda x: F.interpolate(image(x), scale_factor=2),
    "F.interpolate(bilinear)": lambda x: F.interpolate(image(x), scale_factor=2, mode="bilinear", align_corners=False),
    "F.cross_entropy": lambda x: F.cross_entropy(x, labels()),
    "F.nll_loss": lambda x: F.nll_loss(x, labels()),
    "F.mse_loss": lambda x: F.mse_loss(x, square(x)),
    "F.l1_loss": lambda x: F.l1_loss(x, square(x)),
    "F.smooth_l1_loss": lambda x: F.smooth_l1_loss(x, square(x)),
    "F.huber_loss": lambda x: F.huber_loss(x, square(x)),
    "F.bce_with_logits": lambda x: F.binary_cross_entropy_with_logits(x, square(x)),
    "F.binary_cross_entropy": lambda x: F.binary_cross_entropy(unit(x), unit(x)),
    "F.gaussian_nll_loss": lambda x: F.gaussian_nll_loss(x, square(x), square(x)),
    "F.triplet_margin_loss": lambda x: F.triplet_margin_loss(x, square(x), square(x)),
    "F.pairwise_distance": lambda x: F.pairwise_distance(x, square(x)),
    "torch.add(x,fp32)": lambda x: torch.add(x, like(x, f32)),
    "torch.div(x,fp32)": lambda x: torch.div(x, like(x, f32)),
    "torch.sub(x,fp32)": lambda x: torch.sub(x, like(x, f32)),
    "torch.atan2(x,fp32)": lambda x: torch.atan2(x, like(x, f32)),
    "torch.lt(x,fp32)": lambda x: torch.lt(x, like(x, f32)),
    "torch.maximum(x,fp32)": lambda x: torch.maximum(x, like(x, f32)),
    "torch.where(c,x,fp32)": lambda x: torch.where(x > 0, x, like(x, f32)),
    "x - fp32": lambda x: x - like(x, f32),
    "x * fp32": lambda x: x * like(x, f32),
    "x / fp32": lambda x: x / like(x, f32),
    "x *= fp32": lambda x: in_place(x, like(x, f32)),
    "x.exp_()": lambda x: x.exp_(),
    "torch.exp_(x)": torch.exp_,
    "torch.cat([x,fp32])": lambda x: torch.cat([x, like(x, f32)]),
    "torch.stack([x,fp32])": lambda x: torch.stack([x, like(x, f32)]),
    "torch.dot(x,fp32)": lambda x: torch.dot(x[0], like(x[0], f32)),
    "x * fp64": lambda x: x * like(x, f64),
    "x + bf16": lambda x: x + like(x, torch.bfloat16),
    "fp64.sum()": lambda x: x.to(f64).sum(),
    "bf16 @ bf16": lambda x: x.to(torch.bfloat16) @ x.to(torch.bfloat16),
    "nn.RNN": lambda x: nn.RNN(4, 4)(sequence(x))[0],
    "nn.LSTM": lambda x: nn.LSTM(4, 4)(sequence(x))[0],
    "nn.MultiheadAttention(train)": lambda x: nn.MultiheadAttention(4, 2)(sequence(x), sequence(x), sequence(x))[0],
}

_PRODUCT = "a matrix product that autocast knows and apex does not: half, as everywhere in autocast"
_WIDE = "autocast on CPU runs it in float32, apex in the dtype of its input, where it loses precision or has no kernel"
_DOUBLE = "float64 and bfloat16 are left to torch's promotion; apex refuses the pair, or demotes float64"
_RECURRENT = "layers run in float32 on CPU; real apex fails on them, by address arithmetic or for a half input"

# (operation, dtype of the input): what it gives, and why that is meant.
KNOWN_DIFFERENCES = {
    ("torch.einsum", "float32"): ("float16", _PRODUCT),
    ("torch.tensordot", "float32"): ("float16", _PRODUCT),
    ("F.scaled_dot_product_attention", "float32"): ("float16", _PRODUCT),
    ("F.prelu", "float32"): ("float16", "apex lists it, but patches an alias that nothing calls"),
    ("F.prelu", "float16"): ("float16", "apex raises on a float32 weight, for the same reason"),
    ("torch.cdist", "float16"): ("float32", _WIDE),
    ("F.huber_loss", "float16"): ("float32", _WIDE),
    ("x *= fp32", "float16"): ("float16", "in place means in place; apex rebinds the name to a new tensor"),
    ("x * fp64", "float32"): ("float64", _DOUBLE),
    ("x * fp64", "float16"): ("float64", _DOUBLE),
    ("x + bf16", "float32"): ("float32", _DOUBLE),
    ("x + bf16", "float16"): ("float32", _DOUBLE),
    ("fp64.sum()", "float32"): ("float64", _DOUBLE),
    ("fp64.sum()", "float16"): ("float64", _DOUBLE),
    ("nn.RNN", "float16"): ("float32", _RECURRENT),
    ("nn.LSTM", "float32"): ("float32", _RECURRENT),
    ("nn.LSTM", "float16"): ("float32", _RECURRENT),
}


def outcome(name, dtype):
    """The dtype that an operation gives under O1, or the error that it raises, as the recording has them."""
    booster = Booster("cpu", FP16ApexMixedPrecision(verbosity=0), half_products="native")
    x = torch.ones(4, 4, dtype=dtype)
    with booster.autocast():
        try:
            return str(OPERATIONS[name](x).dtype).removeprefix("torch.")
        except Exception as error:
            return f"ERR {type(error).__name__}: {error}"
