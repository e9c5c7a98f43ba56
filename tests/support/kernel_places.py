"""Parameters and gradients at any address and of any size, stepped by kernels and by torch. On CPU tensors where kernels are
interpreted, and on a GPU."""

import torch
from interpreted import follow, gradients, step_on
from torch import nn

INF, NAN = float("inf"), float("nan")


class Anywhere(nn.Module):
    """Parameters of `sizes` elements, in turns 1, 2, 3 and 7 elements behind a multiple of 16 bytes, and gradients likewise.

    Around each is memory of somebody else, in `around`."""

    def __init__(self, sizes, dtype, device):
        super().__init__()
        self.around = []
        for index, size in enumerate(sizes):
            param = nn.Parameter(self._placed(size, (1, 2, 3, 7)[index % 4], dtype, device, 0.5))
            param.grad = self._placed(size, (7, 1, 2, 3)[index % 4], dtype, device, 0.0)
            self.register_parameter(f"p{index}", param)

    def _placed(self, size, offset, dtype, device, value):
        whole = torch.full((offset + size + 64,), -3.0, dtype=dtype, device=device)
        inside = whole[offset : offset + size]
        inside.copy_(torch.randn(size) if value else torch.zeros(size))
        assert size == 0 or inside.data_ptr() == whole.data_ptr() + offset * whole.element_size()
        self.around.append((whole, offset, size))
        return inside

    def kept_around(self):
        """Whether nothing was written outside of parameters and gradients."""
        return all(
            bool((whole[:offset] == -3.0).all() and (whole[offset + size :] == -3.0).all())
            for whole, offset, size in self.around
        )


# Around the elements of a group of scales, of lanes of random numbers, and of a tile.
SIZES = (0, 1, 2, 31, 32, 33, 63, 64, 65, 127, 2047, 2048, 2049, 4097)


def anywhere(both, sizes, rtol):
    """Step `both`, of `Anywhere`: finite gradients, then one that is not at the end of each size, then finite ones."""
    assert all(any(param.data_ptr() % 16 for param in model.parameters()) for _, model, _ in both)
    where = [None, *((index, INF if index % 2 else NAN) for index in (1, len(sizes) - 1)), None]
    for number, bad in enumerate(where):
        follow(*both)
        results = []
        for booster, model, optimizer in both:
            params = list(model.parameters())
            grads = gradients(params, number)
            if bad is not None:
                grads[bad[0]].view(-1)[-1] = bad[1]
            before = [param.grad.data_ptr() for param in params]
            results.append(step_on(booster, model, optimizer, grads, set_to_none=False))
            assert [param.grad.data_ptr() for param in params] == before
        assert [result.applied for result in results] == [bad is None] * 2
        assert both[1][2]._update.decision.steps.reason is None
        for own, other in zip(both[1][1].parameters(), both[0][1].parameters(), strict=True):
            torch.testing.assert_close(own.float(), other.float(), rtol=rtol, atol=6.1e-8)
    for _, model, _ in both:
        assert model.kept_around()
