"""Master weights: float32 numbers behind half-precision parameters, on which the user's own optimizer is stepped.

The idea: the optimizer is stepped as it is, and never sees a half-precision parameter. For the length of a step its groups
hold *handles*: float32 parameters without memory, which are given the masters of some elements for data and their gradients,
cast to float32, for gradient. Masters are made of the weights and what is kept besides, stepped, rounded and written back,
a bucket at a time, so that float32 scratch is that of one bucket and not of the model.

An example: bfloat16 weights, "split" masters, Adam under ZeRO on two ranks; one element of the shard of rank 0, lr 1e-3.

                     before the step           in the step                        after the step
    weight           0x4049 = 3.140625         read                               0x4049: the same, the change is below its ulp
    residual bits    0x0FDB                    read                               0xFF79: the change, kept
    master           none                      0x40490FDB -> 0x4048FF79           none: (0x4049 << 16) - 0x0087
                     (3.1415927)               (3.1405927), in scratch
    gradient         half, times grad_scale    cast to float32 in scratch;        half, times grad_scale: never written
                                               the kernel divides by grad_scale
    exp_avg          of the bucket, float32    updated in place                   of the bucket
    handle           no memory, no gradient    data: masters, grad: scratch       no memory, no gradient
    other ranks      their own elements        their own elements                 `sync_params` sends rounded weights,
                                                                                  and no residual bits: rank 0 alone has them

Words of this room:

    bucket            flat pieces of parameters of one group, dtype and device: the unit of a step. Optimizers of whole
                      tensors, as `model.optimizers.granularity_of` says, get buckets with a handle for each
                      tensor (`bucket.whole`)
    piece             some elements of a parameter in a bucket, starting at an offset that divides by 64
    residual bits     what a bucket keeps besides weights to make masters of them; nothing for "none"
    format            which residual bits, and how they and weights become masters and back
    encoding          how a state is quantized between steps: "bf16", "signed" or "unsigned" with 8 bits and scales
    rng               where stochastic rounding has its random bits from: the step, a name and the place of an element
    foreign write     by other code to a weight between steps. Such a weight is its own master: `accept_foreign_writes`

Files, in reading order:

    formats.py            `MasterOptions`: what users choose; the bits of every format, in place, for eager: `Float32Master`
                          is "fp32", `Split*` "split" and "split24", `Kahan` is rounding="kahan"
    formats_compiled.py   the same arithmetic as pure functions: for compiled steps. In Triton it is `kernels/weights.py`, whose
                          `_store_*` write weight and residual bits
    rounding.py           float32 to half; foreign writes; `RoundingRNG`
    bucket.py             `Bucket`: weights, residual bits, handles
    masters.py            `Masters`: all buckets of an optimizer
    step.py               `MasterStep`: the step, bucket by bucket, and of float32 parameters, which have no master
    compiled.py           `CompiledMasterStep`: a bucket in one pass over memory; a proxy of the optimizer is traced
    quantized_state.py    states in 8 or 16 bits: how, which, and when
    offload.py            residual bits and states in the host's memory, prefetched
    states.py             states of buckets as states of parameters, and back
    master_state.py       what a checkpoint keeps, saved and loaded; float32 weights that a model was given
    master_params.py      float32 parameters in the place of half-precision ones, for methods of an optimizer that are no steps
    update.py             the room as the update sees it: application, parts of a step, choice

After a step `MasterStep` calls `Bucket.commit_masters`, which is `Format.write` of formats.py; a compiled step writes what
`split` of formats_compiled.py returns.

Who depends on it: `mixed_precision/` makes `MasterOptions` and `Masters`, `update/` steps by the classes of `update.py`,
`kernels/` steps the same buckets, `checkpoint/` asks `update.optimizer_state`, which is `MasterState`. A new format touches
`formats.py`, `formats_compiled.py` where it is to be compiled, and `kernels/weights.py` where a kernel is to
step it; the three that compute are held to each other bit for bit by `tests/unit/test_masters_compiled.py` and
`tests/unit/test_kernels_forms.py`.
"""

from booster.masters.formats import MasterOptions
from booster.masters.masters import Masters
from booster.masters.update import choose_master_update
from booster.model.optimizers import register_elementwise

__all__ = ["MasterOptions", "Masters", "choose_master_update", "register_elementwise"]
