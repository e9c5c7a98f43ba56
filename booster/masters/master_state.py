"""Master weights in checkpoints: what is kept of them, and float32 weights that a model was given by `load_state_dict`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from functools import partial
from typing import Any

import torch
from torch import nn

from booster.masters.masters import Masters, Weights, has_half_elements
from booster.masters.optimizer_proxy import State
from booster.masters.rounding import rounded
from booster.model.dtensors import is_dtensor
from booster.model.modules import names_of
from booster.shards import Shards
from booster.tensors.trees import HALF_DTYPES
from booster.update.context import UpdateContext
from booster.update.optimizer_state import OptimizerState
from booster.update.state_dict import IN_MODEL

_WIDE = (torch.float32, torch.float64)


class LoadedWeights:
    """What `load_state_dict` of one model brought in float32 for half parameters, until their masters take it over.

    A hook of the model's load, which rounds them to half as a step does. Torch's cast rounds ties otherwise, and the ranks of
    ZeRO, each of which has a part of the masters, would come to disagree. values: by parameter name; given: whose last load
    was in float32. Float32 weights that half precision holds exactly, all of them, are half weights that somebody widened,
    and have nothing for a master.
    """

    def __init__(self) -> None:
        self.values: dict[str, torch.Tensor] = {}
        self.given: set[str] = set()
        self._wanted: set[str] = set()

    @classmethod
    def of(cls, model: nn.Module, names: Iterable[str]) -> LoadedWeights:
        """That of `model`, which from now on watches for the parameters `names`, too."""
        found = cls.in_hooks_of(model)
        if found is None:
            found = cls()
            model.register_load_state_dict_pre_hook(found)
        found._wanted |= set(names)
        return found

    @classmethod
    def watched(cls, model: nn.Module) -> set[str]:
        """All names of the parameters of `model` whose masters take over what is loaded."""
        found = cls.in_hooks_of(model)
        return set() if found is None else {name for names in found._names(model).values() for name in names}

    @classmethod
    def in_hooks_of(cls, model: nn.Module) -> LoadedWeights | None:
        """Return that of `model`; None where nothing watches its loads."""
        hooks = (getattr(hook, "hook", None) for hook in model._load_state_dict_pre_hooks.values())
        return next((hook for hook in hooks if isinstance(hook, cls)), None)

    def _names(self, model: nn.Module) -> dict[str, list[str]]:
        """All names in `model` of each parameter that is watched for, by the one that is known of it."""
        return {name: names for names in names_of(model).values() for name in names if name in self._wanted}

    def take(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        """The values for `names`, which are forgotten."""
        return {name: self.values.pop(name) for name in names if name in self.values}

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        params = dict(module.named_parameters(remove_duplicate=False))
        brought: dict[str, torch.Tensor] = {}
        for name, names in self._names(module).items():
            param, given = (
                params[name],
                [key for key in names if isinstance(state_dict.get(prefix + key), torch.Tensor)],
            )
            if not given:
                continue
            self.values.pop(name, None)
            self.given.discard(name)
            for key in given:  # in the order in which torch copies them: the last one counts
                value = state_dict[prefix + key]
                if value.dtype in _WIDE and value.shape == param.shape:
                    brought[name] = value.detach()
                    if not is_dtensor(value):
                        # This is the load's own dict, not the user's.
                        state_dict[prefix + key] = rounded(brought[name], param.dtype)
        self.given |= brought.keys()
        if not all(holds(value, params[name].dtype) for name, value in brought.items()):
            self.values |= brought


def holds(value: torch.Tensor, dtype: torch.dtype) -> bool:
    """Whether every element of `value`, or of this rank's part of it, is a number of `dtype`."""
    local: Any = value.to_local() if is_dtensor(value) else value  # type: ignore[attr-defined]
    return torch.equal(local, local.to(dtype).to(local.dtype))


