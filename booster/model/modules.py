"""What is known of a user's modules: the model inside its wrappers, names and name patterns, tied tensors, repeated blocks, and
the order in which a forward uses its children, read from its source.

Models without values are here too: copies on the meta device, and memory and initial values for what is there.
"""

from __future__ import annotations

import ast
import copy
import inspect
import re
import sys
import textwrap
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from booster.common.arguments import listed
from booster.number_formats.scaling import ScaledTensor


class LinearProxy(nn.Linear):
    """Base of the proxies for an `nn.Linear` that multiply in another way; plugins shard them as they shard an `nn.Linear`.

    Attributes:
        arrived: returns the weight that is passed to it in e4m3, m x n under one scale, if a plugin gathered it so and it is
            unchanged since; otherwise None. Plugins set it; copies have none.
        in_high_precision: whether it multiplies as the `nn.Linear` itself, because that was measured to be faster.
    """

    arrived: Callable[[torch.Tensor], ScaledTensor | None] | None = None
    in_high_precision = False


class PlacedModule(nn.Module):
    """Base of what a plugin wraps around the user's model, which is `module`; names are those of the user's model.

    A subclass defines `forward`, which calls `self.module`. `Plugin.place` returns it, and everything in this library
    looks through it: parameters, state dicts and attributes are those of the model. Other wrappers, but for
    `DistributedDataParallel` and those of `torch.compile`, would give parameters other names, and `boost` refuses them.

    Attributes:
        is_partial: whether other ranks hold layers that this one lacks.
    """

    module: nn.Module
    is_partial = False

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def own_parameters(self) -> dict[str, torch.Tensor]:
        """Return the parameters on this rank, by their first names in the user's whole model."""
        return dict(bare(self.module).named_parameters())


def bare(module: nn.Module) -> nn.Module:
    """Return the module inside all wrappers of plugins and `torch.compile`: the one with the names that users know."""
    return uncompiled(unwrap_placed(module))


def uncompiled(module: nn.Module) -> nn.Module:
    """Return the module inside all wrappers of `torch.compile`; anything else as it is."""
    # Not by attribute, because a compiled module passes attributes on to the model inside it.
    while isinstance(inner := getattr(module, "_modules", {}).get("_orig_mod"), nn.Module):
        module = inner
    return module


def wait_for_weights(placed: nn.Module) -> None:
    """Wait for weights of a placed module that an optimizer's step left on their way from other ranks."""
    # By the type: an attribute of the wrapped model may have that name.
    wait = getattr(type(placed), "wait_for_weights", None)
    if wait is not None:
        wait(placed)


def unwrap_placed(module: nn.Module) -> nn.Module:
    """Return the user's model inside what a plugin wrapped around it."""
    while is_placed(module):  # a plugin may wrap more than once
        module = module.module  # type: ignore[assignment]
    return module


def is_placed(module: Any) -> bool:
    """Return whether `module` is what a plugin wrapped around another."""
    return isinstance(module, (nn.parallel.DistributedDataParallel, PlacedModule))


