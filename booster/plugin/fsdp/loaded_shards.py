"""Loading weights of a whole model, or of other shards, into a sharded one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor, distribute_tensor

from booster.mixed_precision.policy import DtypePolicy
from booster.model.dtensors import dtensor_around
from booster.shards.dtensor import check_own
from booster.shards.fully_sharded import forget_scales, reshard
from booster.tensors.trees import HALF_DTYPES


def follow_policy(model: nn.Module, policy: DtypePolicy) -> None:
    """Have weights that are loaded into `model` from now on treated as `policy` says; see `ShardLoaded`."""
    for hook in model._load_state_dict_pre_hooks.values():
        inner = getattr(hook, "hook", hook)
        if isinstance(inner, ShardLoaded):
            inner.set_policy(policy)


class ShardLoaded:
    """A load_state_dict pre-hook that cuts whole tensors to this rank's shards, so that checkpoints of whole models load.

    Where the shards are float32 master weights, a half-precision weight that a master rounds to leaves it as it is. So a model
    and its optimizer, which may hold the masters, load in any order. Float32 weights that are all exact in half precision
    count as half-precision weights that were widened.
    """

    def __init__(self, policy: DtypePolicy) -> None:
        self.set_policy(policy)

    def set_policy(self, policy: DtypePolicy) -> None:
        self._half = policy.param if policy.param in HALF_DTYPES and policy.store is None else None
        self._pinned = policy.keep_fp32

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        reshard(module)
        forget_scales(module)
        masters: dict[str, Any] = {}
        for name, param in module.named_parameters(remove_duplicate=False):
            value = state_dict.get(prefix + name)
            if not isinstance(param, DTensor):
                continue
            check_own(value, param)
            if not isinstance(value, torch.Tensor) or value.shape != param.shape:
                continue  # torch names the mismatch
            if not isinstance(value, DTensor):
                placed = (param.device_mesh, param.placements)
                value = distribute_tensor(value.detach().to(param.device), *placed, src_data_rank=None)
                state_dict[prefix + name] = value
            is_pinned = any(module == "" or name.startswith(f"{module}.") for module in self._pinned)
            if param.dtype == torch.float32 and param.requires_grad and not is_pinned:
                masters[name] = param
        values = {name: state_dict[prefix + name] for name in masters}
        if self._half is not None and all(_holds(value.to_local(), self._half) for value in values.values()):
            state_dict.update(
                {prefix + name: _refined(param, values[name], self._half) for name, param in masters.items()}
            )


def _holds(value: torch.Tensor, dtype: torch.dtype) -> bool:
    return value.dtype == dtype or torch.equal(value, value.to(dtype).to(value.dtype))


def _refined(master: Any, weight: Any, dtype: torch.dtype) -> Any:
    """`weight` of half precision, but `master` where it rounds to that, in whichever way its ties go."""
    if weight.placements != master.placements or weight.device_mesh != master.device_mesh:
        return weight
    kept, given = master.detach().to_local(), weight.to_local().float()
    rounded = kept.to(dtype).float()
    return dtensor_around(torch.where((rounded == given) | (kept + kept == rounded + given), kept, given), master)
