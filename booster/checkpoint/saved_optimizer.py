"""Optimizers, loaded: states, masters and loss scale out of a checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch

from booster.checkpoint.layout import Held
from booster.checkpoint.plain import reference
from booster.checkpoint.saved import Saved, listed
from booster.interface.optimizer import OptimizerWrapper
from booster.shards.divided import Divided
from booster.update.checkpoint import PARAMETERS, STATE_KEY


class SavedOptimizer:
    """One boosted optimizer of the job, and its entry in the checkpoint.

    homes: by parameter, the model of the job that has it, and its name in there.
    """

    def __init__(
        self, saved: Saved, name: str, optimizer: OptimizerWrapper, homes: Mapping[torch.Tensor, tuple[str, str]]
    ) -> None:
        self._saved, self._name, self._optimizer, self._homes = saved, name, optimizer, homes

    def differences(self) -> Iterator[str]:
        """Say what differs between the two; note what is to be read."""
        if self._name not in self._saved.tree["optimizers"]:
            return
        optimizer, name = self._optimizer, self._name
        saved = self._saved.tree["optimizers"][name]
        own_class = type(optimizer.unwrap()).__name__
        if saved["class"] != own_class:
            yield f"optimizers {name!r}: the checkpoint is of {saved['class']}, this is {own_class}"
            return
        groups = optimizer.parameter_names()
        if len(groups) != len(saved["groups"]):
            yield f"optimizers {name!r}: the checkpoint has {len(saved['groups'])} parameter groups, this has {len(groups)}"
            return
        for index, (own, group) in enumerate(zip(groups, saved["groups"], strict=True)):
            unknown = [param for param, _ in own if param not in group["params"]]
            if unknown:
                yield f"optimizers {name!r}: {listed(unknown)} of group {index} are not in that group of the checkpoint"
        params = dict(zip((n for g in groups for n, _ in g), _params(optimizer), strict=True))
        for param_name, param in params.items():
            for value in (saved["state"].get(param_name) or {}).values():
                self._saved.want_part(reference(value), param, optimizer)
            if optimizer.has_master(param):
                self._saved.want_part(self._saved.widest(param_name, name, self._homes.get(param)), param, optimizer)
        for key, value in saved[STATE_KEY].items():
            if key != "masters":
                self._saved.want_all(value)
        self._saved.want_all(self._saved.masters(name).get("rounding"))
        for group in saved["groups"]:
            self._saved.want_all(group["options"])

    def state(self) -> dict[str, Any]:
        """Return what was read as a state dict of the boosted optimizer."""
        optimizer, name = self._optimizer, self._name
        saved = self._saved.tree["optimizers"][name]
        groups = optimizer.parameter_names()
        numbers = {param: number for number, (param, _) in enumerate(entry for own in groups for entry in own)}
        param_groups = [
            {**self._saved.value(group["options"]), "params": [numbers[param] for param, _ in own]}
            for own, group in zip(groups, saved["groups"], strict=True)
        ]
        state = {
            number: self._saved.value(saved["state"][param])
            for param, number in numbers.items()
            if param in saved["state"]
        }
        own = {key: self._saved.value(value) for key, value in saved[STATE_KEY].items() if key != "masters"}
        if not isinstance(own["loss_scaler"], Mapping):
            raise ValueError(f"the loss scale of optimizers {name!r} is {own['loss_scaler']!r}")
        if set(own["loss_scaler"]) != set(optimizer.scaler_state()):
            self._saved.notes.append(
                f"optimizers {name!r}: the loss scale is left as it is, because the precision that saved has another kind"
            )
            own["loss_scaler"] = optimizer.scaler_state()
        rounding = self._saved.masters(name).get("rounding")
        if any(map(optimizer.has_master, _params(optimizer))) or (rounding and optimizer.keeps_masters):
            held = dict(zip(numbers, _params(optimizer), strict=True))
            weights = {
                key: self._saved.widest(key, name, self._homes.get(param))
                for key, param in held.items()
                if optimizer.has_master(param)
            }
            own["masters"] = {
                "weights": {
                    key: _float(self._saved.tensor(source)) for key, source in weights.items() if source is not None
                },
                **({"rounding": self._saved.value(rounding)} if rounding else {}),
            }
        if optimizer.is_partial:
            own[PARAMETERS] = list(numbers)
        return {"state": state, "param_groups": param_groups, STATE_KEY: own}


def _float(tensor: Held) -> Held:
    return tensor.with_values(tensor.values.float()) if isinstance(tensor, Divided) else tensor.float()


def _params(optimizer: OptimizerWrapper) -> list[torch.Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]