def is_fully_sharded(module: nn.Module) -> bool:
    """Return whether torch's `fully_shard` divides `module` or a part of it."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    return fsdp is not None and any(isinstance(child, fsdp.FSDPModule) for child in module.modules())


def matcher(pattern: str) -> Callable[[str], bool]:
    """Return a predicate: does `pattern` match the whole name? `*` matches within one part of it, `**` across parts."""
    parts = (re.escape(part).replace(r"\*", "[^.]*") for part in pattern.split("**"))
    expression = re.compile(".*".join(parts))
    return lambda name: expression.fullmatch(name) is not None


def parents(name: str) -> Iterator[str]:
    """Yield the names of the modules around `name`, outermost first, without the model itself, which has none."""
    parts = name.split(".")
    return (".".join(parts[:i]) for i in range(1, len(parts)))


NEVER_CALLED = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)  # they only hold others


def repeated_blocks(model: nn.Module) -> list[str]:
    """Return the names of the repeated blocks of `model`.

    In other models they are the outermost modules with children and parameters of which a Sequential, ModuleList or ModuleDict
    has several of one class.
    """
    # A transformers model lists the classes of its indivisible modules.
    listed = set(getattr(model, "_no_split_modules", None) or ())
    names = [name for name, module in model.named_modules() if name and type(module).__name__ in listed]
    return names or list(_repeated(model, ""))


def _repeated(parent: nn.Module, path: str) -> Iterator[str]:
    for name, child in parent.named_children():
        is_listed = isinstance(parent, (nn.Sequential, nn.ModuleList, nn.ModuleDict))
        is_block = (
            not isinstance(child, NEVER_CALLED)
            and next(child.children(), None) is not None
            and next(child.parameters(), None) is not None
        )
        if is_listed and is_block and sum(type(other) is type(child) for other in parent._modules.values()) > 1:
            yield f"{path}{name}"
        else:
            yield from _repeated(child, f"{path}{name}.")


class TensorPlace(NamedTuple):
    """One name of a tensor in a model; a tied tensor has several.

    Attributes:
        name: qualified, in the model.
        path: the modules from the model down to the one that holds the tensor.
        own: the name in that module.
    """

    name: str
    path: tuple[nn.Module, ...]
    own: str

    @property
    def holder(self) -> nn.Module:
        """The module that holds it."""
        return self.path[-1]


def tensor_places(model: nn.Module, *, buffers: bool = False) -> dict[torch.Tensor, list[TensorPlace]]:
    """Return every parameter of `model`, and with `buffers` every buffer, with all its places, in the model's order.

    A tensor of a module that is registered under two names has two places, too.
    """
    places: dict[torch.Tensor, list[TensorPlace]] = {}
    for tensor, place in _visit(model, "", (model,), buffers):
        places.setdefault(tensor, []).append(place)
    return places


def parameter_names(model: nn.Module) -> dict[torch.Tensor, list[str]]:
    """Return all names of each parameter of `model`, in the order in which a state dict is loaded."""
    names: dict[torch.Tensor, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(param, []).append(name)
    return names


def _visit(
    module: nn.Module, prefix: str, path: tuple[nn.Module, ...], buffers: bool
) -> Iterator[tuple[torch.Tensor, TensorPlace]]:
    tensors = (*module._parameters.items(), *(module._buffers.items() if buffers else ()))
    for own, tensor in tensors:
        if tensor is not None:
            yield tensor, TensorPlace(f"{prefix}{own}", path, own)
    for name, child in module._modules.items():
        if child is not None:
            yield from _visit(child, f"{prefix}{name}.", (*path, child), buffers)


def fast_path_changes_dtype(model: nn.Module, *, casts: bool) -> bool:
    """Return whether torch's fused inference path would evaluate layers of `model` in another precision than they train in.

    casts: whether the precision casts what functions read, so that the dtype of the weights is not that of the products.
    """
    # That path of the transformer layers reads weights past the modules that hold them.
    return any(
        casts or any(isinstance(child, LinearProxy) or "forward" in child.__dict__ for child in module.modules())
        for module in model.modules()
        if isinstance(module, (nn.TransformerEncoderLayer, nn.MultiheadAttention))
    )


@contextmanager
def fast_path_off() -> Iterator[None]:
    """Return a context without the fused inference path of torch's transformer layers."""
    enabled = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(enabled)


# torch's own attention and some libraries spell it with an underscore.
_INITIALISERS = ("reset_parameters", "_reset_parameters")


