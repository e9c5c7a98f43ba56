"""Why a step was bad: it is run again under a trace, and the first operation that made an inf or NaN is named.

A loss of NaN says nothing of where it began. So the step is replayed with the same weights, inputs and random numbers, and
every operation's result is checked, forward and backward. Each operation with an inf or NaN keeps those of its inputs as its
parents; walking back from the loss, or from the gradients, ends in the operation that made one out of finite numbers. Then what
may help is tried, by more replays. For a float16 model with a too large activation::

    replay          mm -> inf, _softmax -> NaN, nll_loss -> NaN                  NonFiniteTrace
    walk back       nll_loss <- _softmax <- mm: finite inputs, in "layers.1"     Cause(kind="overflow", exact=81920.0)
    try             "layers.1" in float32: all finite                            remedies=("finite with keep_fp32='layers.1'",)
    say             Overflow of float16: the result of aten.mm in layers.1 is too large for it, in the forward pass. ...

Nothing is left changed: memory is copied when a replay is about to write to it, and written back. On several ranks all replay
together, agree on one cause, and a rank that raises takes the others with it.

In reading order:

    nonfinite_trace   the dispatch mode that checks results and keeps parents
    places            which modules, line of code, parameter, and range of numbers
    replay            `restored_after`, `Replay`, and the barrier of its ranks
    diagnosis         `Diagnosis`, and its sentences; `Cause`: from a trace to the operation that began it
    trials            `diagnose`: replays on all ranks, and what helps: a scale, a module in float32, zeros
    skips             skipped steps that are replayed from a log of calls, and `keep_fp32="auto"`

`Booster.diagnose` and `Booster(diagnose=...)` use it. An operation that makes infinities on purpose, or a collective, which is
not in the tables of `nonfinite_trace`, leads a walk astray: add it there.
"""
