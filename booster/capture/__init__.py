"""A whole training step as one CUDA graph: forward, backward, clip, step and loss scale, launched at once.

The idea: a graph is recorded from the user's own function, and replayed with other numbers in the same memory. The host's part
of a step is then copying a batch in, and results out. What Python does in a step happens only while recording, so everything
that changes from step to step has to be in memory that the graph reads.

An example: `step = b.capture(train_step, x, y)`, then `step(x, y)` in a loop.

    capture   refuse by name what no graph can follow; run the step twice on trial, and refuse by line what a host reads
    call 1    train_step itself: optimizers make their states
    call 2    recorded. Inputs, loss scale, its counters and learning rates get memory that stays
    call 3    replayed: copy the batch in, replay, copy the `StepResult` and what was returned out
    ...       a batch of another shape, a module in eval mode, another place in `accumulate`: another graph
              weights that were replaced, as by a load: all graphs are dropped, and recorded again

In reading order:

    captured.py        `CapturedStep`: which graph a call is for, when one is recorded, what the host does around a replay
    graph.py           `CudaRecorder` records and replays; `StepGraph` is one graph with its memory and results
    graph_inputs.py    `TensorAddresses`, `GradientLayout`, `StaticScalars`: what a graph holds fixed, what tells graphs apart;
                       `LRBuffers`, `LRLookahead`: rates where a graph reads them, also where a skipped step must not count
    trial.py           `check` and `reads_of`: what keeps a step out of a graph; `Reads` watches operations for what waits for
                       the device, and names the user's line

It is a tool: `Booster.capture` alone uses it. It reads internals of `update/`, `masters/` and `interface/`: if you add
state there that Python changes in a step, keep it in a tensor that lives on, with a test in tests/unit/test_capture.py.
"""
