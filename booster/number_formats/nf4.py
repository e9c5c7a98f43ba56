"""NF4: sixteen numbers from -1 to 1, denser around zero, as normally distributed weights are.

Source: Dettmers et al. 2023, "QLoRA" (arXiv 2305.14314), appendix E. Zero is one of them, and so are both ends.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

NF4_LEVELS = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
_BETWEEN = [(low + high) / 2 for low, high in zip(NF4_LEVELS, NF4_LEVELS[1:], strict=False)]
_PAIRS = [[NF4_LEVELS[byte & 15], NF4_LEVELS[byte >> 4]] for byte in range(256)]


def encode_nf4(x: torch.Tensor) -> torch.Tensor:
    """Return the codes of the nearest levels, two in a byte, the first in the low half: uint8 of shape (m, half of n, up).

    x: float32 of shape (m, n), numbers from -1 to 1; of what lies beyond the end is nearest. NaN is not legal. A row of odd
    length is filled up with a zero.
    """
    codes = torch.bucketize(x, torch.tensor(_BETWEEN, dtype=torch.float32, device=x.device)).to(torch.uint8)
    codes = F.pad(codes, (0, x.shape[1] % 2), value=NF4_LEVELS.index(0.0))
    return codes[:, ::2] | codes[:, 1::2] << 4


def decode_nf4(codes: torch.Tensor, columns: int) -> torch.Tensor:
    """Return the numbers, float32 of shape (m, columns), whose codes `encode_nf4` made."""
    pairs = F.embedding(codes.int(), torch.tensor(_PAIRS, dtype=torch.float32, device=codes.device))
    return pairs.flatten(1)[:, :columns]
