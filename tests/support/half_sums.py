"""Which sums torch makes in a half dtype itself on a CPU: of every differentiable function that adds up as many terms as asked.

Run it for the table of the docs: `python tests/support/half_sums.py`.
"""

import math

import torch
from torch.nn import functional as F

HALVES = (torch.bfloat16, torch.float16)
COUNTS = (4096, 65536)


def _zeros(n):
    return torch.zeros(n, dtype=torch.long)


def _square(n, most=64):
    """Two sides of a rectangle of n."""
    side = 2 ** (int(math.log2(n)) // 2)
    return side, n // side


def _pad(mode):
    def make(t, n):  # the gradient of a corner is the sum of what is beside it
        a, b = _square(n)
        dims = {"replicate 1": (n,), "replicate 2": (a, b), "replicate 3": (a, b // 4, 4)}[mode]
        pads = [p for d in reversed(dims) for p in (d - 1, 0)]
        return lambda x: F.pad(x, pads, mode="replicate"), [t(1, 1, *(1 for _ in dims))]

    return make


# Of each, by the name that the table has: the function, and operands of it, made by `t(*shape)`.
CASES = {
    "sum": lambda t, n: (lambda x: x.sum(0), [t(n, 4)]),
    "mean": lambda t, n: (lambda x: x.mean(0), [t(n, 4)]),
    "sum of a row": lambda t, n: (lambda x: x.sum(-1), [t(4, n)]),
    "nansum": lambda t, n: (lambda x: x.nansum(0), [t(n, 4)]),
    "broadcast": lambda t, n: (lambda x, y: x + y, [t(n, 4), t(4)]),
    "expand": lambda t, n: (lambda x: x.expand(n, 4), [t(4)]),
    "repeat": lambda t, n: (lambda x: x.repeat(n, 1), [t(1, 4)]),
    "repeat_interleave": lambda t, n: (lambda x: x.repeat_interleave(n, 0), [t(1, 4)]),
    "cumsum": lambda t, n: (lambda x: x.cumsum(0)[-1], [t(n, 4)]),
    "cumsum's gradient": lambda t, n: (lambda x: x.cumsum(0), [t(n, 4)]),
    "logcumsumexp": lambda t, n: (lambda x: x.logcumsumexp(0), [t(n, 4)]),
    "logsumexp": lambda t, n: (lambda x: x.logsumexp(0), [t(n, 4)]),
    "softmax": lambda t, n: (lambda x, y: x.softmax(0) * y, [t(n, 4), t(n, 4)]),
    "log_softmax": lambda t, n: (lambda x: x.log_softmax(0), [t(n, 4)]),
    "var": lambda t, n: (lambda x: x.var(0), [t(n, 4)]),
    "std": lambda t, n: (lambda x: x.std(0), [t(n, 4)]),
    "norm": lambda t, n: (lambda x: torch.linalg.vector_norm(x, dim=0), [t(n, 4)]),
    "matrix_norm": lambda t, n: (lambda x: torch.linalg.matrix_norm(x), [t(n, 4)]),
    "norm of order 1": lambda t, n: (lambda x: torch.linalg.vector_norm(x, 1, dim=0), [t(n, 4)]),
    "norm of order 3": lambda t, n: (lambda x: torch.linalg.vector_norm(x, 3, dim=0), [t(n, 4)]),
    "dist": lambda t, n: (lambda x, y: torch.dist(x, y), [t(n), t(n)]),
    "trace": lambda t, n: (lambda x: torch.trace(x), [t(min(n, 4096), min(n, 4096))]),
    "trapezoid": lambda t, n: (lambda x: torch.trapezoid(x, dim=0), [t(n, 4)]),
    "cov": lambda t, n: (lambda x: torch.cov(x), [t(4, n)]),
    "renorm": lambda t, n: (lambda x: torch.renorm(x, 2, 1, 0.5), [t(n, 4)]),
    "dot": lambda t, n: (torch.dot, [t(n), t(n)]),
    "mv": lambda t, n: (torch.mv, [t(4, n), t(n)]),
    "mm": lambda t, n: (torch.mm, [t(4, n), t(n, 4)]),
    "addmm": lambda t, n: (torch.addmm, [t(4), t(4, n), t(n, 4)]),
    "addmv": lambda t, n: (torch.addmv, [t(4), t(4, n), t(n)]),
    "addbmm": lambda t, n: (torch.addbmm, [t(2, 2), t(n, 2, 2), t(n, 2, 2)]),
    "bmm": lambda t, n: (torch.bmm, [t(2, 4, n), t(2, n, 4)]),
    "einsum": lambda t, n: (lambda x, y: torch.einsum("ni,nj->ij", x, y), [t(n, 4), t(n, 4)]),
    "vecdot": lambda t, n: (torch.linalg.vecdot, [t(2, n), t(2, n)]),
    "linear": lambda t, n: (F.linear, [t(n, 4), t(4, 4), t(4)]),
    "bilinear": lambda t, n: (F.bilinear, [t(n, 4), t(n, 4), t(2, 4, 4), t(2)]),
    "outer": lambda t, n: (torch.outer, [t(n), t(4)]),
    "addr": lambda t, n: (torch.addr, [t(n, 4), t(n), t(4)]),
    "kron": lambda t, n: (torch.kron, [t(n, 1), t(1, 4)]),
    "cdist": lambda t, n: (torch.cdist, [t(4, n), t(2, n)]),
    "conv1d": lambda t, n: (F.conv1d, [t(2, 2, n), t(2, 2, 3), t(2)]),
    "conv2d": lambda t, n: (F.conv2d, [t(1, 2, *_square(n)), t(2, 2, 3, 3), t(2)]),
    "conv_transpose2d": lambda t, n: (F.conv_transpose2d, [t(1, 2, *_square(n)), t(2, 2, 3, 3), t(2)]),
    "conv1d of one position": lambda t, n: (F.conv1d, [t(n, 2, 1), t(2, 2, 1), t(2)]),
    "depthwise conv1d": lambda t, n: (lambda x, w, b: F.conv1d(x, w, b, groups=4), [t(2, 4, n), t(4, 1, 3), t(4)]),
    "layer_norm": lambda t, n: (lambda x, w, b: F.layer_norm(x, (16,), w, b), [t(n, 16), t(16), t(16)]),
    "native_layer_norm": lambda t, n: (
        lambda x, w, b: torch.native_layer_norm(x, (16,), w, b, 1e-5)[0],
        [t(n, 16), t(16), t(16)],
    ),
    "layer_norm of a long row": lambda t, n: (lambda x, w, b: F.layer_norm(x, (n,), w, b), [t(4, n), t(n), t(n)]),
    "rms_norm": lambda t, n: (lambda x, w: F.rms_norm(x, (16,), w), [t(n, 16), t(16)]),
    "group_norm": lambda t, n: (lambda x, w, b: F.group_norm(x, 2, w, b), [t(n // 16, 4, 16), t(4), t(4)]),
    "batch_norm": lambda t, n: (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), [t(n, 4), t(4), t(4)]),
    "instance_norm": lambda t, n: (
        lambda x, w, b: F.instance_norm(x, weight=w, bias=b),
        [t(n // 16, 4, 16), t(4), t(4)],
    ),
    "local_response_norm": lambda t, n: (lambda x: F.local_response_norm(x, 5), [t(n // 16, 8, 4)]),
    "prelu": lambda t, n: (lambda x, w: F.prelu(-x, w), [t(n, 4), t(4)]),
    "normalize": lambda t, n: (lambda x: F.normalize(x, dim=0), [t(n, 4)]),
    "cosine_similarity": lambda t, n: (F.cosine_similarity, [t(4, n), t(4, n)]),
    "pairwise_distance": lambda t, n: (F.pairwise_distance, [t(4, n), t(4, n)]),
    "embedding": lambda t, n: (lambda w: F.embedding(_zeros(n), w), [t(2, 4)]),
    "embedding_bag": lambda t, n: (lambda w: F.embedding_bag(_zeros(n).view(-1, 4), w, mode="sum"), [t(2, 4)]),
    "embedding_bag of one bag": lambda t, n: (
        lambda w: F.embedding_bag(torch.arange(n)[None], w, mode="sum"),
        [t(n, 4)],
    ),
    "embedding_bag with weights": lambda t, n: (
        lambda w, p: F.embedding_bag(torch.arange(n)[None], w, mode="sum", per_sample_weights=p),
        [t(n, 4), t(1, n)],
    ),
    "x[i]": lambda t, n: (lambda w: w[_zeros(n)], [t(2, 4)]),
    "x[i, j]": lambda t, n: (lambda w: w[_zeros(n), _zeros(n)], [t(2, 4)]),
    "x[:, i]": lambda t, n: (lambda w: w[:, _zeros(n)], [t(2, 4)]),
    "take": lambda t, n: (lambda w: torch.take(w, _zeros(n)), [t(8)]),
    "index_select": lambda t, n: (lambda w: torch.index_select(w, 0, _zeros(n)), [t(2, 4)]),
    "index_select of numbers": lambda t, n: (lambda w: torch.index_select(w, 0, _zeros(n)), [t(8)]),
    "index_select of columns": lambda t, n: (lambda w: torch.index_select(w, 1, _zeros(n)), [t(4, 2)]),
    "gather": lambda t, n: (lambda w: torch.gather(w, 0, _zeros(n)[:, None].expand(n, 4)), [t(2, 4)]),
    "gather of numbers": lambda t, n: (lambda w: torch.gather(w, 0, _zeros(n)), [t(8)]),
    "gather of columns": lambda t, n: (lambda w: torch.gather(w, 1, _zeros(n)[None].expand(2, n)), [t(2, 4)]),
    "take_along_dim": lambda t, n: (lambda w: torch.take_along_dim(w, _zeros(n)[:, None], 0), [t(2, 4)]),
    "index_put": lambda t, n: (
        lambda x, y: x.index_put((_zeros(n),), y, accumulate=True),
        [t(2, 4), t(n, 4)],
    ),
    "index_put of one number": lambda t, n: (lambda x, y: x.index_put((torch.arange(n),), y), [t(n, 4), t(4)]),
    "index_add": lambda t, n: (lambda x, y: x.index_add(0, _zeros(n), y), [t(2, 4), t(n, 4)]),
    "index_add of numbers": lambda t, n: (lambda x, y: x.index_add(0, _zeros(n), y), [t(8), t(n)]),
    "index_add of columns": lambda t, n: (lambda x, y: x.index_add(1, _zeros(n), y), [t(4, 2), t(4, n)]),
    "index_reduce": lambda t, n: (lambda x, y: x.index_reduce(0, _zeros(n), y, "mean"), [t(2, 4), t(n, 4)]),
    "scatter_add": lambda t, n: (
        lambda x, y: x.scatter_add(0, _zeros(n)[:, None].expand(n, 4), y),
        [t(2, 4), t(n, 4)],
    ),
    "scatter_add of numbers": lambda t, n: (lambda x, y: x.scatter_add(0, _zeros(n), y), [t(8), t(n)]),
    "scatter_add of columns": lambda t, n: (
        lambda x, y: x.scatter_add(1, _zeros(n)[None].expand(2, n), y),
        [t(2, 4), t(2, n)],
    ),
    "scatter_reduce": lambda t, n: (
        lambda x, y: x.scatter_reduce(0, _zeros(n)[:, None].expand(n, 4), y, "sum"),
        [t(2, 4), t(n, 4)],
    ),
    "scatter_reduce to a mean": lambda t, n: (
        lambda x, y: x.scatter_reduce(0, _zeros(n), y, "mean"),
        [t(8), t(n)],
    ),
    "put": lambda t, n: (lambda x, y: x.put(_zeros(n), y, accumulate=True), [t(8), t(n)]),
    "as_strided": lambda t, n: (lambda x: x.as_strided((n, 4), (0, 1)), [t(4)]),
    "unfold of a tensor": lambda t, n: (lambda x: x.unfold(0, n, 1), [t(n + n // 64)]),
    "fold": lambda t, n: (
        lambda x: F.fold(x, (64, 64), (32, 32)),
        [t(1, 1024, 33 * 33)],
    ),
    "unfold": lambda t, n: (lambda x: F.unfold(x, (32, 32)), [t(1, 1, 64, 64)]),
    "segment_reduce": lambda t, n: (
        lambda x: torch.segment_reduce(x, "sum", lengths=torch.tensor([n]), unsafe=True),
        [t(n)],
    ),
    "segment_reduce to a mean": lambda t, n: (
        lambda x: torch.segment_reduce(x, "mean", lengths=torch.tensor([n]), unsafe=True),
        [t(n)],
    ),
    "sparse coalesce": lambda t, n: (
        lambda x: torch.sparse_coo_tensor(_zeros(n)[None], x, (8,)).coalesce().to_dense(),
        [t(n)],
    ),
    "sparse to_dense": lambda t, n: (
        lambda x: torch.sparse_coo_tensor(_zeros(n)[None], x, (8,)).to_dense(),
        [t(n)],
    ),
    "sparse sum": lambda t, n: (
        lambda x: torch.sparse.sum(torch.sparse_coo_tensor(torch.arange(n)[None], x, (n,))),
        [t(n)],
    ),
    "sparse @ dense": lambda t, n: (
        lambda x, y: torch.sparse_coo_tensor(torch.stack([_zeros(n), torch.arange(n)]), x, (2, n)) @ y,
        [t(n), t(n, 4)],
    ),
    "sparse.mm": lambda t, n: (
        lambda x, y: torch.sparse.mm(torch.sparse_coo_tensor(torch.stack([_zeros(n), torch.arange(n)]), x, (2, n)), y),
        [t(n), t(n, 4)],
    ),
    "grid_sample": lambda t, n: (
        lambda x: F.grid_sample(x, torch.zeros(1, *_square(n), 2, dtype=x.dtype), align_corners=True),
        [t(1, 2, 3, 3)],
    ),
    "grid_sample of nearest": lambda t, n: (
        lambda x: F.grid_sample(x, torch.zeros(1, *_square(n), 2, dtype=x.dtype), "nearest", align_corners=True),
        [t(1, 2, 3, 3)],
    ),
    "grid_sample of bicubic": lambda t, n: (
        lambda x: F.grid_sample(x, torch.zeros(1, *_square(n), 2, dtype=x.dtype), "bicubic", align_corners=True),
        [t(1, 2, 3, 3)],
    ),
    "grid_sample of a volume": lambda t, n: (
        lambda x: F.grid_sample(x, torch.zeros(1, *_square(n), 1, 3, dtype=x.dtype), align_corners=True),
        [t(1, 2, 3, 3, 3)],
    ),
    "grid_sample's grid": lambda t, n: (
        lambda x, g: F.grid_sample(x, g.view(1, 1, 1, 2) * 0.1, align_corners=True),
        [t(1, n, 3, 3), t(2)],
    ),
    "replication padding in 1 dimension": _pad("replicate 1"),
    "replication padding in 2 dimensions": _pad("replicate 2"),
    "replication padding in 3 dimensions": _pad("replicate 3"),
    "avg_pool1d": lambda t, n: (lambda x: F.avg_pool1d(x, n), [t(1, 4, n)]),
    "avg_pool2d": lambda t, n: (lambda x: F.avg_pool2d(x, _square(n)), [t(1, 4, *_square(n))]),
    "avg_pool3d": lambda t, n: (lambda x: F.avg_pool3d(x, (*_square(n), 1)), [t(1, 4, *_square(n), 1)]),
    "overlapping avg_pool2d": lambda t, n: (lambda x: F.avg_pool2d(x, 32, 1), [t(1, 1, 64, 64)]),
    "overlapping max_pool2d": lambda t, n: (lambda x: F.max_pool2d(x + 64 * _peak(x), 32, 1), [t(1, 1, 64, 64)]),
    "overlapping max_pool1d": lambda t, n: (
        lambda x: F.max_pool1d(x + 64 * (torch.arange(2 * n) == n).to(x.dtype), n, 1),
        [t(1, 1, 2 * n)],
    ),
    "overlapping max_pool3d": lambda t, n: (
        lambda x: F.max_pool3d(x + 64 * _peak(x)[..., None], (32, 32, 1), 1),
        [t(1, 1, 64, 64, 1)],
    ),
    "adaptive_avg_pool1d": lambda t, n: (lambda x: F.adaptive_avg_pool1d(x, 1), [t(1, 4, n)]),
    "adaptive_avg_pool2d": lambda t, n: (lambda x: F.adaptive_avg_pool2d(x, 1), [t(1, 4, *_square(n))]),
    "adaptive_avg_pool2d to more": lambda t, n: (lambda x: F.adaptive_avg_pool2d(x, _square(n)), [t(1, 4, 1, 1)]),
    "adaptive_avg_pool3d": lambda t, n: (lambda x: F.adaptive_avg_pool3d(x, 1), [t(1, 4, *_square(n), 1)]),
    "adaptive_max_pool2d to more": lambda t, n: (lambda x: F.adaptive_max_pool2d(x, _square(n)), [t(1, 4, 1, 1)]),
    **{
        f"interpolate {mode}": lambda t, n, mode=mode, dims=dims: (
            lambda x: F.interpolate(x, size=(n,) if dims == 1 else (*_square(n), 1)[: max(dims, 2)], mode=mode),
            [t(1, 1, *[1] * dims)],
        )
        for mode, dims in (
            ("linear", 1),
            ("nearest", 1),
            ("nearest", 2),
            ("nearest", 3),
            ("nearest-exact", 2),
            ("bilinear", 2),
            ("bicubic", 2),
            ("trilinear", 3),
            ("area", 2),
        )
    },
    "max_unpool1d": lambda t, n: (
        lambda x: F.max_unpool1d(x, torch.arange(n)[None], 1, 1),
        [t(1, n)],
    ),
    "gru": lambda t, n: (
        lambda x, h, a, b, c, d: torch.gru(x, h, [a, b, c, d], True, 1, 0.0, True, False, True)[0],
        [t(n // 4, 4, 4), t(1, n // 4, 4), t(12, 4), t(12, 4), t(12), t(12)],
    ),
    "attention": lambda t, n: (F.scaled_dot_product_attention, [t(1, 1, 4, 8), t(1, 1, n, 8), t(1, 1, n, 8)]),
    "nll_loss": lambda t, n: (lambda x: F.nll_loss(x, _zeros(n)), [t(n, 4)]),
    "nll_loss to a sum": lambda t, n: (lambda x: F.nll_loss(x, _zeros(n), reduction="sum"), [t(n, 4)]),
    "nll_loss with weights": lambda t, n: (lambda x: F.nll_loss(x, _zeros(n), torch.ones(4, dtype=x.dtype)), [t(n, 4)]),
    "nll_loss of pictures": lambda t, n: (
        lambda x: F.nll_loss(x, _zeros(n).view(1, *_square(n))),
        [t(1, 4, *_square(n))],
    ),
    "cross_entropy": lambda t, n: (lambda x: F.cross_entropy(x, _zeros(n)), [t(n, 4)]),
    "cross_entropy with smoothing": lambda t, n: (
        lambda x: F.cross_entropy(x, _zeros(n), label_smoothing=0.1),
        [t(n, 4)],
    ),
    "cross_entropy with probabilities": lambda t, n: (
        lambda x: F.cross_entropy(x, torch.full((n, 4), 0.25, dtype=x.dtype)),
        [t(n, 4)],
    ),
    "mse_loss": lambda t, n: (F.mse_loss, [t(n), t(n)]),
    "l1_loss": lambda t, n: (lambda x: F.l1_loss(x, 0 * x), [t(n)]),
    "smooth_l1_loss": lambda t, n: (F.smooth_l1_loss, [t(n), t(n)]),
    "huber_loss": lambda t, n: (F.huber_loss, [t(n), t(n)]),
    "kl_div": lambda t, n: (lambda x, y: F.kl_div(x, y.abs(), reduction="sum"), [t(n), t(n)]),
    "binary_cross_entropy_with_logits": lambda t, n: (
        lambda x: F.binary_cross_entropy_with_logits(x, torch.zeros_like(x)),
        [t(n)],
    ),
    "binary_cross_entropy": lambda t, n: (
        lambda x: F.binary_cross_entropy(x.abs().clamp(0.25, 0.75), torch.zeros_like(x)),
        [t(n)],
    ),
    "soft_margin_loss": lambda t, n: (lambda x: F.soft_margin_loss(x, torch.ones_like(x)), [t(n)]),
    "hinge_embedding_loss": lambda t, n: (lambda x: F.hinge_embedding_loss(x, torch.ones_like(x)), [t(n)]),
    "margin_ranking_loss": lambda t, n: (
        lambda x, y: F.margin_ranking_loss(x, y, torch.ones_like(x), 4.0),
        [t(n), t(n)],
    ),
    "cosine_embedding_loss": lambda t, n: (
        lambda x, y: F.cosine_embedding_loss(x, y, torch.ones(n, dtype=x.dtype)),
        [t(n, 4), t(n, 4)],
    ),
    "multilabel_soft_margin_loss": lambda t, n: (
        lambda x: F.multilabel_soft_margin_loss(x, torch.ones_like(x)),
        [t(n, 4)],
    ),
    "poisson_nll_loss": lambda t, n: (lambda x: F.poisson_nll_loss(x, torch.ones_like(x)), [t(n)]),
    "gaussian_nll_loss": lambda t, n: (
        lambda x, y: F.gaussian_nll_loss(x, torch.ones_like(x), 1 + y.square()),
        [t(n), t(n)],
    ),
    "triplet_margin_loss": lambda t, n: (F.triplet_margin_loss, [t(n, 4), t(n, 4), t(n, 4)]),
    "matrix_exp": lambda t, n: (lambda x: torch.matrix_exp(x - x.mT), [t(16, 16)]),
}


def _peak(x):
    peak = torch.zeros(1, 1, 64, 64, dtype=x.dtype)
    peak[..., 32, 32] = 1
    return peak


def _operands(make, count, random):
    generator = torch.Generator().manual_seed(0)

    def operand(*shape):
        if not random:
            return torch.full(shape, 2.0**-8, dtype=torch.float64)
        return 0.02 + 0.1 * torch.randn(shape, generator=generator, dtype=torch.float64)

    return make(operand, count)


def _results(function, operands, direction, dtype):
    own = [operand.to(dtype, copy=True).requires_grad_() for operand in operands]
    out = function(*own)
    up = torch.full_like(out, 2.0**-8) if direction is None else direction(out.shape).to(out.dtype)
    grads = torch.autograd.grad(out, own, up, allow_unused=True)
    return [each.detach().double() for each in (out, *grads) if each is not None]


def error(name, count, dtype, *, random=False, run=None):
    """The largest error of a result or a gradient in `dtype`, relative to its norm, beside float64 on the same halves.

    run: what computes in `dtype`, as `_results` does; None is torch's own way. Raises what torch raises where it does not.
    """
    function, operands = _operands(CASES[name], count, random)
    operands = [operand.to(dtype).double() for operand in operands]
    direction = None
    if random:

        def direction(shape):
            noise = torch.randn(shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
            return (0.02 + 0.1 * noise).to(dtype)

    exact = _results(function, operands, direction, torch.float64)
    found = (run or _results)(function, operands, direction, dtype)
    # A gradient that cancels to nothing, as of a norm of rows of ones, has no relative error.
    errors = [0.0]
    for a, b in zip(found, exact, strict=True):
        floor = 2.0**-16 * max(1.0, *(x.norm().item() for x in exact))
        errors.append(((a - b).norm() / max(b.norm().item(), floor)).item() if a.isfinite().all() else math.inf)
    return max(errors)


def main():
    print(f"torch {torch.__version__}, {torch.get_num_threads()} thread(s)")
    for name in CASES:
        row = []
        for dtype in HALVES:
            for count in COUNTS:
                try:
                    found = max(error(name, count, dtype, random=random) for random in (False, True))
                except Exception as raised:  # torch has no such kernel
                    row.append(type(raised).__name__ + str(raised)[:60])
                    continue
                row.append(f"{found:.2g}" if found < 10 else "wrong")
        print(f"| {name} | {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
