"""Fake tensors that take the place of what other stages compute, and a cache of what functions return for them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from booster.common.torch_internals.autograd_internals import without_subclasses
from booster.common.torch_internals.tensor_internals import FakeTensor, FakeTensorMode, version

Results = dict[Any, Any]
_MOST = 4096
_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
_METADATA = (bool, int, torch.Size, torch.dtype, torch.device, torch.layout)


class FakeActivationMode(FakeTensorMode):
    """Torch's mode of the fake activations of one model, which are made in it.

    Attributes:
        results: what functions of fake activations returned in earlier forward passes of the same shapes; None: they are run.
            While `allow_non_fake_inputs` is False functions are always run, because a mix of fake and real tensors raises then.
        watching: whether to record in `wrote` that a function changed a fake activation.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.results: Results | None = None
        self.watching = False
        self.wrote = False


class FakeActivation(FakeTensor):
    """A fake tensor: shape, dtype and device, no data.

    Running a function on fake tensors takes as long as fifty on small real ones. Its result depends only on what
    `_described` and `_call_state` return, unless a tensor is written to; so later forward passes read it from a cache.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        mode = next((each.fake_mode for each in _fakes_in((*args, *kwargs.values()))), None)
        if not isinstance(mode, FakeActivationMode):
            mode = None
        with without_subclasses():
            if mode is not None and mode.watching:
                return as_fake_activation(_run_watched(mode, func, args, kwargs))
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


def _run_watched(mode: FakeActivationMode, func: Any, args: Any, kwargs: Any) -> Any:
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
