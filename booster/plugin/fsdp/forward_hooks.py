"""Hooks around the forward of sharded modules: outputs without views, weights of the computed dtype, freed parameters.

And parameters that a forward pass itself writes to, as that of a momentum encoder does (`ForwardWrites`).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from booster.common.arguments import listed
from booster.common.torch_internals.fsdp_internals import (
    fsdp_groups,
    fsdp_states,
    gather_of,
    gathered,
    init_dtypes,
    is_gathered_in_place,
    is_in_forward,
    name_of,
    restore_gather_buffer,
    unsharded_versions,
)
from booster.common.torch_internals.tensor_internals import is_view, of_class, storage_key
from booster.model.params import is_dtensor, local_shard
from booster.plugin.fsdp.groups import Group
from booster.ranks.agreement import reduced
from booster.shards.fully_sharded import UnshardedParams, compared, recover, reshard, sharded_in, write_back
from booster.tensors.trees import Writes, is_container, map_tensors, tensors


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


def noted_writes(others: list[Any], given: tuple[Any, Any], made: Any) -> list[Callable[[], list[torch.Tensor]]]:
    """Return what brings back what forward writes into containers of arguments `given`; others: those that are no tensors."""
    if not any(map(is_container, others)):
        return []
    writes = Writes(given, made)
    return [lambda: list(tensors(writes.bring_back(lambda item: map_tensors(_no_view, item))))]


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
            reshard(sharded_in(module))
        elif self._record is not None:
            self._record(module)


def _requires_grad(output: Any) -> bool:
    if isinstance(output, torch.Tensor):
        return output.requires_grad
    return any(tensor.requires_grad for tensor in tensors(output))


_COMPARED = 4  # first passes of training in which all bits are compared, as writes through `.data` leave no other trace
_SUM = 2**62 - 1
_BITS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.int64}
_FOUND, _LATE, _LOW, _DROPPED = 1, 2, 3, 4
_REFUSED = {
    _DROPPED: "another tensor was put into {names} by `.data = ...`: of a parameter that is sharded, torch drops it without a "
    "word, and the weight stays what it was. Write in place, as by `.data.copy_(...)`; model.half() and model.to(dtype) do it "
    "too: leave the weights as they are, since the precision casts what it computes",
    _LOW: "forward writes to {names}, frozen and float32, but fully_shard gathers a copy of fewer bits, and what is written "
    "there is rounded every time, so that an average stops. Name the module that holds them in keep_fp32, as "
    "keep_fp32=('encoder_k', ...), which has it gathered in float32, or write in the training loop, between passes",
    _LATE: "forward writes to {names} through .data, and did not in the first passes: fully_shard gathers copies, and what was "
    "written to them by now may be lost. Write in place inside torch.no_grad(), which leaves a trace, or in the training "
    "loop, between passes",
}
_APART = (
    "forward writes other numbers to {names} on each rank, as those are that follow a rank's own batch, but each rank keeps a "
    "part of the one weight. Average over the ranks what is written, or make it a buffer"
)


class GatheredGroup:
    """Gathered parameters of `modules` that are freed together; `torch_internals` calls `compare` before torch frees them."""

    def __init__(self, owner: ForwardWrites, modules: Sequence[nn.Module]) -> None:
        self._owner: ForwardWrites = weakref.proxy(owner)  # the owner holds this
        self.groups = {param: group for group in fsdp_groups(modules[:1]) for param in group.fsdp_params}
        self.params = [param for param in self.groups if is_gathered_in_place(param) and param.sharded_param.numel()]
        self.versions: list[int] = []
        self.always = True
        self._hooks = [
            module.register_forward_pre_hook(torch.compiler.disable(self._before_forward))
            for module in modules
            if self.params
        ]

    def _before_forward(self, module: nn.Module, args: Any) -> None:
        """In the first pass, after torch's own hook, which gathers."""
        self.versions = unsharded_versions(self.params)
        self._owner.gathered_first(self.params)
        for hook in self._hooks:
            hook.remove()

    def compare(self) -> None:
        """A module of theirs has computed, and what it gathered is about to be freed."""
        self._owner.compare(self)


