"""Float32 weights that `load_state_dict` of a model brought for half-precision parameters, until their masters take them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from booster.masters.rounding import rounded
from booster.model.dtensors import is_dtensor
from booster.model.modules import parameter_names
from booster.shards import Shards

if TYPE_CHECKING:
    from booster.masters.masters import Masters, Weights

FULL_DTYPES = (torch.float32, torch.float64)


class LoadedWeights:
    """What `load_state_dict` of one model brought in float32 for half parameters, until their masters take it over.

    A hook of the model's load, which rounds them to half precision as a step does. Torch's cast rounds ties otherwise, and
    ranks of ZeRO, each with a shard of the masters, would come to disagree. Float32 weights that half precision holds exactly,
    all of them, are half-precision weights in a float32 file, and say nothing new of masters.

    Attributes:
        values: by parameter name, until a master takes them.
        given: names of the parameters that the last load gave float32 values.
    """

    def __init__(self) -> None:
        self.values: dict[str, torch.Tensor] = {}
        self.given: set[str] = set()
        self._wanted: set[str] = set()

    @classmethod
    def of(cls, model: nn.Module, names: Iterable[str]) -> LoadedWeights:
        """Return that of `model`, which from now on also keeps what is loaded into the parameters `names`."""
        found = cls.in_hooks_of(model)
        if found is None:
            found = cls()
            model.register_load_state_dict_pre_hook(found)
        found._wanted |= set(names)
        return found

    @classmethod
    def watched(cls, model: nn.Module) -> set[str]:
        """Return all names of the parameters of `model` that have masters, which take over what is loaded."""
        found = cls.in_hooks_of(model)
        return set() if found is None else {name for names in found._names(model).values() for name in names}

    @classmethod
    def in_hooks_of(cls, model: nn.Module) -> LoadedWeights | None:
        """Return that of `model`; None where nothing watches its loads."""
        hooks = (getattr(hook, "hook", None) for hook in model._load_state_dict_pre_hooks.values())
        return next((hook for hook in hooks if isinstance(hook, cls)), None)

    def _names(self, model: nn.Module) -> dict[str, list[str]]:
        """Return all names in `model` of each parameter of interest, by the name that masters know."""
        return {name: names for names in parameter_names(model).values() for name in names if name in self._wanted}

    def pop(self, names: Collection[str]) -> dict[str, torch.Tensor]:
        """Return the values for `names`, and forget them."""
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
                if value.dtype in FULL_DTYPES and value.shape == param.shape:
                    brought[name] = value.detach()
                    if not is_dtensor(value):
                        # This is the load's own dict, not the user's.
                        state_dict[prefix + key] = rounded(brought[name], param.dtype)
        self.given |= brought.keys()
        # All or none: a float32 file of half-precision weights has some exact ones by coincidence.
        if not all(holds(value, params[name].dtype) for name, value in brought.items()):
            self.values |= brought


def holds(value: torch.Tensor, dtype: torch.dtype) -> bool:
    """Return whether every element of `value`, or of this rank's shard of it, is a number of `dtype`."""
    local: Any = value.to_local() if is_dtensor(value) else value  # type: ignore[attr-defined]
    return torch.equal(local, local.to(dtype).to(local.dtype))


def take_loaded(
    loaded: LoadedWeights, watched: list[str], names: Mapping[Any, str], shards: Shards, masters: Masters
) -> Weights:
    """Take what was loaded for `watched`, by parameter of `masters`, which hold this."""
    if not loaded.values:
        return {}
    params = {names[param]: param for param in masters.layouts if param in names}
    values = shards.states.of_weights(shards.states.local, loaded.pop(watched), names)
    return {params[name]: value for name, value in values.items() if name in params}
