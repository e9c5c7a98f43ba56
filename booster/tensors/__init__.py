"""Tensors as such: in containers, in flat buckets, as gradients; cast in regions, or so that they do not widen what they meet.

The idea: what several rooms do to tensors is done here once, without knowing models, optimizers or ranks.
Every function takes tensors or containers of them and says what it writes to.

An example: what a boosted model does with its inputs, `model({"ids": ids, "mask": mask})` in half weights.

    trees.map_tensors       walks the dict; containers in which nothing changes come back as the same objects
    cast_regions            `cast_inputs` rounds the float32 mask to half, where finite numbers stay finite, so that the
                            least float32 number in it does not become -inf; `region` enters the precision's context and
                            leaves those that surround it, such as the user's autocast
    weak                    float32 buffers of the model, such as frequencies, keep their bits in forward and are rounded
                            where they meet halves

Files, in reading order:

    trees.py          containers: visit, replace and join the tensors in them; what a pipeline makes of a batch
    grads.py          values, norms, unscaling and clamping of gradients, a few calls for all of them
    flat.py           how parameters are cut into flat buckets, aligned so that the cut changes no bit
    cast_regions.py   torch function modes that cast, and regions under one precision alone
    weak.py           weakly typed float32, and forwards that read buffers so

What may be touched: `grads.py` and `cast_regions.py` run in every step and every forward; tests/unit/test_calls.py counts.
`trees.py` is under everything, so it imports nothing of this library.
"""
