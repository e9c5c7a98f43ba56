"""Parameters on the meta device, which have a shape and no values: giving them memory and initial values."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from booster.common.text import listed
from booster.model.modules import bare

# torch's own attention and some libraries spell it with an underscore.
_INITIALISERS = ("reset_parameters", "_reset_parameters")


def check_meta(module: nn.Module) -> None:
    """Raise ValueError if a module inside `module` has parameters or buffers on the meta device, and cannot set them."""
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
    """Give what `modules` themselves, not their children, hold on the meta device memory on `device` and initial values.

    Values are those of each module's `reset_parameters()`, called children first, as constructors do. Tied parameters
    stay tied where all their modules are among `modules`. Call `check_meta` first. Raises ValueError for a parameter or
    buffer that it left as it was.
    """
    memo: dict[int, torch.Tensor] = {}
    held: list[torch.Tensor] = []  # so that no id is used again meanwhile
    waiting = [module for module in modules if any(tensor.is_meta for tensor in _own_tensors(module))]
    for module in waiting:
        for store in (module._parameters, module._buffers):
            for name, tensor in store.items():
                if tensor is None or not tensor.is_meta:
                    continue
                held.append(tensor)
                if id(tensor) not in memo:
                    empty = _unset(torch.empty_like(tensor, device=device))
                    is_param = isinstance(tensor, nn.Parameter)
                    memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_param else empty
                store[name] = memo[id(tensor)]  # type: ignore[assignment]
    made = set(map(id, memo.values()))
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


def arrive(module: nn.Module, device: torch.device) -> nn.Module:
    """Move `module` to `device`, where parameters and buffers that were on the meta device get memory and values.

    Raises ValueError as `check_meta`, with nothing changed.
    """
    inner = bare(module)
    check_meta(inner)
    materialise(reversed(list(inner.modules())), device)
    return module.to(device)


@torch.no_grad()
def _unset(tensor: torch.Tensor) -> torch.Tensor:
    """Fill `tensor` with what nobody sets: NaN, the least whole number, or True and False in turns; and return it."""
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
