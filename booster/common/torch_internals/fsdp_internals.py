"""The records that `fully_shard` keeps of modules, groups and parameters, and hooks of DistributedDataParallel."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from operator import attrgetter
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from booster.common.torch_internals.autograd_internals import without_function_modes
from booster.common.torch_internals.tensor_internals import preserving_versions, pytree


def bucket_assignment(tensors: list[torch.Tensor], limit: int, indices: Sequence[int] = ()) -> list[list[int]]:
    """Return the buckets, of at most `limit` bytes and one dtype and device, that DDP makes of `tensors`."""
    # Without `indices` buckets come by the first tensor in each, with them as they fill.
    buckets, _ = dist._compute_bucket_assignment_by_size(tensors, [limit], [False] * len(tensors), list(indices))
    return [list(bucket) for bucket in buckets]


def remove_reducer_hooks(module: Any) -> None:
    """Take from the parameters of a `DistributedDataParallel` its hooks, so that it averages no gradient any more."""
    module._remove_autograd_hooks()


@contextmanager
def ignored_by_ddp(module: Any, names: Sequence[str]) -> Iterator[None]:
    """Inside, `DistributedDataParallel(module)` sends none of the parameters and buffers of these names, then or later."""
    if names:
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
    try:
        yield
    finally:
        if names:
            del module._ddp_params_and_buffers_to_ignore


@contextmanager
def _outside_inference() -> Iterator[None]:
    with torch.inference_mode(False), torch.no_grad():  # leaving inference mode turns gradients on
        yield


def outside_inference() -> AbstractContextManager[None]:
    """Return a context that leaves `torch.inference_mode`, without gradients; one that does nothing outside of it."""
    return _outside_inference() if torch.is_inference_mode_enabled() else nullcontext()


_HELD_BACK = "unsharded_accumulated_grad"


def fsdp_states(modules: Iterable[Any]) -> Iterator[Any]:
    """Yield torch's state of each module that `fully_shard` was applied to."""
    for module in modules:
        yield module._get_fsdp_state()


def gathered_name(group: Any) -> str | None:
    """Return the name of the module with the parameters that `group` gathers together; None where it is none, or not known."""
    return getattr(group, "_module_fqn", None) if type(group).__name__ == "FSDPParamGroup" else None


def fsdp_groups(modules: Iterable[Any]) -> list[Any]:
    """Return the groups of parameters that are gathered together, of modules that `fully_shard` was applied to."""
    found: list[Any] = []
    for module in modules:
        found += groups_of(module._get_fsdp_state())
    return found


