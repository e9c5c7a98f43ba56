"""A module around the user's model that shows the model's own attributes, names and state dict."""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NoReturn

import torch
from torch import nn

from booster.common import arguments
from booster.common.misuse import called_by, called_from
from booster.common.torch_internals.tensor_internals import SWAPS_TENSORS
from booster.model.modules import bare, is_fully_sharded, is_placed, unwrap_placed, wait_for_weights
from booster.model.params import is_part

_logger = logging.getLogger(__name__)
_KNOW_PARTS = ("torch.distributed.checkpoint", "booster.")
_WALKS = ("torch.nn.modules.module",)  # by which a module around the wrapper asks it


class TransparentModule(nn.Module):
    """A wrapper that differs from the model inside it by its type alone.

    `module` is what forward calls: the user's model, perhaps inside a plugin's wrapper. Attributes, `state_dict` keys,
    parameter and module names are those of the user's model, whatever wraps it. Attributes are set on the user's model.

    A subclass defines `forward`, and may wrap the user's methods that are called through it: see `_wrap_method`.
    """

    _told_parts = False

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        # Torch's functions of reparametrization write into this dict: it is where they can be refused.
        self.__dict__["_parameters"] = _NoParameters()
        self.module = module
        nn.Module.register_load_state_dict_pre_hook(self, _add_prefix)

    def unwrap(self) -> nn.Module:
        """The user's model, as it was given to `boost`; a `torch.compile` wrapper of the user's stays."""
        wait_for_weights(self.module)
        return unwrap_placed(self.module)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """The state dict of the user's model, keys as the user knows them.

        Where ranks divide parameters, it has this rank's parts, as DTensors, and one WARNING says so, unless it is
        torch.distributed.checkpoint or this library that asks, which know of them.
        """
        state = self._whole().state_dict(*args, **kwargs)
        if not self._told_parts and not called_from(_KNOW_PARTS, through=_WALKS) and any(map(is_part, state.values())):
            # Once: a loop that logs or averages weights asks in every step.
            self.__dict__["_told_parts"] = True
            _logger.warning(
                "state_dict() of a model that is divided among ranks has this rank's shard of each weight: a torch.save of it "
                "on one rank would write that part alone. Write whole weights with b.save_model(model, path), or a "
                "checkpoint with b.save, which all ranks call; get_model_state_dict of "
                "torch.distributed.checkpoint.state_dict makes whole tensors"
            )
        return state

    def zero_grad(self, *args: Any, **kwargs: Any) -> None:
        """As torch, through a plugin's wrapper, which may keep its own gradients; also between forward and backward. A class
        that overrides it is given its own arguments."""
        module = bare(self.module)
        given = inspect.signature(module.zero_grad).bind(*args, **kwargs).arguments
        set_to_none = given.get("set_to_none", True)
        arguments.flag("set_to_none", set_to_none)
        if self.module is not module:
            self.module.zero_grad(set_to_none)
        module.zero_grad(*args, **kwargs)
        if is_fully_sharded(module):
            from booster.shards.fully_sharded import (
                clear_unsharded_grads,  # which imports FSDP, a second for no use elsewhere
            )

            clear_unsharded_grads(module, set_to_none)

    def load_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Load into the user's model; arguments are those of that model's load_state_dict."""
        return self._whole().load_state_dict(*args, **kwargs)

    # parameters(), modules() and buffers() of nn.Module follow from this one.
    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        yield from self._whole().named_modules(memo, prefix, remove_duplicate)

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        yield from self._whole().named_children()

    # What follows recurses through children() in nn.Module, and would miss the module itself.
    def train(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own `train`, whatever arguments its class gives it; returns the wrapper where that returns the model."""
        return self._set_mode("train", args, kwargs)

    def eval(self, *args: Any, **kwargs: Any) -> Any:
        """The model's own `eval`, likewise."""
        return self._set_mode("eval", args, kwargs)

    def _set_mode(self, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        own = bare(self.module)
        returned = getattr(own, name)(*args, **kwargs)
        around = self.module
        while around is not own:  # what plugins wrapped around it
            around.training = own.training
            around = next(around.children())
        return self if returned is own else returned

    def apply(self, fn: Callable[[nn.Module], None]) -> TransparentModule:
        self._whole().apply(arguments.function("fn", fn, "a function of a module"))
        return self

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> TransparentModule:
        wait_for_weights(self.module)
        self.module._apply(
            fn, *(() if recurse else (False,))
        )  # a class may have an _apply of one argument, as metrics do
        return self

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name == "module":
                raise
        if not torch.compiler.is_compiling() and called_by(_REWRITING, through=_READERS):
            _refuse_rewriting()
        value = getattr(bare(self.module), name)
        if callable(value) or isinstance(value, (torch.Tensor, Iterable)):  # what may hold or read weights
            wait_for_weights(self.module)
        if callable(value) and getattr(value, "__self__", None) is bare(self.module):
            return self._wrap_method(value, name)
        return value

    def __setattr__(self, name: str, value: Any) -> None:
        placed = self.__dict__.get("_modules", {}).get("module")
        if placed is None or name == "module" or name in self.__dict__ or hasattr(type(self), name):
            super().__setattr__(name, value)
        elif name in bare(placed)._parameters and called_from((SWAPS_TENSORS,), through=_WALKS):
            bare(placed)._parameters[name] = (
                value  # as functional_call does with modules that have the parameter themselves
            )
        else:
            setattr(bare(placed), name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            super().__delattr__(name)
        else:
            delattr(bare(self.module), name)

    def __dir__(self) -> list[str]:
        return sorted({*super().__dir__(), *dir(bare(self.module))})

    @property
    def training(self) -> bool:
        """The model's own flag, which the model may change without the wrapper."""
        return bare(self.module).training

    @training.setter
    def training(self, mode: bool) -> None:
        if "module" in self.__dict__.get("_modules", {}):  # nn.Module.__init__ sets it first
            bare(self.module).training = mode

    def register_buffer(self, name: str, tensor: torch.Tensor | None, persistent: bool = True) -> None:
        """Register with the user's model."""
        if tensor is not None:
            arguments.instance("tensor", tensor, torch.Tensor, "a tensor or None")
        bare(self.module).register_buffer(_own_name(name), tensor, arguments.flag("persistent", persistent))

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Register with the user's model."""
        if param is not None:
            arguments.instance("param", param, nn.Parameter, "an nn.Parameter or None")
        bare(self.module).register_parameter(_own_name(name), param)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """Add to the user's model."""
        if module is not None:
            arguments.instance("module", module, nn.Module, "a torch.nn.Module or None")
        bare(self.module).add_module(_own_name(name), module)

    def __len__(self) -> int:
        return len(bare(self.module))  # type: ignore[arg-type]

    def __getitem__(self, index: Any) -> Any:
        return self._whole()[index]  # type: ignore[index]

    def __iter__(self) -> Iterator[Any]:
        return iter(self._whole())  # type: ignore[call-overload]

    def __contains__(self, item: Any) -> bool:
        return item in bare(self.module)  # type: ignore[operator]

    def __bool__(self) -> bool:
        return True

    def _whole(self) -> nn.Module:
        """The user's model, with its weights there."""
        wait_for_weights(self.module)
        return bare(self.module)

    def _wrap_method(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        """What the attribute `name`, a bound method of the user's model, is to those who read it through the wrapper."""
        return method


def _as_overridden(name: str, default: Callable[..., Any]) -> Callable[..., Any]:
    """Return a method that is the user's own where the model overrides `nn.Module`'s method `name`, and else `default`."""
    of_torch = getattr(nn.Module, name)

    @functools.wraps(default)
    def method(self: TransparentModule, *args: Any, **kwargs: Any) -> Any:
        own = bare(self.module)
        if name not in own.__dict__ and getattr(type(own), name) is of_torch:
            return default(self, *args, **kwargs)
        returned = getattr(self._whole(), name)(*args, **kwargs)
        return self if returned is own else returned

    return method


# The others do more than the user's method: they switch what plugins wrapped around it, or clear what plugins keep.
# Torch calls those of the extra state by itself, and asks by identity whether a class has them.
_MORE_THAN_OWN = {"forward", "train", "eval", "state_dict", "load_state_dict", "zero_grad", "extra_repr"}
_MORE_THAN_OWN |= {"get_extra_state", "set_extra_state"}
for _name, _method in inspect.getmembers(TransparentModule, inspect.isfunction):
    if not _name.startswith("_") and _name not in _MORE_THAN_OWN and hasattr(nn.Module, _name):
        setattr(TransparentModule, _name, _as_overridden(_name, _method))


class _NoParameters(dict[str, Any]):
    """The parameters of a wrapper: none. Taking one by its name, as torch's old spectral_norm does, raises with the reason."""

    def __missing__(self, name: str) -> Any:
        if not torch.compiler.is_compiling() and called_by(_REWRITING, through=_READERS):
            _refuse_rewriting()
        raise KeyError(name)


# What puts other parameters in the place of a module's own, and reads the module before it changes anything.
_REWRITING = {
    ("torch.nn.utils.parametrize", "register_parametrization"),
    ("torch.nn.utils.parametrize", "remove_parametrizations"),
    ("torch.nn.utils.parametrizations", "orthogonal"),
    ("torch.nn.utils.weight_norm", "apply"),
    ("torch.nn.utils.spectral_norm", "apply"),
    ("torch.nn.utils.prune", "apply"),
}


_READERS = ("torch.nn.utils.", "torch.nn.modules.module")


def _refuse_rewriting() -> NoReturn:
    raise RuntimeError(
        "a boosted model was given to a function of torch.nn.utils that puts other parameters in the place of its; the "
        "optimizer, master weights and checkpoints know them as they were when it was boosted. Do it to your own model, before "
        "its optimizer is made and before boost: weight_norm(net); optimizer = AdamW(net.parameters()); "
        "b.boost(net, optimizer)"
    )


def refuse_torchscript(module: Any, noun: str) -> None:
    """Raise TypeError if `module` is TorchScript: its forward was compiled as it was, and cannot be given other dtypes."""
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError(
            f"the {noun} is a TorchScript module, compiled by torch.jit.script or torch.jit.trace, which a precision or a "
            f"plugin cannot change any more; pass the {noun} as it was before, compile it with torch.compile if it should be "
            "faster, and script it when it is trained"
        )


def _own_name(name: Any) -> str:
    return arguments.text("name", name, "the name of an attribute")


def _wrapper_prefix(module: nn.Module) -> str:
    prefix = "module."
    inner = module._modules["module"]
    while inner is not bare(inner):  # type: ignore[arg-type]
        name = "module" if is_placed(inner) else "_orig_mod"
        prefix += f"{name}."
        inner = inner._modules[name]  # type: ignore[union-attr]
    return prefix


def _add_prefix(module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
    # Only met when the wrapper is a child of another module that loads; torch then walks into `module`.
    long = prefix + _wrapper_prefix(module)
    for key in [key for key in state_dict if key.startswith(prefix)]:
        state_dict[long + key[len(prefix) :]] = state_dict.pop(key)
