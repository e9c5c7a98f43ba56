"""Sharding one module over data-parallel ranks with torch's `fully_shard`, in the dtypes of a policy."""

from __future__ import annotations

import gc
from collections.abc import Callable, Collection, Iterable, Iterator, MutableSet
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from booster.common.text import listed
from booster.common.torch_internals.autograd_internals import has_gradient_hooks
from booster.common.torch_internals.fsdp_internals import (
    fsdp_groups,
    fsdp_params,
    fsdp_states,
    gather_of,
    is_in_forward,
    outside_inference,
    run_hooks_outside_modes,
    see_all_outputs,
    set_dtypes,
    set_gather,
    settle_dtypes,
    shards_integers,
)
from booster.common.torch_internals.fsdp_lifetimes import let_go
from booster.common.torch_internals.tensor_internals import is_view, of_class
from booster.mixed_precision.policy import (
    DtypePolicy,
    gathered_modules,
    half_buffers,
    install_keep_fp32,
    reads_weakly,
    weak_buffers,
)
from booster.model.dtensors import around
from booster.model.meta import check_meta, materialise
from booster.model.modules import LinearProxy, bare
from booster.plugin.fsdp.dtypes import show_computed_dtypes
from booster.plugin.fsdp.groups import Group, plan_groups
from booster.plugin.fsdp.unused import UnusedParameters
from booster.plugin.fsdp.written import RefuseReplaced, WrittenParameters
from booster.ranks.messages import SENDABLE
from booster.shards.dtensor import check_own
from booster.shards.fp8_gather import FP8Gather, WeightScales
from booster.shards.fully_sharded import UnshardedParams, forget_scales, recover, reshard
from booster.tensors.trees import HALF_DTYPES, map_tensors, tensors
from booster.tensors.weak import settle_inputs

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
    left: UnshardedParams | None = None,
) -> list[Any]:
    """Shard the parameters of `module` over `mesh`, in place; return hooks for `change_dtypes`, which have `remove`.

    mesh: one dimension to shard over, or two named ones, (replicate, shard); any size, 1 too. Its type is that of
    `device`. Parameters may be DTensors of tensor parallelism already. blocks: names of modules whose parameters are
    gathered by themselves; see `blocks.block_names`. reshard_after_forward: free the gathered parameters of blocks after
    their forward, and gather them again in backward; a whole number reshards to that many ranks. Those outside all
    blocks stay until backward, if there is to be one. cpu_offload: shards, gradients and optimizer state stay on the CPU.
    reduce_dtype: of gradient collectives; None means what `policy.reduce` says, or float32 where the model is read in
    half precision, or the dtype of the parameters. synchronise: called with the tensors of one group after the other,
    before they are cast; gives all ranks the same values. Parameters on the meta device get values there and then.
    shard_placement: along which dimension a parameter is divided; None, or where it says None, the first.
    gathered: names of modules whose parameters are gathered in `policy.gather`, see `policy.gathered_modules`; one more group
    for each group that holds such and others. Weights of `policy.fp8_weights` are gathered in e4m3, see `FP8Gather`: 1 byte a
    number, and one small all-reduce before every forward pass of `module`. left: takes over what users write to gathered
    parameters between passes; None where no user comes between them.

    Dtypes: shards are `policy.store`, or, where that is None and `policy.param` is given, float32 for whatever trains;
    gathered parameters, and buffers of `policy.half_buffers`, are `policy.param`; modules of `policy.keep_fp32` are float32
    throughout, see `policy.install_keep_fp32`. Nothing is cast at the boundary of the module: that is for the caller, as
    `ModelWrapper` does.

    Raises ValueError, before anything is changed, for parameters that cannot be sharded, those of integers before torch 2.13
    among them, or have no values, or have hooks, or get sparse gradients; RuntimeError if a module is sharded already.
    """
    model = bare(module)
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
    frozen = {
        name: param for name, param in model.named_parameters() if not (param.requires_grad or param.is_complex())
    }
    unsent = [name for name, param in frozen.items() if dtype_at_rest(param, policy, False) not in SENDABLE]
    if unsent and device.type == "cpu" and mesh.size() > 1:
        raise ValueError(
            f"gloo does not gather parameters of {frozen[unsent[0]].dtype}, such as {unsent[0]}, of {len(unsent)}; use "
            "TorchDDPPlugin or LowLevelZeroPlugin, which keep parameters whole, or make them buffers"
        )
    groups = plan_groups(
        model,
        blocks=blocks,
        pinned=policy.keep_fp32,
        dtype_of=lambda param, pinned: dtype_at_rest(param, policy, pinned),
        gathered=gathered,
    )
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda") if cpu_offload else OffloadPolicy()
    memo: dict[int, torch.Tensor] = {}
    held: list[torch.Tensor] = []  # keeps ids in `memo` from being used again
    written = WrittenParameters(model, mesh, device)
    unused = UnusedParameters(model, mesh, device, written)
    weakly = reads_weakly(policy) and bool(policy.keep_fp32 or weak_buffers(model, policy))
    for group in groups:
        # One group at a time, so that no more than one is whole on the device.
        materialise(group.members, device)
        if synchronise is not None:
            synchronise(_tensors(group.members))
        _cast(group, policy, memo, held)
        for child in group.modules:
            child.register_forward_hook(_own_outputs)  # before those of fully_shard, which runs its own after it
        counted = unused.before_sharding(group.modules)
        fully_shard(
            group.modules[0] if len(group.modules) == 1 else group.modules,
            mesh=mesh,
            # Backward wants first what the model itself holds.
            reshard_after_forward=False if group.stays else reshard_after_forward,
            mp_policy=_mixed_precision(policy, group, reduce_dtype),
            offload_policy=offload,
            shard_placement_fn=shard_placement,
        )
        unused.after_sharding(group.modules, counted)
        watch = written.watch(group.modules)
        let_go(group.modules)
        for child in group.modules:
            run_hooks_outside_modes(child, watch)
            if weakly and not group.pinned and child is not model:
                # fully_shard hands on inputs as new tensors, which are not weak any more.
                child.register_forward_pre_hook(settle_inputs(policy.param), with_kwargs=True, prepend=True)  # type: ignore[arg-type]
        if len(group.modules) == 1:  # several are leaves, which return tensors
            see_all_outputs(group.modules[0], tensors)
    gc.collect(1)  # what `fully_shard` leaves behind, functions that call themselves, and that keep the modules
    _cast_buffers(model, policy)
    install_keep_fp32(model, policy)
    model.register_load_state_dict_pre_hook(ShardLoaded(policy))
    model.register_forward_pre_hook(_AdmitUnfrozen(model))
    shards = mesh.get_group(mesh.ndim - 1)
    if policy.fp8_weights and shards.size() > 1:
        _gather_in_fp8(model, policy.fp8_weights, groups, shards)
    if left is not None:
        take_over = torch.compiler.disable(_TakeOver(left))
        model.register_forward_pre_hook(take_over, prepend=True)  # before fully_shard's own, which gathers
        model.register_state_dict_pre_hook(take_over)
    shown = _show_dtypes(model, groups, policy)
    model.register_forward_hook(_Rest(cast(FSDPModule, model), left), always_call=True)
    return shown


