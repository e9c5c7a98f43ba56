"""Modules that stay in float32 inside a half-precision model or region: which ones, and how they compute there.

Modules of a model that begin to compute in float32 during the run, because they overflowed again and again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from booster.common import arguments
from booster.common.arguments import as_fraction, listed
from booster.common.torch_internals.tensor_internals import BatchNorm
from booster.model.modules import matcher, parents, repeated_blocks, tensor_places
from booster.tensors.cast_regions import NewTensors, cast_floats, cast_noting_writes, disabled
from booster.tensors.trees import HALF_DTYPES
from booster.tensors.weak import ForwardDepth, ForwardProxy, as_weak, remove_forward, strip_weak

_MARK = "booster_keep_fp32"


@dataclass(frozen=True)
class Blocks:
    """Blocks of a model by their place, for `keep_fp32` and `keep`: the first and the last of those that repeat.

    first: how many at the beginning; below 1 which share of all blocks, rounded up.
    last: likewise at the end; `Blocks(last=0.15)` is the last 15 % of them.

    Blocks are what a transformers model lists as indivisible, of other models the modules in a list together with others of
    their class. Raises ValueError for a number that is not legal, and, where a model is known, for one without blocks.
    """

    first: float = 0
    last: float = 0

    def __post_init__(self) -> None:
        for name in ("first", "last"):
            value = arguments.number(name, getattr(self, name), least=0)
            if value > 1 and value != int(value):
                raise ValueError(
                    f"{name}={value} is not legal; pass a whole number of blocks, or a share of them below 1"
                )
        if not (self.first or self.last):
            raise ValueError("Blocks() selects nothing; pass first= or last=, a number of blocks or a share of them")

    def names_in(self, model: nn.Module) -> list[str]:
        """Return the names of the blocks of `model` that are meant."""
        names = repeated_blocks(model)
        if not names:
            raise ValueError(
                f"{self} selects nothing of {type(model).__name__}, which has no blocks that repeat; name its modules instead"
            )
        first, last = (
            math.ceil(as_fraction(n) * len(names)) if n < 1 else min(int(n), len(names))
            for n in (self.first, self.last)
        )
        return [*names[:first], *names[len(names) - last :]]


@dataclass(frozen=True)
class Ends:
    """The first and the last linear layer of a model, for `keep` among others: what keep=None means by itself."""

    def names_in(self, model: nn.Module) -> list[str]:
        """Return their names in `model`; a model that is a linear layer itself has none."""
        names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        return [name for name in dict.fromkeys([*names[:1], *names[-1:]]) if name]


KeepFP32 = type | str | Callable[[str, nn.Module], bool] | Blocks | Ends

AUTO = "auto"
"""The entry of keep_fp32 that has modules pinned during the run; see `FP16TorchMixedPrecision`."""


class KeptModules:
    """Which modules of `model` stay in float32 by `keep_fp32`, for a strategy that swaps or casts modules itself.

    keep_fp32: one or several of: a module type; a name or glob pattern matched against the whole qualified name, where
        `*` matches within one part and `**` across parts ("blocks.*.norm1"); a predicate `(name, module) -> bool`; `Blocks` and
        `Ends`, by their place.
    option: what a strategy calls its argument, for messages.
    names: of those that it selects; a module inside a selected one is not listed again.

    Raises ValueError for a type or pattern that selects nothing: a typo would change the precision silently.
    """

    def __init__(
        self, model: nn.Module, keep_fp32: KeepFP32 | Iterable[KeepFP32], *, option: str = "keep_fp32"
    ) -> None:
        arguments.instance("model", model, nn.Module, "a torch.nn.Module")
        arguments.text("option", option, "the name of the option, for messages")
        names: set[str] = set()
        for entry in normalise_keep_fp32(keep_fp32, option):
            chosen = _selected(model, entry) - {""}
            if not chosen and isinstance(entry, (str, type)):
                raise ValueError(
                    f"{option}={entry!r} selects no module of {type(model).__name__}; "
                    f"its top-level modules are {[name for name, _ in model.named_children()]}"
                )
            names |= chosen
        self.names = frozenset(name for name in names if names.isdisjoint(parents(name)))

    def contains(self, name: str) -> bool:
        """Return whether the module `name`, or one that it is in, stays in float32."""
        arguments.instance("name", name, str, "the qualified name of a module")
        return name in self.names or not self.names.isdisjoint(parents(name))


def normalise_keep_fp32(
    keep_fp32: KeepFP32 | Iterable[KeepFP32], option: str = "keep_fp32", *, auto: bool = False
) -> tuple[KeepFP32, ...]:
    """Return `keep_fp32` as a tuple; raises TypeError for an entry that is no type, string or callable. option: its name.

    auto: whether "auto" is legal, which is ValueError otherwise.
    """
    several = isinstance(keep_fp32, Iterable) and not isinstance(keep_fp32, (str, type, Mapping, torch.Tensor))
    entries: tuple[Any, ...] = tuple(keep_fp32) if several else (keep_fp32,)  # type: ignore[arg-type]
    for entry in entries:
        if isinstance(entry, type) and not issubclass(entry, nn.Module):
            raise TypeError(f"{option} names the type {entry.__name__}, which is not a torch.nn.Module")
        legal = isinstance(entry, (type, str, Blocks, Ends)) or callable(entry)
        if isinstance(entry, nn.Module) or not legal:
            raise TypeError(
                f"{option} holds {arguments.shown(entry)}; each entry must be a module type, a name pattern or a predicate "
                "(name, module) -> bool"
            )
        if isinstance(entry, str) and entry == AUTO and not auto:
            raise ValueError(
                f"{option}='auto' is for 'fp16' alone, FP16TorchMixedPrecision. Half weights lie in buckets with their "
                "masters, and in those of DistributedDataParallel, which have their dtypes from boost(), so no module can "
                "become float32 during the run; and bfloat16 overflows where float32 does. Find the modules before the run, "
                "with booster.numerics.auto_pins. For a module of the name auto, write '*auto'"
            )
    return entries


class Float32Forward(ForwardProxy):
    """The forward of one module, in float32: floating inputs cast up, autocast off until it returns.

    device_type: where autocast may be on; None where it never is. output_dtype: what floating outputs are cast to, for a
    module amid half-precision ones; None leaves them in float32, as autocast wants. weakly: they are float32 that is rounded to
    `output_dtype` where it meets such, and stays what it is where the model returns it; of the model that this tells of, and
    plain float32 where the module is called alone. See `tensors/weak.py`.

    A BatchNorm amid half-precision modules gets its half inputs as they are: torch's own reads them next to float32
    parameters, computes in float32 and rounds its output once, without two copies of all activations.

    It takes the place of the module's `forward`, and not of hooks around it: an exception or interrupt then cannot leave
    autocast off, and torch.compile traces it.
    """

    def __init__(
        self,
        forward: Callable[..., Any],
        device_type: str | None,
        output_dtype: torch.dtype | None = None,
        *,
        as_weak: ForwardDepth | None = None,
    ) -> None:
        super().__init__(forward)
        self._device_type = device_type
        self._output_dtype = output_dtype
        self.depth = as_weak
        self._takes_halves = output_dtype in HALF_DTYPES and _normalises_halves(forward)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module: Any = None if self._module is None else self._module()
        if self._takes_halves and module.weight.dtype is torch.float32:
            return cast_floats(self._function(module, *args, **kwargs), self._output_dtype)
        autocast_off = torch.autocast(self._device_type, enabled=False) if self._device_type else nullcontext()
        with autocast_off, disabled(NewTensors):
            if self.depth is not None:
                args, kwargs = strip_weak(args), strip_weak(kwargs)
            args, kwargs, writes = cast_noting_writes(lambda tree: cast_floats(tree, torch.float32), args, kwargs)
            output = self._function(*args, **kwargs) if module is None else self._function(module, *args, **kwargs)
        if writes is not None:
            writes.bring_back(lambda new: cast_floats(new, self._output_dtype))
        if self.depth is not None and self._output_dtype is not None:
            return as_weak(output, self._output_dtype) if self.depth.runs() else output
        return cast_floats(output, self._output_dtype)


def _normalises_halves(forward: Callable[..., Any]) -> bool:
    """Whether this is the own `forward` of a module of torch's that normalises half inputs by float32 parameters in float32."""
    module = getattr(forward, "__self__", None)
    if not isinstance(module, (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)) or not module.affine:
        return False
    # Also where `fully_shard` has given the module another class, which inherits torch's forward.
    return getattr(forward, "__func__", None) is BatchNorm.forward


