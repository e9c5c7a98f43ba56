"""Frozen weights in less memory than they are computed in: how they are stored, and the layer that holds them."""

from booster.frozen.forms import FORMS, Form
from booster.frozen.linear import FrozenLinear, note_origin, origins_of

__all__ = ["FORMS", "Form", "FrozenLinear", "note_origin", "origins_of"]
