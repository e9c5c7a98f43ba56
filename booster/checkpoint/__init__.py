"""Checkpoints: whole names and whole shapes, in folders that appear whole or not at all.

`Booster.save` and `Booster.load` are the way in. `latest` finds the newest valid checkpoint below a folder, `damage` says
what is wrong with one.
"""

from booster.checkpoint.folder import damage, latest
from booster.checkpoint.manifest import CheckpointError
from booster.checkpoint.objects import Loaded

__all__ = ["CheckpointError", "Loaded", "damage", "latest"]