def check_hooks(model: nn.Module) -> None:
    """Raise ValueError for hooks on parameters of `model`, which are not those of what takes the place of the parameters."""
    hooked = [name for name, param in model.named_parameters() if has_gradient_hooks(param)]
    if hooked:
        raise ValueError(
            f"{listed(hooked, 5)} {'has' if len(hooked) == 1 else 'have'} hooks of register_hook or "
            "register_post_accumulate_grad_hook, which would never be called: parts take the place of parameters, and their "
            "gradients come otherwise. Take the hooks off, and change gradients between backward and step, after "
            "optimizer.unscale_grads(), or use a plugin that keeps parameters whole, such as TorchDDPPlugin"
        )


def _show_dtypes(model: nn.Module, groups: Iterable[Group], policy: DtypePolicy) -> list[Any]:
    if policy.param is None:
        return []
    return show_computed_dtypes(model, [group for group in groups if not group.pinned], policy.param)


def stays_sharded(model: nn.Module, before: DtypePolicy, after: DtypePolicy, *, blocks: Collection[str]) -> str | None:
    """Return why `change_dtypes` cannot be called so, in the words after "because"; None: it can. Nothing is changed.

    The tensors of `model` have the dtypes that they had before it was sharded.
    """
    single = [
        name for name, child in model.named_modules() if isinstance(child, FSDPModule) and isinstance(child, nn.Linear)
    ]
    if single:
        return f"fully_shard was applied to the single layer {single[0]!r}, which cannot be replaced any more; use wrap_policy"
    if before.fp8_weights != after.fp8_weights:
        return "gather_in_fp8 says how fully_shard gathers weights, which is settled when it is applied"
    plans = []
    for policy in (before, after):

        def at_rest(param: torch.Tensor, pinned: bool, policy: DtypePolicy = policy) -> torch.dtype:
            return dtype_at_rest(param, policy, pinned)

        plans.append(
            plan_groups(
                model,
                blocks=blocks,
                pinned=policy.keep_fp32,
                dtype_of=at_rest,
                gathered=gathered_modules(model, policy),
            )
        )
    old, new = plans
    shapes = [[(list(map(id, group.modules)), group.pinned, group.gathered) for group in plan] for plan in plans]
    if shapes[0] != shapes[1]:
        return (
            "fully_shard was applied to other groups of modules than it would be for the new precision, which keeps other "
            "modules in float32, or gathers others in half"
        )
    for group in new:
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
    """Give `module`, which `shard_module` sharded, the dtypes of another policy, where `stays_sharded` knows no reason not to.

    shown: what `shard_module`, or this, returned last; returns the same of now. Buffers are as before it was sharded.
    """
    model = bare(module)
    reshard(model)
    for handle in shown:
        handle.remove()
    groups = plan_groups(
        model,
        blocks=blocks,
        pinned=policy.keep_fp32,
        dtype_of=lambda param, pinned: param.dtype,
        gathered=gathered_modules(model, policy),
    )
    for group in groups:
        set_dtypes(group.modules[0], _mixed_precision(policy, group, reduce_dtype))
    _cast_buffers(model, policy)
    install_keep_fp32(model, policy)
    follow_policy(model, policy)
    _hand_over(model, policy.fp8_weights, [group.modules[0] for group in groups])  # layers are others now
    return _show_dtypes(model, groups, policy)


