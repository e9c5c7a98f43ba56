"""A loss scale of your own is one file: it grows a little with every clean step and falls far on an overflow.

    Booster(mixed_precision=FP16TorchMixedPrecision(scale=Sawtooth()))  # or FP16NaiveMixedPrecision

The same object serves steps that are decided on the host and on a CUDA device; there its rule runs a step later, when the
decision has arrived, and no step waits for it.
"""

from booster.mixed_precision import LossScaler


class Sawtooth(LossScaler):
    """A scale that is multiplied by `growth` after a clean step and by `fall` after one that overflowed."""

    enabled = True

    def __init__(self, start=2.0**12, growth=1.02, fall=0.25):
        self._scale, self._growth, self._fall = start, growth, fall

    @property
    def scale(self):
        return self._scale

    def update(self, found_inf):
        self._scale = min(max(self._scale * (self._fall if found_inf else self._growth), 1.0), 2.0**24)

    def state_dict(self):
        return {"scale": self._scale}

    def load_state_dict(self, state):
        self._scale = float(state["scale"])
