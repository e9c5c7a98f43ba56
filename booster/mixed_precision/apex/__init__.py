"""`fp16_apex`: the optimization levels O0 to O3 of NVIDIA's apex.amp, on CPU and CUDA, whether apex is installed or not.

The idea: apex differs from the other precisions in *when* it looks. It unscales and checks what each backward pass brings, at
its end, and moves the loss scale there; an overflow skips the next step. Others look once, at the step. So gradients are
unscaled between passes here, and the update has its gradients and decision here; norms, clips, masters and the step are
those of the library.
Recorded behaviour of apex (tests/data/apex_amp.json) wins over the rules of this library.

An example: O2 (float16 weights, float32 masters), loss scale 65536, two passes before a step.

    backward 1     `.grad` of pass 1 is float16, times 65536. It is cast to float32, divided and put into the sums of the
                   masters. All finite: a clean pass, counted.
    backward 2     what is in `.grad` is set aside, so that the pass is checked by itself. It holds an inf: the scale is
                   halved now, and each optimizer of the pass will skip its next step, once.
    step           skipped; sums are dropped

Files, in reading order:

    apex_options.py       the four levels as data, what a user overrides, what contradicts a level, in apex's words
    scale.py              one loss scale for each loss, shared by all optimizers
    apex_precision.py     `FP16ApexMixedPrecision`: the hooks of a precision, its boosted model, and its update, which skips a
                          step after an overflow
    apex_gradients.py     `ApexGradients`: a pass set apart, unscaled, checked, added; under O2 sums in float32 besides `.grad`
    o1.py                 O1's casts: functions of torch by apex's lists, functions that the user registers, contexts
    real.py               the real apex.amp, where it is installed and asked for

`mixed_precision/apex_amp.py` is apex's own interface on top of this room. Nothing else imports it but the table of precisions.
"""

from booster.mixed_precision.apex.apex_precision import FP16ApexMixedPrecision

__all__ = ["FP16ApexMixedPrecision"]