def copy_on_meta(
    model: nn.Module, purpose: str, *, buffer: Callable[[torch.Tensor], torch.Tensor] | None = None
) -> nn.Module:
    """Return a copy of `model` with its parameters on the meta device; tied tensors stay tied, hooks are shared.

    buffer: makes the copy of a buffer; None: on the meta device too. purpose: what needs the copy, for the ValueError of a
    model that cannot be copied.
    """
    memo: dict[int, Any] = {id(p): nn.Parameter(_on_meta(p), p.requires_grad) for p in model.parameters()}
    # `deepcopy` looks into the memo first: tensors get no copy of their numbers.
    memo |= {id(each): (buffer or _on_meta)(each) for each in model.buffers()}
    for module in model.modules():
        for value in module.__dict__.values():
            if isinstance(value, (dist.ProcessGroup, torch.Generator)):
                memo[id(value)] = value  # these do not copy, and the copy may use the same
    try:
        return copy.deepcopy(model, memo)
    except Exception as error:
        raise ValueError(
            f"{type(model).__name__} cannot be copied, which {purpose} needs: {error}. Keep what does not copy out of the "
            "model's attributes"
        ) from error


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta")


def check_meta(module: nn.Module) -> None:
    """Raise ValueError if a module in `module` has parameters or buffers on the meta device, and no method that sets them."""
    without = [
        name or type(child).__name__
        for name, child in module.named_modules()
        if any(tensor.is_meta for tensor in _own_tensors(child)) and _initialiser(child) is None
    ]
    if without:
        raise ValueError(
            f"these modules have parameters or buffers on the meta device, but no reset_parameters() that would give them "
            f"values: {listed(without)}. Define it, where it sets every parameter and buffer of its module, or build the model "
            "on the CPU"
        )


def materialise(modules: Iterable[nn.Module], device: torch.device) -> None:
    """Give memory on `device` and initial values to what `modules`, without their children, hold on the meta device.

    Tied parameters stay tied if all their modules are among `modules`. Call `check_meta` first. Raises ValueError for a
    parameter or buffer that the method did not set.
    """
    done: dict[torch.Tensor, torch.Tensor] = {}
    waiting = [module for module in modules if any(tensor.is_meta for tensor in _own_tensors(module))]
    # Values are those of each module's `reset_parameters()`, called children first, as constructors do.
    for module in waiting:
        replace_tensors(module, lambda t: _unset(torch.empty_like(t, device=device)) if t.is_meta else t, done)
    made = {id(new) for old, new in done.items() if new is not old}
    # All tensors first: an initialiser may read those of modules inside.
    for module in waiting:
        initialise = _initialiser(module)
        if initialise is not None:
            with torch.no_grad():
                getattr(module, initialise)()
    left = [
        f"{name} of {type(module).__name__}"
        for module in waiting
        for name, tensor in (*module._parameters.items(), *module._buffers.items())
        if tensor is not None and id(tensor) in made and _is_unset(tensor)
    ]
    if left:
        raise ValueError(
            f"reset_parameters() left parameters or buffers that were on the meta device without values: {listed(left)}. Have "
            "it set every parameter and buffer of its module, as the constructor does, or build the model on the CPU"
        )


def replace_tensors(
    module: nn.Module, replacement: Callable[[torch.Tensor], torch.Tensor], done: dict[torch.Tensor, torch.Tensor]
) -> None:
    """Put what `replacement` makes of each parameter and buffer of `module` itself in its place; parameters stay parameters.

    done: replacements by tensor; one dict for all modules of a model, so that tied tensors stay tied.
    """
    stores: tuple[dict[str, Any], ...] = (module._parameters, module._buffers)
    for store in stores:
        for name, tensor in store.items():
            if tensor is None:
                continue
            if tensor not in done:
                new = replacement(tensor)
                is_param = isinstance(tensor, nn.Parameter) and new is not tensor
                done[tensor] = nn.Parameter(new, tensor.requires_grad) if is_param else new
            store[name] = done[tensor]


def materialise_on(module: nn.Module, device: torch.device) -> nn.Module:
    """Move `module` to `device`, where parameters and buffers that were on the meta device get memory and values.

    Raises ValueError as `check_meta`, with nothing changed.
    """
    inner = bare(module)
    check_meta(inner)
    materialise(reversed(list(inner.modules())), device)
    return module.to(device)


