"""One sum of gradients for the column-wise layers of a module that read the same input, such as queries, keys and values."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ParallelStyle

from booster.plugin.tensor_parallel import boundary
from booster.tensors.weak import InPlaceOfForward


class SharedInput:
    """The inputs that children of a module were given while its forward runs; a child given one of them gets the same copy.

    Backward then adds the gradients of the children before it sums them over the ranks, once. Outside of the module's forward
    nothing is kept, and every child has a copy and a sum of its own.
    """

    def __init__(self) -> None:
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] | None = None

    def copy(self, x: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
        """As `boundary.copy`."""
        differentiates = torch.is_grad_enabled() and x.requires_grad
        if self._copies is None or not differentiates or torch.compiler.is_compiling():
            return boundary.copy(x, mesh)
        for given, made in self._copies:
            if given is x:
                return made
        made = boundary.copy(x, mesh)
        self._copies.append((x, made))
        return made

    @contextmanager
    def open(self) -> Iterator[None]:
        """Return a context in which copies are kept."""
        before, self._copies = self._copies, []
        try:
            yield
        finally:
            self._copies = before


class SharingForward(InPlaceOfForward):
    """The forward of a module whose children have a `SharedInput`."""

    def __init__(self, forward: Callable[..., Any], shared: SharedInput) -> None:
        super().__init__(forward)
        self.shared = shared

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.shared.open():
            return self.run(*args, **kwargs)


def siblings(plan: Mapping[str, ParallelStyle], reads: Callable[[ParallelStyle], bool]) -> dict[str, list[str]]:
    """Return by parent the names of those of its children in `plan` whose style `reads` a whole input, if several do."""
    found: dict[str, list[str]] = {}
    for name, style in plan.items():
        if name and reads(style):
            found.setdefault(name.rpartition(".")[0], []).append(name)
    return {parent: names for parent, names in found.items() if len(names) > 1}


def has_forward(module: nn.Module) -> bool:
    """Return whether `module` is called, and not a mere list of others."""
    return not isinstance(module, (nn.ModuleList, nn.ModuleDict))
