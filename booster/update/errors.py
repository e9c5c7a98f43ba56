"""Errors that users may want to catch by name."""


class LossScaleError(RuntimeError):
    """Too many optimizer steps in a row were skipped because gradients were not finite."""
