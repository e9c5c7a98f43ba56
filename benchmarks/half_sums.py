"""Which of torch's functions add halves up in half on this CPU, forward or backward.

    python -m benchmarks.half_sums [--widened] [--dtype bfloat16] [NAME ...]

Each function is run in half and in float64, on sums of 4,096 and of 65,536 terms, mostly between 0.5 and 1; printed are the
relative errors, in the Frobenius norm, of results and of gradients, of those whose sums come out wrong. --widened: with what
`booster/mixed_precision/half_products/half_sums.py` makes of them, and exits with 1 where more than `LEFT` is wrong.
docs/design/half_products.md has the table.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from torch.nn import functional as F

from booster.mixed_precision.half_products.product_choice import HalfProducts

COUNTS = (4_096, 65_536)
# A bfloat16 has 8 bits: what is rounded a few times, or subtracted from its like, is off by some 2**-5.
WRONG = 2.0**-4
# Autograd itself adds up the gradients of what is used many times; a sparse tensor that holds elements several times is
# added to a dense one as it is; a gradient of cosines of 65,536 numbers is below what float16 holds.
LEFT = {"cat same", "stack same", "dense + sparse", "cosine_similarity"}

Case = Callable[[int], tuple[Any, ...]]
LAST = torch.channels_last


def positive(*shape: int) -> torch.Tensor:
    return torch.rand(shape) * 0.5 + 0.5


def normal(*shape: int) -> torch.Tensor:
    return torch.randn(shape)


def zeros(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.long)


def mask(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bool)


def written(target: torch.Tensor, index: Any, value: torch.Tensor) -> torch.Tensor:
    target[index] = value
    return target


# Of each function, by name: for sums of n terms, a call of it and the tensors that it is given.
CASES: dict[str, Case] = {
    "sum of expand (bias)": lambda n: (lambda b: b.expand(n, 8) * 1, positive(8)),
    "add bias": lambda n: (lambda x, b: x + b, positive(n, 8), positive(8)),
    "mul weight": lambda n: (lambda x, b: x * b, positive(n, 8), positive(8)),
    "div weight": lambda n: (lambda x, b: x / b, positive(n, 8), positive(8)),
    "expand": lambda n: (lambda b: b.expand(n, 8).clone(), positive(8)),
    "repeat": lambda n: (lambda b: b.repeat(n), positive(8)),
    "repeat_interleave": lambda n: (lambda b: b.repeat_interleave(n), positive(8)),
    "tile": lambda n: (lambda b: b.tile(n), positive(8)),
    "cumsum": lambda n: (lambda x: x.cumsum(0), positive(n)),
    "cumsum dim0 2d": lambda n: (lambda x: x.cumsum(0), positive(n, 8)),
    "cumprod": lambda n: (lambda x: x.cumprod(0), 1 + (torch.rand(n) - 0.5) / n),
    "logcumsumexp": lambda n: (lambda x: x.logcumsumexp(0), positive(n)),
    "softmax": lambda n: (lambda x: x.softmax(-1), normal(2, n)),
    "softmax dim0": lambda n: (lambda x: x.softmax(0), normal(n, 2)),
    "log_softmax": lambda n: (lambda x: x.log_softmax(-1), normal(2, n)),
    "log_softmax dim0": lambda n: (lambda x: x.log_softmax(0), normal(n, 2)),
    "trace": lambda n: (lambda x: x.trace(), positive(n // 16, n // 16)),
    "trapezoid": lambda n: (torch.trapezoid, positive(n)),
    "cumulative_trapezoid": lambda n: (torch.cumulative_trapezoid, positive(n)),
    "dist": lambda n: (torch.dist, positive(n), positive(n)),
    "cdist": lambda n: (torch.cdist, positive(4, n), positive(4, n)),
    "cdist rows": lambda n: (torch.cdist, positive(2, 8), positive(n, 8)),
    "pdist": lambda n: (F.pdist, positive(4, n)),
    "pairwise_distance": lambda n: (F.pairwise_distance, positive(4, n), positive(4, n)),
    "cosine_similarity": lambda n: (F.cosine_similarity, positive(4, n), positive(4, n)),
    "weight_norm": lambda n: (lambda x, g: torch._weight_norm(x, g, 0), positive(4, n), positive(4, 1)),
    "vector_norm": lambda n: (torch.linalg.vector_norm, positive(n)),
    "vector_norm 1": lambda n: (lambda x: torch.linalg.vector_norm(x, 1), positive(n)),
    "vector_norm 3": lambda n: (lambda x: torch.linalg.vector_norm(x, 3), positive(n)),
    "matrix_norm": lambda n: (torch.linalg.matrix_norm, positive(8, n)),
    "var_mean": lambda n: (lambda x: torch.stack(torch.var_mean(x)), positive(n)),
    "std_mean 1": lambda n: (lambda x: torch.stack(torch.std_mean(x, 0)), positive(n, 4)),
    "corrcoef": lambda n: (torch.corrcoef, positive(3, n)),
    "cov": lambda n: (torch.cov, positive(3, n)),
    "gaussian_nll": lambda n: (
        lambda x, v: F.gaussian_nll_loss(x, torch.zeros_like(x), v),
        positive(n, 4),
        positive(n, 4),
    ),
    "cross_entropy rows": lambda n: (lambda x: F.cross_entropy(x, zeros(n)), normal(n, 4)),
    "cross_entropy classes": lambda n: (lambda x: F.cross_entropy(x, zeros(4)), normal(4, n)),
    "cross_entropy probs": lambda n: (lambda x: F.cross_entropy(x, torch.full_like(x, 0.25)), normal(n, 4)),
    "cross_entropy smoothing": lambda n: (lambda x: F.cross_entropy(x, zeros(4), label_smoothing=0.1), normal(4, n)),
    "nll_loss": lambda n: (lambda x: F.nll_loss(x, zeros(n)), -positive(n, 4)),
    "nll_loss2d": lambda n: (lambda x: F.nll_loss(x, zeros(1, n // 8, 8)), -positive(1, 4, n // 8, 8)),
    "multi_margin": lambda n: (lambda x: F.multi_margin_loss(x, zeros(n)), normal(n, 4)),
    "multi_margin classes": lambda n: (lambda x: F.multi_margin_loss(x, zeros(4), reduction="sum"), normal(4, n)),
    "multilabel_margin": lambda n: (lambda x: F.multilabel_margin_loss(x, zeros(*x.shape)), normal(n, 4)),
    "multilabel_soft_margin": lambda n: (lambda x: F.multilabel_soft_margin_loss(x, torch.ones_like(x)), normal(n, 4)),
    "margin_ranking": lambda n: (lambda x, y: F.margin_ranking_loss(x, y, torch.ones_like(x)), normal(n), normal(n)),
    "triplet": lambda n: (F.triplet_margin_loss, normal(n, 4), normal(n, 4), normal(n, 4)),
    "cosine_embedding": lambda n: (
        lambda x, y: F.cosine_embedding_loss(x, y, torch.ones(x.shape[0], dtype=x.dtype)),
        normal(n, 4),
        normal(n, 4),
    ),
    "layer_norm rows": lambda n: (
        lambda x, w, b: F.layer_norm(x, (8,), w, b).square(),
        normal(n, 8),
        positive(8),
        positive(8),
    ),
    "layer_norm features": lambda n: (
        lambda x, w, b: F.layer_norm(x, (x.shape[1],), w, b).square(),
        normal(4, n),
        positive(n),
        positive(n),
    ),
    "layer_norm features plain": lambda n: (lambda x: F.layer_norm(x, (x.shape[1],)).square(), normal(4, n)),
    "rms_norm rows": lambda n: (lambda x, w: F.rms_norm(x, (8,), w).square(), normal(n, 8), positive(8)),
    "rms_norm features": lambda n: (lambda x, w: F.rms_norm(x, (x.shape[1],), w).square(), normal(4, n), positive(n)),
    "group_norm": lambda n: (lambda x, w, b: F.group_norm(x, 2, w, b).square(), normal(n, 8), positive(8), positive(8)),
    "group_norm space": lambda n: (
        lambda x, w, b: F.group_norm(x, 2, w, b).square(),
        normal(2, 8, n),
        positive(8),
        positive(8),
    ),
    "group_norm cl": lambda n: (
        lambda x, w, b: F.group_norm(x, 2, w, b).square(),
        normal(2, 8, n // 8, 8).contiguous(memory_format=LAST),
        positive(8),
        positive(8),
    ),
    "batch_norm": lambda n: (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True).square(),
        normal(n, 8),
        positive(8),
        positive(8),
    ),
    "batch_norm space": lambda n: (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True).square(),
        normal(2, 8, n),
        positive(8),
        positive(8),
    ),
    "batch_norm cl": lambda n: (
        lambda x, w, b: F.batch_norm(x, None, None, w, b, training=True).square(),
        normal(2, 8, n // 8, 8).contiguous(memory_format=LAST),
        positive(8),
        positive(8),
    ),
    "batch_norm eval": lambda n: (
        lambda x, w, b: F.batch_norm(
            x, torch.zeros(8, dtype=x.dtype), torch.ones(8, dtype=x.dtype), w, b, training=False
        ).square(),
        normal(n, 8),
        positive(8),
        positive(8),
    ),
    "instance_norm": lambda n: (
        lambda x, w, b: F.instance_norm(x, None, None, w, b).square(),
        normal(2, 8, n),
        positive(8),
        positive(8),
    ),
    # Means far from zero, which backward subtracts once more, and gradients of weights that nearly cancel.
    **{
        f"{norm.__name__} mean": lambda n, norm=norm, given=given: (
            lambda x, w, b: norm(x, *given, weight=w, bias=b, **({"training": True} if norm is F.batch_norm else {})),
            normal(16, 8, n // 16) + 4,
            positive(8),
            positive(8),
        )
        for norm, given in ((F.batch_norm, (None, None)), (F.instance_norm, ()), (F.group_norm, (4,)))
    },
    "prelu": lambda n: (F.prelu, -positive(n, 8), positive(1)),
    "prelu channels": lambda n: (F.prelu, -positive(n, 8), positive(8)),
    "glu": lambda n: (F.glu, positive(4, n)),
    "embedding": lambda n: (lambda x: F.embedding(zeros(n), x), positive(4, 8)),
    "embedding freq": lambda n: (lambda x: F.embedding(zeros(n), x, scale_grad_by_freq=True), positive(4, 8)),
    "embedding_bag sum": lambda n: (lambda x: F.embedding_bag(zeros(n)[None], x, mode="sum"), positive(4, 8)),
    "embedding_bag mean rows": lambda n: (lambda x: F.embedding_bag(zeros(n)[:, None], x, mode="mean"), positive(4, 8)),
    "embedding_bag max": lambda n: (lambda x: F.embedding_bag(zeros(n)[:, None], x, mode="max"), positive(4, 8)),
    "embedding_bag weights": lambda n: (
        lambda x, w: F.embedding_bag(zeros(n)[:, None], x, mode="sum", per_sample_weights=w),
        positive(4, 8),
        positive(n, 1),
    ),
    "x[i]": lambda n: (lambda x: x[zeros(n)], positive(4, 8)),
    "x[i,j]": lambda n: (lambda x: x[zeros(n), zeros(n)], positive(4, 8)),
    "x[:,i]": lambda n: (lambda x: x[:, zeros(n)], positive(4, 8)),
    "take": lambda n: (lambda x: x.take(zeros(n)), positive(4, 8)),
    "index_select": lambda n: (lambda x: x.index_select(0, zeros(n)), positive(4, 8)),
    "index_select 1d": lambda n: (lambda x: x.index_select(0, zeros(n)), positive(8)),
    "index_select dim1": lambda n: (lambda x: x.index_select(1, zeros(n)), positive(4, 8)),
    "gather": lambda n: (lambda x: x.gather(1, torch.zeros(4, n, dtype=torch.long)), positive(4, 8)),
    "gather 1d": lambda n: (lambda x: x.gather(0, zeros(n)), positive(8)),
    "gather dim0": lambda n: (lambda x: x.gather(0, torch.zeros(n, 8, dtype=torch.long)), positive(4, 8)),
    "take_along_dim": lambda n: (
        lambda x: torch.take_along_dim(x, torch.zeros(n, 8, dtype=torch.long), 0),
        positive(4, 8),
    ),
    "index_put of one": lambda n: (lambda x: x.new_zeros(n, 8).index_put((torch.arange(n),), x), positive(8)),
    "x[i]=v": lambda n: (lambda x: written(x.new_zeros(n, 8), torch.arange(n), x), positive(8)),
    "x[:]=v": lambda n: (lambda x: written(x.new_zeros(n, 8), slice(None), x), positive(8)),
    "x[mask]=v": lambda n: (lambda x: written(x.new_zeros(n, 8), mask(n, 8), x[0]), positive(1)),
    "x[mask,:]=v": lambda n: (lambda x: written(x.new_zeros(n, 8), mask(n), x), positive(8)),
    "index_fill": lambda n: (lambda x: x.new_zeros(n, 8).index_fill(0, torch.arange(n), x[0]), positive(1)),
    "masked_fill": lambda n: (lambda x: x.new_zeros(n, 8).masked_fill(mask(n, 8), x[0]), positive(1)),
    "where": lambda n: (lambda x: torch.where(mask(n, 8), x, torch.zeros((), dtype=x.dtype)), positive(8)),
    "lerp weight": lambda n: (lambda x, y, w: x.lerp(y, w), positive(n, 8), positive(n, 8), positive(8)),
    "addcmul": lambda n: (torch.addcmul, positive(8), positive(n, 8), positive(8)),
    "clamp tensor": lambda n: (lambda x, m: x.clamp(min=m), positive(n, 8), torch.ones(8) * 0.6),
    "maximum": lambda n: (torch.maximum, positive(n, 8), torch.ones(8) * 0.75),
    "pow exp": lambda n: (lambda x, m: x**m, positive(n, 8), positive(8)),
    "segment_reduce": lambda n: (
        lambda x: torch.segment_reduce(x, "sum", lengths=torch.tensor([x.shape[0]])),
        positive(n),
    ),
    "segment_reduce mean 2d": lambda n: (
        lambda x: torch.segment_reduce(x, "mean", lengths=torch.tensor([x.shape[0]])),
        positive(n, 4),
    ),
    "coalesce": lambda n: (
        lambda x: torch.sparse_coo_tensor(zeros(n)[None], x, (4,)).coalesce().to_dense(),
        positive(n),
    ),
    "coalesce rows": lambda n: (
        lambda x: torch.sparse_coo_tensor(zeros(n)[None], x, (4, 4)).coalesce().to_dense(),
        positive(n, 4),
    ),
    "sparse to_dense": lambda n: (lambda x: torch.sparse_coo_tensor(zeros(n)[None], x, (4,)).to_dense(), positive(n)),
    "sparse.sum": lambda n: (
        lambda x: torch.sparse.sum(torch.sparse_coo_tensor(torch.arange(n)[None], x, (n,))),
        positive(n),
    ),
    "sparse.mm": lambda n: (
        lambda v, x: torch.sparse.mm(torch.sparse_coo_tensor(torch.stack([zeros(n), torch.arange(n)]), v, (4, n)), x),
        positive(n),
        positive(n, 4),
    ),
    "avg_pool1d": lambda n: (lambda x: F.avg_pool1d(x, x.shape[-1]), positive(1, 2, n)),
    "avg_pool2d": lambda n: (lambda x: F.avg_pool2d(x, x.shape[-2:]), positive(1, 2, n // 32, 32)),
    "avg_pool2d cl": lambda n: (
        lambda x: F.avg_pool2d(x, x.shape[-2:]),
        positive(1, 2, n // 32, 32).contiguous(memory_format=LAST),
    ),
    "avg_pool3d": lambda n: (lambda x: F.avg_pool3d(x, x.shape[-3:]), positive(1, 2, n // 64, 8, 8)),
    "lp_pool1d": lambda n: (lambda x: F.lp_pool1d(x, 2, x.shape[-1]), positive(1, 2, n)),
    "adaptive_avg_pool1d": lambda n: (lambda x: F.adaptive_avg_pool1d(x, 1), positive(1, 2, n)),
    "adaptive_avg_pool2d": lambda n: (lambda x: F.adaptive_avg_pool2d(x, 2), positive(1, 2, n // 32, 32)),
    "adaptive_avg_pool2d 1": lambda n: (lambda x: F.adaptive_avg_pool2d(x, 1), positive(1, 2, n // 32, 32)),
    "adaptive_avg_pool2d cl": lambda n: (
        lambda x: F.adaptive_avg_pool2d(x, 2),
        positive(1, 2, n // 32, 32).contiguous(memory_format=LAST),
    ),
    "adaptive_avg_pool3d": lambda n: (lambda x: F.adaptive_avg_pool3d(x, 2), positive(1, 2, n // 64, 8, 8)),
    "adaptive_avg_pool2d up": lambda n: (lambda x: F.adaptive_avg_pool2d(x, (n // 32, 32)), positive(1, 2, 1, 1)),
    "max_pool2d overlapping": lambda n: (
        lambda x: F.max_pool2d(x, (1, 255), stride=(1, 1)),
        torch.cat([torch.ones(1, 1, 1, 1) * 9, positive(1, 1, 1, 255)], -1),
    ),
    **{
        f"max_pool{dim}d 1025": lambda n, dim=dim: (
            lambda x: getattr(F, f"max_pool{dim}d")(x, (*[1] * (dim - 1), 1025), 1),
            torch.cat(
                [positive(*[1] * (dim + 1), 1024), torch.ones([1] * (dim + 2)) * 9, positive(*[1] * (dim + 1), 1024)],
                -1,
            ),
        )
        for dim in (1, 2, 3)
    },
    "adaptive_max1d up": lambda n: (lambda x: F.adaptive_max_pool1d(x, n), positive(1, 2, 1)),
    "adaptive_max3d up": lambda n: (lambda x: F.adaptive_max_pool3d(x, (n // 64, 8, 8)), positive(1, 2, 1, 1, 1)),
    "fractional_max_pool2d": lambda n: (
        lambda x: F.fractional_max_pool2d(x, (1, 512), (1, 512), _random_samples=x.new_full((1, 1, 2), 0.5)),
        torch.cat([positive(1, 1, 1, 511), torch.ones(1, 1, 1, 1) * 9, positive(1, 1, 1, 511)], -1),
    ),
    "fractional_max_pool3d": lambda n: (
        lambda x: F.fractional_max_pool3d(x, (1, 1, 512), (1, 1, 512), _random_samples=x.new_full((1, 1, 3), 0.5)),
        torch.cat([positive(1, 1, 2, 2, 511), torch.ones(1, 1, 2, 2, 1) * 9, positive(1, 1, 2, 2, 512)], -1),
    ),
    "avg_pool1d overlapping": lambda n: (lambda x: F.avg_pool1d(x, 512, 1), positive(1, 1, 1100)),
    "avg_pool2d overlapping": lambda n: (lambda x: F.avg_pool2d(x, (16, 32), 1), positive(1, 1, 64, 64)),
    "lp_pool1d overlapping": lambda n: (lambda x: F.lp_pool1d(x, 2, 512, 1), positive(1, 1, 1100)),
    "fold 512": lambda n: (lambda x: F.fold(x, (1, 1024), (1, 512)), positive(1, 512, 513)),
    "unfold 512": lambda n: (lambda x: F.unfold(x, (1, 512)), positive(1, 1, 1, 1024)),
    "as_strided 512": lambda n: (lambda x: x.as_strided((2048, 512), (1, 1)) * 1, positive(2559)),
    "repeat_interleave by a tensor": lambda n: (lambda x: x.repeat_interleave(torch.full((4,), n // 4)), positive(4)),
    "adaptive_max up": lambda n: (lambda x: F.adaptive_max_pool2d(x, (n // 32, 32)), positive(1, 2, 1, 1)),
    "max_unpool": lambda n: (
        lambda x: F.max_unpool1d(x, torch.arange(x.shape[-1])[None, None] * 2, 2),
        positive(1, 1, n),
    ),
    "upsample nearest1d": lambda n: (lambda x: F.interpolate(x, n), positive(1, 2, 1)),
    "upsample nearest2d": lambda n: (lambda x: F.interpolate(x, (n // 32, 32)), positive(1, 2, 1, 1)),
    "upsample nearest2d cl": lambda n: (
        lambda x: F.interpolate(x, (n // 32, 32)),
        positive(1, 4, 1, 1).contiguous(memory_format=LAST),
    ),
    "upsample nearest3d": lambda n: (lambda x: F.interpolate(x, (n // 64, 8, 8)), positive(1, 2, 1, 1, 1)),
    "upsample nearest-exact": lambda n: (
        lambda x: F.interpolate(x, (n // 32, 32), mode="nearest-exact"),
        positive(1, 2, 1, 1),
    ),
    "upsample linear": lambda n: (lambda x: F.interpolate(x, n, mode="linear"), positive(1, 2, 1)),
    "upsample bilinear": lambda n: (lambda x: F.interpolate(x, (n // 32, 32), mode="bilinear"), positive(1, 2, 1, 1)),
    "upsample bicubic": lambda n: (lambda x: F.interpolate(x, (n // 32, 32), mode="bicubic"), positive(1, 2, 1, 1)),
    "upsample trilinear": lambda n: (
        lambda x: F.interpolate(x, (n // 64, 8, 8), mode="trilinear"),
        positive(1, 2, 1, 1, 1),
    ),
    "interpolate area": lambda n: (lambda x: F.interpolate(x, (1, 1), mode="area"), positive(1, 2, n // 32, 32)),
    "grid_sample 3d": lambda n: (
        lambda x: F.grid_sample(x, torch.full((1, n // 64, 8, 8, 3), -0.45, dtype=x.dtype), align_corners=False),
        positive(1, 2, 2, 2, 2),
    ),
    "grid_sample grid": lambda n: (
        lambda x, g: F.grid_sample(x, g, align_corners=False),
        positive(1, n, 2, 2),
        torch.full((1, 1, 4, 2), -0.2),
    ),
    "affine_grid": lambda n: (lambda x: F.affine_grid(x, (1, 1, n // 32, 32), align_corners=False), normal(1, 2, 3)),
    "unfold": lambda n: (lambda x: F.unfold(x, (1, 255)), positive(1, 1, 1, 255 + 8)),
    "fold": lambda n: (lambda x: F.fold(x, (1, 262), (1, 255)), positive(1, 255, 8)),
    "Tensor.unfold": lambda n: (lambda x: x.unfold(0, 512, 1), positive(512 + 255)),
    "as_strided overlapping": lambda n: (lambda x: x.as_strided((n, 8), (0, 1)) * 1, positive(8)),
    "broadcast_to": lambda n: (lambda x: x.broadcast_to(n, 8).clone(), positive(8)),
    "cat same": lambda n: (lambda x: torch.cat([x] * 256), positive(8)),
    "stack same": lambda n: (lambda x: torch.stack([x] * 512), positive(8)),
    "dense + sparse": lambda n: (
        lambda x: x.new_zeros(4) + torch.sparse_coo_tensor(zeros(n)[None], x, (4,)),
        positive(n),
    ),
    "sparse.sum along": lambda n: (
        lambda x: torch.sparse.sum(
            torch.sparse_coo_tensor(torch.stack([torch.arange(n), zeros(n)]), x, (n, 2)), 0
        ).to_dense(),
        positive(n),
    ),
    "sparse mul": lambda n: (lambda x: (torch.sparse_coo_tensor(zeros(n)[None], x, (4,)) * 2).to_dense(), positive(n)),
    "sparse mv": lambda n: (lambda x: torch.mv(torch.ones(1, n, dtype=x.dtype).to_sparse(), x), positive(n)),
    "csr mm": lambda n: (lambda x: torch.ones(1, n, dtype=x.dtype).to_sparse_csr() @ x, positive(n, 4)),
    "histc": lambda n: (lambda x: torch.histc(x.detach(), 4, 0, 1) + 0 * x[:4], positive(n // 2)),
    "histogram": lambda n: (
        lambda x: torch.histogram(x.new_zeros(n // 2), 4, range=(0.0, 1.0), weight=x.detach())[0] + 0 * x[:4],
        positive(n // 2),
    ),
    "torch.embedding": lambda n: (lambda x: torch.embedding(x, zeros(n)), positive(4, 8)),
    "torch.embedding_bag": lambda n: (lambda x: torch.embedding_bag(x, zeros(n), torch.arange(n))[0], positive(4, 8)),
    "torch.grid_sampler": lambda n: (
        lambda x: torch.grid_sampler(x, x.new_full((1, n // 32, 32, 2), -0.45), 0, 0, False),
        positive(1, 2, 2, 2),
    ),
    **{
        f"torch.{name} mean": lambda n, name=name, rest=rest: (
            lambda x, w, b: getattr(torch, name)(x, *([4, w, b] if name == "group_norm" else [w, b]), *rest),
            normal(16, 8, n // 16) + 4,
            positive(8),
            positive(8),
        )
        for name, rest in {
            "batch_norm": (None, None, True, 0.1, 1e-5, False),
            "instance_norm": (None, None, True, 0.1, 1e-5, False),
            "group_norm": (),
        }.items()
    },
    "cov of a mean": lambda n: (torch.cov, normal(3, n) + 4),
    "corrcoef of a mean": lambda n: (torch.corrcoef, normal(3, n) + 4),
    "var of a mean": lambda n: (lambda x: x.var(1), normal(4, n) + 4),
    "std of a mean": lambda n: (lambda x: x.std(0), normal(n, 4) + 4),
    "normalize": lambda n: (F.normalize, positive(4, n)),
    "normalize 1": lambda n: (lambda x: F.normalize(x, p=1), positive(4, n)),
    "renorm": lambda n: (lambda x: torch.renorm(x, 2, 0, 1.0), positive(4, n)),
    "weight_norm columns": lambda n: (lambda x, g: torch._weight_norm(x, g, 1), normal(n, 4), positive(1, 4)),
    "cummax": lambda n: (lambda x: x.cummax(0)[0], torch.cat([torch.ones(1), positive(n - 1) * 0.5])),
    "logcumsumexp of columns": lambda n: (lambda x: x.logcumsumexp(0), normal(n, 4)),
    "trapezoid over": lambda n: (torch.trapezoid, positive(n), positive(n)),
    "diff": lambda n: (torch.diff, positive(n)),
    "ctc_loss": lambda n: (
        lambda x: F.ctc_loss(
            x.log_softmax(-1), torch.ones(1, 20, dtype=torch.long), torch.tensor([256]), torch.tensor([20])
        ),
        normal(256, 1, 5),
    ),
    **{
        f"{name} cell": lambda n, name=name, gates=gates: (
            lambda x, w, u, b, c: getattr(torch, f"{name}_cell")(x, x.new_ones(n, 4), w, u, b, c),
            normal(n, 4),
            normal(gates, 4),
            normal(gates, 4),
            normal(gates),
            normal(gates),
        )
        for name, gates in {"rnn_tanh": 4, "gru": 12}.items()
    },
    **{
        f"pad {mode}": lambda n, mode=mode: (lambda x: F.pad(x, (3, 3, 3, 3), mode=mode), positive(1, 1, 4, 4))
        for mode in ("circular", "reflect")
    },
    "conv_transpose1d wide": lambda n: (F.conv_transpose1d, positive(1, 2, 600), positive(2, 3, 512), positive(3)),
    "conv1d wide": lambda n: (F.conv1d, positive(1, 1, n), positive(2, 1, n // 2), positive(2)),
    "conv_tbc": lambda n: (torch.conv_tbc, normal(n, 1, 4), normal(3, 4, 4), normal(4)),
    "sdpa of keys": lambda n: (
        F.scaled_dot_product_attention,
        normal(1, 1, 4, 8),
        normal(1, 1, n, 8),
        positive(1, 1, n, 8),
        normal(4, n),
    ),
    "sdpa of queries": lambda n: (
        F.scaled_dot_product_attention,
        normal(1, 1, n, 8),
        normal(1, 1, 4, 8),
        positive(1, 1, 4, 8),
    ),
    "sdpa of one bias": lambda n: (
        F.scaled_dot_product_attention,
        normal(8, 8, n // 64, 8),
        normal(8, 8, 16, 8),
        positive(8, 8, 16, 8),
        normal(1, 16),
    ),
    "masked_scatter": lambda n: (lambda x: x.new_zeros(n).masked_scatter(mask(n), x), positive(n)),
    "masked_select": lambda n: (lambda x: x.expand(n, 8).masked_select(mask(n, 8)), positive(8)),
    "combinations": lambda n: (torch.combinations, positive(600)),
    "sum_to_size": lambda n: (lambda x: x.sum_to_size(1, 8), positive(n, 8)),
    "linear": lambda n: (F.linear, normal(n, 8), normal(4, 8), normal(4)),
    "linear deep": lambda n: (F.linear, positive(4, n), positive(4, n)),
    "bmm": lambda n: (torch.bmm, positive(2, 4, n), positive(2, n, 4)),
    "mv": lambda n: (lambda x, y: x.mv(y), positive(4, n), positive(n)),
    "dot": lambda n: (lambda x, y: x.dot(y), positive(n), positive(n)),
    "outer": lambda n: (torch.outer, positive(n), positive(8)),
    "ger": lambda n: (torch.ger, positive(n), positive(8)),
    "addr": lambda n: (torch.addr, torch.zeros(n, 8), positive(n), positive(8)),
    "kron": lambda n: (torch.kron, positive(n), positive(8)),
    "addbmm": lambda n: (torch.addbmm, torch.zeros(2, 2), positive(n, 2, 2), positive(n, 2, 2)),
    "baddbmm": lambda n: (torch.baddbmm, torch.zeros(2, 4, 4), positive(2, 4, n), positive(2, n, 4)),
    "einsum": lambda n: (lambda x, y: torch.einsum("ni,ni->i", x, y), positive(n, 4), positive(n, 4)),
    "tensordot": lambda n: (lambda x, y: torch.tensordot(x, y, dims=([0], [0])), positive(n, 4), positive(n, 4)),
    "bilinear": lambda n: (F.bilinear, normal(n, 3), normal(n, 3), normal(2, 3, 3), normal(2)),
    "conv1d": lambda n: (F.conv1d, normal(1, 2, n), normal(3, 2, 3), normal(3)),
    "conv1d one": lambda n: (F.conv1d, normal(n, 2, 3), normal(3, 2, 3), normal(3)),
    "conv2d": lambda n: (F.conv2d, normal(1, 2, n // 32, 32), normal(3, 2, 3, 3), normal(3)),
    "conv2d depthwise": lambda n: (
        lambda x, w, b: F.conv2d(x, w, b, groups=4),
        normal(1, 4, n // 32, 32),
        normal(4, 1, 3, 3),
        normal(4),
    ),
    "conv_transpose2d": lambda n: (F.conv_transpose2d, normal(1, 2, n // 32, 32), normal(2, 3, 3, 3), normal(3)),
    "cross": lambda n: (torch.linalg.cross, positive(n, 3), positive(1, 3)),
    "gelu bias": lambda n: (lambda x: F.gelu(x.expand(n, 8)), positive(8)),
    "silu expand": lambda n: (lambda x: F.silu(x.expand(n, 8)), positive(8)),
    "multi_dot": lambda n: (
        lambda x, y, z: torch.linalg.multi_dot([x, y, z]),
        positive(4, n),
        positive(n, 4),
        positive(4, 4),
    ),
    "logaddexp": lambda n: (torch.logaddexp, positive(n, 8), positive(8)),
    "hypot": lambda n: (torch.hypot, positive(n, 8), positive(8)),
}


def _called(holder: Any, name: str, make: Callable[[int], tuple[torch.Tensor, ...]], *args: Any, **kwargs: Any) -> Case:
    """A case of `name`, of which arguments that are functions are asked for by n."""

    def case(n: int) -> tuple[Any, ...]:
        rest = [each(n) if callable(each) else each for each in args]
        return (lambda x, *more: getattr(holder, name)(x.clone(), *rest, *more, **kwargs), *make(n))

    return case


for _name in ["sum", "mean", "var", "std", "nansum", "nanmean", "amax"]:
    CASES[_name] = _called(torch.Tensor, _name, lambda n: (positive(n),))
for _name in ["sum", "mean", "var", "std", "norm", "logsumexp", "nansum", "nanmean", "amax"]:
    CASES[f"{_name} of columns"] = _called(torch.Tensor, _name, lambda n: (positive(n, 8),), dim=0)
    CASES[f"{_name} of rows"] = _called(torch.Tensor, _name, lambda n: (positive(8, n),), dim=1)
for _name in ["mse", "l1", "smooth_l1", "huber", "poisson_nll", "soft_margin", "hinge_embedding"]:
    CASES[_name] = _called(F, f"{_name}_loss", lambda n: (positive(n, 4),), lambda n: torch.ones(n, 4))
for _end in ("", "_"):
    for _kind, _rows in {"numbers": (), "rows": (8,)}.items():
        for _name in ("index_add", "scatter_add", "scatter_reduce", "index_reduce"):
            CASES[f"{_name}{_end} of {_kind}"] = _called(
                torch.Tensor,
                _name + _end,
                lambda n, _rows=_rows: (torch.ones(4, *_rows), positive(n, *_rows)),
                0,
                (lambda n, _rows=_rows: zeros(n, *_rows)) if "scatter" in _name else zeros,
                **({"reduce": "mean"} if "reduce" in _name else {}),
            )
    for _name in ("index_put", "put"):
        CASES[_name + _end] = _called(
            torch.Tensor,
            _name + _end,
            lambda n: (torch.ones(4), positive(n)),
            (lambda n: (zeros(n),)) if _name == "index_put" else zeros,
            accumulate=True,
        )
for _mode in ("bilinear", "nearest", "bicubic"):
    CASES[f"grid_sample, {_mode}"] = lambda n, mode=_mode: (
        lambda x: F.grid_sample(x, x.new_full((1, n // 32, 32, 2), -0.45), mode=mode, align_corners=False),
        positive(1, 2, 2, 2),
    )
for _pads in ((4096, 0), (64, 0, 64, 0), (16, 0, 16, 0, 16, 0)):
    CASES[f"replicate padding, {len(_pads) // 2}d"] = lambda n, pads=_pads: (
        lambda x: F.pad(x, pads, mode="replicate"),
        positive(1, 2, *[3] * (len(pads) // 2)),
    )


def errors(name: str, dtype: torch.dtype, n: int, widened: bool) -> tuple[float, float]:
    """Of the result and of the gradients."""
    torch.manual_seed(0)
    call, *given = CASES[name](n)
    given = [each.to(dtype) for each in given]
    half = [each.clone().requires_grad_() for each in given]
    wide = [each.double().requires_grad_() for each in given]
    products = HalfProducts(dtype)
    products.choose("float32")
    with (products.forward_context("cpu") if widened else None) or nullcontext():
        out = call(*half)
    expected = call(*wide)
    grad = torch.ones(()) if expected.numel() == 1 else positive(*expected.shape)
    out.backward(grad.to(out.dtype).expand(out.shape))
    expected.backward(grad.to(dtype).double().expand(out.shape))
    pairs = [(each.grad, other.grad) for each, other in zip(half, wide, strict=True)]
    gradients = [_error(each, other) for each, other in pairs if each is not None and other is not None]
    return _error(out.detach(), expected.detach()), max(gradients, default=0.0)


def _error(found: torch.Tensor, exact: torch.Tensor) -> float:
    return float((found.double() - exact).norm() / exact.norm().clamp(min=1e-30))


def wrong(dtype: torch.dtype, *, widened: bool, names: list[str] | None = None) -> dict[str, list[str]]:
    """The functions whose sums are wrong, with their errors; what raises is not among them, nor what is beyond the range."""
    found = {}
    for name in names or CASES:
        try:
            each = [errors(name, dtype, n, widened) for n in COUNTS]
        except (NotImplementedError, RuntimeError) as error:
            print(f"{name}: {error}", file=sys.stderr)
            continue
        if any(WRONG < figure < float("inf") for pair in each for figure in pair):
            found[name] = [f"{forward:.1e} / {backward:.1e}" for forward, backward in each]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widened", action="store_true")
    parser.add_argument("--dtype", choices=("bfloat16", "float16"), default="bfloat16")
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    torch.set_num_threads(1)
    print(f"torch {torch.__version__}, {options.dtype}: forward / backward, of {COUNTS[0]:,} and {COUNTS[1]:,} terms")
    found = wrong(getattr(torch, options.dtype), widened=options.widened, names=options.names)
    for name, figures in found.items():
        print(f"{name:32}{figures[0]:24}{figures[1]}")
    return int(options.widened and not found.keys() <= LEFT)


if __name__ == "__main__":
    sys.exit(main())
