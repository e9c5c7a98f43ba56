"""Fully sharded data parallelism: torch's `fully_shard` (FSDP2), in the dtypes of a precision.

The idea: every rank holds a shard of each parameter, gradient and state. Torch gathers the parameters of a block before its
forward and frees them after. What is added here is what a precision needs, and what torch leaves to the user: float32 shards
that serve as master weights, modules pinned to float32 in groups of their own, weights that show the computed dtype while
they are sharded, and errors, on all ranks, where torch would mix up gradients or wait forever.

An example, `bf16_naive` on two ranks, one block with a 4 x 4 weight:

    at rest     float32 shard, 2 x 4 on each rank: the master weight; the optimizer holds this
    forward     gathered in bfloat16, 4 x 4; `block.weight.dtype` is bfloat16 inside the model's forward, also before that
    backward    gathered again; the gradient is reduce-scattered in float32 to 2 x 4
    step        on the shards; nothing is sent

What runs in a pass, in this order; lines without a file are torch's:

    model, before forward    what users wrote to gathered weights goes to shards (`write_back_all` of shards/fully_sharded.py)
    block, before forward    gather; note what forward may write (forward_hooks.py); mark the group (unused_parameters.py)
    block, after forward     hooks on outputs, for backward (unused_parameters.py); free; forward_hooks.py shows dtypes
    backward of a block      gather; zeros where this rank lacks a gradient (unused_parameters.py); reduce-scatter
    end of backward          one collective: which parameters had a gradient on any rank (unused_parameters.py); in the first
                             passes, and after the order of groups changed, one before each group instead

The files, in reading order:

    plugin.py             `TorchFSDPPlugin`, and `ShardingPlugin`, its base and that of `HybridParallelPlugin`
    groups.py             which modules are blocks: the user's `wrap_policy`; which parameters are gathered together: each group
                          has one dtype and one gather dtype; whole or sharded weights that are loaded into shards
    shard_module.py       `shard_module` checks, casts and shards, group by group; `change_dtypes` for another precision
    forward_hooks.py      hooks around forward: no views, computed dtypes shown, gathered parameters freed; what a forward
                          writes to these reaches the shards
    unused_parameters.py  zeros where a rank lacks a gradient; ranks agree which parameters had one

What a rank holds and steps is `shards/fully_sharded.py`. Private names of torch's FSDP are in
`common/torch_internals/fsdp_internals.py`, and the order of hooks on a module matters: each line says why.
"""
