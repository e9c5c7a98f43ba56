"""The facade: what the methods of `Booster` do, in the order in which a run meets them.

The idea: `booster/booster.py` has what makes a Booster and what boosts; its other methods are functions of the files
`*_methods.py` here, which take a `BoosterState` as `self` and which the class names one a line, by subject. Nothing here
knows which precision or plugin runs: both are asked through `MixedPrecision` and `Plugin`. An example:

    b = Booster("cpu", "fp16")               PrecisionRun: a phase with this precision
    b.boost(model, optimizer)                refusals.check_boost; precision.configure(...); BoostedObjects.add(...)
    with b.accumulate(model, optimizer, 4):  an Accumulation, open in Accumulations
        b.backward(loss, optimizer)          divided by 4; synchronised in the fourth pass alone
    optimizer.step()                         not here: booster/interface/optimizer.py
    b.switch("bf16")                         PrecisionRun.switch -> Switch.check on all ranks -> Switch.make

Files in reading order:

    refusals.py             what `Booster` and `boost` accept, checked before anything is changed
    foreign_names.py        names of other libraries, for errors that say what to write; `Booster.from_config`
    before_boost.py         `BeforeBoost`: dtypes, forwards and buffers of a model as its user built it
    precision_run.py        `PrecisionRun`: the precision now, and what changes it; `PrecisionScheduler`: which phase is due
    switch.py               `BoostedObjects`: what one Booster has boosted, as long as the user keeps it; `Switch`: from one
                            precision to another, as a checkpoint would carry it, but in memory
    booster_state.py        `BoosterState`: the attributes that the methods share
    pass_methods.py         `backward`, `accumulate`, `no_sync`, `execute_pipeline`, `shard_sequence`, `capture`
    checkpoint_methods.py   `save`, `load` and the like; `sync_weights`: weights for a sampler, as the forward reads them
    diagnostic_methods.py   `record`, `diagnose`, `estimate_memory`, `memory`, `profile`, `progress`
    accumulation.py         groups of micro-batches, and passes that leave gradients unsynchronised
    collectives.py          `gather` and `reduce` of results
    frozen_weights.py       `booster.load_weights`, `enable_lora`, `save_lora`: weights in few bits, and adapters around them
    description.py          `booster.describe`: what each module is stored in and computes in
    batch_size.py           `find_batch_size`: trials that ranks leave together

What may be touched: a method of `Booster` keeps its signature and docstring, which are public; what it calls here is free. A
check belongs to `refusals.py`, raises before anything is changed, and names what was given, what is legal and the fix. Only
`booster.py`, `booster/__init__.py` and the commands import this room.
"""
