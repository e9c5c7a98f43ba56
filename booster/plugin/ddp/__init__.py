"""Data parallelism: every rank holds the whole model and a share of the batch, and gradients are averaged in backward.

The idea: torch's DistributedDataParallel where it fits, and reducers of ours where it does not, because its buckets outlive the
gradients in them. With gradients that are used within backward (`release_gradients`) or kept as slices (ZeRO 2) nothing may.

An example, two ranks, parameters a, b, c in two buckets {c}, {b, a}, in the order in which backward reaches them:

    backward reaches   c: bucket 0 is full, its all-reduce starts      b: waits for a      a: bucket 1 is full, it starts
    at most two buckets are in flight; the oldest is waited for before a third starts
    backward ends      what no rank reached gets no gradient; ranks agree on that by one small all-reduce

The files, in reading order:

    plugin.py                `TorchDDPPlugin`: options, refusals, what is wrapped around the model
    gradient_reducer.py      `GradientReducer`, the order above for any kind of bucket; a subclass says what
                             buckets are, how one is sent and where its average goes
    averaged_gradients.py    `AverageReducer`: unsharded averages, in torch's buckets; the wrapper of a model; a communication
                             hook for DistributedDataParallel that sends 8 bits; sums by all-to-alls

`booster/plugin/zero.py` subclasses the plugin and the reducer. `shards/replicated.py` and `memory/pass_memory.py` know of the
reducer `register_grad_hooks`, `synchronises`, `left` and MOST_IN_FLIGHT. The order in which ranks send must be the same on all.
"""
