"""The rule of a loss scale in kernels, for many scales at once. Needs Triton."""

from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from booster.kernels.launches import _next_scale
from booster.loss_scaler import DeviceScale, DynamicScale


@triton.jit
def _step(words, single, found, options, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    own = words + 8 * at
    _next_scale(single + 16 * at + 6, own + 4, own + 5, tl.load(found + at), options + 8 * at, single + 16 * at, own)


class Scales:
    """Scales that begin as those of `hosts`, a power of two of them."""

    def __init__(self, hosts: Sequence[DynamicScale]) -> None:
        rules = [(0.0, *DeviceScale(host, torch.device("cpu")).rule, 0.0) for host in hosts]
        self._options = torch.tensor(rules, dtype=torch.float64)
        self._words = torch.zeros(len(hosts), 8, dtype=torch.int64)
        self._single = self._words.view(torch.float32)
        self._single[:, 6] = torch.tensor([host.scale for host in hosts])

    def step(self, found: Sequence[bool]) -> None:
        flags = torch.tensor(found, dtype=torch.int32)
        _step[(1,)](self._words, self._single, flags, self._options, COUNT=len(found))

    def read(self) -> list[tuple[float, int, int]]:
        """(scale, clean steps, overflows) of each."""
        numbers = self._single[:, 6].tolist(), self._words[:, 4].tolist(), self._words[:, 5].tolist()
        return list(zip(*numbers, strict=True))
