"""Parameters by name, and optimizers rebound to other parameters of the same names; this rank's shard of a DTensor, and
DTensors made around a shard.

Buckets of an update see plain local memory. An optimizer that needs unsharded tensors steps DTensors made around that memory,
so its products and norms are those of the unsharded tensor. Nothing here imports DTensor: where it is not loaded, none exists.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from booster.common.torch_internals.tensor_internals import local_tensor
from booster.model.modules import PlacedModule, bare


def params_of(optimizer: torch.optim.Optimizer) -> list[Any]:
    """Return the parameters in the groups of `optimizer`, in their order."""
    return [param for group in optimizer.param_groups for param in group["params"]]


def is_dtensor(tensor: Any) -> bool:
    """Return whether `tensor` is a DTensor, without importing them: where they are not imported there is none."""
    return isinstance(tensor, dtensor_types())


def is_part(tensor: Any) -> bool:
    """Return whether `tensor` is a DTensor of which other ranks hold other parts."""
    if not is_dtensor(tensor) or tensor.device_mesh.size() == 1:
        return False
    return not all(each.is_replicate() for each in tensor.placements)  # a strided shard is none, says `is_shard`


def dtensor_types() -> tuple[type, ...]:
    """Return the class DTensor for `isinstance`, or nothing where it is not imported, so that there is none."""
    # Importing it takes long, and before the import no tensor can be one.
    module = sys.modules.get("torch.distributed.tensor")
    return () if module is None else (module.DTensor,)


def local_shard(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this rank holds of `tensor`, detached, in the memory of `tensor`; of no DTensor, `tensor` itself."""
    return local_tensor(tensor).detach() if is_dtensor(tensor) else tensor


def memory_of(tensor: torch.Tensor) -> int:
    """Return what is the same of two weights in one place: the memory of this rank's shard, or, where that is empty, the id."""
    local = local_shard(tensor)
    return local.data_ptr() if local.numel() else id(tensor)


