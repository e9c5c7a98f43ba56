"""A copy of a model without its weights, on which shapes are inferred and which takes the place of other stages' modules."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from booster.common.torch_internals.tensor_internals import FakeTensor
from booster.model.meta import copy_on_meta
from booster.plugin.pipeline.fake_activation import FakeActivationMode, as_fake_activation
from booster.plugin.pipeline.split import Split, holders, owners
from booster.tensors.weak import InPlaceOfForward, OfAModule

Prepare = Callable[[nn.Module], nn.Module]


class MetaModel:
    """The modules of a model with fake activations in place of parameters: shape, dtype and device, no memory.

    Whatever a fake tensor enters becomes one, and what is computed from inputs and buffers alone is real. So a forward
    pass tells what depends on parameters, and is known only where they are, from what every rank can compute, such as
    masks and positions. The fake tensors are plain attributes: no parameter, buffer or state dict key is left.

    Attributes:
        module: the copy.
        mode: of all its fake tensors.
        stages: by id of a fake parameter, its name and the stages that hold the real one.
        buffers: ids of the copied buffers.
        owned: by name of a module, the stage that owns it; see `owners`.
        call: while set, it is called in place of the forward of a child of the container, with the position of the child, its
            forward, args and kwargs.
    """

    def __init__(self, model: nn.Module, split: Split, *, device: torch.device | None, prepare: Prepare | None) -> None:
        """device: where the model will run; None where its parameters are. prepare: edits the copy, which has parameters
        on the meta device then, as the model will be edited; returns it."""

        def buffer(own: torch.Tensor) -> torch.Tensor:
            there = own.device if own.is_meta or device is None else device
            return own.detach().to(there, copy=True)

        self.mode = FakeActivationMode()
        self.module = copy_on_meta(model, "cutting it into pipeline stages", buffer=buffer)
        devices = {name: device or param.device for name, param in model.named_parameters(remove_duplicate=False)}
        if prepare is not None:
            self.module = prepare(self.module)
        self.stages: dict[int, tuple[str, frozenset[int]]] = {}
        self.buffers: set[int] = set()
        self._make_fake(devices)
        for first, held in holders(model, split).items():
            for name, _ in held:
                owner, _, attribute = name.rpartition(".")
                fake = getattr(self.module.get_submodule(owner), attribute)
                self.stages[id(fake)] = (first, frozenset(stage for _, stage in held))
        self.owned = owners(model, split)
        self.call: Callable[[int, Callable[..., Any], Any, Any], Any] | None = None
        container = self.module.get_submodule(split.container)
        for position, name in enumerate(split.children):
            if split.name_of(position) in self.owned:
                child = container.get_submodule(name)
                child.__dict__["forward"] = _ObservedForward(self, position, child.forward)
        for child in self.module.modules():
            # Hooks that read activations would meet fake ones. Hooks before a forward may make its weights, and stay.
            child._forward_hooks.clear()
            child._backward_hooks.clear()
            child._compiled_call_impl = None

    def fake(
        self, shape: Any, dtype: torch.dtype, device: torch.device, *, requires_grad: bool = False
    ) -> torch.Tensor:
        """Return a new fake activation."""
        with self.mode:
            return as_fake_activation(torch.empty(shape, dtype=dtype, device=device).requires_grad_(requires_grad))

    def _make_fake(self, devices: dict[str, torch.device]) -> None:
        """Turn parameters and buffers into attributes, parameters into fake tensors; tied ones stay tied."""
        fakes: dict[int, torch.Tensor] = {}
        for name, param in list(self.module.named_parameters(remove_duplicate=False)):
            if id(param) not in fakes:
                with self.mode:
                    value = torch.empty_strided(param.size(), param.stride(), dtype=param.dtype, device=devices[name])
                    # All require gradients: a parameter that is frozen today may not be tomorrow.
                    fakes[id(param)] = as_fake_activation(value.requires_grad_(param.is_floating_point()))
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


class _ObservedForward(OfAModule):
    """The forward of a child of the container, which `MetaModel.call` may replace."""

    def __init__(self, meta_model: MetaModel, position: int, forward: Callable[..., Any]) -> None:
        self._meta_model = weakref.ref(meta_model)
        self._position = position
        self._inner = InPlaceOfForward(forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        meta_model = self._meta_model()
        if meta_model is None or meta_model.call is None:
            return self._inner.run(*args, **kwargs)
        return meta_model.call(self._position, self._inner.run, args, kwargs)


def is_fake(value: Any) -> bool:
    """Return whether `value` is a tensor without data: it depends on parameters that another stage has."""
    return isinstance(value, FakeTensor)


def replace_parameter(module: nn.Module, name: str, value: torch.Tensor) -> None:
    """Put a tensor that is no parameter in the place of the parameter `name` of `module`."""
    module._parameters.pop(name)
    setattr(module, name, value)  # not by way of __dict__: recurrent modules keep a list of their weights
