"""Models without values: copies of a model on the meta device, and giving memory and initial values to what is there."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from booster.common.text import listed
from booster.model.modules import bare

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
    memo: dict[int, torch.Tensor] = {}
    held: list[torch.Tensor] = []  # keeps ids in `memo` from being used again
    waiting = [module for module in modules if any(tensor.is_meta for tensor in _own_tensors(module))]
    # Values are those of each module's `reset_parameters()`, called children first, as constructors do.
    for module in waiting:
        for store in (module._parameters, module._buffers):
            for name, tensor in store.items():
                if tensor is None or not tensor.is_meta:
                    continue
                held.append(tensor)
                if id(tensor) not in memo:
                    empty = _unset(torch.empty_like(tensor, device=device))
                    memo[id(tensor)] = (
                        nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
                    )
                store[name] = memo[id(tensor)]  # type: ignore[assignment]
    made = set(map(id, memo.values()))
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