class ForwardWrites:
    """Copies what the forward pass of `model` writes to gathered parameters into this rank's shards.

    Torch frees gathered parameters after the pass, with what was written. Writes in place raise a version counter and are found
    in every pass; others, through `.data`, in the first passes and in rare later ones. RuntimeError, on all ranks, by name, for
    what cannot be copied. Costs in those passes: a comparison of this rank's shards, with copies of one at a time, and one
    small collective, for which a GPU is waited for.
    """

    def __init__(self, model: nn.Module, mesh: DeviceMesh) -> None:
        self._model = weakref.ref(model)
        self._ranks = [mesh.get_group(dim) for dim in range(mesh.ndim) if mesh.size(dim) > 1]
        self._groups: list[GatheredGroup] = []
        self._passes_left, self._late = _COMPARED, False
        self._known: set[Any] = set()
        self._untraced: set[Any] = set()  # those that were written to through `.data`, without a version
        self._places: dict[Any, list[tuple[Any, int]]] = {}
        # In this pass: one of the numbers above or 0, and the sum of all bits.
        self._seen: dict[Any, tuple[int, int]] = {}

    def add_group(self, modules: Sequence[nn.Module]) -> GatheredGroup:
        """Watch `modules`, to which `fully_shard` was just applied together; the last call is for the model itself."""
        self._groups.append(GatheredGroup(self, modules))
        self._places.update((param, _places(param)) for param in self._groups[-1].params)
        return self._groups[-1]

    def gathered_first(self, params: Sequence[Any]) -> None:
        for param in params:
            self._places[param] += _places(param)[1:]

    def before_end(self, number: int) -> None:
        """Before the model's own group is compared: if due, compare all bits until the next pass of training ends."""
        if number > _COMPARED:
            self._passes_left = max(self._passes_left, 2)
            for group in self._groups:
                group.always = True

    @torch.no_grad()
    def compare(self, group: GatheredGroup) -> None:
        versions, last = unsharded_versions(group.params), self._groups[-1]
        if not group.versions:
            group.versions = versions
        for param, now, before in zip(group.params, versions, group.versions, strict=True):
            if self._passes_left or now != before or param in self._untraced:
                restore_gather_buffer(param)
                shard, piece, same = compared(param, gather_of(group.groups[param]))
                if self._passes_left or param not in self._known:
                    last.always = True
                    if self._record(param, now != before, shard.dtype != piece.dtype, bool(same.all())):
                        continue
                write_back(shard, piece, same)
        group.versions = unsharded_versions(group.params)
        group.always = self._passes_left > 0 or not self._untraced.isdisjoint(group.params)
        if group is last:
            self._end()

    def _record(self, param: Any, traced: bool, rounded: bool, same: bool) -> bool:
        what = 0
        if not same:
            what = _FOUND
            if rounded and not param.sharded_param.requires_grad:
                what = _LOW
            elif not traced and self._late and param not in self._untraced:
                what = _LATE
            if not traced:
                self._untraced.add(param)
        before, self._places[param] = self._places[param], _places(param)
        if _replaced(before, self._places[param]):
            what = _DROPPED
        whole = local_shard(gathered(param)).contiguous()  # type: ignore[arg-type]
        bits = int(whole.view(_BITS[whole.element_size()]).sum(dtype=torch.int64)) & _SUM
        self._seen[param] = max(what, self._seen.get(param, (0, 0))[0]), bits
        return same

    def _end(self) -> None:
        """The pass ends: exchange what this rank found, in a collective, if anything was compared."""
        if not self._seen:
            return
        params = [param for group in self._groups for param in group.params]
        kinds, bits = zip(*(self._seen.get(param, (0, 0)) for param in params), strict=True)
        # The maximum of a sum and of its negative: ranks agree if both are one number.
        sums = torch.tensor([*kinds, *bits, *(-each for each in bits)], dtype=torch.int64)
        for ranks in self._ranks:
            sums = reduced(sums, dist.ReduceOp.MAX, ranks)
        anywhere = sums.view(3, -1).tolist()
        self._seen.clear()
        if self._passes_left and self._model().training:  # type: ignore[union-attr]
            self._passes_left -= 1
            self._late = not self._passes_left
        for group in self._groups:
            group.always = self._passes_left > 0 or not self._untraced.isdisjoint(group.params)
        for what, reason in _REFUSED.items():
            if names := [name_of(param) for param, each in zip(params, anywhere[0], strict=True) if each == what]:
                raise RuntimeError(reason.format(names=listed(names, 5)))
        written = [(param, most == -least) for param, each, most, least in zip(params, *anywhere, strict=True) if each]
        self._known.update(param for param, _ in written)
        if apart := [name_of(param) for param, alike in written if not alike]:
            raise RuntimeError(_APART.format(names=listed(apart, 5)))


class RefuseReplaced:
    """Raises RuntimeError in the first passes of a tensor-parallel `model`, if its DTensors got another tensor."""

    def __init__(self, model: nn.Module) -> None:
        self._places = {
            name: [(param, storage_key(param))] for name, param in model.named_parameters() if is_dtensor(param)
        }
        self._passes_left = _COMPARED
        self._hook = model.register_forward_hook(torch.compiler.disable(self))

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self._passes_left -= module.training
        if not self._passes_left:
            self._hook.remove()
        names = []
        for name, before in self._places.items():
            self._places[name] = [(param, storage_key(param)) for param, _ in before]
            if _replaced(before, self._places[name]):
                names.append(name)
        if names:
            raise RuntimeError(_REFUSED[_DROPPED].format(names=listed(names, 5)))


def _places(param: Any) -> list[tuple[Any, int]]:
    """Return the tensors of a parameter with their storage, which `.data = ...` replaces."""
    standing = (param.sharded_param, gathered(param))
    return [(each, storage_key(each)) for each in standing if each is not None and is_dtensor(each)]


def _replaced(before: list[tuple[Any, int]], now: list[tuple[Any, int]]) -> bool:
    return any(old is new and was != key for (old, was), (new, key) in zip(before, now, strict=False))
