"""Tensors and kernels, DTensors, fake tensors, process groups and workers of loaders, by torch's private names.

Flash attention is here with what its public function keeps to itself: the log-sum-exp of each query's scores, by which parts of
attention are joined and differentiated. On a CPU in float32 alone, whatever the operands are, since half sums would be joined;
on CUDA in their dtype, float16 or bfloat16, without masks.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from datetime import timedelta
from importlib import import_module
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm
from torch.nn.modules.batchnorm import _NormBase as RunningNorm
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

if TYPE_CHECKING:
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
        FakeTensor,
        FakeTensorMode,
    )
    from torch.distributed.tensor.placement_types import _StridedShard as StridedShard

__all__ = [
    "SWAPS_TENSORS",
    "BatchNorm",
    "DataDependentOutputException",
    "DynamicOutputShapeException",
    "FakeTensor",
    "FakeTensorMode",
    "RunningNorm",
    "StridedShard",
    "TorchDispatchMode",
    "pytree",
]

# What would make `import booster` slow is imported when it is first asked for.
_LATE = {
    **dict.fromkeys(
        ("DataDependentOutputException", "DynamicOutputShapeException", "FakeTensor", "FakeTensorMode"),
        "torch._subclasses.fake_tensor",
    ),
    "StridedShard": "torch.distributed.tensor.placement_types",
}


def __getattr__(name: str) -> Any:
    if name not in _LATE:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(_LATE[name]), "_StridedShard" if name == "StridedShard" else name)


SWAPS_TENSORS = "torch.nn.utils._named_member_accessor"  # the module that sets tensors for torch.func.functional_call


def of_class(kind: type[torch.Tensor], tensor: torch.Tensor) -> torch.Tensor:
    """Return `tensor`, detached, as one of `kind` that is no view, where `as_subclass` returns a view."""
    return torch.Tensor._make_subclass(kind, tensor)


base_of: Any = torch.Tensor._base.__get__  # type: ignore[union-attr]  # what `tensor._base` calls: of a view, the tensor that it looks at


def written_arguments(func: Any) -> tuple[int | str, ...]:
    """Return which arguments an operator of `torch.ops` writes to, by position or name; none of another function."""
    if isinstance(func, torch._ops.OpOverloadPacket):
        func = getattr(func, func.overloads()[0])
    if not isinstance(func, torch._ops.OpOverload):
        return ()
    written: list[int | str] = []
    for place, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += [place, argument.name]
    return tuple(written)


def written_values(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """Return the arguments of a call of an operator that it writes to, as its schema says."""
    return [
        kwargs.get(argument.name, args[place] if place < len(args) else None)
        for place, argument in enumerate(func._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    ]


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


def gather_full(tensor: Any) -> torch.Tensor:
    """Return the whole of the DTensor `tensor`, on every rank: a collective."""
    # Torch 2.11 takes each strided placement for an order of plain shards, and refuses to gather those that are none, as those
    # of fused projections are that tensor parallelism divides part by part.
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


# Of a tensor, how often it was written in place; writes through `.data` do not count. Asked without a Python call.
version = attrgetter("_version")


def writes(tensors: Sequence[Any]) -> int:
    """Return how often DTensors `tensors` and what this rank holds of them were written in place, in sum."""
    return sum(map(version, tensors)) + sum(map(version, map(_LOCAL, tensors)))


def like_check(tensors: Sequence[torch.Tensor]) -> Callable[..., bool] | None:
    """Return a function of as many objects: whether each has the class, shape, strides, dtype, device and requires_grad that
    the one of `tensors` in its place has now. One call of torch's compiled code; it holds none of `tensors`.

    None where one of them is no plain dense tensor.
    """
    if any(type(each) not in (torch.Tensor, nn.Parameter) or each.layout is not torch.strided for each in tensors):
        # Of a sparse one torch ends the process.
        return None
    return torch._C._dynamo.guards.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None).check


def preserving_versions(tensors: Sequence[torch.Tensor]) -> AbstractContextManager[Any]:
    """Return a context inside which `tensors` are written the very bits that they hold, so that graphs may go on with them."""
    return torch.autograd._unsafe_preserve_version_counter(tuple(tensors))


GROUPED_PRODUCTS = (getattr(torch, "_grouped_mm", None), getattr(torch.nn.functional, "grouped_mm", None))  # of experts


def is_fake_kind(kind: type) -> bool:
    """Return whether `kind` is torch's FakeTensor, which has shapes and no numbers. Imports nothing."""
    module = sys.modules.get("torch._subclasses.fake_tensor")
    return module is not None and issubclass(kind, module.FakeTensor)


def storage_key(tensor: torch.Tensor) -> int:
    """Return the identity of the memory of `tensor`, as long as it lives."""
    return tensor.untyped_storage()._cdata


