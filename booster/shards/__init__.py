"""What one rank holds, and steps, of the parameters of an optimizer."""

from booster.shards.base import Shards

__all__ = ["Shards"]
