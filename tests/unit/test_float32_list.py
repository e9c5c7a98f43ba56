"""What torch.autocast computes in float32 on CUDA, in half on a CPU: values and gradients, against float64."""

import functools
import math

import pytest
import torch
from models_in_half import strategy
from torch import nn
from torch.nn import functional as F

from booster import Booster
from booster.mixed_precision.half_products import float32_products

U = {"bf16": 2.0**-8, "bf16_naive": 2.0**-8, "fp16": 2.0**-11, "fp16_naive": 2.0**-11}
ROWS, COLUMNS = 4, 2048
CLASSES = torch.tensor([1, 5, 9, 2000])


def image(x):
    return x.reshape(ROWS, 2, 32, 32)


def ones(x):
    return torch.ones(ROWS, dtype=x.dtype)


# By the names that the dispatcher has for them, and words for more than one case of a name. Of w, between 0.5 and 1, and x,
# between 1.25 and 1.75, both exact in half: what is subtracted does not cancel, and numbers are far from corners.
OPERATIONS = {
    **{
        name: (lambda w, x, name=name: getattr(torch, name)(w))
        for name in ["erfinv", "exp", "expm1", "log1p", "reciprocal", "rsqrt", "sinh", "cosh", "tan"]
    },
    "log10": lambda w, x: (w * 4).log10(),
    "acos": lambda w, x: (w * 0.5).acos(),
    "asin": lambda w, x: (w * 0.5).asin(),
    "log": lambda w, x: (w * 4).log(),
    "log2": lambda w, x: (w * 4).log2(),
    "pow": lambda w, x: w.pow(3),
    "pow of a tensor": lambda w, x: x.pow(w),
    "scalar to the power": lambda w, x: torch.pow(3.0, w),
    "softplus": lambda w, x: F.softplus(w),
    "softmax": lambda w, x: w.mul(4).softmax(-1),
    "log_softmax": lambda w, x: w.mul(4).log_softmax(-1),
    "layer_norm": lambda w, x: F.layer_norm(w, (COLUMNS,)),
    "group_norm": lambda w, x: F.group_norm(w, 8),
    "rms_norm": lambda w, x: F.rms_norm(w, (COLUMNS,)),
    "cumsum": lambda w, x: w.cumsum(-1),
    "cumprod": lambda w, x: near_one(w).cumprod(-1),
    "prod": lambda w, x: near_one(w).prod(-1),
    "prod of all": lambda w, x: near_one(w)[0].prod(),
    "sum": lambda w, x: w.sum(-1),
    "logsumexp": lambda w, x: w.logsumexp(-1),
    "norm": lambda w, x: w.norm(),
    "norm 1": lambda w, x: w.norm(1, -1),
    "norm 3": lambda w, x: w.norm(3, -1),
    "frobenius_norm": lambda w, x: torch.norm(w, "fro"),
    "linalg_matrix_norm": lambda w, x: torch.linalg.matrix_norm(w),
    "linalg_vector_norm": lambda w, x: torch.linalg.vector_norm(w, dim=-1),
    "renorm": lambda w, x: w.renorm(2, 0, 1.0),
    "dist": lambda w, x: torch.dist(w, x),
    "cdist": lambda w, x: torch.cdist(w, x),
    "pdist": lambda w, x: F.pdist(w * x.new_tensor([1, 2, 4, 8])[:, None]),
    "cosine_similarity": lambda w, x: F.cosine_similarity(w * signs(w), x, -1),
    "addcdiv": lambda w, x: torch.addcdiv(w, w, x),
    "addcmul": lambda w, x: torch.addcmul(w, w, x),
    "atan2": lambda w, x: torch.atan2(w, x),
    "index_put": lambda w, x: x.index_put((torch.zeros(1, dtype=torch.long),), w[:1], accumulate=True),
    "scatter_add": lambda w, x: x.scatter_add(1, torch.zeros(w.shape, dtype=torch.long), w)[:, 0],
    "grid_sampler": lambda w, x: F.grid_sample(image(w), x.new_full((ROWS, 2, 2, 2), 0.03125), align_corners=False),
    "prelu": lambda w, x: F.prelu(-w, x[0, :1]),
    **{
        f"{name}2d": (lambda w, x, mode=mode: F.interpolate(image(w), size=(48, 40), mode=mode))
        for name, mode in {
            "upsample_nearest": "nearest",
            "_upsample_nearest_exact": "nearest-exact",
            "upsample_bilinear": "bilinear",
            "upsample_bicubic": "bicubic",
        }.items()
    },
    **{
        f"_upsample_{mode}2d_aa": (
            lambda w, x, mode=mode: F.interpolate(image(w), size=(20, 12), mode=mode, antialias=True)
        )
        for mode in ("bilinear", "bicubic")
    },
    "upsample_linear1d": lambda w, x: F.interpolate(w[None], size=3000, mode="linear"),
    "upsample_trilinear3d": lambda w, x: F.interpolate(image(w)[None], size=(4, 48, 40), mode="trilinear"),
    "poisson_nll_loss": lambda w, x: F.poisson_nll_loss(w, x),
    "cosine_embedding_loss": lambda w, x: F.cosine_embedding_loss(w * signs(w), x * 4, ones(x)),
    "cosine_embedding_loss of others": lambda w, x: F.cosine_embedding_loss(w * (1 + signs(w)), x, -ones(x)),
    "nll_loss": lambda w, x: F.nll_loss(w, CLASSES),
    "nll_loss2d": lambda w, x: F.nll_loss(image(w), torch.ones(ROWS, 32, 32, dtype=torch.long)),
    "cross_entropy": lambda w, x: F.cross_entropy(w, CLASSES),
    "hinge_embedding_loss": lambda w, x: F.hinge_embedding_loss(w, x.sign()),
    "hinge_embedding_loss of others": lambda w, x: F.hinge_embedding_loss(w, -x.sign(), margin=2.0),
    "kl_div": lambda w, x: F.kl_div(w, x, reduction="batchmean"),
    "l1_loss": lambda w, x: F.l1_loss(w, x),
    "smooth_l1_loss": lambda w, x: F.smooth_l1_loss(w, x),
    "huber_loss": lambda w, x: F.huber_loss(w, x),
    "mse_loss": lambda w, x: F.mse_loss(w, x),
    "mse_loss, summed": lambda w, x: F.mse_loss(w, x * 16, reduction="sum"),
    "margin_ranking_loss": lambda w, x: F.margin_ranking_loss(w, x, x.sign(), 0.5),
    "multilabel_margin_loss": lambda w, x: F.multilabel_margin_loss(w, labels(3)),
    "soft_margin_loss": lambda w, x: F.soft_margin_loss(w, x.sign()),
    "triplet_margin_loss": lambda w, x: F.triplet_margin_loss(w, 2 * x, x * 0.5),
    "triplet_margin_with_distance_loss": lambda w, x: F.triplet_margin_with_distance_loss(w, 2 * x, x * 0.5),
    "multi_margin_loss": lambda w, x: F.multi_margin_loss(w, CLASSES),
    "multilabel_soft_margin_loss": lambda w, x: F.multilabel_soft_margin_loss(w, x.sign()),
    "gaussian_nll_loss": lambda w, x: F.gaussian_nll_loss(w, x, torch.ones_like(x)),
    "binary_cross_entropy_with_logits": lambda w, x: F.binary_cross_entropy_with_logits(w, x.sign()),
}


