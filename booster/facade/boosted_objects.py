"""What one Booster has boosted."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from booster.data import DataLoaderWrapper
from booster.facade.before_boost import BeforeBoost
from booster.facade.switch import BoostRecord
from booster.interface.model import ModelWrapper, boosted_wrapper
from booster.interface.optimizer import OptimizerWrapper


class BoostOutput(tuple[Any, ...]):
    """(model, optimizer, criterion, dataloader, lr_scheduler), for which Python's own error would not name `boost`."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"boost() returns {len(self)} objects, not a model, and together they have no attribute {name!r}. Write "
            "model, optimizer, *_ = b.boost(model, optimizer)"
        )


class BoostedObjects:
    """The objects of one Booster, as long as the user keeps them.

    Attributes:
        models: both what the user gave and what wraps it.
        criteria: the wrappers of criteria that are modules.
        loaders: the wrappers of loaders.
        optimizers: the wrappers, by the id of the user's optimizer, which its wrapper keeps alive.

    Models and criteria are in the order in which they were boosted, the same on every rank; a set has no order.
    """

    def __init__(self) -> None:
        self.models: weakref.WeakKeyDictionary[nn.Module, None] = weakref.WeakKeyDictionary()
        self.criteria: weakref.WeakKeyDictionary[ModelWrapper, None] = weakref.WeakKeyDictionary()
        self.loaders: weakref.WeakSet[DataLoaderWrapper] = weakref.WeakSet()
        self._boostings: list[BoostRecord] = []
        self.optimizers: weakref.WeakValueDictionary[int, OptimizerWrapper] = weakref.WeakValueDictionary()

    def add(
        self,
        model: nn.Module,
        boosted: ModelWrapper,
        criterion: Any,
        optimizers: Sequence[OptimizerWrapper],
        built: BeforeBoost,
        *,
        alone: bool = True,
    ) -> None:
        """Keep what `boost` was given and made; built: what the model was. alone: False for one of several that share
        optimizers."""
        built.forget_unrounded(boosted.module)
        self._boostings.append(BoostRecord(built, boosted, optimizers, criterion, alone=alone))
        self.models.update({model: None, boosted: None})
        if isinstance(criterion, ModelWrapper):
            self.criteria[criterion] = None
        for wrapper in optimizers:
            self.optimizers[id(wrapper.unwrap())] = wrapper

    def boostings(self) -> list[BoostRecord]:
        """Return what each call of `boost` returned, in their order, of which the user has the model still."""
        self._boostings = [each for each in self._boostings if each.model is not None]
        return list(self._boostings)

    def dtypes(self) -> dict[torch.Tensor, torch.dtype]:
        """Return in which dtype each tensor of the boosted models was given to `boost`."""
        return {
            tensor: dtype
            for each in self.boostings()
            if each.model is not None
            for tensor, dtype in each.built.dtypes(each.model.module).items()
        }

    def wrappers(self) -> list[ModelWrapper]:
        """Return the boosted models."""
        return [model for model in self.models if isinstance(model, ModelWrapper)]

    def modules(self) -> list[ModelWrapper]:
        """Return the boosted models and the criteria that are modules."""
        return [*self.wrappers(), *self.criteria]

    def all_optimizers(self, method: str) -> list[OptimizerWrapper]:
        """Return the boosted optimizers. Raises RuntimeError where there is none for `method` yet."""
        found = list(self.optimizers.values())
        if not found:
            raise RuntimeError(f"{method}() came before boost(): there is no step of a boosted optimizer to look at")
        return found

    def labelled(self) -> dict[str, ModelWrapper]:
        """Return the boosted models, by a name for messages; "" for a single one."""
        boosted = self.wrappers()
        if len(boosted) == 1:
            return {"": boosted[0]}
        labelled: dict[str, ModelWrapper] = {}
        for model in boosted:
            name = type(model.unwrap()).__name__
            labelled[f"{name}-{len(labelled)}" if name in labelled else name] = model
        return labelled

    def own(self, model: nn.Module, method: str) -> ModelWrapper:
        """Return the boosted model that `method` was given. Raises TypeError or ValueError for one of somebody else."""
        wrapper = boosted_wrapper(model, method)
        if wrapper not in self.models:
            raise ValueError(f"{method} got a {type(wrapper.unwrap()).__name__} that this Booster did not boost")
        return wrapper
