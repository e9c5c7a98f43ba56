"""Linear layers that multiply in 4 to 8 bits: recipes as data, the layer, and the strategies that convert models."""
