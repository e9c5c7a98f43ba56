"""Linear layers in low precision by hand: numpy and ml_dtypes for the formats, nothing of booster in it."""

import ml_dtypes
import numpy as np
import torch

E4M3, E5M2, E2M1 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.float4_e2m1fn


def rounded(x, kind, largest):
    """float32 numbers, those of `kind` that are nearest; int8 is `kind` None."""
    x = np.clip(x, -largest, largest)
    return np.rint(x) if kind is None else x.astype(kind).astype(np.float32)


def scaled(x, kind, over, power_of_two=False):
    """What `x` means once it is in `kind`, with a scale for the whole, each row, or each `over` numbers of a row."""
    largest = 127.0 if kind is None else float(ml_dtypes.finfo(kind).max)
    rows, columns = x.shape
    size = {"tensor": None, "row": columns}.get(over, over)
    if size is None:
        groups = x.reshape(1, -1)
    else:
        groups = np.pad(x, ((0, 0), (0, -columns % size))).reshape(-1, size)
    scale = np.abs(groups).max(1, keepdims=True) / np.float32(largest)
    if power_of_two:
        scale = np.exp2(np.ceil(np.log2(np.maximum(scale, 2.0**-126)))).astype(np.float32)
    scale = np.maximum(scale, np.float32(2.0**-126))
    result = rounded(groups / scale, kind, largest) * scale
    return result.reshape(rows, -1)[:, :columns].astype(np.float32)


def nv(x, square=False, noise=None):
    """What `x` means in nvfp4: blocks of 16, or of 16 x 16, with e4m3 scales times one of the matrix."""
    rows, columns = x.shape
    down = 16 if square else 1
    padded = np.pad(x, ((0, -rows % down), (0, -columns % 16)))
    blocks = padded.reshape(-1, down, padded.shape[1] // 16, 16)
    whole = max(np.abs(x).max() / np.float32(6) / np.float32(448), np.float32(2.0**-126))
    scale = rounded(np.abs(blocks).max((1, 3), keepdims=True) / np.float32(6) / whole, E4M3, 448.0)
    scale = np.maximum(scale, np.float32(2.0**-9)) * whole
    numbers = blocks / scale
    if noise is None:
        result = rounded(numbers, E2M1, 6.0)
    else:
        grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 6], np.float32)
        size = np.minimum(np.abs(numbers), 6)
        place = np.searchsorted(grid[:8], size, "right") - 1
        low, high = grid[place], grid[place + 1]
        chance = np.where(high > low, (size - low) / np.where(high > low, high - low, 1), 0)
        draws = noise.random(numbers.shape, np.float32)
        result = np.copysign(np.where(draws < chance, high, low), numbers)
    return (result * scale).reshape(padded.shape)[:rows, :columns].astype(np.float32)


def hadamard(x):
    """A fixed rotation of each 16 neighbours of a row."""
    matrix = np.ones((1, 1), np.float32)
    while len(matrix) < 16:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    signs = np.where(np.random.default_rng(0).random(16) < 0.5, -1, 1).astype(np.float32)
    padded = np.pad(x, ((0, 0), (0, -x.shape[1] % 16)))
    return (padded.reshape(len(x), -1, 16) * signs @ matrix / 4).reshape(len(x), -1).astype(np.float32)


_draws = np.random.default_rng(1)


def e4m3_rows(x):
    return scaled(x, E4M3, "row", power_of_two=True)


def mx(x):
    return scaled(x, E4M3, 32, power_of_two=True)


def blocks(x):
    return scaled(x, E4M3, 128)


def squares(x):
    """Blocks of 128 x 128."""
    rows, columns = x.shape
    padded = np.pad(x, ((0, -rows % 128), (0, -columns % 128)))
    parts = padded.reshape(-1, 128, padded.shape[1] // 128, 128).transpose(0, 2, 1, 3)
    low = scaled(parts.reshape(-1, 128 * 128), E4M3, "row").reshape(parts.shape)
    return low.transpose(0, 2, 1, 3).reshape(padded.shape)[:rows, :columns].astype(np.float32)


def int8_rows(x):
    return scaled(x, None, "row")


def e4m3(x):
    return scaled(x, E4M3, "tensor")


def e5m2(x):
    return scaled(x, E5M2, "tensor")


def tf32(x):
    """The nearest numbers with 10 bits of mantissa, by way of float64."""
    mantissa, exponent = np.frexp(x.astype(np.float64))
    return np.ldexp(np.rint(mantissa * 2**11), exponent - 11).astype(np.float32)


# For each of the three products what becomes of both matrices (their last dimension is summed over); None stays wide.
RECIPES = {
    "fp8": ((e4m3, e4m3), (e5m2, e4m3), (e5m2, e4m3)),
    "fp8 rowwise": ((e4m3_rows, e4m3_rows),) * 3,
    "fp8 rowwise_with_gw_hp": (
        (e4m3_rows, e4m3_rows),
        (e4m3_rows, lambda w: scaled(w, E4M3, "tensor", power_of_two=True)),
        None,
    ),
    "fp8 blocks": ((blocks, squares), (blocks, squares), (blocks, blocks)),
    "mxfp8": ((mx, mx),) * 3,
    "nvfp4": (
        (nv, lambda w: nv(w, square=True)),
        (lambda g: nv(g, noise=_draws), lambda w: nv(w, square=True)),
        (lambda g: nv(hadamard(g), noise=_draws), lambda x: nv(hadamard(x))),
    ),
    "nvfp4 nearest": (
        (nv, lambda w: nv(w, square=True)),
        (nv, lambda w: nv(w, square=True)),
        (nv, nv),
    ),
    "int8": ((int8_rows, int8_rows),) * 3,
    "tf32": ((tf32, tf32),) * 3,
}


def product(a, b, how, dtype):
    """`a @ b.t()`, summed in float32 and rounded to `dtype` once."""
    if how is None:
        return a.to(dtype) @ b.to(dtype).t()
    a, b = (torch.from_numpy(low(each.detach().float().numpy())) for low, each in zip(how, (a, b), strict=True))
    return (a @ b.t()).to(dtype)


class Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, recipe):
        ctx.save_for_backward(x, weight)
        ctx.recipe = recipe
        with torch.autocast("cpu", enabled=False):
            return product(x, weight, RECIPES[recipe][0], x.dtype)

    @staticmethod
    def backward(ctx, g):
        x, weight = ctx.saved_tensors
        _, of_x, of_weight = RECIPES[ctx.recipe]
        return product(g, weight.t(), of_x, x.dtype), product(g.t(), x.t(), of_weight, x.dtype).to(weight.dtype), None


class LowLinear(torch.nn.Module):
    """A linear layer in place of `linear`, with its parameters."""

    def __init__(self, linear, recipe):
        super().__init__()
        self.weight, self.bias, self.recipe = linear.weight, linear.bias, recipe

    def forward(self, x):
        dtype = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else x.dtype
        y = Linear.apply(x.to(dtype).flatten(0, -2), self.weight, self.recipe).view(*x.shape[:-1], -1)
        return y if self.bias is None else y + self.bias.to(dtype)
