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

CLOSURE_ON_SHARDS = (
    "{optimizer}.step(closure) cannot run on shards of the parameters; call booster.backward and step() without it"
)

CLOSURE_UNCHECKED = (
    "{optimizer}.step(closure) computes and uses its gradients in one go, so skip_nonfinite=True cannot look at them; call "
    "booster.backward and step() without a closure, or use Booster(skip_nonfinite=False)"
)

FOREIGN_MASTERS = (
    "the optimizer state holds float32 master weights, but this precision keeps none; resume with the precision that wrote "
    "it, or delete state['booster']['masters'] to go on from the rounded weights"
)

IN_MODEL_STATE = (
    "the optimizer state was written where float32 weights are those of the model, as under TorchFSDPPlugin, and this model "
    "keeps half ones: {number} parameters, such as {names}, were not given float32 weights. Call model.load_state_dict with "
    "the float32 weights of that run first, then optimizer.load_state_dict; or delete state['booster']['masters'] to go on "
    "from the rounded weights"
)

UNKNOWN_PARAMETERS = (
    "the added parameters belong to no boosted model, so their gradients would not be synchronised among ranks; make them "
    "parameters of the model before boost()"
)
