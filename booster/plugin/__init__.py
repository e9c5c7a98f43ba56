"""Parallelisms: where modules are placed, which ranks share the batch, and when gradients are averaged.

The idea: a plugin is one axis, the precision the other, and they meet in `Plugin.place(module, policy, device)`. The policy is
data: which dtype parameters are stored, gathered, computed and reduced in. A plugin honours or refuses each field and knows no
precision. It may replace parameters but keeps their names, so that the optimizer can be rebound.

An example, what `Booster(mixed_precision="fp16_naive", plugin=TorchDDPPlugin())` does with a model:

    plugin.bind(device)                             process groups
    plugin.synchronise(model)                       all ranks start from rank 0's weights
    placed = plugin.place(model, policy, device)    policy.param=float16: weights are cast, the model is wrapped by DDP
    shards = plugin.make_shards(optimizer)          what this rank holds and steps; here everything
    with plugin.no_sync(placed): ...                passes that accumulate
    plugin.group                                    the ranks that must skip a step together

In reading order:

    base.py            `Plugin`, all that one may override, with what each means; `SingleDevice`; meshes that plugins share
    ddp/               DistributedDataParallel, and reducers of ours
    zero.py            slices of states, masters and gradients
    fsdp/              torch's `fully_shard`
    tensor_parallel/   layers sharded over ranks
    sequence_parallel/ ranks that share sequences
    pipeline/          stages on several ranks
    expert_parallel.py whole experts on each rank
    hybrid.py          fsdp/ and all below it together: who is placed first, and on which dimension of the mesh

A new plugin is one file and a line below (`examples/extending/plugin.py`). Rooms above import the names below alone, but for
`memory/`, which estimates what these do. Plugins on DTensors are loaded when first asked for: they import much of
torch.distributed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from booster.model.modules import PlacedModule
from booster.plugin.base import Pipeline, Plugin, SingleDevice
from booster.plugin.ddp.averaged_gradients import FP8Communication
from booster.plugin.ddp.plugin import TorchDDPPlugin

if TYPE_CHECKING:
    from booster.plugin.fsdp.plugin import TorchFSDPPlugin
    from booster.plugin.hybrid import HybridParallelPlugin
    from booster.plugin.zero import LowLevelZeroPlugin

__all__ = [
    "FP8Communication",
    "HybridParallelPlugin",
    "LowLevelZeroPlugin",
    "Pipeline",
    "PlacedModule",
    "Plugin",
    "SingleDevice",
    "TorchDDPPlugin",
    "TorchFSDPPlugin",
]

_LAZY = {
    "HybridParallelPlugin": "booster.plugin.hybrid",
    "LowLevelZeroPlugin": "booster.plugin.zero",
    "TorchFSDPPlugin": "booster.plugin.fsdp.plugin",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
