"""The update of one optimizer: from a backward pass to a step, with loss scale, norm, clip and the decision to skip.

The idea: gradients are read once and written as rarely as can be. They stay multiplied by the loss scale until the step. One
pass computes their norm, which shows an overflow and gives the clip factor; scale and clip are then one number,
`grad_scale`, by which a fused optimizer divides while it steps.

An example: a loss scale of 1024, `clip_grad_norm=1.0`, and gradients with a norm of 4096 as they are, so 4.0 in truth.

    b.backward(loss, optimizer)     loss * 1024; autograd fills `.grad`              Gradients.scale = 1024
    optimizer.step()
        norm                        4096, read once; finite, so nothing is skipped   Gradients.read
        clip                        factor 1.0 / 4.0, which waits                    Gradients.factor = 0.25
        grad_scale                  1024 / 0.25 = 4096                               StepScalars
        step                        AdamW(fused=True) divides by 4096 as it steps    Application.step
        loss scale                  one more step without overflow                   LossScaler.update(False)
        StepResult                  applied, grad_norm 4.0, loss_scale 1024.0

Had the norm been inf, on any rank, nothing would be stepped: the host does not call the optimizer, a device gives it
`found_inf`.

In reading order:

    context.py           `UpdateContext`: the optimizer, scale, ranks, shards and options that an update is made from;
                         `StepListener`: base class of what hears of steps; `Parameters`: names, and checks that nothing
                         else changed dtypes or scaled gradients; `OptimizerState`: what a checkpoint holds of an optimizer
    choice.py            the table of which objects an update is put together from; start here to add a kind of step;
                         switching an optimizer to its fused kernel, and back; norms and steps by torch.compile
    update.py            `Update`: one optimizer's step, as a wrapper calls it
    gradients.py         `Gradients`: which scale `.grad` carries, which clips wait, what was read; when `.grad` is written
    backward.py          `run_backward` for one or several optimizers; `JointDecision` of those that share a loss
    decision.py          the rule of a decision, and the two base classes `Norms` and `Decision`; `StepResult`, the counters
                         of steps, and the error after too many skips
    host.py, device.py   the rule by Python numbers, and by 0-dim tensors that nothing waits for
    application.py       `Application`: step the user's optimizer; `StepScalars`: by which numbers; `FusedKernel`: what
                         torch's fused kernels can step
    distributed_muon.py  Muon on matrices that ranks hold shards of
    in_backward.py       the optimizer in backward (`release_gradients`): passes, and what is known between them
    in_backward_pass.py  one optimizer in one such pass: a step in parts, restricted to some of its parameters
    state_dict.py        what state dicts of a boosted optimizer look like; state_loading.py: a load of one, which changes all
                         or nothing

An option to clipping goes from `Booster` through `UpdateOptions` (context.py), from a call through `clip_grad_by_norm` of
`interface/optimizer.py`, to `Gradients.clip_norm`. The factor is `Norms.clipped`: host.py, device.py, `kernels/readings.py`.
A clip of `Booster(clip_grad_norm=)` on a device waits in `Gradients.deferred_max_norm` until the decision; with kernels it is
applied in `kernels/launches.py`. There is one factor for all gradients of an optimizer: clipping only some must write `.grad`
at once, as `clip_value` does. The norm to clip to is also given to in_backward.py and `interface/closures.py`, and is an option
of `mixed_precision/naive.py`.

Backward passes past `b.backward`, as a bare `loss.backward()`, under a loss scaler: `Gradients.require_backward` refuses a step
without any pass of ours. With a scale other than 1, in the first two steps and one in a hundred, hooks of `BarePasses`
(context.py) see one that is added to ours, and raise; `GradMutationCheck` sees gradients that were written between backward
and step, and warns.

What is true everywhere: what steps gradients runs inside `Shards.local()`, where parameters are this rank's shards; a step
within backward takes `Shards.local_shards`. A number is a float on a host and a 0-dim tensor on a device; `float(...)` of one
waits for the device. Below are `shards/`, `ranks/` and `tensors/`; `masters/`, `kernels/`, apex and `interface/optimizer.py`
subclass or call what is here.
"""
