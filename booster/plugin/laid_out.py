"""Modules of which the trainable parameters lie in the flat buckets of a layout."""

from __future__ import annotations

from torch import nn

from booster.shards.zero_buckets import Layout


class LaidOut(nn.Module):
    """Mixin before the base of a module, of which `layout` may hold the trainable parameters; None where it does not."""

    layout: Layout | None = None

    def wait_for_weights(self) -> None:
        """Wait for weights that a step left on their way."""
        if self.layout is not None:
            self.layout.arriving.wait()

    def zero_grad(self, set_to_none: bool = True) -> None:
        super().zero_grad(set_to_none)
        if self.layout is not None:
            self.layout.clear_gradients(set_to_none)
