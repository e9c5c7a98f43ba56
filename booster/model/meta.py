"""Parameters on the meta device, which have a shape and no values: giving them memory and initial values."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from booster.ground.text import listed
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
    stay tied where all their modules are among `modules`. Call `check_meta` first.
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
                    empty = torch.empty_like(tensor, device=device)
                    is_param = isinstance(tensor, nn.Parameter)
                    memo[id(tensor)] = nn.Parameter(empty, tensor.requires_grad) if is_param else empty
                store[name] = memo[id(tensor)]  # type: ignore[assignment]
    for module in waiting:
        initialise = _initialiser(module)
        if initialise is not None:
            with torch.no_grad():
                getattr(module, initialise)()


def arrive(module: nn.Module, device: torch.device) -> nn.Module:
    """Move `module` to `device`, where parameters and buffers that were on the meta device get memory and values.

    Raises ValueError as `check_meta`, with nothing changed.
    """
    inner = bare(module)
    check_meta(inner)
    materialise(reversed(list(inner.modules())), device)
    return module.to(device)


def _own_tensors(module: nn.Module) -> list[torch.Tensor]:
    return [*module.parameters(recurse=False), *module.buffers(recurse=False)]


def _initialiser(module: nn.Module) -> str | None:
    return next((name for name in _INITIALISERS if callable(getattr(module, name, None))), None)
