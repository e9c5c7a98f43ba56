"""Every private name of torch that booster uses and that has no public twin; an upgrade of torch is this file.

Checked on torch 2.11 to 2.15 (`tests/unit/test_torch_internals.py` says which names are missing elsewhere). Not here:
`torch._foreach_*`, which torch documents in its optimizers, and the dictionaries of a module, `_parameters`, `_modules`,
`_buffers` and those of hooks, which are as old as modules.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from itertools import filterfalse
from operator import attrgetter, methodcaller
from types import CodeType, FunctionType
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.batchnorm import _NormBase as RunningNorm
from torch.optim import Optimizer
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import DataLoader

from booster.common.inference import outside_inference
from booster.common.misuse import OwnStep

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
    )
    from torch.distributed.pipelining import PipelineStage
    from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

__all__ = [
    "SWAPS_TENSORS",
    "BatchNorm",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "PipelineStage",
    "RunningNorm",
    "StridedShard",
    "TorchDispatchMode",
    "pytree",
]

_LATE = {
    "DataDependentOutputException": ("torch._subclasses.fake_tensor", "DataDependentOutputException"),
    "DynamicOutputShapeException": ("torch._subclasses.fake_tensor", "DynamicOutputShapeException"),
    "FakeTensor": ("torch._subclasses.fake_tensor", "FakeTensor"),
    "FakeTensorMode": ("torch._subclasses.fake_tensor", "FakeTensorMode"),
    "StridedShard": ("torch.distributed.tensor.placement_types", "_StridedShard"),
}


def __getattr__(name: str) -> Any:  # what would make `import booster` slow is imported where it is used
    if name == "PipelineStage":
        return _pipeline_stage()
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, own = _LATE[name]
    return getattr(importlib.import_module(module), own)


SWAPS_TENSORS = "torch.nn.utils._named_member_accessor"  # the module that sets tensors for torch.func.functional_call

# ---------------------------------------------------------------------- the autograd engine


def is_compiled(module: nn.Module) -> bool:
    """Return whether a call of `module` runs what torch.compile made of it."""
    return getattr(module, "_compiled_call_impl", None) is not None or "_orig_mod" in module._modules


def compiled_like(module: nn.Module, function: Callable[..., Any]) -> Callable[..., Any] | None:
    """Return `function` compiled by the options with which torch.compile wrapped `module`; None where it did not."""
    options: Any = getattr(module, "dynamo_ctx", None) if "_orig_mod" in module._modules else None
    return None if options is None else options(function)


def graph_task() -> int:
    """Return the number of the backward pass that runs in this thread, or -1."""
    return torch._C._current_graph_task_id()


def has_saved_tensors_hooks() -> bool:
    """Return whether what autograd saves goes through hooks of the thread, as inside a checkpoint that is not reentrant."""
    return saved_tensors_hooks_around() is not None


# What it asks, and whether a transform of `torch.func`, such as vmap or grad, runs around: None where not. Functions of C, as
# each product asks.
saved_tensors_hooks_around = functools.partial(torch._C._autograd._top_saved_tensors_default_hooks, True)
interpreters_around = torch._C._functorch.peek_interpreter_stack
# The level of forward mode that is entered, or -1. A function of C likewise.
dual_level = functools.partial(getattr, torch.autograd.forward_ad, "_current_level")


def when_backward_ends(action: Callable[[], None]) -> None:
    """Call `action` once, after the backward pass that runs now has filled all gradients."""
    torch.autograd.Variable._execution_engine.queue_callback(action)


def engine_backward(*args: Any, **kwargs: Any) -> Any:
    """Run autograd as `torch.autograd.backward` does, in the torch function modes of the caller, which that leaves."""
    return torch.autograd.Variable._execution_engine.run_backward(*args, **kwargs)


def running_node() -> tuple[str, int, Any] | None:
    """Return the autograd node that runs in this thread: its class's name, its number, and of one that fills `.grad` the leaf.

    None outside a backward pass.
    """
    node = torch._C._current_autograd_node()
    return None if node is None else (node.name(), node._sequence_nr(), getattr(node, "variable", None))


def newest_node_number() -> int:
    """Return the number of the autograd node that was made last in this thread: inside an operator, if it records, its own."""
    return torch.autograd._get_sequence_nr() - 1


def engine_starts() -> frozenset[CodeType]:
    """Return the code on Python's stack by which a backward pass is handed to the engine."""
    return frozenset({torch.autograd.graph._engine_run_backward.__code__, engine_backward.__code__})


# ---------------------------------------------------------------------- torch function modes


def function_modes() -> list[Any]:
    """Return the torch function modes of this thread, outermost first."""
    return [torch._C._get_function_stack_at(index) for index in range(num_function_modes())]


num_function_modes = torch._C._len_torch_function_stack  # of this thread; itself, because every pass asks it


def without_function_modes() -> AbstractContextManager[Any]:
    """Return a context in which torch functions go to no torch function mode and no subclass's `__torch_function__`."""
    return torch._C.DisableTorchFunction()


def with_function_modes() -> AbstractContextManager[Any]:
    """Return a context, for use inside `without_function_modes`, in which functions go to the modes around that."""
    return torch._C._EnableTorchFunction()