def compute_in_fp32(
    module: nn.Module,
    device_type: str | None,
    output_dtype: torch.dtype | None = None,
    *,
    as_weak: ForwardDepth | None = None,
) -> None:
    """Make `module` compute in float32, in place; the arguments are those of `Float32Forward`."""
    # Around the original forward, not around the wrapper of the first call.
    # Doing it again replaces what was said the first time, it does not add to it.
    forward = module.forward.forward if isinstance(module.forward, Float32Forward) else module.forward
    module.forward = Float32Forward(forward, device_type, output_dtype, as_weak=as_weak)


def compute_as_before(module: nn.Module) -> None:
    """Undo `compute_in_fp32`, in place."""
    remove_forward(module, Float32Forward)


def set_fp32_attr_to_module(module: nn.Module) -> None:
    """Mark `module`: inside a half-precision model it keeps float32 parameters and computes in float32.

    With everything inside it. Mark modules before the model is given to `NaiveAMPModel` or `Booster.boost`.
    """
    arguments.instance("module", module, nn.Module, "a torch.nn.Module")
    setattr(module, _MARK, True)


def is_marked(name: str, module: nn.Module) -> bool:
    """A predicate for `keep_fp32`: modules that `set_fp32_attr_to_module` marked."""
    return getattr(module, _MARK, False)


