"""A random Hadamard transform of 16 neighbours, which spreads an outlier over the block that it lies in."""

from __future__ import annotations

import torch

ROTATION = 16
# Drawn once, as in the paper (arXiv 2509.25149): all layers and steps rotate alike, and both operands must.
SIGNS = (1, 1, -1, 1, -1, -1, 1, -1, 1, 1, 1, -1, -1, 1, -1, -1)
_ROWS = [
    [float(sign * (-1) ** (row & column).bit_count()) for column in range(ROTATION)] for row, sign in enumerate(SIGNS)
]


def rotated(x: torch.Tensor) -> torch.Tensor:
    """Return the float32 matrix `x` with every 16 neighbours of a row, some of their signs turned, through a Hadamard matrix.

    The rotation is orthogonal, so it leaves `a @ b.t()` as it is. The number of columns must be a multiple of 16. A quarter of
    each number is added or taken away, one after the other, on every device: a product of float32 matrices would sum in an
    order of its own on a GPU, and in TF32 where that is allowed. On CPUs it sums in this order, but for a single row.
    """
    signs = torch.tensor(_ROWS, dtype=torch.float32, device=x.device)
    quarters = x.reshape(-1, ROTATION) * ROTATION**-0.5
    if x.device.type == "cpu" and len(quarters) > 1:
        return (quarters @ signs).view(x.shape)
    total = torch.zeros_like(quarters)
    for place in range(ROTATION):
        total = total + quarters[:, place : place + 1] * signs[place]
    return total.view(x.shape)