def of_class(kind: type[torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, detached, as one of `kind` that is no view, where `as_subclass` returns a view."""
    return torch.Tensor._make_subclass(kind, tensor)


def without_subclasses() -> AbstractContextManager[Any]:
    """Return a context in which torch functions go to no subclass's `__torch_function__`, but to modes."""
    return torch._C.DisableTorchFunctionSubclass()


base_of: Any = torch.Tensor._base.__get__  # type: ignore[union-attr]  # what `tensor._base` calls: of a view, the tensor that it looks at


def written_arguments(func: Any) -> tuple[int | str, ...]:
    """Return which arguments an operator of `torch.ops` writes to, by position or name; none of another function."""
    if isinstance(func, torch._ops.OpOverloadPacket):
        func = getattr(func, func.overloads()[0])
    if not isinstance(func, torch._ops.OpOverload):
        return ()
    found: list[int | str] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            found += [place, argument.name]
    return tuple(found)


def uninterceptable(function: Any) -> Any:
    """Return a copy of a function of torch written in Python that hands itself to no torch function mode, but what it calls."""
    names = {**function.__globals__, "has_torch_function": lambda tensors: False}
    return FunctionType(function.__code__, names, function.__name__, function.__defaults__, function.__closure__)


def default_device_mode() -> Any | None:
    """Return the mode by which `torch.set_default_device` acts, or None."""
    return getattr(torch._GLOBAL_DEVICE_CONTEXT, "device_context", None)


# ---------------------------------------------------------------------- tensors and kernels


def sparse_values(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a sparse tensor that need not be coalesced; a view."""
    return tensor._values()


def dense_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """Return the tensors with memory that `tensor` is made of: itself, or indices and values of a sparse one."""
    if tensor.layout is torch.strided:
        return [tensor]
    if tensor.layout is torch.sparse_coo:
        return [tensor._indices(), tensor._values()]
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        return [tensor.crow_indices(), tensor.col_indices(), tensor.values()]
    return [tensor.ccol_indices(), tensor.row_indices(), tensor.values()]


def is_view(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is a view in the eyes of autograd."""
    return tensor._is_view()


def default_store() -> dist.Store:
    """Return the store by which the ranks of the default process group met."""
    return dist.distributed_c10d._get_default_store()


def agent_serves_store() -> bool:
    """Say whether the launcher, such as `booster run` or torchrun, serves the store of the ranks, and not rank 0."""
    return sys.modules[dist.rendezvous.__module__]._torchelastic_use_agent_store()


def gather_whole(tensor: Any) -> torch.Tensor:
    """Return the whole of the DTensor `tensor`, on every rank: a collective.

    torch 2.11 takes each strided placement for an order of plain shards, and refuses to gather those that are none, as those
    of fused projections are that tensor parallelism divides part by part. Here they are told apart.
    """
    if torch.__version__.startswith("2.11."):
        spec = tensor._spec
        if spec._maybe_convert_StridedShard_to_shard_order(spec.placements, spec.mesh) is None:
            tensor = type(tensor).from_local(
                tensor.to_local(),
                spec.mesh,
                spec.placements,
                run_check=False,
                shape=tensor.shape,
                stride=tensor.stride(),
            )
            tensor._spec.use_strided_shard_as_shard_order = False
            tensor._spec.shard_order = spec.compute_default_shard_order(spec.placements)
    whole: torch.Tensor = tensor.full_tensor()
    return whole


plain_functions = torch._C.DisableTorchFunctionSubclass
"""A context inside which operations take tensors of subclasses for plain ones."""

# Of a tensor, how often it was written in place; writes through `.data` do not count. Asked without a Python call.
version = attrgetter("_version")


def loads_with_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether anybody's code runs when `optimizer` loads a state."""
    return bool(optimizer._optimizer_load_state_dict_pre_hooks or optimizer._optimizer_load_state_dict_post_hooks)


def writes(tensors: Sequence[Any]) -> int:
    """Return how often DTensors `tensors` and what this rank holds of them were written in place, in sum."""
    return sum(map(version, tensors)) + sum(map(version, map(_LOCAL, tensors)))


def of_same_version(tensors: Sequence[torch.Tensor]) -> AbstractContextManager[Any]:
    """Return a context inside which `tensors` are written the very bits that they hold, so that graphs may go on with them."""
    return torch.autograd._unsafe_preserve_version_counter(tuple(tensors))


def is_fake_kind(kind: type) -> bool:
    """Return whether `kind` is torch's FakeTensor, which has shapes and no numbers. Imports nothing."""
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return module is not None and issubclass(kind, module.FakeTensor)


def storage_key(tensor: torch.Tensor) -> int:
    """Return what tells the memory of `tensor` from that of all others, as long as it lives."""
    return tensor.untyped_storage()._cdata


def multiply_and_check_(grads: list[torch.Tensor], found_inf: torch.Tensor, ratio: torch.Tensor) -> None:
    """Multiply `grads` in place and set `found_inf` to 1 where any was not finite; one kernel, no host sync."""
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, ratio)


def update_scale_(
    scale: torch.Tensor, clean: torch.Tensor, found_inf: torch.Tensor, growth: float, backoff: float, interval: int
) -> None:
    """Move a float32 loss scale and its int32 count of clean steps, in place, as GradScaler does; one kernel, no host sync."""
    torch._amp_update_scale_(scale, clean, found_inf, growth, backoff, interval)


def has_kernel(operator: str, dispatch_key: str) -> bool:
    """Return whether `operator` ("aten::...") has a kernel of its own for "CPU" or "CUDA"."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator, dispatch_key)


# ---------------------------------------------------------------------- optimizers


def set_fused_flags(optimizer: Optimizer, fused: bool) -> None:
    """Note in `optimizer`, as its constructor does, whether it is stepped by torch's fused kernels."""
    optimizer._step_supports_amp_scaling = fused  # type: ignore[attr-defined]
    optimizer._need_device_dtype_check_for_fused = fused  # type: ignore[attr-defined]


# Module and name of what `torch.save` has its tensors and parameters rebuilt by.
REBUILDERS = tuple(f"torch._utils _rebuild_{what}" for what in ("tensor", "tensor_v2", "tensor_v3", "parameter"))
_LOCAL = attrgetter("_local_tensor")  # asked without a Python call
_PLAIN = frozenset((torch.Tensor,))
_IS_GUARD = OwnStep.__instancecheck__  # asked without a Python call


def step_hooks(optimizer: Optimizer) -> tuple[list[Callable[..., Any]], list[Callable[..., Any]]]:
    """Return what is called before and after every step: torch's global hooks and the optimizer's own, in order.

    Without the guard of this library, which is not the user's.
    """
    module: Any = sys.modules[Optimizer.__module__]
    own = filterfalse(_IS_GUARD, optimizer._optimizer_step_pre_hooks.values())
    return (
        [*module._global_optimizer_pre_hooks.values(), *own],
        [*optimizer._optimizer_step_post_hooks.values(), *module._global_optimizer_post_hooks.values()],
    )


def remove_guards(optimizer: Optimizer) -> None:
    """Have the guards of this library on `optimizer` let every step pass."""
    for hook in optimizer._optimizer_step_pre_hooks.values():
        if isinstance(hook, OwnStep):
            hook.leave()


def exchange_step_hooks(optimizer: Optimizer, hooks: tuple[Any, Any] | None) -> tuple[Any, Any]:
    """Give `optimizer` the step hooks `hooks` (None: none) and return those that it had. The global ones are not touched."""
    before = optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks
    pre, post = (OrderedDict(), OrderedDict()) if hooks is None else hooks
    optimizer._optimizer_step_pre_hooks, optimizer._optimizer_step_post_hooks = pre, post
    return before


def note_step(optimizer: Optimizer) -> None:
    """Tell LR schedulers, which warn otherwise, that a step was taken."""
    optimizer._opt_called = True  # type: ignore[attr-defined]


_OptimizerClass = TypeVar("_OptimizerClass", bound=type[Optimizer])


def told_found_inf(kind: _OptimizerClass) -> _OptimizerClass:
    """Have torch's GradScaler set `found_inf` on optimizers of class `kind` before it calls their `step`; returns `kind`."""
    kind._step_supports_amp_scaling = True  # type: ignore[attr-defined]
    return kind


def unhooked(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return the `step` of an optimizer without torch's profiling around it, which calls the hooks too."""
    return step.__wrapped__ if getattr(step, "hooked", False) else step  # type: ignore[attr-defined]


# ---------------------------------------------------------------------- the compiler


def is_counted_step(value: object) -> bool:
    """Return whether `value` is the `step` that a schedule of torch has put before that of an optimizer's class, to count."""
    return getattr(value, "_wrapped_by_lr_sched", False) is True


def unwrapped(function: Any) -> Any:
    """Return a function of an optimizer without what torch puts around it.

    Torch hides `_init_group` from the compiler, and puts around `step` what calls hooks and what sets the grad mode between
    graph breaks.
    """
    while True:
        if hasattr(function, "_torchdynamo_orig_callable"):
            function = function._torchdynamo_orig_callable
        elif function.__dict__.get("hooked", False) or function.__code__.co_name == "_use_grad":
            function = function.__wrapped__
        else:
            return function


def int_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the product of two int8 matrices, in int32."""
    return torch._int_mm(a, b)


def scaled_matmul(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return the product of two fp8 matrices, in `dtype`; on the CPU too, where the public `F.scaled_mm` does not run."""
    return torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=dtype)


def compiler_is_loaded() -> bool:
    """Return whether anything can have been compiled: whether somebody has imported the compiler, which takes seconds."""
    return "torch._dynamo" in sys.modules


def outside_of_graphs(
    function: Callable[[torch.Tensor], torch.Tensor], why: str
) -> Callable[[torch.Tensor], torch.Tensor]:
    """Return `function` as one that no compiler traces. Of what is being compiled: the graph ends here, or with fullgraph=True
    the compilation, which says `why`."""
    torch._dynamo.graph_break(msg=why)
    return torch.compiler.disable(function, reason=why)


def compile_graph() -> Callable[..., Any]:
    """Return inductor's `compile(graph, example_inputs)`; imports it, which torch.compile does anyway."""
    import torch._inductor

    return torch._inductor.compile


# ---------------------------------------------------------------------- modules


def module_call() -> CodeType:
    """Return the code on Python's stack by which a module, its local `self`, is called, hooks included."""
    return nn.Module._call_impl.__code__


def add_state_dict_hook(module: nn.Module, hook: Callable[..., Any]) -> None:
    """Call `hook(module, state_dict, prefix, local_metadata)` after `module.state_dict()`, once however often this is asked."""
    if all(entry is not hook for entry in module._state_dict_hooks.values()):
        module._register_state_dict_hook(hook)


# ---------------------------------------------------------------------- DistributedDataParallel


def bucket_assignment(tensors: list[torch.Tensor], limit: int, indices: Sequence[int] = ()) -> list[list[int]]:
    """Return the buckets, of at most `limit` bytes and one dtype and device, that `DistributedDataParallel` makes of `tensors`.

    indices: the numbers that stand for them, where buckets are to come as they fill; else by the first tensor in each.
    """
    buckets, _ = dist._compute_bucket_assignment_by_size(tensors, [limit], [False] * len(tensors), list(indices))
    return [list(bucket) for bucket in buckets]


# ---------------------------------------------------------------------- DTensors


def leave_gradients_alone(module: Any) -> None:
    """Take from the parameters of a `DistributedDataParallel` its hooks, so that it averages no gradient any more."""
    module._remove_autograd_hooks()


@contextmanager
def left_to_others(module: Any, names: Sequence[str]) -> Iterator[None]:
    """Inside, `DistributedDataParallel(module)` sends none of the parameters and buffers of these names, then or later."""
    if names:
        nn.parallel.DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)
    try:
        yield
    finally:
        if names:
            del module._ddp_params_and_buffers_to_ignore


def own_part(tensor: Any) -> torch.Tensor:
    """Return what this rank holds of a DTensor, itself; not differentiable. `to_local` makes a view, by way of autograd."""
    local: torch.Tensor = tensor._local_tensor
    if type(local) is not torch.Tensor:  # on its way; to_local waits for it
        with torch.no_grad():
            local = tensor.detach().to_local()
    return local


def own_parts(tensors: Iterable[Any]) -> list[torch.Tensor]:
    """Return `own_part` of each of `tensors`."""
    found = list(map(_LOCAL, tensors))
    if not _PLAIN.issuperset(map(type, found)):
        found = list(map(own_part, tensors))
    return found


def placed_unlike(tensors: Iterable[Any]) -> list[Any]:
    """Return those of DTensors `tensors` whose gradient, which is a DTensor of the same mesh, is divided otherwise."""
    found = []
    for tensor in tensors:
        if tensor.grad._spec is not tensor._spec and tensor.grad.placements != tensor.placements:
            found.append(tensor)
    return found


# ---------------------------------------------------------------------- fully_shard

_HELD_BACK = "unsharded_accumulated_grad"


def fsdp_states(modules: Iterable[Any]) -> Iterator[Any]:
    """Yield torch's state of each module that `fully_shard` was applied to."""
    for module in modules:
        yield module._get_fsdp_state()


def process_group_of(arg: Any) -> dist.ProcessGroup | None:
    """Return the process group that the argument `arg` of a collective is, as torch's dispatcher has it; None: it is none."""
    if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
        return dist.ProcessGroup.unbox(arg)
    if isinstance(arg, str) and arg in dist.distributed_c10d._world.pg_names.values():
        return dist.distributed_c10d._resolve_process_group(arg)  # type: ignore[arg-type]
    return None


def gathered_name(group: Any) -> str | None:
    """Return the name of the module whose parameters are gathered together in `group`; None where it is none, or not known."""
    return getattr(group, "_module_fqn", None) if type(group).__name__ == "FSDPParamGroup" else None


def fsdp_groups(modules: Iterable[Any]) -> list[Any]:
    """Return the groups of parameters that are gathered together, of modules that `fully_shard` was applied to."""
    found: list[Any] = []
    for module in modules:
        found += _groups_of(module._get_fsdp_state())
    return found


def _groups_of(state: Any) -> list[Any]:
    if hasattr(state, "_fsdp_param_groups"):
        return list(state._fsdp_param_groups)
    return [] if state._fsdp_param_group is None else [state._fsdp_param_group]  # in torch 2.11 it has one, or none


def fsdp_params(modules: Iterable[Any]) -> list[Any]:
    """Return torch's record of every parameter of such modules."""
    found: list[Any] = []
    for group in fsdp_groups(modules):
        found += group.fsdp_params
    return found


def let_go(modules: Sequence[nn.Module]) -> None:
    """Have what `fully_shard`, just applied to `modules` together, notes of them not keep them alive.

    Torch's records refer to the modules that hold them, and to each other, so that only Python's collector would free a model,
    which does not know of a GPU's memory.
    """
    (state,) = fsdp_states(modules[:1])
    held = _Weakly(weakref.ref(module, functools.partial(_forget, weakref.ref(state))) for module in modules)
    state._modules = held
    for group in fsdp_groups(modules[:1]):
        group.modules = held
        group._module_to_pre_save_state_dict_hook_handle = weakref.WeakKeyDictionary()
        group._module_to_pre_load_state_dict_hook_handle = weakref.WeakKeyDictionary()
        for param in group.fsdp_params:
            param._module_info = _Holders(**vars(param._module_info))
    if len(modules) > 1:  # whose hooks know which of them are still to run
        hooks = [
            hook for each in modules for hook in (*each._forward_pre_hooks.values(), *each._forward_hooks.values())
        ]
        for cell in _cells(hooks):
            if isinstance(cell.cell_contents, nn.Module):
                cell.cell_contents = _Same(cell.cell_contents)
            elif cell.cell_contents == set(modules):
                cell.cell_contents = weakref.WeakSet(modules)


def _cells(functions: Iterable[Any]) -> Iterator[Any]:
    """Yield what `functions`, and functions in it, close over."""
    for cell in (cell for function in functions for cell in getattr(function, "__closure__", None) or ()):
        yield cell
        if isinstance(cell.cell_contents, FunctionType):
            yield from _cells([cell.cell_contents])


class _Same(weakref.ref[nn.Module]):
    """Finds its module in a set, and does not keep it alive."""

    __hash__ = weakref.ref.__hash__

    def __eq__(self, other: object) -> bool:
        return self() is other


class _Weakly(list[Any]):
    """Modules that it does not keep alive, in the place of a tuple of them."""

    def __iter__(self) -> Iterator[Any]:
        return (reference() for reference in super().__iter__())

    def __getitem__(self, index: Any) -> Any:
        return super().__getitem__(index)()


class _Holders:
    """In the place of torch's `ParamModuleInfo`: which modules hold a parameter, and by which name. It keeps none alive.

    Where a module is replaced by one that has its dict of parameters, as one that computes otherwise is, they are set there.
    """

    module = property(methodcaller("_module"))  # asked without a Python call

    def __init__(self, module: nn.Module, shared_modules: Iterable[nn.Module], **names: Any) -> None:
        replaced = functools.partial(_leave_parameters, weakref.ref(self), module._parameters)
        self._module: Callable[[], nn.Module | None] = weakref.ref(module, replaced)
        self.shared_modules = [_with_parameters(each._parameters) for each in shared_modules]
        self.__dict__.update(names)


def _leave_parameters(holders: weakref.ref[_Holders], parameters: dict[str, Any], module: object) -> None:
    left = holders()
    if left is not None:
        kept = _with_parameters(parameters)
        left._module = lambda: kept


def _with_parameters(parameters: dict[str, Any]) -> nn.Module:
    """Return a module whose parameters are those of another: what is set in it is set there."""
    module = nn.Module()
    module.__dict__["_parameters"] = parameters
    return module


def _forget(reference: weakref.ref[Any], module: object) -> None:
    """Take out what `fully_shard` keeps of modules that are all gone from what it keeps of all of their model."""
    state = reference()
    if state is None or any(module is not None for module in state._modules):
        return
    if state in state._state_ctx.all_states:
        state._state_ctx.all_states.remove(state)
    groups = _groups_of(state)
    order = getattr(state._comm_ctx, "post_forward_order", [])
    order[:] = [group for group in order if group not in groups]


def is_in_forward(state: Any) -> bool:
    """Return whether a state of `fsdp_states` is in its forward pass, or was left there by an exception."""
    return state._training_state.name == "FORWARD"


def has_run(state: Any) -> bool:
    """Return whether a state of `fsdp_states` was set up, which torch does in the first forward pass."""
    return hasattr(state._comm_ctx, "all_gather_stream")  # which has no value before, in any torch


def end_iteration(module: Any) -> None:
    """Bring a module that `fully_shard` was applied to, and all in it, to what they are between passes, after one that raised.

    The module is the outermost such. Gradients that were on their way are lost.
    """
    if hasattr(module, "reset_iter_state"):
        module.reset_iter_state()
    else:
        _end_iteration_of_2_11(module._get_fsdp_state())


def _end_iteration_of_2_11(root: Any) -> None:
    """Do what `reset_iter_state` of later torch does: wait for what is on its way, and forget where the passes were."""
    shared, passes = root._comm_ctx, root._state_ctx
    idle = type(root._training_state).IDLE
    wait = root._device_handle.current_stream().wait_event
    for kept in (shared.all_gather_state, shared.reduce_scatter_state):
        if kept is not None and kept.event is not None:
            wait(kept.event)
    shared.all_gather_state = shared.reduce_scatter_state = None
    for state in passes.all_states:
        state._modules_to_run_forward.clear()
        state._training_state = idle
        group = state._fsdp_param_group
        if group is not None:
            group.finalize_backward()  # waits for reductions, copies to the host and a gather that nobody took
            if group._reshard_after_forward_event is not None:
                wait(group._reshard_after_forward_event)
                group._reshard_after_forward_event = None
            group._partial_reduce_output = None
            group._training_state = idle
            group._to_sharded()
    shared.post_forward_order.clear()
    passes.iter_forward_root = None
    passes.post_backward_final_callback_queued = False


def run_hooks_outside_modes(module: nn.Module, watch: Any) -> None:
    """Let the hooks around the forward of `module`, to which `fully_shard` was just applied, run in no torch function mode.

    They gather and free; a mode that sees what a user's forward calls need not see each of the some hundred functions that a
    group takes for that. Nor do they run in `torch.inference_mode`: what is gathered into stays, for training too.
    watch: has `look()`, called before what was gathered is freed, whenever `always`, or where the whole parameters of its
    `params` were written in place since they had `versions`.
    """
    (state,) = fsdp_states([module])
    tables: list[tuple[Any, Any]] = [(module._forward_pre_hooks, None), (module._forward_hooks, watch)]
    for hooks, watched in tables:
        for key, hook in hooks.items():
            inner = hook  # of several modules it is wrapped
            while hasattr(inner, "__wrapped__") and not hasattr(inner, "__self__"):
                inner = inner.__wrapped__
            if getattr(inner, "__self__", None) is state:
                hooks[key] = _outside_modes(hook, watched)


_VERSION_OF_WHOLE = attrgetter("_unsharded_param._version")


def versions_of_wholes(params: Sequence[Any]) -> list[int]:
    """Return how often the whole parameters of records of `fsdp_params` were written in place; gathering does not count."""
    return list(map(_VERSION_OF_WHOLE, params))


def _outside_modes(hook: Callable[..., Any], watch: Any) -> Callable[..., Any]:
    def run(*args: Any, **kwargs: Any) -> Any:
        with without_function_modes(), outside_inference():
            # As `versions_of_wholes`, but that every forward pass of every group comes here.
            if watch is not None and (watch.always or list(map(_VERSION_OF_WHOLE, watch.params)) != watch.versions):
                watch.look()
            return hook(*args, **kwargs)

    return torch.compiler.disable(run)  # as the hook itself is


def shards_integers() -> bool:
    """Return whether `fully_shard` takes parameters of integers, which it refuses, or casts to half, before torch 2.13."""
    return torch.__version__ >= "2.13"


def see_all_outputs(module: nn.Module, walk: Callable[[Any], Iterable[torch.Tensor]]) -> None:
    """Let `fully_shard`, just applied to `module`, gather for backward where its outputs lie in whatever `walk` looks into.

    Torch 2.11 looks into no dataclass and no subclass of tuple and list, and computes backward with parameters that were freed.
    """
    (state,) = fsdp_states([module])
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


def has_gradient_hooks(tensor: torch.Tensor) -> bool:
    """Return whether the user has `register_hook` or `register_post_accumulate_grad_hook` on `tensor`."""
    return bool(tensor._backward_hooks) or bool(getattr(tensor, "_post_accumulate_grad_hooks", None))


def settle_dtypes(groups: Iterable[Any]) -> str | None:
    """Make groups of parameters decide their dtypes now, which torch does in the first forward pass.

    Returns the name of a part of theirs with a hook of `register_hook`, which autograd never calls, if there is one.
    """
    hooked = None
    for group in groups:
        if getattr(group, "_orig_dtype", True) is None:
            group._init_mp_dtypes()
        with torch._C.DisableTorchFunction():  # to look at hooks is none of the functions of a model
            for param in group.fsdp_params:
                if param.sharded_param._backward_hooks:
                    hooked = param._param_fqn
    return hooked


def set_dtypes(module: Any, policy: Any) -> None:
    """Make a module that `fully_shard` was applied to gather and reduce by another `MixedPrecisionPolicy` from now on.

    Its parameters are sharded at present.
    """
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


def held_back(param: Any) -> torch.Tensor | None:
    """Return the unreduced gradient that torch keeps in a record of `fsdp_params`, beside that of the gathered parameter.

    torch 2.15 and above keep none there: what backward passes leave without synchronisation is the gathered one's `.grad`.
    """
    return param.unsharded_accumulated_grad if _keeps_apart(param) else None


def hold_back(param: Any, grad: torch.Tensor | None) -> None:
    """Keep `grad` as what `held_back` returns; None drops it."""
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


def unreduced(group: Any) -> tuple[list[bool | None], bool]:
    """Return of each record of a group of `fsdp_groups` whether it has a gradient that is to be reduced, None for one that is
    frozen or was never gathered; and whether gradients of the group are kept in the records, in the dtype of the reduction.

    Those of this pass are kept there too, if those of earlier passes are: a reduction is of one dtype.
    """
    params = group.fsdp_params
    apart = False
    if params and not isinstance(getattr(type(params[0]), _HELD_BACK, None), property):  # see `held_back`
        for param in params:
            apart = apart or param.unsharded_accumulated_grad is not None
    found: list[bool | None] = []
    for param in params:
        whole = getattr(param, "_unsharded_param", None)
        if whole is None:
            found.append(None)
            continue
        if not whole.numel():
            whole.grad = None  # there is nothing in it, and torch's reduction takes no empty ones
        if apart and param.unsharded_accumulated_grad is not None:
            param.accumulate_unsharded_grad_if_needed()
        elif apart:
            param.to_accumulated_grad_if_needed()
        has = whole.grad is not None or (apart and param.unsharded_accumulated_grad is not None)
        found.append(has if has or (whole.requires_grad and whole.numel() > 0) else None)
    return found, apart


def zero_unreduced(param: Any, apart: bool) -> None:
    """Give a record of `fsdp_params`, which was gathered, a gradient of zeros; apart: as `unreduced` says of its group."""
    whole = param._unsharded_param
    if apart:
        param.unsharded_accumulated_grad = torch.zeros_like(whole, dtype=param.reduce_dtype)
    else:
        whole.grad = torch.zeros_like(whole)


def leave_out(group: Any) -> None:
    """Have torch leave out a group of `fsdp_groups` that was never gathered when a backward pass without synchronisation ends:
    it would look for gradients of parameters that are not there."""
    if not any(hasattr(param, "_unsharded_param") for param in group.fsdp_params):
        group._training_state = type(group._training_state).POST_BACKWARD


def is_gathered(group: Any) -> bool:
    """Return whether the modules of a group of `fsdp_groups` have whole parameters at present."""
    return bool(group.is_unsharded)


def set_gather(module: Any, gather: Any) -> None:
    """Make the group of a module that `fully_shard` was applied to all-gather by `gather`."""
    module.set_custom_all_gather(gather)


def has_workers(loader: Any) -> bool:
    """Return whether the workers of a loader with `persistent_workers=True` run."""
    return getattr(loader, "_iterator", None) is not None


def end_workers(loader: Any) -> None:
    """Have the next iteration of a DataLoader begin with new workers, as its first one did."""
    if has_workers(loader):
        loader._iterator = None


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


def takes_its_gathering(param: Any) -> bool:
    """Return whether a record of `fsdp_params` is gathered into what becomes the whole parameter, by no class of its own."""
    return not hasattr(param._sharded_local_tensor, "fsdp_post_all_gather")


def name_of(param: Any) -> str:
    """Return the name of a record of `fsdp_params` in the outermost module; after the first forward pass has begun."""
    return str(param._param_fqn)


def gather_here_again(param: Any) -> None:
    """Have the whole parameter of a record of `fsdp_params` stand in the memory that is gathered into again, with its numbers,
    if somebody put another tensor there by `.data = ...`."""
    (memory,), whole = param.all_gather_outputs, param._unsharded_param
    local = getattr(whole, "_local_tensor", whole).detach()
    if local.data_ptr() != memory.data_ptr():
        own = memory.as_strided(param._orig_size, param._contiguous_orig_stride, 0)
        with of_same_version([own]):
            own.copy_(local)
        if local is getattr(whole, "_local_tensor", None):
            whole._local_tensor = own
        else:
            whole.data = own


def own_piece(param: Any, whole: torch.Tensor) -> torch.Tensor:
    """Return of `whole`, a plain tensor of the shape that is gathered, what this rank's shard of a record is gathered from."""
    dim, length = param.fsdp_placement.dim, whole.shape[param.fsdp_placement.dim]
    size = -(-length // param.mesh_info.shard_mesh_size)  # the last ranks may have less, or nothing
    start = min(param.mesh_info.shard_mesh_rank * size, length)
    return whole.narrow(dim, start, min(size, length - start))


def joined_shards(param: Any, parts: torch.Tensor) -> torch.Tensor:
    """Return the whole that a record of `fsdp_params` is gathered to, of `parts`: (ranks, numbers of a filled up shard)."""
    dim, shapes = param.fsdp_placement.dim, param.padded_sharded_param_size
    pieces = parts.view(len(parts), *shapes)
    whole = pieces.flatten(0, 1) if dim == 0 else torch.cat(pieces.unbind(), dim)
    return whole.narrow(dim, 0, param._orig_size[dim]).contiguous()


def free_when_resharded(param: Any, tensor: torch.Tensor) -> None:
    """Have the memory of `tensor` freed when what a record of `fsdp_params` has gathered is; its storage is empty then.

    It is put where torch keeps what extensions of all-gathers have made, which such a record has none of.
    """
    param._unsharded_inner_tensors = [tensor]


# ---------------------------------------------------------------------- pipelines


def computes_weights_apart() -> bool:
    """Return whether the schedules of torch compute gradients of weights rightly where they do it apart from those of inputs.

    Before torch 2.13 those of a weight that a stage uses twice, once behind the other, are too large (pytorch#180952).
    """
    return torch.__version__ >= "2.13"


@functools.cache
def _pipeline_stage() -> type[Any]:
    from torch.distributed.pipelining import PipelineStage

    return PipelineStage if hasattr(PipelineStage, "_get_grad_send_meta") else _declared(PipelineStage)


def _declared(base: Any) -> type[Any]:
    """Return a class of torch 2.11's pipeline stages, `base`, that goes by the tensors declared to it, as later ones do.

    Of itself it takes all that it receives to require gradients, which integers cannot, and to have them, and it sends a
    greeting to its own rank where two stages in a row lie there, which gloo cannot.
    """

    class DeclaredStage(base):
        has_backward: bool

        def _get_init_p2p_neighbors_ops(self) -> list[Any]:
            return [op for op in super()._get_init_p2p_neighbors_ops() if op.group_peer != self.group_rank]

        def _prepare_forward_infra(self, *args: Any, **kwargs: Any) -> Any:
            backward, self.has_backward = (
                self.has_backward,
                False,
            )  # else what is received into requires gradients from now on
            try:
                return super()._prepare_forward_infra(*args, **kwargs)
            finally:
                self.has_backward = backward

        def _retrieve_recv_activations(self, fwd_chunk_id: int) -> Any:
            buffers = super()._retrieve_recv_activations(fwd_chunk_id)
            for buffer, declared in zip(buffers, self.inputs_meta, strict=True):
                buffer.requires_grad_(declared.requires_grad and self.has_backward)
            return buffers

        def _create_grad_send_info(self, args_recv_info: Any) -> list[Any]:
            pairs = zip(args_recv_info, self.inputs_meta, strict=True)
            return [info.source if declared.requires_grad else None for info, declared in pairs]

        def _create_grad_recv_info(self, act_send_info: Any) -> tuple[Any, ...]:
            infos = super()._create_grad_recv_info(act_send_info)  # none, of the one output of the last stage
            pairs = zip(infos, self.get_outputs_meta(), strict=False)
            return tuple(info if declared.requires_grad else None for info, declared in pairs)

        def _retrieve_recv_grads(self, bwd_chunk_id: int) -> Any:
            return tuple(info and info.buffer for info in self.grad_recv_info[bwd_chunk_id])

        def set_local_fwd_input(self, prev_stage_outputs: Any, mb_index: int) -> None:
            for info, tensor in zip(self.args_recv_info[mb_index], prev_stage_outputs, strict=True):
                info.buffer = tensor.detach()

        def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
            for info, grad in zip(self.grad_recv_info[mb_index], next_stage_bwd_outputs, strict=True):
                if info is not None:
                    info.buffer = grad

        def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> None:
            super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)
            if self.has_backward and not self.is_first:
                given = zip(
                    self.bwd_cache[bwd_chunk_id], self.args_recv_info[bwd_chunk_id], self.inputs_meta, strict=True
                )
                self.bwd_cache[bwd_chunk_id] = tuple(
                    torch.zeros_like(info.buffer) if grad is None and declared.requires_grad else grad
                    for grad, info, declared in given
                )

    return DeclaredStage


# ---------------------------------------------------------------------- what the tests look at

NAMES: Mapping[str, Callable[[], Any]] = {
    "torch._C._current_graph_task_id": lambda: torch._C._current_graph_task_id,
    "torch._C._autograd._top_saved_tensors_default_hooks": lambda: torch._C._autograd._top_saved_tensors_default_hooks,
    "torch.autograd.Variable._execution_engine": lambda: torch.autograd.Variable._execution_engine,
    "torch._C._current_autograd_node": lambda: torch._C._current_autograd_node,
    "Node._sequence_nr": lambda: torch.ones(1, dtype=torch.float32, requires_grad=True).exp().grad_fn._sequence_nr,  # type: ignore[union-attr]
    "torch.autograd._get_sequence_nr": lambda: torch.autograd._get_sequence_nr,
    "torch.autograd.graph._engine_run_backward": lambda: torch.autograd.graph._engine_run_backward.__code__,
    "Tensor._make_subclass": lambda: torch.Tensor._make_subclass,
    "torch._C.DisableTorchFunction": lambda: torch._C.DisableTorchFunction,
    "torch._C._EnableTorchFunction": lambda: torch._C._EnableTorchFunction,
    "Module._compiled_call_impl": lambda: nn.Module._compiled_call_impl,
    "UntypedStorage._cdata": lambda: torch.zeros(1, dtype=torch.float32).untyped_storage()._cdata,
    "Module._call_impl": lambda: nn.Module._call_impl.__code__.co_varnames.index("self"),
    "torch._C._get_function_stack_at": lambda: torch._C._get_function_stack_at,
    "torch._C._len_torch_function_stack": lambda: torch._C._len_torch_function_stack,
    "torch._GLOBAL_DEVICE_CONTEXT": lambda: torch._GLOBAL_DEVICE_CONTEXT,
    "Tensor._values": lambda: torch.Tensor._values,
    "Tensor._indices": lambda: torch.Tensor._indices,
    "Tensor._is_view": lambda: torch.Tensor._is_view,
    "torch.distributed.distributed_c10d._get_default_store": lambda: dist.distributed_c10d._get_default_store,
    "torch.distributed.distributed_c10d._world": lambda: dist.distributed_c10d._world.pg_names,
    "torch.distributed.distributed_c10d._resolve_process_group": lambda: dist.distributed_c10d._resolve_process_group,
    "rendezvous._torchelastic_use_agent_store": lambda: (
        sys.modules[dist.rendezvous.__module__]._torchelastic_use_agent_store
    ),
    "torch.distributed._compute_bucket_assignment_by_size": lambda: dist._compute_bucket_assignment_by_size,
    "Tensor._version": lambda: torch.Tensor._version,
    "Optimizer._optimizer_load_state_dict_pre_hooks": lambda: (
        torch.optim.Optimizer.__init__,
        torch.optim.SGD([torch.zeros(1, dtype=torch.float32)])._optimizer_load_state_dict_pre_hooks,
    ),
    "torch.autograd._unsafe_preserve_version_counter": lambda: torch.autograd._unsafe_preserve_version_counter,
    "torch._amp_foreach_non_finite_check_and_unscale_": lambda: torch._amp_foreach_non_finite_check_and_unscale_,
    "torch._int_mm": lambda: torch._int_mm,
    "torch._scaled_mm": lambda: torch._scaled_mm,
    "torch._dynamo": lambda: importlib.util.find_spec("torch._dynamo").name,  # type: ignore[union-attr]
    "torch._C._dispatch_has_kernel_for_dispatch_key": lambda: torch._C._dispatch_has_kernel_for_dispatch_key,
    "optimizer._global_optimizer_pre_hooks": lambda: sys.modules[Optimizer.__module__]._global_optimizer_pre_hooks,
    "optimizer._global_optimizer_post_hooks": lambda: sys.modules[Optimizer.__module__]._global_optimizer_post_hooks,
    "Optimizer._optimizer_step_pre_hooks": lambda: _an_optimizer()._optimizer_step_pre_hooks,
    "Optimizer._optimizer_step_post_hooks": lambda: _an_optimizer()._optimizer_step_post_hooks,
    "Adam(fused)._step_supports_amp_scaling": lambda: _an_optimizer()._step_supports_amp_scaling,
    "SGD(fused)._need_device_dtype_check_for_fused": lambda: (
        _an_optimizer(torch.optim.SGD)._need_device_dtype_check_for_fused
    ),
    "Optimizer.step._wrapped_by_lr_sched": lambda: _scheduled().step._wrapped_by_lr_sched,
    "Optimizer.step.hooked": lambda: type(_an_optimizer()).step.hooked,
    "Optimizer.step.__wrapped__": lambda: type(_an_optimizer()).step.__wrapped__,
    **{f"{module}.{name}": functools.partial(__getattr__, key) for key, (module, name) in _LATE.items()},
    "torch.utils._pytree": lambda: (pytree.tree_flatten, pytree.tree_unflatten, pytree.tree_leaves, pytree.TreeSpec),
    "Adam.step unwrapped": lambda: unwrapped(torch.optim.Adam.step).__code__.co_varnames.index("closure"),
    "Module._state_dict_hooks": lambda: nn.Module()._state_dict_hooks,
    "Module._register_state_dict_hook": lambda: nn.Module._register_state_dict_hook,
    "DataLoader._iterator": lambda: DataLoader([0])._iterator,  # type: ignore[arg-type]
    "DataLoader._index_sampler": lambda: DataLoader.__dict__["_index_sampler"].fget,
}
"""How to reach every name above that needs no process group, for the test that says which are missing."""


def _an_optimizer(kind: type[Any] = torch.optim.Adam) -> Any:
    return kind([nn.Parameter(torch.zeros(1, dtype=torch.float32))], lr=0.1, fused=True)


def _scheduled() -> Any:
    optimizer = _an_optimizer()
    torch.optim.lr_scheduler.StepLR(optimizer, 1)
    return optimizer
