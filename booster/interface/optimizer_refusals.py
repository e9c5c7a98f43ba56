"""What a boosted optimizer refuses: a GradScaler, and states by torch's checkpoints that would lose something."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from torch.optim import Optimizer

from booster.update.state_dict import STATE_KEY
from booster.update.update import Update


def refuse_grad_scaler(optimizer: Optimizer) -> NoReturn:
    """Raise RuntimeError: a GradScaler has set `found_inf` on the boosted `optimizer`."""
    for name in ("grad_scale", "found_inf"):  # torch leaves them where step() raises
        optimizer.__dict__.pop(name, None)
    raise RuntimeError(
        "a GradScaler stepped the boosted optimizer, which has the loss scale of its precision already, if that needs "
        "one: the update would be scaled twice. Delete the GradScaler: write b.backward(loss, optimizer) for "
        "scaler.scale(loss).backward(), optimizer.step() for scaler.step(optimizer), optimizer.clip_grad_by_norm(max_norm) "
        "for scaler.unscale_(optimizer) and the clip, and nothing for scaler.update(); GradScaler(enabled=False) may stay"
    )


def check_nothing_is_lost(own: Mapping[str, Any], update: Update) -> None:
    """Raise RuntimeError if torch's checkpoints, which keep torch's keys alone, would drop what a resume needs.

    own: the states of masters.
    """
    masters = own.get("masters", {})
    lost = ["float32 masters"] if masters.get("weights") else []
    lost += ["the random state of stochastic rounding"] if masters.get("rounding") else []
    lost += ["the loss scale"] if update.gradients.scaler.enabled else []
    if lost:
        raise RuntimeError(
            f"torch.distributed.checkpoint.state_dict would drop {' and '.join(lost)} of this optimizer. Save with "
            "Booster.save, which keeps everything, and load with Booster.load, into any layout; or keep what "
            f"optimizer.state_dict() returns, whose key {STATE_KEY!r} has them"
        )
