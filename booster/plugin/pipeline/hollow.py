"""Fake tensors that stand for what lies on other stages, and that are asked for the same result only once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from booster.common.torch_internals.autograd_internals import without_subclasses
from booster.common.torch_internals.tensor_internals import FakeTensor, FakeTensorMode, version

Answers = dict[Any, Any]
_MOST = 4096
_PLAIN = (type(None), bool, int, float, complex, str, torch.dtype, torch.device, torch.layout, torch.memory_format)
_METADATA = (bool, int, torch.Size, torch.dtype, torch.device, torch.layout)


class HollowMode(FakeTensorMode):
    """Torch's mode of the hollow tensors of one model, which are made in it.

    answers: what functions of hollow tensors returned before in forward passes like this one; None: they are run. A function
    that mixes hollow with real tensors while `allow_non_fake_inputs` is False is always run, as it raises.
    watching: whether to note, in `wrote`, that a function changed a hollow tensor.
    """

    def __init__(self) -> None:
        super().__init__(allow_non_fake_inputs=True)
        self.answers: Answers | None = None
        self.watching = False
        self.wrote = False


class Hollow(FakeTensor):
    """A fake tensor: shape, dtype and device, no data.

    Running a function on fake tensors takes as long as fifty on small real ones. What comes out depends on what is in
    `_described` alone, unless somebody writes into a tensor; so a forward pass like the last one need not run it again.
    """

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        mode = _mode_of(args) or _mode_of(kwargs)
        with without_subclasses():
            if mode is not None and mode.watching:
                return hollow(_watched(mode, func, args, kwargs))
            answers = mode.answers if mode is not None and mode.allow_non_fake_inputs else None
            if answers is None:
                return hollow(func(*args, **kwargs))
            try:
                key = (func, _call_state(), _described(args), _described(kwargs))
            except _Indescribable:
                return hollow(func(*args, **kwargs))
            if key not in answers:
                result = hollow(func(*args, **kwargs))
                if not _lasts(result, args, kwargs):
                    return result
                if len(answers) >= _MOST:  # numbers that differ in every step
                    answers.clear()
                answers[key] = _without_graph(result)
            return answers[key]


class _Indescribable(Exception):
    """An argument on whose values the result may depend, or whose class is not known."""


def hollow(result: Any) -> Any:
    """Make the fake tensors in `result`, of a torch function, hollow, in place; returns it."""
    if type(result) is FakeTensor:
        result.__class__ = Hollow
    elif isinstance(result, (tuple, list)):
        for entry in result:
            hollow(entry)
    return result


def _mode_of(tree: Any) -> HollowMode | None:
    """Return the mode of the first hollow tensor among arguments."""
    for value in tree.values() if isinstance(tree, dict) else tree:
        if isinstance(value, Hollow):
            mode = value.fake_mode
            return mode if isinstance(mode, HollowMode) else None
        if isinstance(value, (tuple, list)) and (found := _mode_of(value)) is not None:
            return found
    return None


def _watched(mode: HollowMode, func: Any, args: Any, kwargs: Any) -> Any:
    if torch.is_inference_mode_enabled():  # which does not count what is written
        mode.wrote = True
        return func(*args, **kwargs)
    given = list(_hollows((*args, *kwargs.values())))
    before = [version(value) for value in given]
    result = func(*args, **kwargs)
    name = getattr(func, "__name__", "")
    mode.wrote |= name in ("__set__", "requires_grad_") or before != [version(value) for value in given]
    return result


def _hollows(values: Any) -> Iterator[Hollow]:
    for value in values:
        if isinstance(value, Hollow):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _hollows(value)


def _call_state() -> tuple[Any, ...]:
    """Return what else a result's dtype depends on, and whether it requires gradients."""
    cast = tuple(torch.get_autocast_dtype(kind) for kind in ("cpu", "cuda") if torch.is_autocast_enabled(kind))
    return cast, torch.is_grad_enabled(), torch.get_default_dtype()


def _described(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        kind = type(value)
        if kind is not Hollow and (value.numel() < 2 or kind not in (torch.Tensor, torch.nn.Parameter)):
            raise _Indescribable  # a length, perhaps
        shape, strides = value.shape, value.stride()
        return kind is Hollow, shape, strides, value.dtype, value.device, value.requires_grad
    if isinstance(value, _PLAIN) or value is Ellipsis:
        return type(value), value
    if type(value) in (tuple, list, torch.Size):
        return (type(value), *map(_described, value))
    if type(value) is slice:
        return slice, _described(value.start), _described(value.stop), _described(value.step)
    if type(value) is dict:
        return tuple((name, _described(entry)) for name, entry in value.items())
    raise _Indescribable


def _lasts(result: Any, args: Any, kwargs: Any) -> bool:
    """Return whether `result` may be given again: nobody will change it, and it is no argument."""
    if isinstance(result, Hollow):
        return not any(result is value for value in _hollows((*args, *kwargs.values())))
    if type(result) is tuple:
        return all(entry is None or _lasts(entry, args, kwargs) for entry in result)
    return isinstance(result, _METADATA)


def _without_graph(result: Any) -> Any:
    """Return `result` without its graph, which would keep real tensors that entered it."""
    if isinstance(result, Hollow):
        return hollow(result.detach().requires_grad_(result.requires_grad)) if result.grad_fn is not None else result
    return tuple(map(_without_graph, result)) if type(result) is tuple else result