def labels(number):
    """The first `number` classes of each row, and no others."""
    return torch.arange(COLUMNS).expand(ROWS, COLUMNS).where(torch.arange(COLUMNS) < number, -1)


def near_one(w):
    """`w`, of which every number is doubled that comes where the product of those before it is below one."""
    doubled = torch.ones(w.shape, dtype=w.dtype)
    for row, numbers in enumerate(w.tolist()):
        product = 1.0
        for column, number in enumerate(numbers):
            doubled[row, column] = factor = 2.0 if product < 1 else 1.0
            product *= number * factor
    return w * doubled


def signs(w):
    """0, 1/2, 1, 1, and so on."""
    return torch.arange(COLUMNS).remainder(4).clamp(max=2).to(w.dtype) * 0.5


class Computes(nn.Module):
    """A function of a half that a product returns, so that autocast does not find float32."""

    def __init__(self, call, w):
        super().__init__()
        self.w, self.call = nn.Parameter(w.clone()), call

    def forward(self, x):
        w = self.w.reshape(-1, 16) @ torch.eye(16, dtype=self.w.dtype)  # which changes no bit
        return self.call(w.reshape(ROWS, COLUMNS), x.to(w.dtype))


@functools.lru_cache(maxsize=1)
def exact(name):
    """What goes in, the result and its gradient in float64, weights of the result, and a scale of gradients of about 1."""
    gen = torch.Generator().manual_seed(0)
    w = torch.randint(64, 128, (ROWS, COLUMNS), generator=gen) / 128
    x = torch.randint(80, 112, (ROWS, COLUMNS), generator=gen) / 64
    model = Computes(OPERATIONS[name], w.double())
    expected = model(x.double())
    weights = torch.randint(4, 8, expected.shape, generator=gen) / 4
    (expected * weights).sum().backward()
    right = model.w.grad
    size = float(right.norm() / right.count_nonzero().sqrt())
    return w, x, expected.detach(), right, weights, 2.0 ** -round(math.log2(size))


