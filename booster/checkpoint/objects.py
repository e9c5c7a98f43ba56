"""The objects that a checkpoint is made of, each under a name, and snapshots of them while they are loaded.

Where a later object refuses its state, those that were loaded before it are restored. What an optimizer keeps that no
checkpoint holds is named after its first step: its states do not exist before.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from booster.checkpoint.state_tree import encode
from booster.common import arguments
from booster.common.arguments import listed
from booster.common.snapshot import StateSnapshot
from booster.common.untrusted_files import printable
from booster.data import DataLoaderWrapper, is_stateful
from booster.interface.model import ModelWrapper, boosted_wrapper
from booster.interface.optimizer import OptimizerWrapper, update_of
from booster.interface.scheduler import LRSchedulerWrapper
from booster.masters.master_state import LoadedWeights
from booster.masters.quantized_state import QuantizedState
from booster.model.modules import bare, tensor_places
from booster.model.optimizers import granularity_of
from booster.tensors.trees import is_container, map_tensors, tensors


@dataclass(frozen=True)
class Objects:
    """What is saved or loaded together.

    Attributes:
        models, optimizers: boosted, by name; so are all others.
        criteria: those that are modules.
        dataloaders, lr_schedulers: boosted, or with a state of the user's.
        extra: the user's own.
        error_feedback: by the name of a model, what this rank alone carries from step to step, see `Plugin.error_feedback`.
    """

    models: Mapping[str, ModelWrapper]
    optimizers: Mapping[str, OptimizerWrapper]
    criteria: Mapping[str, nn.Module]
    dataloaders: Mapping[str, Any]
    lr_schedulers: Mapping[str, Any]
    extra: Any
    error_feedback: Mapping[str, dict[torch.Tensor, torch.Tensor]] = field(default_factory=dict)


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
                "first, or optimizer.zero_grad() to drop them"
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
            if not is_stateful(value) or isinstance(value, type):
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


_OURS = ("torch.", "booster.")


def snapshot(part: Any) -> Callable[[], None]:
    """Return what gives a loader, a scheduler or an object of the user's the state that it has now."""
    if isinstance(part, DataLoaderWrapper):  # its state dict may refuse what cannot be gone on with elsewhere
        return part.snapshot()
    # Copied, and to host memory: loading writes into the tensors that are there.
    state = map_tensors(_host_copy, part.state_dict(), copy_containers=True)
    attributes = [(own, dict(vars(own))) for own in _with_attributes(part)]

    def restore() -> None:
        try:
            part.load_state_dict(state)
        finally:  # what a load sets beyond the state, such as that it was asked for a position
            for own, before in attributes:
                vars(own).clear()
                vars(own).update(before)

    return restore


def load_module(module: nn.Module, state: dict[str, Any], undo: ExitStack) -> None:
    """Load `state`, of names and shapes that fit, into `module`.

    Raises ValueError for entries that differ from those of `module` and that it does not read.
    """
    # A snapshot of a large model costs its size, so it is made only where a load may fail half-way.
    if may_refuse(module) or not _torch_reads(user_module(module), state):
        undo.callback(_module_snapshot(module))
    unread = module.load_state_dict(state, strict=False).unexpected_keys
    now = module.state_dict() if unread else {}
    # An entry that is equal is one that the module makes anew, as a buffer of a constant.
    lost = [key for key in unread if not _equal(state[key], now.get(key))]
    if lost:
        raise ValueError(
            f"{listed(lost, 8)} differ from the job's, and the modules that write these do not read them; give the model "
            "what it had when it was saved, as weights quantised from the same file, or leave such out of checkpoints with "
            "frozen=False"
        )