def has_kernel(operator: str, dispatch_key: str) -> bool:
    """Return whether `operator` ("aten::...") has its own kernel for "CPU" or "CUDA"."""
    return torch._C._dispatch_has_kernel_for_dispatch_key(operator, dispatch_key)


_LOCAL = attrgetter("_local_tensor")  # asked without a Python call

_PLAIN = frozenset((torch.Tensor,))


def int_mm(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """Return the product of two int8 matrices, in int32."""
    return torch._int_mm(a, b)


def scaled_matmul(
    a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """Return the product of two fp8 matrices, in `dtype`; on the CPU too, where the public `F.scaled_mm` does not run."""
    return torch._scaled_mm(a, b, scale_a=scale_a, scale_b=scale_b, out_dtype=dtype)


def add_state_dict_hook(module: nn.Module, hook: Callable[..., Any]) -> None:
    """Call `hook(module, state_dict, prefix, local_metadata)` after `module.state_dict()`, once however often this is asked."""
    if all(entry is not hook for entry in module._state_dict_hooks.values()):
        module.register_state_dict_post_hook(hook)


def local_tensor(tensor: Any) -> torch.Tensor:
    """Return what this rank holds of a DTensor, itself; not differentiable. `to_local` makes a view, by way of autograd."""
    local: torch.Tensor = tensor._local_tensor
    if type(local) is not torch.Tensor:  # on its way; to_local waits for it
        with torch.no_grad():
            local = tensor.detach().to_local()
    return local


def local_tensors(tensors: Iterable[Any]) -> list[torch.Tensor]:
    """Return `local_tensor` of each of `tensors`."""
    shards = list(map(_LOCAL, tensors))
    if not _PLAIN.issuperset(map(type, shards)):
        shards = list(map(local_tensor, tensors))
    return shards


def placed_differently(tensors: Iterable[Any]) -> list[Any]:
    """Return those of DTensors `tensors` that have a gradient with other placements on the same mesh."""
    different = []
    for tensor in tensors:
        if tensor.grad._spec is not tensor._spec and tensor.grad.placements != tensor.placements:
            different.append(tensor)
    return different


def process_group_of(arg: Any) -> dist.ProcessGroup | None:
    """Return the process group that the argument `arg` of a collective is, as torch's dispatcher has it; None: it is none."""
    if isinstance(arg, torch.ScriptObject) and "ProcessGroup" in str(arg._type()):
        return dist.ProcessGroup.unbox(arg)
    if isinstance(arg, str) and arg in dist.distributed_c10d._world.pg_names.values():
        return dist.distributed_c10d._resolve_process_group(arg)  # type: ignore[arg-type]
    return None


def abort_gloo_waits() -> None:
    """Have all that waits in collectives of gloo in this process raise; their groups are of no use afterwards."""
    for group in list(dist.distributed_c10d._world.pg_map):
        size = dist.get_world_size(group)
        if size > 1 and "gloo" in dist.get_backend_config(group):
            other = (dist.get_rank(group) + 1) % size
            with suppress(RuntimeError):  # a receive that is late ends all connections of its group
                late: Any = dist.irecv(torch.empty(1, dtype=torch.uint8), group=group, group_src=other)
                late.wait(timedelta(milliseconds=1))


def has_workers(loader: Any) -> bool:
    """Return whether the workers of a loader with `persistent_workers=True` run."""
    return getattr(loader, "_iterator", None) is not None


def end_workers(loader: Any) -> None:
    """Have the next iteration of a DataLoader begin with new workers, as its first one did."""
    if has_workers(loader):
        loader._iterator = None


_aten: Any = torch.ops.aten


def flash_forward(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    is_causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output and log-sum-exp, (batch, heads, queries) in float32. mask: additive, in the dtype of `query`."""
    if query.device.type == "cpu":
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            query, key, value, 0.0, is_causal, attn_mask=mask, scale=scale
        )
        return out, lse
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    out, lse, *_ = _aten._scaled_dot_product_flash_attention(query, key, value, 0.0, is_causal, scale=scale)
    return out, lse


def flash_backward(
    grad: torch.Tensor,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    mask: torch.Tensor | None,
    *,
    is_causal: bool,
    scale: float | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the gradients of query, key and value. out, lse: of all keys, also where `key` are only some of them."""
    if query.device.type == "cpu":
        grads: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = (
            _aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad, query, key, value, out, lse, 0.0, is_causal, attn_mask=mask, scale=scale
            )
        )
        return grads
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    lse = lse.contiguous()  # which is read as if it were so
    seed = torch.zeros(2, dtype=torch.uint64, device=query.device)  # of dropout, of which there is none
    nothing = torch.empty(0, dtype=torch.int32, device=query.device)
    lengths = (None, None, query.shape[2], key.shape[2])
    of_cuda: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = _aten._scaled_dot_product_flash_attention_backward(
        grad, query, key, value, out, lse, *lengths, 0.0, is_causal, seed, nothing, scale=scale
    )
    return of_cuda
