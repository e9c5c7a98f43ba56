"""How far a gradient, added up over micro-batches in half precision or in float32, is from the one of float32 weights.

`python -m benchmarks.accumulation` prints the relative error of the whole gradient of a small net of half weights.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

DTYPES = {torch.bfloat16: 1.0, torch.float16: 1024.0}  # with a loss scale that keeps gradients out of subnormals
COUNTS = (1, 4, 8, 16, 32, 64, 128)
WIDTH = 256


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))


def errors(dtype: torch.dtype, count: int) -> tuple[float, float]:
    """Relative errors of gradients of `dtype` summed in `dtype` and in float32."""
    torch.manual_seed(0)
    half = net().to(dtype)
    wide = net()
    wide.load_state_dict(half.state_dict())
    inputs, targets = torch.randn(count, 8, WIDTH).to(dtype), torch.randn(count, 8, WIDTH)

    def gradients(model: nn.Module, x: torch.Tensor, y: torch.Tensor) -> Sequence[torch.Tensor]:
        loss = (model(x).float() - y).square().mean() * (DTYPES[dtype] / count)
        return torch.autograd.grad(loss, list(model.parameters()))

    in_half = [torch.zeros_like(param) for param in half.parameters()]
    in_float32, exact = ([torch.zeros_like(param) for param in wide.parameters()] for _ in range(2))
    for x, y in zip(inputs, targets, strict=True):
        found = gradients(half, x, y)
        torch._foreach_add_(in_half, found)
        torch._foreach_add_(in_float32, [grad.float() for grad in found])
        torch._foreach_add_(exact, gradients(wide, x.float(), y))
    whole = flat(exact)
    in_h, in_f = ((float((flat(each) - whole).norm() / whole.norm())) for each in (in_half, in_float32))
    return in_h, in_f


def flat(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([each.flatten().float() for each in tensors])


def main() -> None:
    print(f"| micro-batches | {' | '.join(map(str, COUNTS))} |\n|---|{'---|' * len(COUNTS)}")
    for dtype in DTYPES:
        found = [errors(dtype, count) for count in COUNTS]
        for name, column in (("in itself", 0), ("in float32", 1)):
            cells = " | ".join(f"{100 * each[column]:.2g} %" for each in found)
            print(f"| {str(dtype).removeprefix('torch.')}, summed {name} | {cells} |")


if __name__ == "__main__":
    main()
