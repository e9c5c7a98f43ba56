"""What one rank holds, and steps, of the parameters of an optimizer."""

from booster.shards.base import Shards, is_dtensor

__all__ = ["Shards", "is_dtensor"]
