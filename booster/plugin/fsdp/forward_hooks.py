"""Hooks around the forward of sharded modules: outputs without views, weights of the computed dtype, freed parameters."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from booster.common.torch_internals.fsdp_internals import fsdp_groups, fsdp_states, init_dtypes, is_in_forward
from booster.common.torch_internals.tensor_internals import is_view, of_class
from booster.plugin.fsdp.groups import Group
from booster.shards.fully_sharded import UnshardedParams, recover, reshard
from booster.tensors.trees import map_tensors, tensors


def show_computed_dtypes(model: nn.Module, groups: Iterable[Group], dtype: torch.dtype | None) -> list[Any]:
    """Make the floating parameters in `groups` of `model` show `dtype` inside its forward; call it after `fully_shard`.

    Returns handles with `remove`.
    """
    # Models ask weights for the dtype to compute in: `pixels.to(self.projection.weight.dtype)`, `torch.finfo(self.dtype).min`.
    handles: list[Any] = []
    shown: list[_Slots] = []
    for group in groups:
        if group.pinned or dtype is None:
            continue
        # A shard that is a master weight is float32 until its module runs, and again afterwards, so such a model would compute
        # in two dtypes at once.
        slots = _Slots(group.members, dtype)
        # The group of `model` itself is gathered as long as it runs.
        if model not in group.modules and slots.differ():
            shown.append(slots)
            for module in group.modules:
                # After the hook by which torch frees what was gathered; like that one it is not for torch.compile to trace.
                handles.append(module.register_forward_hook(torch.compiler.disable(slots.after_forward)))
    if not shown:
        return handles

    def begin(module: nn.Module, args: Any) -> None:
        for slots in shown:
            slots.show()

    def end(module: nn.Module, args: Any, output: Any) -> None:
        for slots in shown:
            slots.hide()

    handles.append(model.register_forward_pre_hook(torch.compiler.disable(begin)))
    handles.append(model.register_forward_hook(torch.compiler.disable(end), always_call=True))
    return handles


class _Slots:
    """The entries of one group's parameters in the tables of their modules."""

    def __init__(self, members: Sequence[nn.Module], dtype: torch.dtype) -> None:
        self._dtype = dtype
        self._slots = [
            _Slot(module._parameters, name, param)
            for module in members
            for name, param in module._parameters.items()
            if param is not None and param.is_floating_point()
        ]
        self._showing = False

    def differ(self) -> bool:
        return any(slot.param.dtype != self._dtype for slot in self._slots)

    # `show` and `hide` run in every forward pass: a parameter that they know costs no access to a tensor.
    def show(self) -> None:
        self._showing = True
        for slot in self._slots:
            param = slot.place[slot.name]
            if param is slot.param and slot.proxy is not None:
                slot.place[slot.name] = slot.proxy
            elif param is not slot.proxy and param.dtype != self._dtype:  # neither gathered nor known
                slot.param, slot.proxy = param, ComputeDtypeProxy.of(param, self._dtype)
                slot.place[slot.name] = slot.proxy

    def hide(self) -> None:
        self._showing = False
        for slot in self._slots:
            if slot.proxy is not None and slot.place[slot.name] is slot.proxy:
                slot.place[slot.name] = slot.param

    def after_forward(self, module: nn.Module, args: Any, output: Any) -> None:
        if self._showing:
            self.show()


class _Slot:
    """A parameter in the table of its module, and its proxy."""

    __slots__ = ("name", "param", "place", "proxy")

    def __init__(self, place: dict[str, Any], name: str, param: torch.Tensor) -> None:
        self.place, self.name, self.param = place, name, param
        self.proxy: ComputeDtypeProxy | None = None


class ComputeDtypeProxy(torch.Tensor):
    """A proxy for a sharded parameter. Its dtype is the one computed in; everything else is passed on to the parameter."""

    _is_param = True  # to `isinstance(..., nn.Parameter)`
    param: torch.Tensor
    shown: torch.dtype

    @staticmethod
    def of(param: torch.Tensor, dtype: torch.dtype) -> ComputeDtypeProxy:
        made = torch.zeros((), dtype=dtype, device=param.device).expand(param.shape).as_subclass(ComputeDtypeProxy)
        made.__dict__.update(param=param, shown=dtype)
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if func == _GET_DTYPE:
            return args[0].__dict__["shown"]
        if func in _CASTS and len(args) > 1 and isinstance(args[1], cls):  # x.to(weight), x.type_as(weight)
            return args[0].to(args[1].param.device, args[1].shown)
        return func(*map_tensors(_param_of, args), **map_tensors(_param_of, kwargs or {}))


_GET_DTYPE = torch.Tensor.dtype.__get__  # type: ignore[attr-defined]
_CASTS = (torch.Tensor.to, torch.Tensor.type_as)


def _param_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.__dict__["param"] if isinstance(tensor, ComputeDtypeProxy) else tensor


class _NoView(torch.autograd.Function):
    """The same values in the same memory, but no view for autograd: a tensor with its own history."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return of_class(type(tensor), tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


def outputs_without_views(module: nn.Module, args: Any, output: Any) -> Any:
    """A forward hook to register before those of `fully_shard`: returns outputs that are no views."""
    # fully_shard hooks the gradients of outputs. An in-place operation on a view drops such a hook, of which torch warns, and a
    # Linear with a bias already returns a view.
    return _no_view(output) if isinstance(output, torch.Tensor) else map_tensors(_no_view, output)


def _no_view(tensor: torch.Tensor) -> torch.Tensor:
    own: torch.Tensor = _NoView.apply(tensor) if is_view(tensor) and tensor.grad_fn is not None else tensor
    return own


class AdmitUnfrozen:
    """A forward pre-hook: a group that was frozen in the first pass may be trained later.

    Torch fixes the dtype of a group's gradients in the first forward pass, and for a frozen group it fixes none.

    Raises ValueError for shards with hooks of `register_hook`, which autograd never calls.
    """

    def __init__(self, model: nn.Module) -> None:
        # Looked up once, because torch.compile would trace it in every call.
        self._groups = fsdp_groups([child for child in model.modules() if isinstance(child, FSDPModule)])

    def __call__(self, module: nn.Module, args: Any) -> None:
        if (name := init_dtypes(self._groups)) is not None:
            raise ValueError(
                f"{name} has a hook of register_hook, which would never be called: autograd computes the gradient of the "
                "gathered weight, and this is a part of it. Take the hook off, and register it by "
                "register_post_accumulate_grad_hook, which is called when the gradient of the part is there"
            )


class FreeGathered:
    """A forward hook: frees gathered parameters after a forward pass that no backward pass follows, or that raised.

    Torch frees them in backward only. Users would find them in place of the shards until then, and what they write to them
    would be lost at the next step.
    """

    def __init__(self, model: FSDPModule, unsharded: UnshardedParams | None) -> None:
        (self._state,) = fsdp_states([model])
        self._record = None if unsharded is None else torch.compiler.disable(unsharded.snapshot)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        if is_in_forward(self._state):  # it raised: the hook of fully_shard did not run
            recover(module)
        elif not _requires_grad(output):
            reshard(module)
        elif self._record is not None:
            self._record(module)


def _requires_grad(output: Any) -> bool:
    if isinstance(output, torch.Tensor):
        return output.requires_grad
    return any(tensor.requires_grad for tensor in tensors(output))
