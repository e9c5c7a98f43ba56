"""From a step that can be replayed to its `Diagnosis`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from booster.numerics.diagnosis.cause import Cause
from booster.numerics.diagnosis.diagnosis import Diagnosis, power_of_two
from booster.numerics.diagnosis.replay import Replay
from booster.numerics.diagnosis.trials import Trials

_HALF = ("float16", "bfloat16")


def diagnose(
    replay: Replay, *, group: dist.ProcessGroup | None, device: torch.device, notes: tuple[str, ...] = ()
) -> Diagnosis:
    """Replay the step, name the first bad number, and try what helps. A collective: all ranks of `group` call it alike."""
    trials = Trials(replay, group, device.type)
    shown = trials.first()
    cause = shown.cause
    known: dict[str, Any] = {"loss": shown.loss, "loss_scale": replay.scale}
    if not shown.bad:
        finite = (
            f"Every number that reached the loss or a gradient was finite, the largest gradient {shown.largest_gradient:.3g}."
            " What made the step bad is not in this computation, or not with these random numbers."
        )
        return Diagnosis(kind=None, **known, notes=(finite, *notes))
    if cause is None:
        untraced = "The loss or a gradient is not finite, but no operation of the replay made it so."
        return Diagnosis(kind=None, **known, notes=(untraced, *notes))
    kind, remedies = cause.kind, []
    if kind == "overflow" and cause.direction == "backward" and replay.scale > 1.0:
        scale = trials.largest_scale(cause)
        if scale is not None:
            kind = "loss_scale"
            remedies.append(f"finite at scale {power_of_two(scale)}")
    if kind in ("overflow", "operation", "loss_scale") and _is_half(cause):
        module = trials.module_in_float32(cause)
        if module is not None:
            remedies.append(
                "finite with mixed_precision='fp32'" if trials.is_root(module) else f"finite with keep_fp32={module!r}"
            )
    certain = bool(remedies) or trials.is_mended(cause) or (cause.alone and not cause.foreign)
    return Diagnosis(
        kind=kind,  # type: ignore[arg-type]
        module=cause.module,
        operation=cause.operation,
        direction=cause.direction,  # type: ignore[arg-type]
        dtype=cause.dtype,
        rank=cause.rank,
        remedies=tuple(remedies),
        certain=certain,
        advice=_advice(cause, kind),
        autograd_node=cause.node,
        of=cause.of,
        parameter=cause.name,
        modules=cause.chain,
        passed=cause.passed,
        source=cause.source,
        inputs=cause.inputs,
        output=cause.output,
        rows=cause.rows,
        micro_batch=cause.micro_batch,
        stage=cause.stage,
        notes=notes,
        **known,
    )


def _is_half(cause: Cause) -> bool:
    return cause.dtype in _HALF or any(numbers.dtype in _HALF for numbers in cause.inputs)


def _advice(cause: Cause, kind: str) -> tuple[str, ...]:
    if kind == "data":
        rows = f"rows {', '.join(map(str, cause.rows))} of it" if cause.rows else "it"
        return (f"repair or drop {rows} before the step",)
    if kind == "weights":
        return ("load a checkpoint from before, or set these numbers anew",)
    operation = (cause.of or cause.operation).partition(".")[2]
    for names, text in _BY_OPERATION.items():
        if operation in names:
            return (text,)
    return ()


_BY_OPERATION = {
    ("log", "log2", "log10", "log1p"): "keep the argument above zero, as by x.clamp_min(1e-6)",
    (
        "div",
        "div_",
        "reciprocal",
    ): "keep the divisor away from zero, in a format that holds the small number added to it",
    ("sqrt", "rsqrt", "pow", "norm", "linalg_vector_norm"): (
        "add a small number under the root: its slope at zero is infinite"
    ),
    ("_softmax", "_log_softmax", "_safe_softmax"): "let every row have an entry that is not -inf",
    ("exp", "exp_", "expm1"): "subtract the maximum first, or use logsumexp, softmax or softplus",
}
