"""What of one optimizer goes into a checkpoint: its states, and what is kept besides."""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from booster.common.torch_internals.optimizer_internals import loads_with_hooks
from booster.model.optimizers import load_states
from booster.update.context import UpdateContext


@dataclass
class Fill:
    """What a load gives for states and masters on the meta device, as buckets take them over: no more than one is there twice.

    Attributes:
        read: given what a group holds, the name of a state (None: its master), and a place in memory order, reads as many
            numbers from there as it is given memory for.
        before: the states of buckets until then, to be written over.
    """

    read: Callable[[torch.Tensor, str | None, int, torch.Tensor], None]
    before: MutableMapping[Any, Any] = field(default_factory=dict)


class OptimizerState:
    """The state of the optimizer as it is, and nothing besides: the null object of `MasterState`."""

    has_masters = False
    """Whether float32 numbers stand behind half parameters."""

    def __init__(self, job: UpdateContext) -> None:
        self.optimizer = job.optimizer
        self.shards = job.shards
        self.names = job.names

    @property
    def state(self) -> Any:
        """The optimizer's state, by the parameters that the user knows."""
        return self.shards.states.view_state(self.optimizer.state)

    def has_master(self, param: torch.Tensor) -> bool:
        """Return whether float32 numbers stand behind `param`, a whole parameter, as checkpoints keep them."""
        return False

    def loads_without_copy(self, param: torch.Tensor) -> bool:
        """Return whether a load makes the tensors that it is given the states of `param`, and reads none of their numbers."""
        # Torch's own optimizers do, without hooks of their load, for states of the parameter's dtype.
        return type(self.optimizer).__module__.startswith("torch.optim.") and not loads_with_hooks(self.optimizer)

    def state_dict(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """Torch's state dict of what the optimizer's groups hold, and what is kept besides. Inside `local()`."""
        return self.optimizer.state_dict(), {}

    def can_be_filled(self, param: torch.Tensor) -> bool:
        """Return whether a load may give states and master of `param`, a whole parameter, by a `Fill`."""
        return False

    def read_state_dict(
        self, state_dict: dict[str, Any], own: Mapping[str, Any], fill: Fill | None = None
    ) -> Callable[[], None]:
        """`load_state_dict` into what the optimizer's groups hold; own: what `state_dict` gave besides. Inside `local()`.

        What is returned does the rest, and does not fail.
        """
        # Containers of the optimizer may change, but no tensor.
        load_states(self.optimizer, state_dict)
        return lambda: None

    def rounding_state(self) -> dict[str, Any]:
        """Return the random state of rounding, where weights are rounded stochastically, to be given to `load_rounding`."""
        return {}

    def load_rounding(self, state: Mapping[str, Any]) -> None:
        """Continue the random numbers of rounding where `rounding_state` was taken; does nothing where none are drawn."""

    def restore_params(self) -> dict[torch.Tensor, torch.Tensor]:
        """Have the states by what the groups hold; return the masters likewise. Inside `local()`."""
        return {}

    def attach(self, model: nn.Module) -> None:
        """Take over what masters can use of weights that are loaded into `model`."""

    def take_loaded(self) -> None:
        """Have masters become the values that were loaded into their weights, if any were; a step does it by itself."""

    def weights_in_model(self) -> list[str]:
        """Names of trained parameters that are their own masters. Not inside `local()`."""
        return []

    def master_tensors(self) -> list[torch.Tensor]:
        """Return what is kept besides half weights."""
        return []

    def scratch_tensors(self) -> list[torch.Tensor]:
        """Return the scratch that stays from step to step."""
        return []

    def wait_for_copies(self) -> None:
        """Wait until what the last step sent to the host's memory, if anything, has arrived there."""

    def read_masters(self, masters: Mapping[str, Any]) -> tuple[Mapping[str, Any], dict[torch.Tensor, torch.Tensor]]:
        """Of masters of whole parameters, the part that is kept besides, and values of parameters that are their own masters.

        Not inside `local()`. Raises ValueError, with nothing changed, if there is no use for them or bits would be lost.
        """
        if masters["weights"]:
            raise ValueError(
                "the optimizer state holds float32 master weights, but this precision keeps none; resume with the precision "
                "that wrote it, or delete state['booster']['masters'] to go on from the rounded weights"
            )
        return masters, {}
