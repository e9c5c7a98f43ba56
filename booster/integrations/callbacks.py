"""What a boosted Trainer does between a clip and a step, for those who read gradients there."""

from __future__ import annotations

import functools
from typing import Any

_HOOK = "on_pre_optimizer_step"


def unscales_gradients(trainer: Any) -> Any:
    """Return a callback of `trainer`, to be its first, that makes `.grad` readable where one of the others reads it."""
    return _callback_class()(trainer)


@functools.cache
def _callback_class() -> Any:
    from transformers import TrainerCallback

    class UnscalesGradients(TrainerCallback):
        """Divides gradients by the loss scale, and clips them, before others are called; not where nobody looks."""

        def __init__(self, trainer: Any) -> None:
            self._trainer = trainer

        def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            others = (type(each) for each in self._trainer.callback_handler.callbacks if each is not self)
            if any(getattr(each, _HOOK) is not getattr(TrainerCallback, _HOOK) for each in others):
                self._trainer.optimizer.unscale_grads()

    return UnscalesGradients
