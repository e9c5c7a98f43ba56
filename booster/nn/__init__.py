"""Parts of a training loop that are neither a model nor an optimizer."""

from booster.nn import lr_scheduler

__all__ = ["lr_scheduler"]
