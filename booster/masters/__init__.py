"""Master weights: float32 numbers behind half-precision parameters, which the user's own optimizer is stepped on."""

from booster.masters.masters import Masters
from booster.masters.options import MasterOptions
from booster.masters.update import choose_master_update
from booster.model.optimizer_kinds import register_elementwise

__all__ = ["MasterOptions", "Masters", "choose_master_update", "register_elementwise"]
