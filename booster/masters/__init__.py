"""Master weights: float32 numbers behind half-precision parameters, which the user's own optimizer is stepped on."""

from booster.masters.masters import Masters
from booster.masters.options import MasterOptions
from booster.masters.update import MasterUpdate
from booster.model.optimizer_kinds import register_elementwise

__all__ = ["MasterOptions", "MasterUpdate", "Masters", "register_elementwise"]
