"""Steps of optimizers by Triton kernels, as few launches on a device, and matrices rounded for low precisions.

The idea: on a GPU a small step costs what its launches cost, so all tensors are stepped by three. The addresses of everything
that is read and written are rows of a table in memory of the device, and each program of a launch steps one tile of one row.

An example: AdamW under a loss scale with a clip, 148 parameters.

    measure   a program for each tile of 2,048 gradients: partial sums of squares
    decide    one program: the norm, found_inf, the clip, grad_scale, the next loss scale; and for each parameter the step
              count and the numbers that the rule makes of it (bias corrections, decay)
    update    a program for each tile: load the weight in its form, divide the gradient, open the states, apply the rule,
              close the states, store the weight; one launch for each kind of dtype, form and options
    no number comes back to the host: `StepResult` reads a copy when somebody asks

What is stepped is put together from three parts that know nothing of each other: a rule (`rules.py`), a form of weights and
forms of states (`weights.py`). The optimizer stays the user's: kernels read and write its own states, so that torch can make
the next step, and makes those that kernels do not know. `Unsupported` says which.

In reading order:

    eligibility.py      `by_kernels`: whether an optimizer is stepped so, or why not
    probe.py            before that, a trial next to torch on a few small tensors
    kernel_decision.py  `KernelDecision`: the decision and step, in the place of `update/device.py`'s; the optimizer in backward
    readings.py         what was read of gradients, by kernels or by torch
    supported.py        which parameters are stepped: as they are, or buckets of master weights
    segments.py         their contiguous segments, with states and step counts; the rows, sorted into launches of one kernel
                        each
    switches.py         which parts are taken by default, and what a run on a card said of them
    steps.py            `KernelSteps`: tables kept from step to step, and the launches
    launches.py         the kernels `measure`, `decide` and `update`
    launch_cache.py     compiled kernels launched without Triton's look at each argument
    rule.py, rules.py   what a rule is (public), and those of torch's optimizers and of Lion
    weights.py          forms of weights and of states
    arithmetic.py       bits, halves and powers that all of these share
    matrices.py         matrices rounded to low precisions, by the kernels of matrix_kernels.py

Tests run kernels interpreted on a CPU (`make kernels`): results are compared with torch's to an ulp, forms to the bit.

`mixed_precision/configure.py` and `mixed_precision/low_precision/operands.py` alone import this room: with booster itself
eligibility.py, switches.py and matrices.py; what needs Triton on CUDA, or where `fused_optimizer="triton"` asks for it.
"""
