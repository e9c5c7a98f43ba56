"""Random numbers for rounding by chance, the same on every rank and after every checkpoint."""

from __future__ import annotations

import zlib

import torch

from booster.flat import ALIGNMENT
from booster.masters.packed import Chances

_BITS = 16


class Dither:
    """Sixteen random bits for each lane of a bucket, new in every step, for each name that asks.

    Elements 64 apart share them. What an element is rounded with then depends on the step, the name and the element's place
    in its own parameter, as pieces begin at multiples of 64, and not on how parameters were packed or cut. Each element is
    rounded right on average over steps; neighbours are rounded independently within 64 elements.

    count: steps so far, which is all that a checkpoint needs. The user's random state is neither read nor changed.
    drawn: what was asked for in this step. Cleared, it is drawn again, the same, when it is asked for again.
    """

    def __init__(self, seed: int = 1024) -> None:
        self.count = 0
        self._seed = seed
        self.drawn: dict[tuple[str, torch.device], Chances] = {}

    def next(self) -> None:
        """Go on to the next step."""
        self.count += 1
        self.drawn.clear()

    def resume(self, count: int) -> None:
        """Continue after `count` steps."""
        self.count = count
        self.drawn.clear()

    def lanes(self, name: str, device: torch.device) -> torch.Tensor:
        """Return 64 numbers from 0 to 65535, int32."""
        return self.chances(name, device).lanes

    def chances(self, name: str, device: torch.device) -> Chances:
        """Return the same, with what is made of them."""
        key = (name, device)
        if key not in self.drawn:
            # Torch's generator for CPUs takes 32 bits of a seed.
            seed = (self._seed + self.count * 0x9E3779B1 + zlib.crc32(name.encode())) % 2**32
            generator = torch.Generator().manual_seed(seed)
            drawn = torch.randint(0, 2**_BITS, (ALIGNMENT,), dtype=torch.int32, generator=generator)
            if device.type == "cuda":  # memory of its own kind, so that nothing waits for the copy
                drawn = drawn.pin_memory()
            self.drawn[key] = Chances(drawn.to(device, non_blocking=True))
        return self.drawn[key]
