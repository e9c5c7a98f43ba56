"""Shard a model over the ranks of a tensor-parallel group."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Shard
from torch.distributed.tensor.parallel import ParallelStyle, parallelize_module

from booster.common.torch_internals.tensor_internals import StridedShard
from booster.mixed_precision.policy import DtypePolicy
from booster.plugin.tensor_parallel.linear_styles import Colwise
from booster.plugin.tensor_parallel.local_style import LocalStyle, SharedInputGrad, SharingForward
from booster.plugin.tensor_parallel.tp_plan import Slots, TPPlan, placements_differ, resolve_plan, tied_slots
from booster.tensors.trees import HALF_DTYPES
from booster.tensors.weak import ForwardProxy, ModuleReference, cast_weak_inputs


def check_tensor_parallel(model: nn.Module, *, mesh: DeviceMesh, tp_plan: TPPlan, sequence_parallelism: bool) -> None:
    """Raise TypeError or ValueError if `apply_tensor_parallel` would; nothing is changed, and no collective runs.

    model, mesh, tp_plan, sequence_parallelism: those of that function.
    """
    _resolve(model, mesh, tp_plan, sequence_parallelism)


def apply_tensor_parallel(
    model: nn.Module, *, mesh: DeviceMesh, tp_plan: TPPlan, sequence_parallelism: bool, policy: DtypePolicy
) -> None:
    """Divide `model` among the ranks of the one-dimensional `mesh`, in place. On a mesh of one nothing changes.

    tp_plan: a dict from module name patterns to styles, a callable that makes one of the model, or None for the plan that
        is known for it.
    sequence_parallelism: between the blocks' branches every rank keeps a part of the sequence only.
    policy: which modules are kept in float32; the caller makes them compute so, afterwards.

    Parameters of divided modules become new DTensor parameters, in the dtype they have; all others stay plain, and their
    gradients are the same on all ranks of `mesh`, which must come with the same weights: nothing is sent.
    Raises as `resolve_plan`, before anything is changed; after that only for two of torch's styles that part a tied weight.
    """
    plan = _resolve(model, mesh, tp_plan, sequence_parallelism)
    if not plan:
        return
    slots = tied_slots(model)
    frozen = {name for name, param in model.named_parameters(remove_duplicate=False) if not param.requires_grad}
    forwards = _share_inputs(model, plan)
    for name, style in plan.items():
        module = model.get_submodule(name)
        if isinstance(style, LocalStyle):
            parallelize_module(module, mesh, style, src_data_rank=None)
        else:
            _apply_foreign(module, mesh, style, policy, pinned=name in policy.keep_fp32)
    for parent, shared in forwards.items():
        module = model.get_submodule(parent)
        module.forward = SharingForward(module.forward, shared)
    tie(slots)
    for name, param in model.named_parameters():
        if name in frozen:  # some of torch's styles make parameters that train
            param.requires_grad_(False)


def fsdp_placement(param: torch.Tensor) -> Shard | None:
    """How `fully_shard(shard_placement_fn=...)` may divide `param` again; None as it likes, along dimension 0."""
    # A fused projection holds a piece of each part of dimension 0, which cannot be divided along that dimension once more.
    if isinstance(param, DTensor) and any(isinstance(p, StridedShard) and p.dim == 0 for p in param.placements):
        return Shard(1)
    return None


def _resolve(
    model: nn.Module, mesh: DeviceMesh, tp_plan: TPPlan, sequence_parallelism: bool
) -> dict[str, ParallelStyle]:
    if mesh.ndim != 1:
        raise ValueError(f"tensor parallelism needs a mesh of one dimension, got {mesh.ndim}; pass mesh['tp']")
    if mesh.size() == 1 and tp_plan is None:
        return {}
    divided = [name for name, param in model.named_parameters() if isinstance(param, DTensor)]
    if divided:
        raise RuntimeError(f"{divided[0]!r} is a DTensor already: the model was divided before; pass it as it was then")
    plan = resolve_plan(model, tp_plan, tp_size=mesh.size(), sequence_parallelism=sequence_parallelism)
    return {} if mesh.size() == 1 else plan


def _share_inputs(model: nn.Module, plan: dict[str, ParallelStyle]) -> dict[str, SharedInputGrad]:
    """Let column-wise layers of one module in `plan` share the sum of gradients; returns by parent what they share."""
    layers: dict[str, list[str]] = {}
    for name, style in plan.items():
        if name and isinstance(style, Colwise) and style.reads_whole_input:
            layers.setdefault(name.rpartition(".")[0], []).append(name)
    by_parent = {}
    for parent, names in layers.items():
        if len(names) > 1 and not isinstance(model.get_submodule(parent), (nn.ModuleList, nn.ModuleDict)):
            by_parent[parent] = shared = SharedInputGrad()
            plan |= {name: cast(Colwise, plan[name]).sharing(shared) for name in names}
    return by_parent


def _apply_foreign(
    module: nn.Module, mesh: DeviceMesh, style: ParallelStyle, policy: DtypePolicy, *, pinned: bool
) -> None:
    """Apply a style of torch or of the user."""
    pre, post = set(module._forward_pre_hooks), set(module._forward_hooks)
    parallelize_module(module, mesh, style)
    if not pinned:
        if policy.param in HALF_DTYPES:  # its hooks make DTensors of inputs, and these are not weakly typed
            module.register_forward_pre_hook(cast_weak_inputs(policy.param), with_kwargs=True, prepend=True)
        return
    before = _remove_new(module._forward_pre_hooks, module._forward_pre_hooks_with_kwargs, pre)
    after = _remove_new(module._forward_hooks, module._forward_hooks_with_kwargs, post)
    # Its hooks become part of the forward of a pinned module: outside of it, they would communicate in half precision.
    module.forward = _HookedForward(module, before, after)


Hook = tuple[Callable[..., Any], bool]  # a hook, and whether it takes keyword arguments


class _HookedForward(ModuleReference):
    """The forward of a module, with hooks that were taken from it."""

    def __init__(self, module: nn.Module, before: list[Hook], after: list[Hook]) -> None:
        self._module = weakref.ref(module)
        self._inner = ForwardProxy(module.forward)
        self._before, self._after = before, after

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = self._module()
        for hook, with_kwargs in self._before:
            if with_kwargs:
                changed = hook(module, args, kwargs)
                args, kwargs = (args, kwargs) if changed is None else changed
            else:
                changed = hook(module, args)
                if changed is not None:
                    args = changed if isinstance(changed, tuple) else (changed,)
        output = self._inner.run(*args, **kwargs)
        for hook, with_kwargs in self._after:
            changed = hook(module, args, kwargs, output) if with_kwargs else hook(module, args, output)
            output = output if changed is None else changed
        return output


def _remove_new(hooks: Any, with_kwargs: dict[int, bool], before: set[int]) -> list[Hook]:
    """Remove the hooks that were not there `before`; returns them, each with whether it takes keyword arguments."""
    return [(hooks.pop(key), with_kwargs.pop(key, False)) for key in list(hooks) if key not in before]


def tie(slots: list[Slots]) -> None:
    """Put the parameter of the first place of each list into the others. Raises ValueError if their placements differ."""
    for places in slots:
        (first_name, first_module, first_own), *others = places
        param = first_module._parameters[first_own]
        for name, module, own in others:
            other = module._parameters[own]
            if _of(other) != _of(param):
                raise placements_differ(first_name, _of(param), name, _of(other))
            module._parameters[own] = param


def _of(param: torch.Tensor | None) -> Placement | None:
    return param.placements[0] if isinstance(param, DTensor) else None
