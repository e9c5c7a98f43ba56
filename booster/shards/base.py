"""The parts of parameters that this rank holds; the null object, where they are whole."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.optim import Optimizer

if TYPE_CHECKING:
    from booster.params import Kept

State = dict[str, Any]


class Shards:
    """The part of an optimizer's parameters that this rank steps. This base class: all of it, the same on every rank.

    Updates and master weights see parts only, which are plain tensors. Between steps the optimizer's groups hold the
    parameters, as the user knows them; inside `local()` they hold the parts. `names` maps parameters to their names.
    """

    sharded = False
    names: Mapping[Any, str] = {}
    """The name of each parameter and part, for messages."""
    kept: Kept | None = None
    """Where layers are divided among ranks: which parameters of the whole optimizer are here."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def local(self) -> AbstractContextManager[Any]:
        """Context in which the optimizer's groups hold this rank's parts, in the same order, each with its gradient.

        A part is the same object every time, a leaf, and a view of its parameter; its `.grad` is a view of the true
        gradient, and a replaced or removed one is carried back on leaving. Re-entering it does nothing.
        """
        return nullcontext()

    def part_of(self, param: torch.Tensor) -> torch.Tensor:
        """What stands for `param` inside `local()`."""
        return param

    def copies(self, part: torch.Tensor) -> int | None:
        """On how many of the ranks that step together this very part lies; None: each has all of every parameter."""
        return None

    def holders(self) -> list[torch.Tensor]:
        """Every tensor whose `.grad` a backward pass may add to, whether it has one or not. Inside `local()`."""
        return [param for group in self.optimizer.param_groups for param in group["params"]]

    def written(self, parts: list[torch.Tensor]) -> list[torch.Tensor]:
        """Whose gradients are to be scaled or clamped where those of `parts`, which have one each, are. Inside `local()`."""
        return parts

    def cut(self, value: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
        """The elements of `value`, a tensor or DTensor of the shape of `param`, that belong to this rank's part."""
        return value

    def placed(self, value: torch.Tensor, param: torch.Tensor) -> torch.Tensor:
        """`value`, a tensor or DTensor of the shape of `param`, laid out among ranks as `param` is. May be a collective."""
        return value

    def moves(self, value: torch.Tensor, param: torch.Tensor) -> bool:
        """Whether `placed` and `cut` of `value` are collectives; raises ValueError if `value` cannot be laid out here."""
        if is_dtensor(value):
            raise ValueError(
                "the optimizer state holds DTensors, each a rank's part of a tensor, and this plugin keeps whole tensors; make "
                "them whole with full_tensor(), on all ranks, before saving"
            )
        return False

    def forget_gathered(self) -> None:
        """Drop what was gathered of parameters, which somebody wrote to."""

    def publish(self) -> None:
        """After a step: make parameters on all ranks what their parts now are. A collective, if anything."""

    def clear_gradients(self, set_to_none: bool) -> None:
        """Forget gradients that are kept elsewhere than in the `.grad` of parameters."""

    def name_of(self, param: torch.Tensor) -> str:
        """Return what messages call `param`."""
        return self.names.get(param, f"a parameter of shape {tuple(param.shape)}")

    def check_gradients(self) -> None:
        """Raise RuntimeError if ranks would step on gradients that they do not share. The same on every rank."""

    def abandon_backward(self) -> None:
        """Bring parameters back to what they are between passes, after a backward pass that raised."""

    # ------------------------------------------------------------------ checkpoints

    def view_state(self, state: Mapping[Any, State]) -> Mapping[Any, State]:
        """The optimizer's state by parameter, for reading, from that by part. Not a collective."""
        return state

    def widen_state(self, states: dict[int, State]) -> dict[int, State]:
        """State by index, as in a torch state dict: of whole parameters from that of parts. May be a collective."""
        return states

    def cut_state(self, states: dict[int, State]) -> dict[int, State]:
        """The inverse of `widen_state`, also for states of whole tensors where it makes DTensors."""
        return states

    def widen_weights(self, weights: dict[str, torch.Tensor], names: Mapping[Any, str]) -> dict[str, torch.Tensor]:
        """Tensors by parameter name: in the shape of parameters from those of parts. May be a collective."""
        return weights

    def cut_weights(self, weights: dict[str, torch.Tensor], names: Mapping[Any, str]) -> dict[str, torch.Tensor]:
        """The inverse of `widen_weights`."""
        return weights


UNSYNCHRONISED = (
    "the gradients of this optimizer are not averaged over the ranks, because passes ran inside no_sync() and none outside of "
    "it after them; before step(), run the last forward and backward pass outside of no_sync(), or use booster.accumulate()"
)
FROZEN = (
    "{name} has a gradient, but was frozen when the model was boosted, so ranks do not share it and would drift apart; call "
    "requires_grad_() before boost(), or use TorchFSDPPlugin, which also trains what is unfrozen later"
)


def is_dtensor(tensor: Any) -> bool:
    """Whether `tensor` is a DTensor, without importing them: where they are not imported there is none."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def world_size(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else dist.get_world_size(group)