def groups_of(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # in torch 2.11 it has one, or none


def fsdp_params(modules: Iterable[Any]) -> list[Any]:
    """Return torch's record of every parameter of such modules."""
    found: list[Any] = []
    for group in fsdp_groups(modules):
        found += group.fsdp_params
    return found


def is_in_forward(state: Any) -> bool:
    """Return whether a state of `fsdp_states` is in its forward pass, or was left there by an exception."""
    return state._training_state.name == "FORWARD"


def has_run(state: Any) -> bool:
    """Return whether a state of `fsdp_states` was set up, which torch does in the first forward pass."""
    return hasattr(state._comm_ctx, "all_gather_stream")  # which has no value before, in any torch


def end_iteration(module: Any) -> None:
    """Bring the outermost module that `fully_shard` was applied to back to between passes, after one that raised."""
    if hasattr(module, "reset_iter_state"):
        # Gradients that were on their way are lost.
        module.reset_iter_state()
    else:
        _end_iteration_of_2_12(module._get_fsdp_state())


def _end_iteration_of_2_12(root: Any) -> None:
    """Do what `reset_iter_state` of later torch does: wait for what is on its way, and forget where the passes were."""
    shared, passes = root._comm_ctx, root._state_ctx
    idle = type(root._training_state).IDLE
    wait = root._device_handle.current_stream().wait_event
    reductions = getattr(shared, "reduce_scatter_states", None)  # from torch 2.12 on
    for kept in (shared.all_gather_state, *(reductions or [vars(shared).get("reduce_scatter_state")])):
        if kept is not None and kept.event is not None:
            wait(kept.event)
    forgotten: dict[str, Any] = {"reduce_scatter_state": None} if reductions is None else {"reduce_scatter_states": []}
    vars(shared).update(forgotten, all_gather_state=None)
    for state in passes.all_states:
        state._modules_to_run_forward.clear()
        state._training_state = idle
        for group in groups_of(state):
            group.finalize_backward()  # waits for reductions, copies to the host and a gather that was not used
            if group._reshard_after_forward_event is not None:
                wait(group._reshard_after_forward_event)
                group._reshard_after_forward_event = None
            group._partial_reduce_output = None
            group._training_state = idle
            group._to_sharded()
    shared.post_forward_order.clear()
    passes.iter_forward_root = None
    passes.post_backward_final_callback_queued = False


_VERSION_OF_WHOLE = attrgetter("_unsharded_param._version")


def unsharded_versions(params: Sequence[Any]) -> list[int]:
    """Return how often the whole parameters of records of `fsdp_params` were written in place; gathering does not count."""
    return list(map(_VERSION_OF_WHOLE, params))


def run_hooks_outside_modes(
    module: nn.Module, group: Any, note: Callable[..., Any], note_gather: Callable[[], Any]
) -> None:
    """Let the hooks around the forward of `module`, to which `fully_shard` was just applied, run in no torch function mode.

    They gather and free.
    group: has `compare()`, called before what was gathered is freed, whenever `always`, or where the whole parameters of its
    `params` were written in place since they had `versions`.
    note: of arguments, and what torch makes of them, returns what brings writes into containers back: a function, or none.
    note_gather: called before torch gathers for what no backward pass follows.
    """
    (state,) = fsdp_states([module])
    around = _AroundForward(state, group, note, note_gather)
    for hooks, run in ((module._forward_pre_hooks, around.before), (module._forward_hooks, around.after)):
        for key, hook in hooks.items():
            inner: Any = hook  # of several modules it is wrapped
            while hasattr(inner, "__wrapped__") and not hasattr(inner, "__self__"):
                inner = inner.__wrapped__
            if getattr(inner, "__self__", None) is state:
                hooks[key] = torch.compiler.disable(partial(run, hook))  # as the hook itself is


class _AroundForward:
    """Calls `hook`, one of torch's around the forward of a module, in no mode, with what booster does at the same moment."""

    # A mode that sees what a user's forward calls need not see each of the some hundred functions that a group takes for that.
    # Nor does it run in `torch.inference_mode`: what is gathered into stays, for training too.
    def __init__(self, state: Any, group: Any, note: Callable[..., Any], note_gather: Callable[[], Any]) -> None:
        self._state, self._group, self._note, self._note_gather = state, group, note, note_gather
        self._groups, self._states = groups_of(state), type(state._training_state)
        self._brings_back: list[Any] = []

    def before(self, hook: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        # Reentrant checkpointing computes a module that runs twice again when its backward has run already in this pass, and
        # torch would take it for a part of that, and reduce no gradient of it.
        done = self._state._training_state is self._states.PRE_BACKWARD
        if done and all(group._training_state is self._states.POST_BACKWARD for group in self._groups):
            self._state._training_state = self._states.IDLE
        # Inputs with gradients are of reentrant checkpointing, which computes again within backward.
        if not (torch.is_grad_enabled() or all(group.is_unsharded for group in self._groups)) and not any(
            isinstance(each, torch.Tensor) and each.requires_grad for each in args
        ):
            self._note_gather()
        with without_function_modes(), outside_inference():
            made = hook(module, args, kwargs)
            # Torch puts what requires gradients into new containers; no call where all are tensors.
            others = [each for each in (*args, *kwargs.values()) if not isinstance(each, torch.Tensor)]
            self._brings_back = self._note(others, (args, kwargs), made) if others else []
            return made

    def after(self, hook: Callable[..., Any], module: nn.Module, args: Any, output: Any) -> Any:
        with without_function_modes(), outside_inference():
            # As `unsharded_versions`, but that every forward pass of every group comes here.
            group = self._group
            if group.always or list(map(_VERSION_OF_WHOLE, group.params)) != group.versions:
                group.compare()
            made = hook(module, args, output)
            if self._brings_back:  # what forward wrote into the new containers goes back, and is an output
                self._state._register_pre_backward_hook(self._brings_back.pop()())
            return made


def shards_integers() -> bool:
    """Return whether `fully_shard` takes parameters of integers, which it refuses, or casts to half, before torch 2.13."""
    return torch.__version__ >= "2.13"


def hook_all_outputs(module: nn.Module, walk: Callable[[Any], Iterable[torch.Tensor]]) -> None:
    """Let `fully_shard`, just applied to `module`, gather for backward where its outputs lie in whatever `walk` looks into."""
    (state,) = fsdp_states([module])
    # Torch 2.11 looks into no dataclass and no subclass of tuple and list, and computes backward with parameters that were
    # freed.
    if not hasattr(sys.modules[type(state).__module__], "collect_grad_tensors"):
        module.register_forward_hook(torch.compiler.disable(_OtherOutputs(state, walk)))


class _OtherOutputs:
    def __init__(self, state: Any, walk: Callable[[Any], Iterable[torch.Tensor]]) -> None:
        self._state = state
        self._walk = walk

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._state._training_state.name == "IDLE":  # not where activations are computed again
            seen = {id(leaf) for leaf in pytree.tree_leaves(output)}
            self._state._register_pre_backward_hook([tensor for tensor in self._walk(output) if id(tensor) not in seen])


def hook_each_member(modules: Sequence[nn.Module], walk: Callable[[Any], Iterable[torch.Tensor]]) -> None:
    """Let `fully_shard`, just applied to `modules` together, gather for backward wherever it comes to one of them first.

    Torch does so at outputs of the one that ran last alone, which may have run without gradients, or not reach the loss.
    """
    (state,) = fsdp_states(modules[:1])
    for module in modules:
        module.register_forward_hook(torch.compiler.disable(_MemberOutputs(state, walk)))


class _MemberOutputs:
    def __init__(self, state: Any, walk: Callable[[Any], Iterable[torch.Tensor]]) -> None:
        self._state, self._walk, self._groups = state, walk, groups_of(state)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        # Of the last one torch's own hook is enough, and what is computed again in backward is gathered.
        if (
            self._state._modules_to_run_forward
            and self._state._training_state.name == "FORWARD"
            and torch.is_grad_enabled()
        ):
            for tensor in self._walk(output):
                if tensor.requires_grad:
                    tensor.register_hook(self._before_backward)

    def _before_backward(self, grad: torch.Tensor) -> None:
        if self._state._training_state.name != "PRE_BACKWARD" or not all(group.is_unsharded for group in self._groups):
            self._state._pre_backward(grad)


def init_dtypes(groups: Iterable[Any]) -> str | None:
    """Make groups of parameters decide their dtypes now, which torch does in the first forward pass."""
    hooked = None
    for group in groups:
        if getattr(group, "_orig_dtype", True) is None:
            group._init_mp_dtypes()
        with torch._C.DisableTorchFunction():  # to look at hooks is none of the functions of a model
            for param in group.fsdp_params:
                # Autograd never calls a hook of a sharded parameter, so that the name of one is returned.
                if param.sharded_param._backward_hooks:
                    hooked = param._param_fqn
    return hooked


def set_dtypes(module: Any, policy: Any) -> None:
    """Make a module that `fully_shard` was applied to gather and reduce by another `MixedPrecisionPolicy` from now on."""
    # Its parameters are sharded at present.
    module._get_fsdp_state()._mp_policy = policy
    for group in fsdp_groups([module]):
        group.mp_policy = policy
        for param in group.fsdp_params:
            param.mp_policy = policy
            param.all_gather_outputs = []  # of the dtype of before
            if hasattr(param, "_unsharded_param"):
                del param._unsharded_param
        group._init_mp_dtypes()


def gathered(param: Any) -> Any | None:
    """Return the whole parameter of a record of `fsdp_params`; None before it was ever gathered."""
    return getattr(param, "_unsharded_param", None)


def all_gathered(params: Iterable[Any]) -> list[Any]:
    """Return `gathered` of each of `params`."""
    found = []
    for param in params:
        found.append(getattr(param, "_unsharded_param", None))
    return found


def drop_unreduced(params: Sequence[Any]) -> None:
    """Drop what records of `fsdp_params` hold back, and the gradients of their whole parameters."""
    apart = bool(params) and _keeps_apart(params[0])
    for param in params:
        if apart:
            param.unsharded_accumulated_grad = None
        whole = getattr(param, "_unsharded_param", None)
        if whole is not None:
            whole.grad = None


def unreduced_grad(param: Any) -> torch.Tensor | None:
    """Return the unreduced gradient that torch keeps in a record of `fsdp_params`, next to that of the unsharded parameter."""
    # Torch 2.15 and above keep none there: it is the gathered parameter's `.grad`.
    return param.unsharded_accumulated_grad if _keeps_apart(param) else None


def set_unreduced_grad(param: Any, grad: torch.Tensor | None) -> None:
    """Keep `grad` as what `unreduced_grad` returns; None drops it."""
    if _keeps_apart(param):
        param.unsharded_accumulated_grad = grad


def _keeps_apart(param: Any) -> bool:
    return not isinstance(getattr(type(param), _HELD_BACK, None), property)


def registered_group(tensor: torch.Tensor) -> Any | None:
    """Return the group of `fsdp_groups` that is reduced by the node that `tensor` comes from; None for others."""
    return getattr(tensor.grad_fn, "param_group", None)


def reduces(group: Any) -> bool:
    """Return whether a group of `fsdp_groups` reduces gradients at present, as outside of passes without synchronisation."""
    return bool(group.reduce_grads)


_HOOKS = attrgetter("sharded_param._post_accumulate_grad_hooks")


def has_hooks(group: Any) -> bool:
    """Return whether a parameter of a group of `fsdp_groups` has `register_post_accumulate_grad_hook`."""
    return any(map(_HOOKS, group.fsdp_params))


NOTHING, FROZEN, LACKS, HAS = range(4)
"""What `unreduced` says of a parameter: never gathered or empty; no gradient, and it trains not, or does; it has one."""


def unreduced(group: Any) -> tuple[list[int], bool]:
    """Return of each record of a group of `fsdp_groups` one of the four states of its gradient that is to be reduced; and
    whether gradients of the group are kept in the records, in the dtype of the reduction."""
    params = group.fsdp_params
    apart = False
    if params and not isinstance(getattr(type(params[0]), _HELD_BACK, None), property):  # see `unreduced_grad`
        for param in params:
            # Those of this pass are kept there too, if those of earlier ones are: a reduction is of one dtype.
            apart = apart or param.unsharded_accumulated_grad is not None
    found: list[int] = []
    for param in params:
        whole = getattr(param, "_unsharded_param", None)
        if whole is None or not whole.numel():
            if whole is not None:  # there is nothing in it, and torch's reduction takes no empty ones
                whole.grad = None
                if apart:
                    param.unsharded_accumulated_grad = None
            found.append(NOTHING)
            continue
        if apart and param.unsharded_accumulated_grad is not None:
            param.accumulate_unsharded_grad_if_needed()
        elif apart:
            param.to_accumulated_grad_if_needed()
        has = whole.grad is not None or (apart and param.unsharded_accumulated_grad is not None)
        found.append(HAS if has else LACKS if whole.requires_grad else FROZEN)
    return found, apart


def zero_unreduced(param: Any, apart: bool) -> None:
    """Give a record of `fsdp_params`, which was gathered, a gradient of zeros; apart: as `unreduced` says of its group."""
    whole = param._unsharded_param
    if apart:
        param.unsharded_accumulated_grad = torch.zeros_like(whole, dtype=param.reduce_dtype)
    else:
        # Torch 2.15 may want another dtype than that of `whole`.
        whole.grad = torch.zeros_like(whole, dtype=getattr(whole, "grad_dtype", None))


def skip_backward_end(group: Any) -> None:
    """Have torch leave out a group of `fsdp_groups` that was never gathered when a pass without synchronisation ends."""
    if not any(hasattr(param, "_unsharded_param") for param in group.fsdp_params):
        # Torch would look for gradients of parameters that are not there.
        group._training_state = type(group._training_state).POST_BACKWARD


def is_gathered(group: Any) -> bool:
    """Return whether the modules of a group of `fsdp_groups` have whole parameters at present."""
    return bool(group.is_unsharded)


def gather_of(group: Any) -> Any:
    """Return what a group of `fsdp_groups` all-gathers by."""
    return group._all_gather_comm


def padded_length(param: Any) -> int:
    """Return how many numbers of a record of `fsdp_params` each rank brings to an all-gather."""
    return int(param.padded_sharded_param_size.numel())


def dtype_in_gather(param: Any) -> torch.dtype:
    """Return the dtype in which a record of `fsdp_params` is gathered; after the first forward pass has begun."""
    dtype: torch.dtype = param.param_dtype or param.orig_dtype
    return dtype


def is_gathered_in_place(param: Any) -> bool:
    """Return whether what a record of `fsdp_params` is gathered into becomes its unsharded parameter."""
    return not hasattr(param._sharded_local_tensor, "fsdp_post_all_gather")


def name_of(param: Any) -> str:
    """Return the name of a record of `fsdp_params` in the outermost module; after the first forward pass has begun."""
    return str(param._param_fqn)


def restore_gather_buffer(param: Any) -> None:
    """Put the unsharded parameter of a record of `fsdp_params` back into the memory that is gathered into, with its numbers,
    if somebody put another tensor there by `.data = ...`."""
    (memory,), whole = param.all_gather_outputs, param._unsharded_param
    local = getattr(whole, "_local_tensor", whole).detach()
    if local.data_ptr() != memory.data_ptr():
        own = memory.as_strided(param._orig_size, param._contiguous_orig_stride, 0)
        with preserving_versions([own]):
            own.copy_(local)
        if local is getattr(whole, "_local_tensor", None):
            whole._local_tensor = own
        else:
            whole.data = own


def shard_of_full(param: Any, whole: torch.Tensor) -> torch.Tensor:
    """Return of `whole`, a plain tensor of the shape that is gathered, what this rank's shard of a record is gathered from."""
    dim, length = param.fsdp_placement.dim, whole.shape[param.fsdp_placement.dim]
    size = -(-length // param.mesh_info.shard_mesh_size)  # the last ranks may have less, or nothing
    start = min(param.mesh_info.shard_mesh_rank * size, length)
    return whole.narrow(dim, start, min(size, length - start))


def join_shards(param: Any, parts: torch.Tensor) -> torch.Tensor:
    """Return the whole that a record of `fsdp_params` is gathered to, of `parts`: (ranks, numbers of a filled up shard)."""
    dim, shapes = param.fsdp_placement.dim, param.padded_sharded_param_size
    pieces = parts.view(len(parts), *shapes)
    whole = pieces.flatten(0, 1) if dim == 0 else torch.cat(pieces.unbind(), dim)
    return whole.narrow(dim, 0, param._orig_size[dim]).contiguous()


def free_when_resharded(param: Any, tensor: torch.Tensor) -> None:
    """Have the memory of `tensor` freed when what a record of `fsdp_params` has gathered is; its storage is empty then."""
    # It is put where torch keeps what extensions of all-gathers have made, which such a record has none of.
    param._unsharded_inner_tensors = [tensor]
