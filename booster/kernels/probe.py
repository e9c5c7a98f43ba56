"""A trial of kernels on a device, before they step anybody's weights: a few small tensors, stepped by torch as well."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from booster.kernels.kernel_decision import KernelDecision, kernel_update
from booster.kernels.launch_cache import failure
from booster.kernels.rule import Rule
from booster.loss_scaler import DynamicScale
from booster.masters.bucket import Bucket
from booster.masters.formats import Kahan, MasterOptions, Nearest, Split24, Stochastic
from booster.masters.masters import Masters
from booster.masters.quantized_state import QuantizedState
from booster.masters.update import choose_master_update
from booster.update.choice import choose_update, on_device
from booster.update.context import UpdateContext, UpdateOptions

SHAPES = ((7, 5), (33,), (3, 700), (1,))  # one begins within a group of 32 elements, one fills more than a tile
STEPS = (1.0, 1.0, float("inf"))  # what one gradient is multiplied by: the last step is skipped
_EXACT = 1e-6  # of float32 numbers, which torch's loops may contract
# What one step of a form is, in shares of a weight: an update that is an ulp off may move a weight so far.
_OF_FORM: Mapping[Any, Mapping[torch.dtype, float]] = {
    **dict.fromkeys((Nearest, Stochastic), {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}),
    Split24: {torch.bfloat16: 2.0**-15, torch.float16: 2.0**-18},
    Kahan: {torch.bfloat16: 2.0**-15, torch.float16: 2.0**-20},
}
_SMALLEST = 6.1e-8  # a step of float16 near zero

Options = tuple[tuple[str, Any], ...]


def like_torch(rule: Rule, optimizer: Optimizer, masters: Masters | None, device: torch.device) -> str | None:
    """Return None where steps of `optimizer` by kernels are those of torch on `device`, else what differs."""
    dtypes = {param.dtype for group in optimizer.param_groups for param in group["params"]}
    # Copies to the host change no number, and a trial has no pinned memory to spend.
    options = None if masters is None else dataclasses.replace(masters.options, offload=False)
    for group in optimizer.param_groups:
        # Once in a process for a rule, its flags, forms and device: a trial compiles and takes seconds.
        difference = _tried(rule, _typical(rule.optimizer, group), options, tuple(sorted(dtypes, key=str)), device)
        if difference is not None:
            return difference
    return None


@functools.cache
def _tried(
    rule: Rule, group: Options, masters: MasterOptions | None, dtypes: tuple[torch.dtype, ...], device: torch.device
) -> str | None:
    try:
        torchs, ours = (_Trial(rule, dict(group), masters, dtypes, device, by_kernels=way) for way in (False, True))
        for number, factor in enumerate(STEPS):
            if number:
                # Each step starts from the same numbers, so that an ulp of the last one does not grow.
                ours.copy_from(torchs)
            for trial in (torchs, ours):
                trial.step(number, factor)
            difference = ours.difference(torchs)
            if difference is not None:
                return f"{difference} in step {number + 1} of a trial"
    except Exception as error:  # whatever it is, weights of a user are not to meet it
        return failure(error, device)
    return None


def _typical(kind: type[Optimizer], group: Mapping[str, Any]) -> Options:
    """Return the options of `group` with typical numbers in place of those there: what is compiled depends on which are 0."""
    options: list[tuple[str, Any]] = []
    for name, parameter in inspect.signature(kind).parameters.items():
        value, typical = group.get(name), parameter.default
        if name not in group or name in ("foreach", "fused", "capturable", "differentiable"):
            continue
        if isinstance(value, bool) or value is None:
            options.append((name, value))
        elif name == "lr":
            options.append((name, 1e-2))
        elif isinstance(value, (int, float)):
            # Zero stays zero: it is compiled into another kernel.
            options.append((name, value if not value else typical if isinstance(typical, float) and typical else 0.1))
        elif typical is not inspect.Parameter.empty:
            options.append((name, typical))
    return tuple(options)


class _Trial:
    """Small tensors on `device`, and an update of them."""

    def __init__(
        self,
        rule: Rule,
        group: dict[str, Any],
        masters: MasterOptions | None,
        dtypes: Sequence[torch.dtype],
        device: torch.device,
        *,
        by_kernels: bool,
    ) -> None:
        drawn = [_drawn(shape, index).to(device) for index, shape in enumerate(SHAPES)]
        self._params = [nn.Parameter(each.to(dtype, copy=True)) for dtype in dtypes for each in drawn]
        if "foreach" in inspect.signature(rule.optimizer).parameters:
            group["foreach"] = False
        self._optimizer = rule.optimizer(self._params, **group)
        context = UpdateContext(
            optimizer=self._optimizer,
            scaler=DynamicScale(init_scale=4.0, growth_interval=2),
            options=UpdateOptions(skip_nonfinite=True),
        )
        self._masters = None if masters is None else Masters(self._optimizer, {}, masters)
        if self._masters is None:
            self._update = choose_update(context)
        else:
            self._update = choose_master_update(context, masters=self._masters)
        if by_kernels:
            self._update = kernel_update(
                on_device(context, device), rule, self._update.decision.application, self._update.optimizer_state
            )

    def step(self, number: int, factor: float) -> None:
        gradients = self._update.gradients
        scale = gradients.next_scale
        gradients.before_backward(scale)
        for index, param in enumerate(self._params):
            grad = _drawn(tuple(param.shape), 100 + 10 * number + index) * 1e-2
            grad.view(-1)[0] *= factor if index == 0 else 1.0
            param.grad = (grad.to(param.device) * scale).to(param.dtype)
        gradients.after_backward(None)
        gradients.mutation_check = None  # these gradients are meant to be others
        gradients.clip_norm(0.5)
        self._applied = self._update.step().applied
        decision = self._update.decision
        if number and isinstance(decision, KernelDecision) and decision.steps.reason is not None:
            raise RuntimeError(decision.steps.reason)

    @torch.no_grad()
    def copy_from(self, other: _Trial) -> None:
        """Take over the numbers of `other`."""
        for own, theirs in zip(self._tensors(), other._tensors(), strict=True):
            own.copy_(theirs)

    def difference(self, other: _Trial) -> str | None:
        """Return what is not as in `other`, which began with the same numbers."""
        if self._applied != other._applied:
            return f"the step is {'applied' if self._applied else 'skipped'}, and torch's is not"
        if float(self._update.gradients.scaler.scale) != float(other._update.gradients.scaler.scale):
            return "the loss scale"
        for index, (own, theirs) in enumerate(zip(self._weights(), other._weights(), strict=True)):
            if not _near(own, theirs, self._tolerance(index)):
                return f"a weight of shape {tuple(own.shape)}, {self._params[index].dtype},"
        for (name, own), (_, theirs) in zip(self._elements(), other._elements(), strict=True):
            if not own.is_floating_point() or own.dtype == torch.bfloat16:
                bits = [each.view(torch.int16) if each.element_size() == 2 else each for each in (own, theirs)]
                if (bits[0].int() - bits[1].int()).abs().max() > 1:
                    return f"the state {name!r}"
            elif not _near(own, theirs, _EXACT):
                return f"the state {name!r}"
        return None

    def _tolerance(self, index: int) -> float:
        param = self._params[index]
        for bucket in self._buckets:
            if any(param is other for other in bucket.params):
                steps = (own[bucket.dtype] for kind, own in _OF_FORM.items() if isinstance(bucket.format, kind))
                return next(steps, _EXACT)
        return _EXACT

    @property
    def _buckets(self) -> Sequence[Bucket]:
        return () if self._masters is None else self._masters.buckets

    def _weights(self) -> list[torch.Tensor]:
        values = {} if self._masters is None else self._masters.values()
        return [values.get(param, param).detach().float().clone() for param in self._params]

    def _kept(self) -> Iterator[tuple[str, torch.Tensor, Bucket | None]]:
        """All tensors in the optimizer's state, with the bucket of their elements."""
        handles = [(handle, bucket) for bucket in self._buckets for handle in bucket.handles]
        for owner, bucket in [*((param, None) for param in self._params), *handles]:
            for name, value in sorted(self._optimizer.state.get(owner, {}).items()):
                for tensor in value.tensors if isinstance(value, QuantizedState) else [value]:
                    flat = bucket is not None and not bucket.whole and tensor.numel() == bucket.size
                    yield name, tensor, bucket if flat else None

    def _elements(self) -> Iterator[tuple[str, torch.Tensor]]:
        """States without the gaps between the pieces of a bucket, which are not read."""
        for name, tensor, bucket in self._kept():
            pieces = () if bucket is None else bucket.pieces_of(tensor)
            yield name, torch.cat([piece.reshape(-1) for piece in pieces]) if pieces else tensor

    def _tensors(self) -> list[torch.Tensor]:
        masters = self._update.optimizer_state.master_tensors()
        return [*self._params, *masters, *(tensor for _, tensor, _ in self._kept())]


def _drawn(shape: Sequence[int], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), device="cpu", dtype=torch.float32)


def _near(one: torch.Tensor, other: torch.Tensor, share: float) -> bool:
    wanted = other.float().to(one.device)
    bound = wanted.abs() * share + max(float(wanted.abs().max()) * _EXACT, _SMALLEST if share > _EXACT else 0.0)
    return bool(((one.float() - wanted).abs() <= bound).all())