def _torch_reads(module: nn.Module, keys: Iterable[str]) -> bool:
    """Whether each of `keys` is a parameter, a buffer or an extra state of `module`, which torch's own code loads."""
    known = {
        name
        for name, _ in (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    }
    return all(key in known or key.endswith("_extra_state") for key in keys)


def _equal(saved: Any, own: Any) -> bool:
    if isinstance(saved, torch.Tensor) and isinstance(own, torch.Tensor):
        return saved.dtype == own.dtype and torch.equal(saved, own.to(saved.device))
    return type(saved) is type(own) and bool(saved == own)


def may_refuse(module: nn.Module) -> bool:
    """Return whether code of the user's runs while a state that fits is loaded into `module`: torch's own only copies."""
    own = user_module(module)
    return any(_has_own_code(child) for child in own.modules())


def read_by_torch(module: nn.Module) -> dict[str, torch.Tensor]:
    """The tensors of `module`, by name, of which a load does nothing but write into them: those alone may be read in place."""
    own = user_module(module)
    if may_refuse(module):
        return {}
    watched = LoadedWeights.names_with_masters(own)
    # Without those that have several names, which may differ in a file, and those with masters that take over what is loaded.
    found = {places[0].name: tensor for tensor, places in tensor_places(own, buffers=True).items() if len(places) == 1}
    return {name: tensor for name, tensor in found.items() if name not in watched}


def makes_entries(module: nn.Module) -> bool:
    """Return whether code of the user's may give `module` what a state does not have under its name."""
    return any(_has_own_code(child, _LOAD) for child in user_module(module).modules())


_LOAD = ("load_state_dict", "_load_from_state_dict")


def _has_own_code(module: nn.Module, methods: tuple[str, ...] = (*_LOAD, "set_extra_state")) -> bool:
    code = [getattr(getattr(type(module), name), "__module__", "") for name in methods]
    code += ["instance" for name in methods if name in vars(module)]
    for hook in (*module._load_state_dict_pre_hooks.values(), *module._load_state_dict_post_hooks.values()):
        inner = getattr(hook, "hook", hook)
        code.append(getattr(inner, "__module__", "") or type(inner).__module__)
    return not all(f"{where}.".startswith(_OURS) for where in code)


def _module_snapshot(module: nn.Module) -> Callable[[], None]:
    own = user_module(module)
    python = StateSnapshot([own, LoadedWeights.in_hooks_of(own)], numbers=False, random=False)
    # In host memory: next to the weights a device may have no room for a second copy.
    numbers = [(tensor, _host_copy(tensor)) for tensor in (*own.parameters(), *own.buffers())]
    extra_states = [
        (child, copy.deepcopy(child.get_extra_state()))
        for child in own.modules()
        if _has_own_code(child) and type(child).get_extra_state is not nn.Module.get_extra_state
    ]

    @torch.no_grad()
    def restore() -> None:
        python.restore()
        for child, state in extra_states:
            child.set_extra_state(state)
        for tensor, value in numbers:
            tensor.copy_(value)

    return restore


def _host_copy(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().to("cpu", copy=True)


def _with_attributes(part: Any) -> Iterator[Any]:
    """The objects of ours and of torch's that a state is loaded into by their attributes."""
    if isinstance(part, LRSchedulerWrapper):
        yield part
        yield from _with_attributes(part.unwrap())
    elif isinstance(part, torch.optim.lr_scheduler.LRScheduler):
        yield part
        for inner in getattr(part, "_schedulers", ()):  # SequentialLR, ChainedScheduler
            yield from _with_attributes(inner)


_logger = logging.getLogger(__name__)


def is_cut(optimizer: OptimizerWrapper, param: torch.Tensor) -> bool:
    """Return whether `param` is stepped in parts, so that a container of its states holds parts of tensors."""
    update = update_of(optimizer)
    in_parts = update.optimizer_state.has_masters or update.shards.shard_of(param) is not param
    return in_parts and granularity_of(optimizer.unwrap()) == "elementwise"


def has_tensors(value: Any) -> bool:
    """Return whether `value` is a container with tensors."""
    return is_container(value) and next(tensors(value), None) is not None


def warn_of_unsaved(optimizer: OptimizerWrapper) -> None:
    """Log a WARNING if no checkpoint will hold what `optimizer` keeps, as its first step left it. No collective."""
    own = optimizer.unwrap()
    if type(own).state_dict is not Optimizer.state_dict:
        return  # it may save other things than it keeps
    cut = any(is_cut(optimizer, param) for group in own.param_groups for param in group["params"])
    try:
        for state in own.state.values():
            for key, value in state.items() if isinstance(state, Mapping) else ():
                if cut and has_tensors(value):
                    raise TypeError(
                        f"its state {key!r} is a container of tensors, of which ranks or buckets have parts"
                    )
                if not isinstance(value, QuantizedState):
                    encode(value, f"its state {key!r}", {})
        for group in own.param_groups:
            encode({key: value for key, value in group.items() if key != "params"}, "its group", {})
    except TypeError as error:
        what = f"{type(own).__name__} trains, but saving it will raise, and nothing be written: {error}"
        _logger.warning("%s", printable(what))
