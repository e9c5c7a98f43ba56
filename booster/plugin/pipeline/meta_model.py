"""A copy of a model without its weights, on which shapes are inferred and which takes the place of other stages' modules.

Its parameters are fake activations; what functions return for these is kept in a cache.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from booster.common.torch_internals.autograd_internals import without_subclasses
from booster.common.torch_internals.tensor_internals import (
    GROUPED_PRODUCTS,
    FakeTensor,
    FakeTensorMode,
    storage_key,
    version,
)
from booster.model.modules import copy_on_meta
from booster.plugin.pipeline.split import Split, holders, owners
from booster.tensors.trees import tensors
from booster.tensors.weak import (
    ForwardProxy,
    ModuleReference,
    WeakBufferTensor,
    WeakStateTensor,
    WeakTensor,
    strip_weak,
)

Prepare = Callable[[nn.Module], nn.Module]


class MetaModel:
    """The modules of a model with fake activations in place of parameters: shape, dtype and device, no memory.

    Whatever a fake tensor enters becomes one, and what is computed from inputs and buffers alone is real. So a forward
    pass separates what depends on parameters, and is known only where they are, from what every rank can compute, such
    as masks and positions. The fake tensors are plain attributes: no parameter, buffer or state dict key is left.

    Attributes:
        module: the copy.
        mode: of all its fake tensors.
        stages: by id of a fake parameter, its name and the stages that hold the real one.
        owners, holders: which stage has which module and parameter; see `split.py`.
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
        if prepare is not None:  # dtypes of activations follow from those of the stages
            self.module = prepare(self.module)
        self.stages: dict[int, tuple[str, frozenset[int]]] = {}
        self._buffers: set[int] = set()
        self._make_fake(devices)
        self.owners = owners(model, split)
        self.holders = holders(model, self.owners)
        for first, held in self.holders.items():
            for name, _ in held:
                owner, _, attribute = name.rpartition(".")
                fake = getattr(self.module.get_submodule(owner), attribute)
                self.stages[id(fake)] = (first, frozenset(stage for _, stage in held))
        self.call: Callable[[int, Callable[..., Any], Any, Any], Any] | None = None
        container = self.module.get_submodule(split.container)
        for position, name in enumerate(split.children):
            if split.name_of(position) in self.owners:
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

    def is_buffer(self, tensor: torch.Tensor) -> bool:
        """Return whether `tensor` is one of the copied buffers, a view of one, or an alias, as of weights in half."""
        return _memory(tensor) in self._buffers

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
                    del module._buffers[name]  # a state dict must not have it; see the class
                    value = buffer
                    if buffer.is_meta:
                        device = next(iter(devices.values()), torch.device("cpu"))
                        value = self.fake(buffer.shape, buffer.dtype, device)
                    else:
                        self._buffers.add(_memory(buffer))
                    setattr(module, name, value)


def _memory(tensor: torch.Tensor) -> int:
    return storage_key(tensor) if tensor.layout is torch.strided else id(tensor)  # sparse tensors have no storage


class _ObservedForward(ModuleReference):
    """The forward of a child of the container, which `MetaModel.call` may replace."""

    def __init__(self, meta_model: MetaModel, position: int, forward: Callable[..., Any]) -> None:
        self._meta_model = weakref.ref(meta_model)
        self._position = position
        self._inner = ForwardProxy(forward)

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


Results = dict[Any, Any]


_MOST = 4096


_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)


_METADATA = (bool, int, torch.Size, torch.dtype, torch.device, torch.layout)


