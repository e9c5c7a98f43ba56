"""Gradients that a plugin keeps beside the parameters that a model shows now."""

from __future__ import annotations

import sys

from torch import nn


def clear_unsharded_grads(module: nn.Module, set_to_none: bool) -> None:
    """Clear those of every kind, in a model of any plugin."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    if fsdp is not None and any(isinstance(child, fsdp.FSDPModule) for child in module.modules()):
        # Imported here, as it takes FSDP along.
        from booster.shards import fully_sharded

        fully_sharded.clear_unsharded_grads(module, set_to_none)
