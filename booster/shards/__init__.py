"""What one rank holds, and steps, of the parameters of an optimizer: its shards.

The idea: updates and master weights see plain tensors of this rank, however the model is parallel. A plugin makes one `Shards`
for each optimizer. Between steps the optimizer's groups hold the user's parameters; inside `shards.local()` the same lists hold
this rank's shards, in the same order. So there is one update, and fused kernels run where DTensors have no rule.

[Note: roles of tensors]

    parameter           what the user's model registered, and what groups hold between steps
    shard               what this rank steps of it: a leaf that is a view of its memory; the parameter itself where it is whole
    gradient shard      the same elements of the gradient; the `.grad` of the shard inside `local()`
    unsharded gradient  the whole gradient, averaged over ranks, on every rank: `.grad` of a parameter (DDP, ZeRO-1)
    unsharded param     under `fully_shard` the whole parameter, which exists between its all-gather and its reshard;
                        `sharded_params` gives the DTensors that the model holds otherwise
    unsharded accumulated gradients   gradients of passes inside `no_sync`, which `fully_shard` keeps out of `.grad`
    state               what the optimizer keeps, by shard; `states.full` makes it whole, `states.sharded` a `FlatShard`
    flat bucket         parameters end to end in one tensor, of which each rank owns a slice (`FlatParameters`)
    bucket slot         a parameter's place in a flat bucket (`BucketSlot`)
    replica             a rank that holds the same shard; `num_replicas` divides norms, so that each element counts once

An example: a weight of 6 elements, 2 ranks, Adam; what each rank has (slices are multiples of 64 elements in truth).

                          DDP               ZeRO-1                        ZeRO-2                  FSDP
    before a step
      parameter           [0..5]            [0..5], view of a bucket      as ZeRO-1               DTensor, local [0..2] | [3..5]
      gradient            .grad [0..5]      .grad [0..5]                  bucket.gradient         .grad DTensor, local
                                                                          [0..2] | [3..5]         [0..2] | [3..5]
      states              [0..5]            [0..2] | [3..5]               [0..2] | [3..5]         [0..2] | [3..5]
    inside `local()`
      the group holds     the parameter     shard [0..2] | [3..5]         as ZeRO-1               shard [0..2] | [3..5]
      shard.grad          .grad             view of .grad                 view of the slice       local tensor of .grad
    after the step
      parameter, rank 0   new 0..5          new 0..2, old 3..5            as ZeRO-1               new 0..2, which is all it has
      sync_params         nothing           slices to all ranks           as ZeRO-1               frees what was gathered before

Files, in reading order:

    base.py                 `Shards`: every operation, for parameters that are whole; `Shards.states`: states and masters
                            between shards and parameters; `FlatShard`: a slice of elements as boxes of the whole tensor
    replicated.py           DDP: whole parameters; which gradients DistributedDataParallel has averaged; a few comparisons a
                            run: do ranks that step alike still hold the same
    zero_buckets.py         ZeRO: `FlatParameters`, and the buckets of a module: who owns what; weights still on their way
    zero.py                 ZeRO: slices of flat buckets as shards
    zero_states.py          ZeRO: what a rank has of a parameter and of a group; states of whole parameters, gathered
    dtensor.py              tensor parallelism and FSDP: local tensors of DTensors; sums of gradients that ranks hold as terms
    fully_sharded.py        FSDP: what a forward pass leaves gathered, what `no_sync` leaves unreduced
    fp8_gather.py           FSDP: all-gathers in e4m3 for layers that would round to it anyway

Who depends on it: `update/`, `masters/`, `kernels/`, `checkpoint/` and the plugins, on `Shards`; checkpoints also on
`FlatShard`, the plugins on the class that they make, `memory/` and `interface/` on single classes. What is added to `Shards`
needs a null version in `base.py`. The order of the groups' lists must be the same on leaving `local()`, and a shard must stay
the same object from step to step: states have it for a key.
"""

from booster.shards.base import Shards

__all__ = ["Shards"]
