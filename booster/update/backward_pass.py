"""One backward pass, as the updates that take part in it see it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from booster.update.base import Update


@dataclass(eq=False)
class BackwardPass:
    """See the module docstring.

    updates: those of the optimizers that the loss is for. loss_id: which of the precision's loss scalers. delayed: the
    gradients are not complete after it, as inside `no_sync`, so nobody may look at them yet. checked: an overflow in it
    counts. create_graph: gradients are part of a graph, as a penalty on them needs. found: what each update found in its
    gradients, for a decision that all of them share.
    """

    updates: Sequence[Update]
    loss_id: int = 0
    delayed: bool = False
    checked: bool = True
    create_graph: bool = False
    found: list[Any] = field(default_factory=list)
