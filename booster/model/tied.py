"""Where the tensors of a model stand: a tied one has several places."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn


class TensorPlace(NamedTuple):
    """A name of a tensor in a model: `path`, the modules from the model to the one that holds it, and its name in there."""

    name: str
    path: tuple[nn.Module, ...]
    own: str

    @property
    def holder(self) -> nn.Module:
        """The module that holds it."""
        return self.path[-1]


def places_of(model: nn.Module, *, buffers: bool = False) -> dict[torch.Tensor, list[TensorPlace]]:
    """Return every parameter of `model`, and with `buffers` every buffer, with all its places, in the model's order.

    By path: what a module holds that stands in two places has two places, too.
    """
    found: dict[torch.Tensor, list[TensorPlace]] = {}
    for tensor, place in _visit(model, "", (model,), buffers):
        found.setdefault(tensor, []).append(place)
    return found


def names_of(model: nn.Module) -> dict[torch.Tensor, list[str]]:
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
