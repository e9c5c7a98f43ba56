"""Optimizers whose groups hold the parameters of a placed model, and what their updates are made of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer

from booster.interface.model import CriterionWrapper, ModelWrapper
from booster.mixed_precision.policy import Placement
from booster.model.modules import PlacedModule
from booster.model.params import placed_parameters, prefixes, rebind, together
from booster.shards import Shards


@dataclass(frozen=True)
class Rebound:
    """One of them. shards: what this rank steps. params: of the placed model, by name. own: which of these it holds."""

    optimizer: Optimizer
    shards: Shards
    params: Mapping[str, torch.Tensor]
    own: frozenset[str]

    def named_parts(self) -> dict[torch.Tensor, str]:
        """Return the names of parameters and of what this rank steps of them; inside `shards.local()`."""
        parts = self.shards.shard_of
        return {tensor: name for name, param in self.params.items() for tensor in (param, parts(param))}

    def take(self, weights: dict[str, torch.Tensor]) -> dict[torch.Tensor, torch.Tensor]:
        """Take its own out of `weights`, by what this rank steps of them; inside `shards.local()`."""
        own = {name: self.params[name] for name in list(weights) if name in self.own}
        return {
            self.shards.shard_of(param): self.shards.local_slice(weights.pop(name), param)
            for name, param in own.items()
        }


def rebind_all(
    optimizers: Sequence[Optimizer],
    before: Mapping[str, torch.Tensor],
    placed: Sequence[nn.Module],
    placement: Placement,
) -> list[Rebound]:
    """Make `optimizers` hold the parameters of the models `placed` in place of those of `before`, see `params.rebind`."""
    params: dict[str, torch.Tensor] = {}
    for each, prefix in zip(placed, prefixes(placed), strict=True):
        params |= {prefix + name: param for name, param in placed_parameters(each).items()} if optimizers else {}
    partial = any(isinstance(each, PlacedModule) and each.is_partial for each in placed)
    selections = [rebind(each, before, params, partial=partial) for each in optimizers]
    # All before the first is wrapped: together they may settle how parameters are divided.
    all_shards = [placement.make_shards(each) for each in optimizers]
    rebound = []
    for optimizer, shards, selection in zip(optimizers, all_shards, selections, strict=True):
        shards.select(selection)
        held = {param for group in optimizer.param_groups for param in group["params"]}
        own = frozenset(name for name, param in params.items() if param in held)
        rebound.append(Rebound(optimizer, shards, params, own))
    return rebound


def tensor_names(
    placed: Sequence[nn.Module], criterion: ModelWrapper | CriterionWrapper | None
) -> dict[torch.Tensor, str]:
    """Return the names of parameters, as users see them."""
    names: dict[torch.Tensor, str] = {param: name for name, param in together(placed).named_parameters()}
    if isinstance(criterion, ModelWrapper):
        names |= {param: f"criterion.{name}" for name, param in criterion.named_parameters()}
    return names