def dtensor_around(local: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Return a tensor laid out as `whole`, of which this rank holds `local`; where `whole` is no DTensor, `local`."""
    if not is_dtensor(whole):
        return local
    from torch.distributed.tensor import DTensor

    like: Any = whole
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=whole.shape, stride=whole.stride()
    )


def num_shards(param: torch.Tensor) -> int:
    """Into how many shards `param` is divided."""
    like: Any = param
    if not is_dtensor(param):
        return 1
    sizes = zip(like.device_mesh.shape, like.placements, strict=True)
    return math.prod(size for size, placement in sizes if not placement.is_replicate())


def empty_handle(like: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return a float32 leaf of the shape and layout of `like`, without storage: a parameter, or a DTensor."""
    empty = torch.zeros((), dtype=torch.float32, device=device).expand(local_shard(like).shape)
    # Not as a parameter: `to_local` of one returns another tensor each time.
    return dtensor_around(empty, like).requires_grad_() if is_dtensor(like) else nn.Parameter(empty)


def inner_tensor(handle: torch.Tensor) -> torch.Tensor:
    """Return the tensor that is given data for `handle`: the handle itself, or what is inside of a DTensor."""
    return local_tensor(handle) if is_dtensor(handle) else handle


def named_parameters(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter of `model` by its qualified name; a tied parameter has one entry, its first name."""
    return dict(model.named_parameters())


def as_one_module(models: Sequence[nn.Module]) -> nn.Module:
    """Return a module that holds `models` without what plugins wrapped around them.

    Of several the names of parameters begin with the model's place in the list.
    """
    # Of one model it is the model itself.
    return bare(models[0]) if len(models) == 1 else nn.ModuleList(map(bare, models))


def name_prefixes(models: Sequence[nn.Module]) -> list[str]:
    """Return what names of `as_one_module(models)` begin with, one for each model."""
    return [""] if len(models) == 1 else [f"{place}." for place in range(len(models))]


def placed_parameters(placed: nn.Module) -> dict[str, torch.Tensor]:
    """Every parameter of a placed model on this rank, by its name in the user's model."""
    return placed.own_parameters() if isinstance(placed, PlacedModule) else named_parameters(bare(placed))


def describe_optimizer_wrapper(given: Any) -> str:
    """Describe a wrapper around an optimizer that was given in its place, and what to pass; "" for anything else."""
    name = type(given).__name__
    held = (getattr(given, key, None) for key in ("optim", "optimizer"))
    inner = next((value for value in held if isinstance(value, Optimizer)), None)
    if inner is None:
        return ""
    advice = f"pass the {type(inner).__name__} inside it"
    if name == "LARC":
        advice = (
            f"pass the {type(inner).__name__} inside it, or an optimizer that takes the trust ratio itself, such as "
            "timm.optim.Lars(params, lr, trust_coeff=0.02, trust_clip=True)"
        )
    return (
        f"{name}, a wrapper around {type(inner).__name__} that is no Optimizer itself: what it does to gradients before the "
        f"step would meet scaled or divided ones. Instead {advice}"
    )


@dataclass(frozen=True)
class Selection:
    """Which parameters of a whole model's optimizer a rank kept.

    Attributes:
        positions: in each group, the places of those that it kept.
        sizes: of the groups before.
        elsewhere: names of the parameters that it did not keep, whether in a group or in none yet.
    """

    positions: list[list[int]]
    sizes: list[int]
    elsewhere: frozenset[str]

    def of(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Return this rank's shards of a torch state dict of the whole model; any other state dict as it is."""
        groups = state_dict.get("param_groups") or []
        if [len(group["params"]) for group in groups] != self.sizes:
            return state_dict
        own = [
            {**group, "params": [group["params"][position] for position in positions]}
            for group, positions in zip(groups, self.positions, strict=True)
        ]
        held = {key for group in own for key in group["params"]}
        gone = {key for group in groups for key in group["params"]} - held
        return {
            **state_dict,
            "param_groups": own,
            "state": {key: value for key, value in state_dict["state"].items() if key not in gone},
        }


def rebind(
    optimizer: Optimizer, old: Mapping[str, torch.Tensor], new: Mapping[str, torch.Tensor], *, partial: bool = False
) -> Selection | None:
    """Make `optimizer` hold `new[name]` wherever it held `old[name]`, and move its state along.

    State of the parameter's shape goes to the new parameter's device. Parameters in neither mapping stay. partial: those
    without a counterpart are on other ranks, and leave the optimizer, and what stays is returned. Otherwise raises
    RuntimeError, with nothing changed, if a parameter has no counterpart.
    """
    # Groups are edited in place, because LR schedulers hold them.
    names = {id(param): name for name, param in old.items()}
    held = (names.get(id(param)) for group in optimizer.param_groups for param in group["params"])
    missing = [name for name in held if name is not None and name not in new]
    if missing and not partial:
        raise RuntimeError(
            f"after placing the model there is no parameter named {missing}; its optimizer would not train it. A plugin keeps "
            "names, and wraps a model in a subclass of booster.plugin.PlacedModule only"
        )
    kept: list[list[int]] = []
    sizes = [len(group["params"]) for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        gone = {id(p): p for p in group["params"] if id(p) in names and names[id(p)] not in new}
        for param in gone.values():
            optimizer.state.pop(param, None)
        kept.append([index for index, p in enumerate(group["params"]) if id(p) not in gone])
        # In place: LR schedulers and users hold the list.
        group["params"][:] = [p for p in group["params"] if id(p) not in gone]
        for index, param in enumerate(group["params"]):
            if id(param) not in names:
                continue
            replacement = new[names[id(param)]]
            # Keys of the state are the parameters themselves.
            if replacement is not param:
                group["params"][index] = replacement
                if param in optimizer.state:
                    optimizer.state[replacement] = optimizer.state.pop(param)
            # Also of a parameter that stayed and went to another device.
            state: dict[str, Any] = optimizer.state.get(replacement) or {}
            for key, value in state.items():
                if isinstance(value, torch.Tensor) and value.shape == replacement.shape:
                    state[key] = value.to(replacement.device)
    return Selection(kept, sizes, frozenset(old.keys() - new.keys())) if partial else None


Done = dict[torch.Tensor, torch.Tensor]


def set_tensors(module: nn.Module, value_of: Callable[[str, torch.Tensor], torch.Tensor], done: Done) -> None:
    """Give each floating tensor of `module` itself the value and dtype that `value_of`, asked by its name there, returns.

    done: replacements by tensor; one dict for all modules of a model, so that tied tensors stay tied.
    """
    for name, param in module._parameters.items():
        if param is None or not param.is_floating_point():
            continue
        if param not in done:  # a tied parameter is cast once
            value = value_of(name, param)
            if is_dtensor(param) and value.dtype != param.dtype:
                # Parameters stay the same objects, except DTensors, which are replaced.
                done[param] = nn.Parameter(value, requires_grad=param.requires_grad)
            else:
                if value is not param:
                    param.data = value
                done[param] = param
        module._parameters[name] = done[param]  # type: ignore[assignment]
    for name, buffer in module._buffers.items():
        if buffer is not None and buffer.is_floating_point():
            if buffer not in done:
                done[buffer] = value_of(name, buffer)
            module._buffers[name] = done[buffer]
