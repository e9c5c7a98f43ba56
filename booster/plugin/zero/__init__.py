"""ZeRO 1 and 2: every rank holds all weights and one slice of masters, optimizer states and, in stage 2, gradients.

The idea: parameters are laid end to end in flat buckets, and each bucket is cut into one slice per rank. A rank steps its
slices and then sends the weights in them to all others. The layout and the step are in `booster/shards` (`zero_buckets.py`,
`zero.py`); this room averages gradients into it and wraps the model.

An example, two ranks, one bucket of the weights a (3 numbers) and b (5), so a slice is 4 numbers:

    bucket       a0 a1 a2 b0 | b1 b2 b3 b4
    stage 1      DistributedDataParallel averages all 8 on both ranks; rank 0 steps the first 4, rank 1 the others
    stage 2      a reduce-scatter gives rank 0 the average of the first 4; `.grad` of a and b is None afterwards
    after step   rank 0 sends a0..b0, rank 1 sends b1..b4; with overlap_allgather the next forward waits, not `step`

The files:

    plugin.py   `LowLevelZeroPlugin`: options, and which of the wrappers a stage needs: `SliceReducer` reduces by hooks of ours
                (stage 2), `BucketReducer` takes what DistributedDataParallel filled (stage 1 with reduce_scatter), `ZeroDDP` is
                that module with pending all-gathers

Policies that would round weights on their way between ranks are refused (`check_gathers`), because what arrives is kept.
"""