class FakeActivationMode(FakeTensorMode):
    """Torch's mode of the fake activations of one model, which are made in it.

    Attributes:
        results: what functions of fake activations returned in earlier forward passes of the same shapes; None: they are run.
            While `allow_non_fake_inputs` is False functions are always run, because a mix of fake and real tensors raises then.
        records_writes: whether to record in `wrote` that a function changed a fake activation.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.results: Results | None = None
        self.records_writes = False
        self.wrote = False

    def dispatch(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(isinstance(tensor, WeakTensor) for tensor in tensors((args, kwargs))):
            # A float buffer that a block writes is a weak tensor where weights are in half; torch's mode takes no subclasses.
            args, kwargs = strip_weak((args, kwargs))
        return super().dispatch(func, types, args, kwargs)


_WEAK = frozenset((WeakTensor, WeakBufferTensor, WeakStateTensor))


class FakeActivation(FakeTensor):
    """A fake tensor: shape, dtype and device, no data.

    Running a function on fake tensors takes as long as fifty on small real ones. Its result depends only on what
    `_described` and `_call_state` return, unless a tensor is written to; so later forward passes read it from a cache.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not _WEAK.isdisjoint(types):
            return NotImplemented  # weak tensors are rounded first, by their own class
        mode = _mode_of(args) or _mode_of(kwargs.values())
        if func in GROUPED_PRODUCTS and args[0].dtype != torch.bfloat16:
            # The product of experts: kernels on CPUs take every dtype, torch's function of its shapes bfloat16 alone.
            return func(*(arg.bfloat16() for arg in args[:2]), *args[2:], **kwargs).to(args[0].dtype)
        with without_subclasses():
            if mode is not None and mode.records_writes:
                return as_fake_activation(_run_recording_writes(mode, func, args, kwargs))
            results = mode.results if mode is not None and mode.allow_non_fake_inputs else None
            if results is None:
                return as_fake_activation(func(*args, **kwargs))
            try:
                key = (func, _call_state(), _described(args), _described(kwargs))
            except _Indescribable:
                return as_fake_activation(func(*args, **kwargs))
            if key not in results:
                result = as_fake_activation(func(*args, **kwargs))
                if not _is_cacheable(result, args, kwargs):
                    return result
                if len(results) >= _MOST:  # an argument is a number that differs in every step
                    results.clear()
                results[key] = _without_graph(result)
            return results[key]


class _Indescribable(Exception):
    """An argument has values on which the result may depend, or an unknown class."""


def as_fake_activation(result: Any) -> Any:
    """Make the fake tensors in `result`, of a torch function, fake activations, in place; returns it."""
    if type(result) is FakeTensor:
        result.__class__ = FakeActivation
    elif isinstance(result, (tuple, list)):
        for entry in result:
            as_fake_activation(entry)
    return result


def _fakes_in(values: Any) -> Iterator[FakeActivation]:
    for value in values:
        if isinstance(value, FakeActivation):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _fakes_in(value)


def _mode_of(values: Any) -> FakeActivationMode | None:
    """Return the mode of the first fake activation. A loop, not a generator: it runs for each function of each block."""
    for value in values:
        if isinstance(value, FakeActivation):
            mode = value.fake_mode
            return mode if isinstance(mode, FakeActivationMode) else None
        if isinstance(value, (tuple, list)) and (found := _mode_of(value)) is not None:
            return found
    return None


def _run_recording_writes(mode: FakeActivationMode, func: Any, args: Any, kwargs: Any) -> Any:
    if torch.is_inference_mode_enabled():  # tensors have no version counter in it, so assume a write
        mode.wrote = True
        return func(*args, **kwargs)
    given = list(_fakes_in((*args, *kwargs.values())))
    before = [version(value) for value in given]
    result = func(*args, **kwargs)
    name = getattr(func, "__name__", "")
    mode.wrote |= name in ("__set__", "requires_grad_") or before != [version(value) for value in given]
    return result


def _call_state() -> tuple[Any, ...]:
    """Return what else the dtype of a result depends on, and whether it requires gradients."""
    cast = tuple(torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind))
    return cast, torch.is_grad_enabled(), torch.get_default_dtype()


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        kind = type(value)
        # A real tensor of one element may be a length, on which shapes depend.
        if kind is not FakeActivation and (value.numel() < 2 or kind not in (torch.Tensor, torch.nn.Parameter)):
            raise _Indescribable
        return kind is FakeActivation, value.shape, value.stride(), value.dtype, value.device, value.requires_grad
    if isinstance(value, _PLAIN) or value is Ellipsis:
        return type(value), value
    if type(value) in (tuple, list, torch.Size):
        return (type(value), *map(_described, value))
    if type(value) is slice:
        return slice, _described(value.start), _described(value.stop), _described(value.step)
    if type(value) is dict:
        return tuple((name, _described(entry)) for name, entry in value.items())
    raise _Indescribable


def _is_cacheable(result: Any, args: Any, kwargs: Any) -> bool:
    """Return whether `result` may be returned again: it is immutable or a new fake activation, not an argument."""
    if isinstance(result, FakeActivation):
        return not any(result is value for value in _fakes_in((*args, *kwargs.values())))
    if type(result) is tuple:
        return all(entry is None or _is_cacheable(entry, args, kwargs) for entry in result)
    return isinstance(result, _METADATA)


def _without_graph(result: Any) -> Any:
    """Return `result` without its graph, which would keep alive the real tensors that entered it."""
    if isinstance(result, FakeActivation) and result.grad_fn is not None:
        return as_fake_activation(result.detach().requires_grad_(result.requires_grad))
    return tuple(map(_without_graph, result)) if type(result) is tuple else result
