"""The fused inference path of torch's transformer layers, which reads weights past the modules that hold them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from booster.model.modules import LinearStandIn


def passes_over(model: nn.Module, *, casts: bool) -> bool:
    """Return whether that path would evaluate layers of `model` in another precision than they train in.

    casts: whether the precision casts what functions read, so that weights at rest do not say in what they multiply.
    """
    return any(
        casts or any(isinstance(child, LinearStandIn) or "forward" in child.__dict__ for child in module.modules())
        for module in model.modules()
        if isinstance(module, (nn.TransformerEncoderLayer, nn.MultiheadAttention))
    )


@contextmanager
def fast_path_off() -> Iterator[None]:
    """Context without that path."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)
