"""What a run writes of itself, without waiting for a device, and reads back.

A record is a folder with one file for each rank, of JSON objects, one a line. `Booster.record` opens it, and a listener of each
optimizer adds a line a step. In sampled steps, every so many, gradients and weights are counted too: not stored, but as a
histogram of their binary exponents, from which what underflowed and the room above can be said later. So::

    optimizer.step()  ->  {"kind": "step", "optimizer": "0", "step": 7, "applied": true, "loss": 2.31, "loss_scale": 65536, ...}
    sampled           ->  {"kind": "sample", "of": "gradient", "name": "0.weight", "low": -31, "counts": [4, 12, ...], ...}
    read_run(folder)  ->  Run(steps={"0": [Step(number=7, loss=2.31, ...)]}, samples={"0": [Underflow(...)]}, ...)

A process that is killed leaves a last line cut short, and one that resumes goes back: reading takes both, and keeps of a step
that was made twice the later.

In reading order:

    record_file     the form of lines, the file that is appended to, and reading it line by line
    record          `Record`, which is being written, and `Records`, those of one Booster
    samples         gradients before a step, weights before and after it, counted; `Underflow`: what a histogram of exponents
                    says of one tensor
    layer_counts    outputs of modules, and operands of low-precision layers, counted
    recorded_run    `read_run`: the files of all ranks as one `Run`

Users see the form of lines: a new key needs its check in `record_file`, and `SCHEMA` counts up where old readers would misread
one. Numbers on a device are copied by `HostCopy`, and nothing here may wait for one but `flush` and `close`.
"""
