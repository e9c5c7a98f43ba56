"""A copy of a model's structure without its weights, on which shapes are found and which stands for foreign parts."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from booster.common.torch_internals.tensor_internals import FakeTensor
from booster.model.meta import copy_on_meta
from booster.plugin.pipeline.hollow import HollowMode, hollow
from booster.plugin.pipeline.split import Split, holders, owners
from booster.tensors.weak import InPlaceOfForward, OfAModule

Prepare = Callable[[nn.Module], nn.Module]


class Skeleton:
    """The modules of a model with fake tensors in place of parameters: shape, dtype and device, no memory.

    Whatever a fake tensor enters becomes one; what is computed from inputs and buffers alone is real. So a forward pass
    tells apart what depends on parameters, which is known where they are, and what every rank can work out, such as
    masks and positions. Its fake tensors are plain attributes: no parameter, no buffer and no state dict key is left.

    module: the copy. mode: of all its fake tensors. stages: by id of a fake parameter, its name and the stages that have
    the real one. buffers: ids of the copied buffers.
    """

    def __init__(self, model: nn.Module, split: Split, *, device: torch.device | None, prepare: Prepare | None) -> None:
        """device: where the model will run; None where its parameters are. prepare: edits the copy, which has parameters
        on the meta device then, as the model will be edited; returns it."""
        self.mode = HollowMode()

        def buffer(own: torch.Tensor) -> torch.Tensor:
            there = own.device if own.is_meta or device is None else device
            return own.detach().to(there, copy=True)

        self.module = copy_on_meta(model, "cutting it into pipeline stages", buffer=buffer)
        where = {name: device or param.device for name, param in model.named_parameters(remove_duplicate=False)}
        if prepare is not None:
            self.module = prepare(self.module)
        self.stages: dict[int, tuple[str, frozenset[int]]] = {}
        self.buffers: set[int] = set()
        self._hollow(where)
        for first, held in holders(model, split).items():
            for name, _ in held:
                self.stages[id(_attribute(self.module, name))] = (first, frozenset(stage for _, stage in held))
        self.owned = owners(model, split)
        self.call: Callable[[int, Callable[..., Any], Any, Any], Any] | None = None
        container = self.module.get_submodule(split.container)
        for position, name in enumerate(split.children):
            if split.name_of(position) in self.owned:
                child = container.get_submodule(name)
                child.__dict__["forward"] = _Observed(self, position, child.forward)
        for child in self.module.modules():
            # Hooks that look at activations would meet fake ones. Hooks before a forward may make its weights.
            child._forward_hooks.clear()
            child._backward_hooks.clear()
            child._compiled_call_impl = None

    def fake(
        self, shape: Any, dtype: torch.dtype, device: torch.device, *, requires_grad: bool = False
    ) -> torch.Tensor:
        """A new fake tensor."""
        with self.mode:
            return hollow(torch.empty(shape, dtype=dtype, device=device).requires_grad_(requires_grad))

    def _hollow(self, devices: dict[str, torch.device]) -> None:
        """Turn parameters and buffers into attributes, parameters into fake tensors; tied ones stay tied."""
        fakes: dict[int, torch.Tensor] = {}
        held = list(self.module.named_parameters(remove_duplicate=False))
        for name, param in held:
            if id(param) not in fakes:
                # All need gradients: one that is frozen today may not be tomorrow.
                with self.mode:
                    value = torch.empty_strided(param.size(), param.stride(), dtype=param.dtype, device=devices[name])
                    fakes[id(param)] = hollow(value.requires_grad_(param.is_floating_point()))
            owner, _, attribute = name.rpartition(".")
            replace_parameter(self.module.get_submodule(owner), attribute, fakes[id(param)])
        for module in self.module.modules():
            for name, buffer in list(module._buffers.items()):
                if buffer is not None:
                    del module._buffers[name]
                    value = buffer
                    if buffer.is_meta:
                        device = next(iter(devices.values()), torch.device("cpu"))
                        value = self.fake(buffer.shape, buffer.dtype, device)
                    else:
                        self.buffers.add(id(buffer))
                    setattr(module, name, value)


class _Observed(OfAModule):
    """The forward of a child of the container, which whoever runs the skeleton, by its `call`, may answer for it."""

    def __init__(self, skeleton: Skeleton, position: int, forward: Callable[..., Any]) -> None:
        self._skeleton = weakref.ref(skeleton)
        self._position = position
        self._inner = InPlaceOfForward(forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        skeleton = self._skeleton()
        if skeleton is None or skeleton.call is None:
            return self._inner.run(*args, **kwargs)
        return skeleton.call(self._position, self._inner.run, args, kwargs)


def is_fake(value: Any) -> bool:
    """Whether `value` is a tensor without data, which depends on parameters that are elsewhere."""
    return isinstance(value, FakeTensor)


def replace_parameter(module: nn.Module, name: str, value: torch.Tensor) -> None:
    """Put a tensor that is no parameter in the place of the parameter `name` of `module`."""
    module._parameters.pop(name)
    setattr(module, name, value)  # not by way of __dict__: recurrent modules keep a list of their weights


def _attribute(module: nn.Module, name: str) -> Any:
    owner, _, attribute = name.rpartition(".")
    return getattr(module.get_submodule(owner), attribute)