def follow_policy(model: nn.Module, policy: DtypePolicy) -> None:
    """Have whole tensors that are loaded into `model` be cut as `policy` wants from now on; see `ShardLoaded`."""
    for hook in model._load_state_dict_pre_hooks.values():
        inner = getattr(hook, "hook", hook)
        if isinstance(inner, ShardLoaded):
            inner.follow(policy)


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
        set_gather(module, FP8Gather(records, low, scales))
    _hand_over(model, layers, [module for module, _, _ in for_each])

    def measure(*_: Any) -> None:
        with outside_inference():
            scales.measure()

    hook = torch.compiler.disable(measure)
    model.register_forward_pre_hook(hook, prepend=True)  # before fully_shard's own, which gathers


def _hand_over(model: nn.Module, layers: Collection[str], sharded: Iterable[Any]) -> None:
    """Have those of `layers` that multiply by themselves take the bytes of their weights that the groups of `sharded` get."""
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
    """Do for `module` what `shard_module` does beside sharding, where there is no other rank to shard it with.

    Its parameters have the dtypes of `policy` already, see `store_parameters`. They may be DTensors of tensor parallelism.
    """
    install_keep_fp32(bare(module), policy)
    RefuseReplaced(bare(module))
    bare(module).register_load_state_dict_pre_hook(ShardLoaded(policy))


def without_reduction(
    module: nn.Module, held: MutableSet[nn.Module], unreduced: MutableSet[nn.Module]
) -> AbstractContextManager[Any]:
    """Make a context in which backward passes leave gradients of a sharded `module` unreduced.

    held: the modules inside such a context now. unreduced: those that have been, whose gradients may wait.
    """
    model = bare(module)
    # Inside another such context, leaving this one must not switch synchronisation on.
    if not isinstance(model, FSDPModule) or model in held:
        return nullcontext()
    unreduced.add(model)
    return _without_reduction(model, held)


@contextmanager
def _without_reduction(model: Any, held: MutableSet[nn.Module]) -> Iterator[None]:
    held.add(model)
    model.set_requires_gradient_sync(False)
    try:
        yield
    finally:
        model.set_requires_gradient_sync(True)
        held.discard(model)


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


def _cast(group: Group, policy: DtypePolicy, memo: dict[int, torch.Tensor], held: list[torch.Tensor]) -> None:
    """Cast what the members of `group` hold; tied tensors stay tied."""
    for module in group.members:
        for name, param in module._parameters.items():
            if param is None:
                continue
            if id(param) not in memo:
                dtype = dtype_at_rest(param, policy, group.pinned)
                changes = dtype != param.dtype or not param.is_contiguous()
                cast_param = param.detach().to(dtype).contiguous() if changes else None
                memo[id(param)] = param if cast_param is None else nn.Parameter(cast_param, param.requires_grad)
                held.append(param)
            module._parameters[name] = cast(nn.Parameter, memo[id(param)])


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
    known = {id(buffer): buffer for buffer in model.buffers()}  # held, so that no other gets its id meanwhile
    made = {own: known[own].to(dtype) for own, dtype in to.items()}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            module._buffers[name] = made.get(id(buffer), buffer)


