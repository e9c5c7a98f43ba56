"""What one rank holds, and steps, of the parameters of an optimizer."""

from booster.shards.base import Shards, dtensor_types, is_dtensor, is_part

__all__ = ["Shards", "dtensor_types", "is_dtensor", "is_part"]