def asked_for(model: nn.Module, dtype: torch.dtype) -> Callable[[str, nn.Module], bool]:
    """A predicate for `keep_fp32`: modules that classes of transformers list as float32 in a model of `dtype`."""
    # That is `_keep_in_fp32_modules` in float16, and `_keep_in_fp32_modules_strict` in both.
    lists = ["_keep_in_fp32_modules_strict"] + ["_keep_in_fp32_modules"] * (dtype == torch.float16)
    wished = {
        tuple(entry.split("."))
        for module in model.modules()
        for attribute in lists
        for entry in getattr(module, attribute, None) or ()
        if isinstance(entry, str)
    }

    def selects(name: str, module: nn.Module) -> bool:
        parts = tuple(name.split("."))
        if any(parts[-len(each) :] == each for each in wished):
            return True
        is_leaf = next(module.children(), None) is None
        # A name there is part of the name of a module, or that of a parameter of one without children, which then is kept as a
        # whole.
        return is_leaf and any(
            (*parts, own)[-len(each) :] == each
            for own, param in module._parameters.items()
            if param is not None
            for each in wished
        )

    return selects


def selected_buffers(model: nn.Module, entries: KeepFP32 | Iterable[KeepFP32], option: str) -> frozenset[str]:
    """Return the names of the float buffers of `model` that `entries` select: by name, or with the module that holds them.

    option: what the argument is called, for messages. Raises ValueError for a name or type that selects none.
    """
    floats = [name for name, buffer in model.named_buffers(remove_duplicate=False) if buffer.is_floating_point()]
    found: set[str] = set()
    for entry in normalise_keep_fp32(entries, option):
        modules = _selected(model, entry)
        matches = matcher(entry) if isinstance(entry, str) else modules.__contains__
        chosen = {name for name in floats if matches(name) or "" in modules or not modules.isdisjoint(parents(name))}
        if not chosen and isinstance(entry, (str, type)):
            raise ValueError(
                f"{option}={entry!r} selects no float buffer of {type(model).__name__}, which has "
                f"{listed(floats) if floats else 'none'}"
            )
        found |= chosen
    return frozenset(found)