QUICK = {"prod", "cosine_embedding_loss", "mse_loss, summed", "logsumexp", "_upsample_bilinear2d_aa"}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in OPERATIONS]
)
@pytest.mark.parametrize("precision", U)
def test_what_cuda_computes_in_float32_is_as_exact_as_the_format_is(name, precision):
    w, x, expected, right, weights, scale = exact(name)
    model, *_ = Booster("cpu", strategy(precision), half_products="float32").boost(Computes(OPERATIONS[name], w))
    out = model(x)
    (out.double() * weights * scale).sum().backward()
    found = model.w.grad.double() / scale
    # A result is rounded once, after sums in float32 of as many terms as there are. Its gradient is that of the function in
    # torch, of up to six kernels in half, each of which rounds by up to u; as they are independent, together they are
    # sqrt(6) u in the norm over all numbers.
    terms = ROWS * COLUMNS * 2.0**-24
    assert (out - expected).norm() <= (U[precision] + terms) * expected.norm()
    assert (found - right).norm() <= (6**0.5 * U[precision] + terms) * right.norm()


ELSEWHERE = {
    "refused, as on CUDA": "binary_cross_entropy",
    "without a half kernel, torch says so": "nuclear_norm",
    "called by others": "native_layer_norm _convolution convolution _thnn_fused_gru_cell _thnn_fused_lstm_cell",
    "of one backend": "cudnn_convolution cudnn_convolution_transpose _cudnn_rnn _scaled_dot_product_flash_attention",
    "the same in one, two and three dimensions": "upsample_nearest1d upsample_nearest3d _upsample_nearest_exact1d "
    "_upsample_nearest_exact3d",
}


def test_every_function_that_autocast_has_a_rule_for_on_cuda_is_a_product_or_was_compared():
    """By the dispatcher's own table; where this fails, torch has a new one, which goes into `OPERATIONS` or above."""
    products = {func.__name__.removeprefix("linalg_") for func in float32_products._PRODUCTS}
    known = {name.partition(" ")[0].rstrip(",") for name in OPERATIONS}.union(*map(str.split, ELSEWHERE.values()))
    found = set()
    for overload in torch._C._dispatch_get_all_op_names():
        space, _, name = overload.partition("::")
        name = name.partition(".")[0]
        if space == "aten" and torch._C._dispatch_has_kernel_for_dispatch_key(overload, "AutocastCUDA"):
            found.add(name)
    assert {name for name in found - known if name.removeprefix("linalg_") not in products} == set()
    assert {"softmax", "prod", "kl_div", "linear"} <= found