def _tensors(modules: Iterable[nn.Module]) -> list[torch.Tensor]:
    return [
        tensor for module in modules for tensor in (*module.parameters(recurse=False), *module.buffers(recurse=False))
    ]


class _Own(torch.autograd.Function):
    """The same values in the same memory, but no view: a tensor with a history of its own."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return of_class(type(tensor), tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def _own_outputs(module: nn.Module, args: Any, output: Any) -> Any:
    # fully_shard hooks the gradients of outputs. An in-place operation on a view drops such a hook, of which torch warns,
    # and a Linear with a bias already returns a view.
    return _own(output) if isinstance(output, torch.Tensor) else map_tensors(_own, output)


def _own(tensor: torch.Tensor) -> torch.Tensor:
    own: torch.Tensor = _Own.apply(tensor) if is_view(tensor) and tensor.grad_fn is not None else tensor
    return own


class _AdmitUnfrozen:
    """torch settles in the first forward pass in which dtype a group's gradients arrive, for a frozen group in none.

    Raises ValueError for parts with hooks of `register_hook`, which autograd never calls.
    """

    def __init__(self, model: nn.Module) -> None:
        # Found once: looking them up is not for torch.compile to trace.
        sharded = [child for child in model.modules() if isinstance(child, FSDPModule)]
        self._groups = fsdp_groups(sharded)

    def __call__(self, module: nn.Module, args: Any) -> None:
        if (name := settle_dtypes(self._groups)) is not None:
            raise ValueError(
                f"{name} has a hook of register_hook, which would never be called: autograd computes the gradient of the "
                "gathered weight, and this is a part of it. Take the hook off, and register it by "
                "register_post_accumulate_grad_hook, which is called when the gradient of the part is there"
            )


class _Rest:
    """Frees gathered parameters after a forward pass that no backward pass follows, or that raised.

    Nothing else would: users would meet them in place of their own, and what is written to them is lost at the next step.
    """

    def __init__(self, model: FSDPModule, left: UnshardedParams | None) -> None:
        (self._state,) = fsdp_states([model])
        self._note = None if left is None else torch.compiler.disable(left.note)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if is_in_forward(self._state):  # it raised: the hook of fully_shard did not run
            recover(module)
        elif not _requires_grad(output):
            reshard(module)
        elif self._note is not None:
            self._note(module)


def _requires_grad(output: Any) -> bool:
    if isinstance(output, torch.Tensor):
        return output.requires_grad
    return any(tensor.requires_grad for tensor in tensors(output))


class _TakeOver:
    """Before a forward pass, and before weights are saved: see `UnshardedParams`."""

    def __init__(self, left: UnshardedParams) -> None:
        self._left = left

    def __call__(self, module: nn.Module, *args: Any) -> None:
        with outside_inference():  # in which no part of a weight can be looked at
            self._left.take_over(module)


class ShardLoaded:
    """A load_state_dict pre-hook that cuts whole tensors to this rank's shards, so that checkpoints of whole models load.

    Where the shards are float32 masters of half weights, half weights that they round to leave them as they are: so the
    order in which a model and its optimizer, which may hold the masters, load does not matter. Weights of float32 that
    half precision holds exactly, all of them, are half weights that were widened.
    """

    def __init__(self, policy: DtypePolicy) -> None:
        self.follow(policy)

    def follow(self, policy: DtypePolicy) -> None:
        """Weights are what `policy` says from now on."""
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
            if param.dtype == torch.float32 and param.requires_grad and not self._is_pinned(name):
                masters[name] = param
        values = {name: state_dict[prefix + name] for name in masters}
        if self._half is not None and all(_holds(value.to_local(), self._half) for value in values.values()):
            state_dict.update(
                {prefix + name: _refined(param, values[name], self._half) for name, param in masters.items()}
            )

    def _is_pinned(self, name: str) -> bool:
        return any(module == "" or name.startswith(f"{module}.") for module in self._pinned)


def _holds(value: torch.Tensor, dtype: torch.dtype) -> bool:
    return value.dtype == dtype or torch.equal(value, value.to(dtype).to(value.dtype))


def _refined(master: Any, weight: Any, dtype: torch.dtype) -> Any:
    """`weight` of half precision, but `master` where it rounds to that, in whichever way its ties go."""
    if weight.placements != master.placements or weight.device_mesh != master.device_mesh:
        return weight
    kept, given = master.detach().to_local(), weight.to_local().float()
    rounded = kept.to(dtype).float()
    return around(torch.where((rounded == given) | (kept + kept == rounded + given), kept, given), master)
