"""The objects that a checkpoint is made of, each under a name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from booster.common import arguments
from booster.data import DataLoaderWrapper
from booster.interface.model import ModelWrapper, boosted_wrapper
from booster.interface.optimizer import OptimizerWrapper, update_of
from booster.interface.scheduler import LRSchedulerWrapper
from booster.model.modules import bare


@dataclass(frozen=True)
class Objects:
    """What is saved or loaded together.

    Attributes:
        models, optimizers: boosted, by name; so are all others.
        criteria: those that are modules.
        dataloaders, lr_schedulers: boosted, or with a state of the user's.
        extra: the user's own.
        carried: by the name of a model, what this rank alone carries from step to step, see `Plugin.carried`.
    """

    models: Mapping[str, ModelWrapper]
    optimizers: Mapping[str, OptimizerWrapper]
    criteria: Mapping[str, nn.Module]
    dataloaders: Mapping[str, Any]
    lr_schedulers: Mapping[str, Any]
    extra: Any
    carried: Mapping[str, dict[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


@dataclass(frozen=True)
class Loaded:
    """What a load found.

    Attributes:
        step: as given to `save`.
        extra: what was saved as such.
        path: the checkpoint; None for a start.
        run: what was written down of the job.
    """

    step: int
    extra: Any
    path: Path | None
    run: Mapping[str, Any] = field(default_factory=dict, compare=False)

    def __repr__(self) -> str:
        return f"Loaded(step={self.step}, path={self.path and str(self.path)!r}, extra={_outline(self.extra)})"


def _outline(value: Any) -> str:
    """What `value` is, without the numbers of its tensors: those of a whole model would fill the screen."""
    if isinstance(value, torch.Tensor):
        return f"tensor({str(value.dtype).removeprefix('torch.')}, {list(value.shape)})"
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key!r}: {_outline(entry)}' for key, entry in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_outline, value))}]"
    return repr(value) if value is None or isinstance(value, (str, int, float, bool)) else type(value).__name__


def check_no_gradients_wait(objects: Objects) -> None:
    """Raise RuntimeError if an optimizer has gradients that no step has used: a checkpoint would lose them."""
    for name, optimizer in objects.optimizers.items():
        if waiting := update_of(optimizer).gradients.num_backwards:
            passes = "pass" if waiting == 1 else "passes"
            raise RuntimeError(
                f"save() between backward and step: the gradients of {waiting} backward {passes} of optimizer {name!r} wait "
                "for a step, and a checkpoint does not hold gradients. Save after the whole group: call optimizer.step() "
                "first, or "
                "optimizer.zero_grad() to drop them"
            )


def user_module(module: nn.Module) -> nn.Module:
    """Return the user's own module inside a boosted model; any other module as it is."""
    return bare(module.module) if isinstance(module, ModelWrapper) else module


_WRAPPERS = {"optimizer": OptimizerWrapper, "dataloader": DataLoaderWrapper, "lr_scheduler": LRSchedulerWrapper}


def named(model: Any, optimizer: Any, criterion: Any, dataloader: Any, lr_scheduler: Any, extra: Any) -> Objects:
    """Name what `save` and `load` were given: one object, a list of them, or a dict by the user's own names.

    Raises TypeError for what `boost` did not return, and for loaders and schedulers without a state.
    """
    models = {name: boosted_wrapper(value, "a checkpoint") for name, value in _named("model", model).items()}
    optimizers = _named("optimizer", optimizer)
    for value in optimizers.values():
        if not isinstance(value, OptimizerWrapper):
            raise TypeError(f"a checkpoint needs the optimizer that boost() returned, got {type(value).__name__}")
    for value in _named("criterion", criterion).values():
        if not callable(value):
            meant = next((name for name, kind in _WRAPPERS.items() if isinstance(value, kind)), None)
            hint = f"; pass it by name, {meant}=..." if meant else ""
            raise TypeError(f"criterion must be callable, got {arguments.described(value)}{hint}")
    criteria = {name: value for name, value in _named("criterion", criterion).items() if isinstance(value, nn.Module)}
    loaders, schedulers = _named("dataloader", dataloader), _named("lr_scheduler", lr_scheduler)
    for kind, found in (("dataloader", loaders), ("lr_scheduler", schedulers)):
        for value in found.values():
            meant = next((name for name, each in _WRAPPERS.items() if name != kind and isinstance(value, each)), None)
            if meant:
                raise TypeError(f"{kind} is given {arguments.described(value)}; pass it by name, {meant}=...")
            stateful = all(callable(getattr(value, name, None)) for name in ("state_dict", "load_state_dict"))
            if not stateful or isinstance(value, type):
                raise TypeError(
                    f"{kind} {type(value).__name__} has no state_dict() and load_state_dict(), by which its state could "
                    f"be kept; pass the {kind} that boost() returned"
                )
    return Objects(models, optimizers, criteria, loaders, schedulers, extra)


def _named(kind: str, given: Any) -> dict[str, Any]:
    if given is None:
        return {}
    if isinstance(given, Mapping):
        wrong = [name for name in given if not isinstance(name, str) or not name or "/" in name]
        if wrong:
            raise ValueError(f"{kind} names must be strings without '/', got {wrong}")
        return dict(given)
    if isinstance(given, Sequence) and not isinstance(given, (nn.Module, str, bytes)):
        return {str(index): value for index, value in enumerate(given)}
    return {"0": given}
