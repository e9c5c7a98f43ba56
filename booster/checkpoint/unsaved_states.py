"""What an optimizer keeps that no checkpoint holds, told after its first step: its states do not exist before."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch.optim import Optimizer

from booster.checkpoint.state_tree import encode
from booster.common.untrusted_files import printable
from booster.interface.optimizer import OptimizerWrapper, update_of
from booster.masters.quantized_state import QuantizedState
from booster.model.optimizers import kind_of
from booster.tensors.trees import is_container, tensors

_logger = logging.getLogger(__name__)


def is_cut(optimizer: OptimizerWrapper, param: torch.Tensor) -> bool:
    """Return whether `param` is stepped in parts, so that a container of its states holds parts of tensors."""
    update = update_of(optimizer)
    in_parts = update.optimizer_state.has_masters or update.shards.shard_of(param) is not param
    return in_parts and kind_of(optimizer.unwrap()) == "elementwise"


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
