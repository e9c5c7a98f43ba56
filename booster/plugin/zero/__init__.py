"""ZeRO 1 and 2: every rank holds the whole model and a slice of gradients and states."""
