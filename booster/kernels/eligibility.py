"""Whether an optimizer is stepped by kernels: where that is asked for."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import torch
from torch.optim import Optimizer

from booster.kernels import switches
from booster.masters.update import ReportingDecision
from booster.model.optimizers import granularity_of
from booster.ranks import agreement
from booster.update.choice import on_device
from booster.update.context import UpdateContext
from booster.update.device import DeviceGradients, device_of
from booster.update.gradients import Gradients
from booster.update.update import Update

if TYPE_CHECKING:
    from booster.masters.masters import Masters

_logger = logging.getLogger(__name__)
ASKED = "triton"
TAKEN_BY_TRUE: tuple[str, ...] = ("cuda",)
"""Types of devices on which `fused_optimizer=True` takes kernels wherever they can be, and a trial of them is like torch."""


def by_kernels(make: Callable[[UpdateContext], Update]) -> Callable[[UpdateContext], Update]:
    """Return what makes an update by kernels where it can, else what `make` makes, with one INFO line (an error where asked by
    name)."""
    return functools.partial(_choose, make)


def _choose(make: Callable[[UpdateContext], Update], context: UpdateContext) -> Update:
    update = make(context)
    asked, device = context.options.fused_optimizer == ASKED, device_of(context.optimizer, context.group)
    if not asked and device.type not in TAKEN_BY_TRUE:
        return update
    masters: Masters | None = getattr(update.optimizer_state, "masters", None)
    off, name = switches.off(*_parts(masters, context)), type(context.optimizer).__name__
    reason = _refusal(update, masters, context, device) or (None if asked else _chosen(context) or off)
    if reason is None:
        from booster.kernels.kernel_decision import kernel_update
        from booster.kernels.probe import like_torch
        from booster.kernels.rules import rule_of

        rule: Any = rule_of(context.optimizer)
        differing = None if asked else like_torch(rule, context.optimizer, masters, device)
        if differing is not None:
            reason = "they are not like torch's steps"
            said = "steps of %s by Triton kernels on %s are not like torch's, which makes them: %s"
            _logger.warning(said, name, device, differing)
    if (context.shards.sharded or not asked) and context.group is not None:
        # Norms and decisions are collectives, which all ranks make in one way.
        if agreement.largest(float(reason is not None), context.group):
            reason = reason or "that of another rank cannot be"
    if reason is None:
        _logger.info("%s is stepped by Triton kernels on %s%s", name, device.type, f", where {off}" if off else "")
        decision = update.decision
        counts_zeros = isinstance(decision, ReportingDecision) and decision.counts_zeros
        context = on_device(context, device)
        return kernel_update(context, rule, decision.application, update.optimizer_state, counts_zeros=counts_zeros)
    if not asked:
        _logger.info("%s is stepped by torch, and not by Triton kernels: %s", name, reason)
        return update
    raise ValueError(
        f"fused_optimizer={ASKED!r} cannot step this {name} by kernels: {reason}; leave fused_optimizer True, which takes "
        "torch's fused ones"
    )


def _refusal(update: Update, masters: Masters | None, context: UpdateContext, device: torch.device) -> str | None:
    """Return why kernels cannot step the optimizer of `context`, None if they can."""
    if type(update) is not Update or type(update.gradients) not in (Gradients, DeviceGradients):
        return f"its precision makes its own update, {type(update).__name__}"
    if isinstance(update.decision, ReportingDecision) and update.decision.verbose:
        return "its steps are logged, by the host (verbose=True)"
    if find_spec("triton") is None:
        return "Triton is not installed"
    from booster.kernels.launches import IS_INTERPRETED

    if device.type not in ("cuda", "cpu") or (device.type == "cpu") != IS_INTERPRETED:
        return f"its parameters lie on {device.type}; TRITON_INTERPRET=1, set before, runs kernels on a CPU, and only there"
    devices = _devices(context)
    if {each.type for each in devices} > {device.type}:
        return f"its parameters lie on devices of several types, {', '.join(sorted(map(str, devices)))}"
    if len(devices) > 1 and context.options.release_gradients:
        return f"its parameters lie on {len(devices)} devices, and release_gradients steps on one"
    return _refused_groups(context.optimizer) or _refused_weights(masters, context.optimizer)


def _parts(masters: Masters | None, context: UpdateContext) -> Iterator[str]:
    """Names in `switches.py` of what steps are put together from."""
    yield f"rule {type(context.optimizer).__name__}"
    formats = () if masters is None else (bucket.format for bucket in masters.buckets)
    yield from sorted({f"weights {type(each).__name__}" for each in formats}) or ("weights float32",)
    if masters is not None and masters.options.states != "fp32":
        yield f"states {masters.options.states}"
    yield from ["release"] * bool(context.options.release_gradients) + ["shards"] * context.shards.sharded


def _devices(context: UpdateContext) -> set[torch.device]:
    return {param.device for group in context.optimizer.param_groups for param in group["params"]}


def _chosen(context: UpdateContext) -> str | None:
    """Return why the optimizer keeps an implementation that its user chose."""
    for option in () if context.switched else ("foreach", "fused"):
        if any(group.get(option) is not None for group in context.optimizer.param_groups):
            return f"it was built with {option}="
    devices = _devices(context)
    if len(devices) > 1:
        return f"its parameters lie on {len(devices)} devices, where they step who asks for them by name"
    return None


def _refused_groups(optimizer: Optimizer) -> str | None:
    from booster.kernels.rules import rule_of

    name, rule = type(optimizer).__name__, rule_of(optimizer)
    if rule is None:
        return f"its class has no rule among them, unless booster.register_elementwise({name}, rule=...) gives it one"
    for group in optimizer.param_groups:
        for option in ("capturable", "differentiable"):
            if group.get(option):
                return f"it was built with {option}=True"
        for name, value in group.items():
            if isinstance(value, torch.Tensor) and value.is_cuda and name not in ("lr", "initial_lr"):
                return f"its {name} is a tensor on a device"
    return rule.refusal(optimizer)


def _refused_weights(masters: Masters | None, optimizer: Optimizer) -> str | None:
    from booster.kernels.weights import FORMS
    from booster.masters.masters import own_gradient

    if masters is not None and granularity_of(optimizer) != "elementwise":
        return "it is not stepped element by element"
    for param in (param for group in optimizer.param_groups for param in group["params"]):
        if type(param) not in (torch.Tensor, torch.nn.Parameter):
            return f"a parameter is a {type(param).__name__}"
        if param.dtype != torch.float32 and (masters is None or not masters.may_have(param)):
            if masters is None or param.dtype not in (torch.float16, torch.bfloat16):
                return f"a parameter of shape {tuple(param.shape)} is {param.dtype}"
    if masters is None:
        return None
    if masters.gradient_of is not own_gradient:
        return "its gradients are kept apart from .grad"
    for bucket in masters.buckets:
        if type(bucket.format) not in FORMS:
            return f"half weights are kept in the form {type(bucket.format).__name__}"
    return None