@torch.no_grad()
def _unset(tensor: torch.Tensor) -> torch.Tensor:
    """Fill `tensor` with values that no initialiser sets, and return it: NaN, the least whole number, alternating bools."""
    if tensor.is_floating_point() or tensor.is_complex():
        return tensor.copy_(torch.full_like(tensor, torch.nan, dtype=_wide(tensor)))
    if tensor.dtype == torch.bool:
        return tensor.copy_(
            (torch.arange(tensor.numel(), dtype=torch.int64, device=tensor.device) % 2 == 0).view(tensor.shape)
        )
    return tensor.fill_(torch.iinfo(tensor.dtype).max if tensor.dtype == torch.uint8 else torch.iinfo(tensor.dtype).min)


@torch.no_grad()
def _is_unset(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` is as `_unset` made it; of floats, whether any element is."""
    if tensor.is_floating_point() or tensor.is_complex():
        return bool(tensor.to(_wide(tensor)).isnan().any())
    return tensor.numel() > 1 and torch.equal(tensor, _unset(torch.empty_like(tensor)))


def _wide(tensor: torch.Tensor) -> torch.dtype:
    return torch.float32 if tensor.dtype.itemsize == 1 else tensor.dtype  # float8 has few functions


def _own_tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _initialiser(module: nn.Module) -> str | None:
    return next((name for name in _INITIALISERS if callable(getattr(module, name, None))), None)


_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.GeneratorExp, ast.DictComp)


def names_in_forward(module: nn.Module) -> list[str]:
    """Return the attributes that the forward of `module` reads, of whatever object, in the order in which they are used.

    What is called is used after its arguments are. Methods of the module's class are entered where they are named, each once.
    """
    # A forward of the instance is that of the user, or of a library such as accelerate, and is read too.
    forward = module.__dict__.get("forward", type(module).forward)
    # Nothing is known, and the list is empty, for a forward without source.
    return list(_names_in(forward, type(module), {"forward"}))


def side_of(child: str, row: str, names: list[str]) -> int:
    """Return -1 if `names` have `child` before `row` only, 1 if after its first place only, 0 if the source does not say."""
    if child not in names or row not in names:
        return 0
    places = [place for place, name in enumerate(names) if name == child]
    start = names.index(row)
    return -1 if places[-1] < start else 1 if places[0] > start else 0


def parsed(function: Callable[..., Any]) -> list[ast.stmt]:
    """Return the body of a Python function, parsed; empty where its source is not to be had."""
    try:
        (definition,) = ast.parse(textwrap.dedent(inspect.getsource(inspect.unwrap(function)))).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return []
    return getattr(definition, "body", [])


def _names_in(function: Callable[..., Any], cls: type, entered: set[str]) -> Iterator[str]:
    for statement in parsed(function):
        yield from _names(statement, cls, entered)


def _names(node: ast.AST, cls: type, entered: set[str]) -> Iterator[str]:
    for child in _in_order(node):
        yield from _names(child, cls, entered)
    if isinstance(node, ast.Attribute):
        yield node.attr
        own = getattr(cls, node.attr, None)
        if inspect.isfunction(own) and node.attr not in entered and node.attr not in vars(nn.Module):
            entered.add(node.attr)
            yield from _names_in(own, cls, entered)


def _in_order(node: ast.AST) -> list[ast.AST]:
    """The children of `node` as they are evaluated."""
    if isinstance(node, ast.Call):
        return [*node.args, *node.keywords, node.func]
    children = list(ast.iter_child_nodes(node))
    if isinstance(node, _COMPREHENSIONS):
        return [*node.generators, *(child for child in children if child not in node.generators)]
    if isinstance(node, ast.Assign):
        return [node.value, *node.targets]
    return children
