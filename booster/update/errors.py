"""Errors that users may want to catch by name."""


class LossScaleError(RuntimeError):
    """Too many optimizer steps in a row were skipped because gradients were not finite."""


BARE_BACKWARD = (
    "there are gradients, but no booster.backward(loss, optimizer) since the last step: under a loss scaler those of a bare "
    "loss.backward() are not scaled, and those of the last step have been used. Call booster.backward(loss, optimizer) "
    "instead, and name every optimizer that will step on that loss: booster.backward(loss, [optimizer_a, optimizer_b])"
)

CLOSURE_UNDER_SCALE = (
    "{optimizer}.step(closure) cannot run under a loss scaler: the decision to skip falls after backward, inside the closure. "
    "Use mixed_precision='fp32' or 'bf16', or, if the optimizer does not need a closure, call "
    "booster.backward(loss, optimizer) and then step()"
)
