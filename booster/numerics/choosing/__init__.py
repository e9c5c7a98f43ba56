"""Which precision to train in, and which modules to keep in float32: both found by measuring the user's own model.

Every candidate trains a few steps on one batch, from the same seed. Its time is that of its steps over float32 steps taken in
turns with them, so a machine that slows down slows both. Its error is that of its gradients against float32's at the same
weights: at the first ones, and at those after five float32 steps. Then::

    advise(model_fn, batch, criterion, optimizer_fn)        ->  Advice: a row for each precision, ranked, with reasons
    auto_pins(model, batch, criterion, "fp16", bound=0.1)   ->  Pins: the fewest modules for keep_fp32 that hold the bound
    time_layers(model_fn, batch)                            ->  TimedLayers: each shape of linear layer, in each low precision

In reading order:

    trained_subject   one model under one precision, to be stepped and measured; the error of its gradients
    advice            `Budget`, `Row`, `Advice`; how rows are ranked, and the sentences that say why
    advise            the measurement
    pin_search        `auto_pins`: each block alone, the largest together, then those that are not needed taken away
    timed_layers      `time_layers`

What may be touched: what is measured and how rows are ranked; each candidate must begin from the same weights and seed.

A tool: it boosts models with a precision's `configure`, as `Booster` does, and the command `booster advise` shows what it says.
"""
