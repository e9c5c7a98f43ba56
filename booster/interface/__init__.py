"""What `boost` returns: wrappers around the user's model, criterion, optimizer and scheduler, known by their type alone.

The idea: the user's own objects stay, are edited in place, and are reached through wrappers that pass everything on but what
the precision must see. An example, bf16 by autocast on one device:

    model(x)                  PrecisionModule._run: casts x, runs the user's forward in the precision's region, casts the output
    model.generate(x)         an attribute of the user's model; its methods run in the region too
    model.weight = w          set on the user's model, as `state_dict` keys and names of parameters are its own
    optimizer.step()          OptimizerWrapper: an `Update` unscales, clips, decides and steps the user's optimizer, or skips
    scheduler.step()          advances if that step was applied

Files in reading order:

    transparent.py          `TransparentModule`: attributes, names and state dicts of the model inside, whatever wraps it
    model.py                `PrecisionModule` and `ModelWrapper`: forward and methods under a precision; `extras_of`
    error_hints.py          errors of a forward pass with a known cause; what optimizers refuse: a GradScaler, and torch's
                            checkpoints where they would drop masters
    call_log.py             what models were given in a step, by reference, for replays of it (numerics/diagnosis)
    optimizer.py            `OptimizerWrapper`: a torch Optimizer around the user's own
    closures.py             closures, and `zero_grad` of gradients of several kinds
    scheduler.py            `LRSchedulerWrapper`, and which state a scheduler may load

What may be touched: a step passes here, so each call counts (`tests/unit/test_calls.py`). A wrapper sets its own attributes by
`__dict__`, since plain assignment sets them on the user's model. Other rooms ask by functions (`update_of`, `gradients_of`,
`extras_of`, `precision_of`), not by attributes: their names belong to the user. mixed_precision/ makes the wrappers; facade/,
checkpoint/ and numerics/ read them.
"""
