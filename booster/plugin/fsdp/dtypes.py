"""Weights that show, inside forward, the dtype in which their module computes, also while they are sharded.

Models ask weights for it: `pixels.to(self.projection.weight.dtype)`, `torch.finfo(self.dtype).min`. A shard that is a
master is float32 until its module runs, and again afterwards, so such a model would compute in two dtypes at once.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import nn

from booster.plugin.fsdp.groups import Group
from booster.tensors.trees import map_tensors


def show_computed_dtypes(model: nn.Module, groups: Iterable[Group], dtype: torch.dtype) -> list[Any]:
    """Make the floating parameters in `groups` of `model` show `dtype` inside its forward, where they are stored in another.

    Those of the group of `model` itself are gathered as long as it runs. To be called after `fully_shard`. Returns what has
    `remove`.
    """
    handles: list[Any] = []
    shown: list[_Slots] = []
    for group in groups:
        slots = _Slots(group.members, dtype)
        if model not in group.modules and slots.differ():
            shown.append(slots)
            for module in group.modules:
                # Behind the hook by which torch frees what was gathered, and, as that one, not for torch.compile to trace.
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
    """Where the parameters of one group stand in their modules."""

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

    # These two run at every forward pass: for a parameter they have looked at before they ask nothing of a tensor.
    def show(self) -> None:
        self._showing = True
        for slot in self._slots:
            param = slot.place[slot.name]
            if param is slot.param and slot.proxy is not None:
                slot.place[slot.name] = slot.proxy
            elif param is not slot.proxy and param.dtype != self._dtype:  # neither gathered nor known
                slot.param, slot.proxy = param, Shown.of(param, self._dtype)
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
    """A parameter in the table of its module, and what stands for it there."""

    __slots__ = ("name", "param", "place", "proxy")

    def __init__(self, place: dict[str, Any], name: str, param: torch.Tensor) -> None:
        self.place, self.name, self.param = place, name, param
        self.proxy: Shown | None = None


class Shown(torch.Tensor):
    """Stands for a sharded parameter. Its dtype is the one computed in; all else is asked of the parameter, or done to it."""

    _is_param = True  # to `isinstance(..., nn.Parameter)`
    param: torch.Tensor
    shown: torch.dtype

    @staticmethod
    def of(param: torch.Tensor, dtype: torch.dtype) -> Shown:
        """Make the stand-in of `param`."""
        made = torch.zeros((), dtype=dtype, device=param.device).expand(param.shape).as_subclass(Shown)
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
    return tensor.__dict__["param"] if isinstance(tensor, Shown) else tensor
