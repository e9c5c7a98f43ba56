"""Loading an optimizer's state without rounding it."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer


def load_states(optimizer: Optimizer, state_dict: dict[str, Any]) -> None:
    """Run `optimizer.load_state_dict`, then give single numbers, such as NAdam's product of momenta, their dtype back.

    Torch casts every floating state to the dtype of its parameter. A number that stands beside a half parameter is no
    part of it, and half precision would change it. Linear in the number of parameters, which torch's is not by itself.
    """
    if type(optimizer).load_state_dict is Optimizer.load_state_dict:
        groups = [{**group, "params": _Keys(group["params"])} for group in state_dict["param_groups"]]
        state_dict = {**state_dict, "param_groups": groups}
    optimizer.load_state_dict(state_dict)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    keys = [key for group in state_dict["param_groups"] for key in group["params"]]
    saved = [(param, state_dict["state"].get(key, {})) for param, key in zip(params, keys, strict=True)]
    # Of a parameter without dimensions every state is a single number: what they are is known from the others.
    numbers = {
        name
        for param, own in saved
        if param.dim()
        for name, value in own.items()
        if name != "step" and _is_number(value)
    }
    for param, own in saved:
        loaded = optimizer.state.get(param, {})
        for name in numbers & own.keys() & loaded.keys():
            if _is_number(loaded[name]) and _is_number(own[name]) and loaded[name].dtype != own[name].dtype:
                loaded[name] = own[name].to(loaded[name].device)


class _Keys(list[Any]):
    """The keys of a group's parameters. Torch looks for each tensor's parameter among them."""

    _known: frozenset[Any] | None = None

    def __contains__(self, key: object) -> bool:
        if self._known is None:  # when first asked: a hook may have changed them before
            self._known = frozenset(self)
        return key in self._known


def _is_number(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 0
