"""Sharding one module over data-parallel ranks with torch's `fully_shard`, in the dtypes of a policy."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import Shard

from booster.common.arguments import listed
from booster.common.torch_internals.autograd_internals import has_gradient_hooks
from booster.common.torch_internals.fsdp_internals import (
    fsdp_groups,
    fsdp_params,
    gather_of,
    hook_all_outputs,
    hook_each_member,
    outside_inference,
    run_hooks_outside_modes,
    set_dtypes,
    shards_integers,
)
from booster.common.torch_internals.fsdp_lifetimes import hold_modules_weakly
from booster.mixed_precision.policy import (
    DtypePolicy,
    gathered_modules,
    half_buffers,
    install_keep_fp32,
    reads_weakly,
    weak_buffers,
)
from booster.model.modules import LinearProxy, bare, check_meta, materialise, replace_tensors
from booster.plugin.expert_parallel import ExpertSharding
from booster.plugin.fsdp.forward_hooks import (
    AdmitUnfrozen,
    ForwardWrites,
    FreeGathered,
    RefuseReplaced,
    noted_writes,
    outputs_without_views,
    show_computed_dtypes,
)
from booster.plugin.fsdp.groups import Group, ShardLoaded, apply_policy, plan_groups
from booster.plugin.fsdp.unused_parameters import UnusedParameters
from booster.ranks.agreement import SENDABLE
from booster.shards.fp8_gather import FP8Gather, WeightScales
from booster.shards.fully_sharded import UnshardedParams, reshard, sharded_in
from booster.tensors.trees import HALF_DTYPES, tensors
from booster.tensors.weak import cast_weak_inputs

Synchronise = Callable[[Iterable[torch.Tensor]], None]
ShardPlacement = Callable[[nn.Parameter], Shard | None]


def shard_module(
    module: nn.Module,
    policy: DtypePolicy,
    *,
    mesh: DeviceMesh,
    device: torch.device,
    blocks: Collection[str] = (),
    reshard_after_forward: bool | int = True,
    cpu_offload: bool = False,
    reduce_dtype: torch.dtype | None = None,
    synchronise: Synchronise | None = None,
    shard_placement: ShardPlacement | None = None,
    gathered: Collection[str] = (),
    unsharded: UnshardedParams | None = None,
    experts: ExpertSharding | None = None,
) -> tuple[list[Any], Callable[[], None]]:
    """Shard the parameters of `module` over `mesh`, in place.

    Returns hooks for `change_dtypes`, which have `remove`, and what to call before gradients are reduced outside of backward.

    mesh: one dimension to shard over, or two named ones, (replicate, shard); of any size, 1 too, and of the type of `device`.
        Parameters may be DTensors of tensor parallelism already.
    blocks: names of modules with parameters that are gathered separately; see `groups.block_names`.
    reshard_after_forward: free the gathered parameters of blocks after their forward, and gather them again in backward; a
        whole number reshards to that many ranks. Parameters outside all blocks stay until backward, if there is one.
    cpu_offload: shards, gradients and optimizer states stay on the CPU.
    reduce_dtype: of gradient collectives; None: `policy.reduce`, or float32 under half precision, or the parameters' dtype.
    synchronise: called with the tensors of one group after the other, before they are cast; gives all ranks the same values.
        Parameters on the meta device get values just before.
    shard_placement: along which dimension a parameter is sharded; None, or where it returns None, the first.
    gathered: names of modules with parameters gathered in `policy.gather`, see `policy.gathered_modules`. A group that holds
        such and others becomes two.
    unsharded: writes back what users write to gathered parameters between passes; None: users have no access between passes.
    experts: how modules with experts are divided, each a group by itself on its own mesh; None: as all others.

    Dtypes: shards are `policy.store`, or, where that is None and `policy.param` is given, float32 if they train; gathered
    parameters, and buffers of `policy.half_buffers`, are `policy.param`; modules of `policy.keep_fp32` are float32 throughout.
    Weights of `policy.fp8_weights` are gathered in e4m3, see `FP8Gather`: 1 byte a number, and one small all-reduce before
    every forward pass of `module`. Nothing is cast at the boundary of the module: that is for the caller, as `ModelWrapper`.

    Raises ValueError, before anything is changed, for parameters that cannot be sharded, those of integers before torch 2.13
    among them, or have no values, or have hooks, or get sparse gradients; RuntimeError if a module is sharded already.
    """
    model = bare(module)
    _check_shardable(
        model, policy, mesh=mesh, device=device, reshard_after_forward=reshard_after_forward, reduce_dtype=reduce_dtype
    )
    groups = _groups(model, policy, blocks, gathered)
    dealt = {} if experts is None else _experts_groups(model, experts, groups)
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if cpu_offload else OffloadPolicy()
    done: dict[torch.Tensor, torch.Tensor] = {}
    written = ForwardWrites(model, mesh)
    unused = UnusedParameters(model, mesh, device, written)
    weakly = reads_weakly(policy) and bool(policy.keep_fp32 or weak_buffers(model, policy))
    for group in groups:
        # One group at a time, so that no more than one is whole on the device.
        materialise(group.members, device)
        if synchronise is not None:
            own = [(*module.parameters(recurse=False), *module.buffers(recurse=False)) for module in group.members]
            synchronise([tensor for each in own for tensor in each])
        own_sharding = dealt.get(group)
        if own_sharding is not None:
            own_sharding.divide(group.modules[0])
        _cast(group, policy, done)
        for child in group.modules:
            child.register_forward_hook(outputs_without_views)  # before those of fully_shard
        counted = unused.before_sharding(group.modules)
        fully_shard(
            group.modules[0] if len(group.modules) == 1 else group.modules,
            mesh=mesh if own_sharding is None else own_sharding.mesh,
            # Backward wants first what the model itself holds.
            reshard_after_forward=False if group.stays else reshard_after_forward,
            mp_policy=_mixed_precision(policy, group, reduce_dtype),
            offload_policy=offload,
            shard_placement_fn=shard_placement if own_sharding is None else own_sharding.placement,
        )
        unused.after_sharding(group.modules, counted)
        gathered_group = written.add_group(group.modules)
        hold_modules_weakly(group.modules)
        for child in group.modules:
            run_hooks_outside_modes(child, gathered_group, noted_writes, counted.note_gather)
            if weakly and not group.pinned and child is not model:
                # fully_shard hands on inputs as new tensors, which are not weak any more.
                child.register_forward_pre_hook(cast_weak_inputs(policy.param), with_kwargs=True, prepend=True)  # type: ignore[arg-type]
        if len(group.modules) == 1:  # several are leaves, which return tensors
            hook_all_outputs(group.modules[0], tensors)
        else:
            hook_each_member(group.modules, tensors)
    gc.collect(1)  # `fully_shard` leaves recursive closures, cycles that keep the modules alive
    _cast_buffers(model, policy)
    install_keep_fp32(model, policy)
    model.register_load_state_dict_pre_hook(ShardLoaded(policy))
    model.register_forward_pre_hook(AdmitUnfrozen(model))
    shards = mesh.get_group(mesh.ndim - 1)
    if policy.fp8_weights and shards.size() > 1:
        _gather_in_fp8(model, policy.fp8_weights, groups, shards)
    if unsharded is not None:

        def write_back(module: nn.Module, *_: Any, unsharded: UnshardedParams = unsharded) -> None:
            with outside_inference():  # in inference mode the shard of a weight cannot be read
                unsharded.write_back_all(module)

        write_back_all = torch.compiler.disable(write_back)
        model.register_forward_pre_hook(write_back_all, prepend=True)  # before fully_shard's own, which gathers
        model.register_state_dict_pre_hook(write_back_all)
    shown = show_computed_dtypes(model, groups, policy.param)
    model.register_forward_hook(FreeGathered(cast(FSDPModule, model), unsharded), always_call=True)
    return shown, unused.before_reduction


def _check_shardable(
    model: nn.Module,
    policy: DtypePolicy,
    *,
    mesh: DeviceMesh,
    device: torch.device,
    reshard_after_forward: bool | int,
    reduce_dtype: torch.dtype | None,
) -> None:
    """Raise as `shard_module` does."""
    sparse = [name for name, child in model.named_modules() if getattr(child, "sparse", False) is True]
    if any(param.requires_grad for name in sparse for param in model.get_submodule(name).parameters(recurse=False)):
        raise ValueError(
            f"sparse=True of {listed(sparse, 5)} in {type(model).__name__} makes sparse gradients, which cannot be "
            "divided among ranks; build with sparse=False, or use TorchDDPPlugin"
        )
    sharded = [name or type(child).__name__ for name, child in model.named_modules() if isinstance(child, FSDPModule)]
    if sharded:
        raise RuntimeError(
            f"{', '.join(sharded[:5])} went through fully_shard already; pass the model as it was before"
        )
    if reduce_dtype is not None and policy.reduce not in (None, reduce_dtype):
        raise ValueError(
            f"reduce_dtype={reduce_dtype} contradicts the precision's policy, which says reduce={policy.reduce}"
        )
    if policy.fp8_weights and not isinstance(reshard_after_forward, bool):
        raise ValueError(
            f"reshard_after_forward={reshard_after_forward} keeps gathered weights divided over fewer ranks, and weights that "
            "are gathered in fp8 are not cut like that; pass True or False, or leave gather_in_fp8 False"
        )
    check_meta(model)
    check_hooks(model)
    integers = [
        name for name, param in model.named_parameters() if not (param.is_floating_point() or param.is_complex())
    ]
    if integers and not shards_integers():
        raise ValueError(
            f"fully_shard of torch {torch.__version__} does not shard parameters of integers, such as {integers[0]}, of "
            f"{len(integers)}; use torch 2.13 or newer, TorchDDPPlugin or LowLevelZeroPlugin, or keep frozen weights in a "
            "float dtype"
        )
    frozen = {n: param for n, param in model.named_parameters() if not (param.requires_grad or param.is_complex())}
    unsent = [name for name, param in frozen.items() if dtype_at_rest(param, policy, False) not in SENDABLE]
    if unsent and device.type == "cpu" and mesh.size() > 1:
        raise ValueError(
            f"gloo does not gather parameters of {frozen[unsent[0]].dtype}, such as {unsent[0]}, of {len(unsent)}; use "
            "TorchDDPPlugin or LowLevelZeroPlugin, which keep parameters whole, or make them buffers"
        )


def _groups(model: nn.Module, policy: DtypePolicy, blocks: Collection[str], gathered: Collection[str]) -> list[Group]:
    return plan_groups(
        model,
        blocks=blocks,
        pinned=policy.keep_fp32,
        dtype_of=lambda param, pinned: dtype_at_rest(param, policy, pinned),
        gathered=gathered,
    )


def _experts_groups(model: nn.Module, experts: ExpertSharding, groups: list[Group]) -> dict[Group, ExpertSharding]:
    """Return those of `groups` that are modules with experts."""
    holders = {model.get_submodule(name): name for name in experts.names}
    with_experts = {group: holders.pop(group.modules[0]) for group in groups if group.modules[0] in holders}
    for name in holders.values():
        raise ValueError(
            f"{name!r} holds experts that another module of {type(model).__name__} shares, and ep_size deals them to ranks; "
            "give each module its own experts, or leave ep_size out"
        )
    return dict.fromkeys(with_experts, experts)


def check_hooks(model: nn.Module) -> None:
    """Raise ValueError for hooks on parameters of `model`, which the shards that replace the parameters would not have."""
    hooked = [name for name, param in model.named_parameters() if has_gradient_hooks(param)]
    if hooked:
        raise ValueError(
            f"{listed(hooked, 5)} {'has' if len(hooked) == 1 else 'have'} hooks of register_hook or "
            "register_post_accumulate_grad_hook, which would never be called: parts take the place of parameters, and their "
            "gradients come otherwise. Take the hooks off, and change gradients between backward and step, after "
            "optimizer.unscale_grads(), or use a plugin that keeps parameters whole, such as TorchDDPPlugin"
        )


def dtypes_refusal(model: nn.Module, before: DtypePolicy, after: DtypePolicy, *, blocks: Collection[str]) -> str | None:
    """Return why `change_dtypes` cannot be called so, in the words after "because"; None: it can. Nothing is changed."""
    single = [
        name for name, child in model.named_modules() if isinstance(child, FSDPModule) and isinstance(child, nn.Linear)
    ]
    if single:
        return f"fully_shard was applied to the single layer {single[0]!r}, which cannot be replaced any more; use wrap_policy"
    if before.fp8_weights != after.fp8_weights:
        return "gather_in_fp8 says how fully_shard gathers weights, which is settled when it is applied"
    # The tensors of `model` have the dtypes that they had before it was sharded.
    plans = [_groups(model, policy, blocks, gathered_modules(model, policy)) for policy in (before, after)]
    shapes = [[(list(map(id, group.modules)), group.pinned, group.gathered) for group in plan] for plan in plans]
    if shapes[0] != shapes[1]:
        return (
            "fully_shard was applied to other groups of modules than it would be for the new precision, which keeps other "
            "modules in float32, or gathers others in half"
        )
    for group in plans[1]:
        for member in group.members:
            for name, param in member._parameters.items():
                dtypes = [dtype_at_rest(param, policy, group.pinned) for policy in (before, after) if param is not None]
                if len(set(dtypes)) > 1:
                    return f"shards of weights such as {name!r} are {dtypes[0]} at rest and would have to become {dtypes[1]}"
    return None


def change_dtypes(
    module: nn.Module,
    policy: DtypePolicy,
    shown: Iterable[Any],
    *,
    blocks: Collection[str],
    reduce_dtype: torch.dtype | None,
) -> list[Any]:
    """Give `module`, which `shard_module` sharded, the dtypes of another policy; call `dtypes_refusal` first.

    shown: what `shard_module` or this function returned last; returns the same for now.
    """
    model = bare(module)
    reshard(sharded_in(model))  # gathered parameters have the old dtypes
    for handle in shown:
        handle.remove()
    groups = _groups(model, policy, blocks, gathered_modules(model, policy))
    for group in groups:
        set_dtypes(group.modules[0], _mixed_precision(policy, group, reduce_dtype))
    # Buffers must be as before sharding.
    _cast_buffers(model, policy)
    install_keep_fp32(model, policy)
    apply_policy(model, policy)
    _set_fp8_weights(model, policy.fp8_weights, [group.modules[0] for group in groups])  # layers are others now
    return show_computed_dtypes(model, groups, policy.param)


def _gather_in_fp8(
    model: nn.Module, layers: Collection[str], groups: Iterable[Group], ranks: dist.ProcessGroup
) -> None:
    """Make the groups of `model` gather the weights of `layers` in e4m3 over `ranks`."""
    weights = {id(model.get_submodule(name).weight) for name in layers}
    for_each: list[tuple[nn.Module, list[Any], list[Any]]] = []
    for group in groups:
        records = list(fsdp_params(group.modules[:1]))
        low = [record for record in records if id(record.sharded_param) in weights]
        if low:
            for_each.append((group.modules[0], records, low))
    scales = WeightScales([record for _, _, low in for_each for record in low], ranks)
    for module, records, low in for_each:
        cast(Any, module).set_custom_all_gather(FP8Gather(records, low, scales))
    _set_fp8_weights(model, layers, [module for module, _, _ in for_each])

    def measure(*_: Any) -> None:
        with outside_inference():
            scales.measure()

    hook = torch.compiler.disable(measure)
    model.register_forward_pre_hook(hook, prepend=True)  # before fully_shard's own, which gathers


def _set_fp8_weights(model: nn.Module, layers: Collection[str], sharded: Iterable[Any]) -> None:
    """Let low-precision ones among `layers` read the gathered bytes of their weights from groups of `sharded`."""
    gathers = {
        id(record.sharded_param): partial(gather.arrived, record)
        for group in fsdp_groups(sharded)
        if isinstance(gather := gather_of(group), FP8Gather)
        for record in group.fsdp_params
    }
    for layer in map(model.get_submodule, layers):
        if isinstance(layer, LinearProxy):
            layer.arrived = gathers.get(id(layer.weight))


def keep_whole(module: nn.Module, policy: DtypePolicy) -> None:
    """Do for `module` what `shard_module` does apart from sharding, where no other rank shares its parameters.

    Parameters may be DTensors of tensor parallelism.
    """
    # Its parameters have the dtypes of `policy` already, see `store_parameters`.
    install_keep_fp32(bare(module), policy)
    RefuseReplaced(bare(module))
    bare(module).register_load_state_dict_pre_hook(ShardLoaded(policy))


def dtype_at_rest(param: torch.Tensor, policy: DtypePolicy, pinned: bool) -> torch.dtype:
    """Return the dtype of the shard of `param`; pinned: its module is kept in float32."""
    if not param.is_floating_point() or (policy.param is None and policy.store is None):
        return param.dtype
    if pinned:
        return torch.float32
    if policy.store is not None:
        return policy.store
    # Shards that train are the masters. Frozen ones have no bits to lose, and stay as short as they came.
    return torch.float32 if param.requires_grad else param.dtype


def _mixed_precision(policy: DtypePolicy, group: Group, reduce_dtype: torch.dtype | None) -> MixedPrecisionPolicy:
    if group.pinned:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    gathered = policy.gather if group.gathered else policy.param
    own = [param for member in group.members for param in member.parameters(recurse=False)]
    if any(param.is_complex() and param.requires_grad for param in own):  # and so are all that train
        of_others = gathered if any(param.is_floating_point() for param in own) else None
        return MixedPrecisionPolicy(param_dtype=of_others, cast_forward_inputs=False)
    default = torch.float32 if (gathered or policy.store) in HALF_DTYPES else None
    return MixedPrecisionPolicy(
        param_dtype=gathered, reduce_dtype=reduce_dtype or policy.reduce or default, cast_forward_inputs=False
    )


def _cast(group: Group, policy: DtypePolicy, done: dict[torch.Tensor, torch.Tensor]) -> None:
    """Cast parameters that the members of `group` hold; done: see `replace_tensors`."""

    def cast_param(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, nn.Parameter):
            return tensor
        dtype = dtype_at_rest(tensor, policy, group.pinned)
        return tensor.detach().to(dtype).contiguous() if dtype != tensor.dtype or not tensor.is_contiguous() else tensor

    for module in group.members:
        replace_tensors(module, cast_param, done)


def _cast_buffers(model: nn.Module, policy: DtypePolicy) -> None:
    """Cast the buffers of `model` that `policy` does not leave as they were registered; tied ones stay tied."""
    half = policy.param or policy.store
    if half is None:
        return
    to = {id(buffer): half for buffer in half_buffers(model, policy)}
    for name in policy.keep_fp32:
        to |= {
            id(buffer): torch.float32 for buffer in model.get_submodule(name).buffers() if buffer.is_floating_point()
        }
    done: dict[torch.Tensor, torch.Tensor] = {}
    for module in model.modules():
        replace_tensors(module, lambda tensor: tensor.to(to[id(tensor)]) if id(tensor) in to else tensor, done)
