"""What one rank holds, and steps, of the parameters of an optimizer."""

from booster.shards.base import Shards, clear_hidden_gradients, dtensor_types, is_dtensor

__all__ = ["Shards", "clear_hidden_gradients", "dtensor_types", "is_dtensor"]
