"""Recipes of layers that multiply in 4 to 8 bits, by short names."""

import pytest

from booster.mixed_precision.low_precision.recipes import (
    FP8_RECIPES,
    INT8_RECIPE,
    MXFP8,
    fp8_blocks_recipe,
    nvfp4_recipe,
)

RECIPES = {
    "fp8": FP8_RECIPES["tensorwise"],
    "fp8 rowwise": FP8_RECIPES["rowwise"],
    "fp8 rowwise_with_gw_hp": FP8_RECIPES["rowwise_with_gw_hp"],
    "fp8 blocks": fp8_blocks_recipe(power_of_two_scales=False),
    "mxfp8": MXFP8,
    "nvfp4": nvfp4_recipe(stochastic_rounding=True, hadamard=True),
    "nvfp4 nearest": nvfp4_recipe(stochastic_rounding=False, hadamard=False),
    "int8": INT8_RECIPE,
}
EVERY_RECIPE = pytest.mark.parametrize("name", RECIPES)