def is_batch_norm(name: str, module: nn.Module) -> bool:
    """A predicate for `keep_fp32`: BatchNorm of any dimension: half precision would spoil its running statistics.

    name: of the module in the model; it does not matter.
    module: what is asked about.
    """
    return isinstance(module, BatchNorm)


def check_untied(model: nn.Module, names: Iterable[str]) -> None:
    """Raise ValueError if a module of `names` shares a parameter or buffer with one that stays in half precision."""
    # A shared tensor has one dtype, and its two modules would want two.
    kept = {id(model.get_submodule(name)) for name in names}
    for tensor, places in tensor_places(model, buffers=True).items():
        by_side = {any(id(module) in kept for module in place.path): place.name for place in reversed(places)}
        if tensor.is_floating_point() and len(by_side) == 2:
            raise ValueError(
                f"{by_side[True]} is in a module that is kept in float32, and is the same tensor as {by_side[False]}, which is "
                "not; keep both of its modules in float32 (keep_fp32=...), or neither"
            )


def _selected(model: nn.Module, entry: KeepFP32) -> set[str]:
    """The names of the modules of `model`, itself among them, that one entry means."""
    if isinstance(entry, (Blocks, Ends)):
        return set(entry.names_in(model))
    if isinstance(entry, type):
        return {name for name, module in model.named_modules() if isinstance(module, entry)}
    if isinstance(entry, str):
        return set(filter(matcher(entry), dict(model.named_modules())))
    return {name for name, module in model.named_modules() if entry(name, module)}


SKIPS = 2
"""So many skipped steps that begin in one module pin it."""
WINDOW = 100
"""Steps that these lie within, at most."""


class RunPins:
    """Counts the skips of one boosted model by the module that each began in, and pins those that have too many.

    For models under autocast, with weights in float32 anyway: a pin changes what is computed in, from the next forward
    pass on. model: the user's. device_type: where autocast is on. names: pinned so far, in order.
    """

    def __init__(self, model: nn.Module, device_type: str) -> None:
        self.names: list[str] = []
        self._model, self._device_type = model, device_type
        self._skips: dict[str, list[int]] = {}

    def count_skip(self, name: str, step: int) -> bool:
        """Take note that the skip of `step` began in the module `name`; returns whether that pins it now."""
        if not self.can_pin(name):
            return False
        steps = [each for each in self._skips.get(name, []) if step - WINDOW < each < step]
        self._skips[name] = [*steps, step]
        if len(self._skips[name]) < SKIPS:
            return False
        self._pin(name)
        return True

    def can_pin(self, name: str) -> bool:
        """Return whether `name` is a module inside the model that is not pinned yet, nor is what holds it."""
        modules = dict(self._model.named_modules())
        return bool(name) and name in modules and not {name, *parents(name)} & {*self.names}

    def missing(self, state: Mapping[str, Any]) -> list[str]:
        """Return the modules of `state`, which `state_dict` gave, that the model does not have."""
        modules = dict(self._model.named_modules())
        return [name for name in state.get("names", []) if name not in modules]

    def state_dict(self) -> dict[str, Any]:
        """What is pinned, and the skips that count towards the next pin, as plain containers."""
        return {"names": list(self.names), "skips": {name: list(steps) for name, steps in self._skips.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Pin what was pinned when `state` was taken, and nothing else. An empty one: nothing was."""
        for name in self.names:
            compute_as_before(self._model.get_submodule(name))
        self.names = []
        for name in state.get("names", []):
            self._pin(arguments.text("the name of a pinned module", name))
        self._skips = {name: list(steps) for name, steps in state.get("skips", {}).items()}

    def _pin(self, name: str) -> None:
        compute_in_fp32(self._model.get_submodule(name), self._device_type)
        self.names.append(name)
        self._skips.pop(name, None)