class MasterState(OptimizerState):
    """The masters of half parameters, and the optimizer's state, whose tensors are those of buckets."""

    has_masters = True

    def __init__(self, context: UpdateContext, masters: Masters) -> None:
        super().__init__(context)
        self.masters = masters
        self._loaded = LoadedWeights()
        self._watched: list[str] = []

    @property
    def state(self) -> Any:
        return self.shards.view_state(self.masters.view_state(self._put_state))

    def _put_state(self, param: torch.Tensor, own: State | None) -> None:
        with self.shards.local():  # in which groups hold the parts that have masters
            self.masters.put_state(param, own)

    def has_master(self, param: torch.Tensor) -> bool:
        return param.requires_grad and has_half_elements(param)

    def loads_without_copy(self, param: torch.Tensor) -> bool:
        return False  # they are copied into buckets

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return self.masters.optimizer_state_dict(), {"masters": self.masters.state_dict()}

    def rounding_state(self) -> dict[str, Any]:
        return self.masters.rounding_state()

    def load_rounding(self, state: Mapping[str, Any]) -> None:
        self.masters.load_rounding({"rounding": state})

    def restore_params(self) -> dict[torch.Tensor, torch.Tensor]:
        return self.masters.restore_params()

    def weights_in_model(self) -> list[str]:
        return [name for name, param in self._named().items() if param.requires_grad and param.dtype in _WIDE]

    def master_tensors(self) -> list[torch.Tensor]:
        return [bucket.residual for bucket in self.masters.buckets if bucket.residual is not None]

    def scratch_tensors(self) -> list[torch.Tensor]:
        return [] if self.masters.scratch is None else self.masters.scratch.tensors()

    def wait_for_copies(self) -> None:
        self.masters.sync()

    def watch(self, model: nn.Module) -> None:
        self._watched = [name for name, param in self._named().items() if param.dtype in HALF_DTYPES]
        self._loaded = LoadedWeights.of(model, self._watched)
        self.masters.take_weights_from(partial(_take_loaded, self._loaded, self._watched, self.names, self.shards))

    def take_loaded(self) -> None:
        if self._loaded.values:
            self.masters.register_params()

    def read_masters(self, masters: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[torch.Tensor, torch.Tensor]]:
        params, weights = self._named(), masters["weights"]
        here = {name for name, param in params.items() if self.has_master(param)}
        lost = sorted((here & set(masters.get(IN_MODEL, ()))) - weights.keys() - self._loaded.given)
        if lost:
            raise ValueError(
                "the optimizer state was written where float32 weights are those of the model, as under TorchFSDPPlugin, and "
                f"this model keeps half ones: {len(lost)} parameters, such as {lost[:4]}, were not given float32 weights. Call "
                "model.load_state_dict with the float32 weights of that run first, then optimizer.load_state_dict; or delete "
                "state['booster']['masters'] to go on from the rounded weights"
            )
        own = {name for name, param in params.items() if name in weights and param.dtype in _WIDE}
        for name in own:
            if weights[name].shape != params[name].shape:
                raise ValueError(
                    f"the optimizer state's master of {name} has shape {tuple(weights[name].shape)}, and the parameter "
                    f"{tuple(params[name].shape)}. Nothing was loaded"
                )
        residual = {name: weight for name, weight in weights.items() if name not in own}
        return {**masters, "weights": residual}, {params[name]: weights[name] for name in own}

    def _named(self) -> dict[str, torch.Tensor]:
        held = (param for group in self.optimizer.param_groups for param in group["params"])
        return {self.names[param]: param for param in held if param in self.names}

    def read_state_dict(self, state_dict: dict[str, Any], own: Mapping[str, Any]) -> Callable[[], None]:
        saved = own.get("masters")
        self.masters.register_params()
        weights = {} if saved is None else self.masters.read_state_dict(saved)
        states = self.masters.read_optimizer_state_dict(state_dict)

        def take_over() -> None:
            self.masters.register_params()  # weights that were loaded since
            self.masters.take_over(states, weights)
            if saved is not None:
                self.masters.load_rounding(saved)

        return take_over


def _take_loaded(
    loaded: LoadedWeights, watched: list[str], names: Mapping[Any, str], shards: Shards, masters: Masters
) -> Weights:
    """Take what was loaded for `watched`, by parameter of `masters`, which hold this."""
    if not loaded.values:
        return {}
    params = {names[param]: param for param in masters.params() if param in names}
    values = shards.local_weights(loaded.take(watched), names)
    return {params[name]: value for name, value in values.items() if name in params}
