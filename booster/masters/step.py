"""Stepping the user's optimizer on float32 masters, a bucket at a time.

The optimizer is the user's own object, and its `step` is called as it is. It does not see the half parameters. While a bucket
is stepped, the only parameter in its groups is a handle: a float32 parameter that is given the bucket's masters for data and
its gradients, cast to float32, for gradient::

    half weights, residual   --join-->   masters --.                             .--> half weights (rounded)
                                                    >  handle, optimizer.step() <
    half gradients, scaled   --cast-->   grads   --'                             '--> residual bits

With m the master, w the weight, g the scaled gradient, s the loss scale and c the clip factor::

    m  <-  step(m, g * c / s)            w  <-  round(m)

Neither s nor c is applied by itself. They are one number, `grad_scale` = s / c, by which fused kernels divide as they read
the gradient; for other optimizers the float32 copy is multiplied once. The half gradients stay what they are.

Why buckets: join and cast need 8 bytes of float32 scratch for an element, which are those of the largest bucket, an eighth
of the parameters or 2 MiB, and not of the model. And a thousand small tensors in one flat bucket are one call.

Optimizers that need whole tensors get buckets of whole tensors, a handle each; those that must see everything at once, all
handles together.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from itertools import repeat
from typing import Any

import torch

from booster.common.torch_internals.optimizer_internals import mark_step_called, step_hooks, unhooked
from booster.masters.bucket import Bucket
from booster.masters.master_params import MasterParams
from booster.masters.masters import Masters, replaced_params
from booster.masters.offload import HostMemory, Prefetch
from booster.model.optimizers import OPTIMIZERS
from booster.model.params import params_of
from booster.tensors.flat import SMALLEST_BUCKET, has_same_layout, is_dense, pack, split_by_device
from booster.tensors.trees import HALF_DTYPES
from booster.update.application import (
    NO_SCALARS,
    FusedKernel,
    StepScalars,
    given_grads,
    honours_grad_scale,
    laid_like,
    start_late_momentum,
)
from booster.update.context import KEPT_FLOAT32, SPARSE
from booster.update.distributed_muon import distributed_muon
from booster.update.in_backward_pass import Restricted, bare_step, hooks_once

_FLOAT32_MAX = torch.finfo(torch.float32).max

_contiguous: Callable[[torch.Tensor], bool] = torch.Tensor.is_contiguous


class MasterStep:
    """Steps the optimizer of `masters`.

    For the length of a step the groups hold handles: those of one bucket, or, for optimizers that must see everything at
    once, all of them. Working gradients are read, never written.
    """

    def __init__(self, masters: Masters) -> None:
        self.masters = masters
        self._kernel = FusedKernel(masters.optimizer, masters.names)
        self._bare: Callable[..., Any] = bare_step  # the optimizer's `step` without hooks, found once in a step
        self._muon = distributed_muon(masters.optimizer)

    @torch.no_grad()
    def step(self, scalars: StepScalars = NO_SCALARS) -> None:
        """Update masters and working weights by the working gradients, divided as `scalars`. Hooks fire once.

        Nothing waits for tensors in `scalars`; they are for an optimizer with states and a kernel that heeds them
        (`honours_grad_scale`).
        """
        optimizer = self.masters.optimizer
        hooked = any(step_hooks(optimizer))
        try:
            with hooks_once(optimizer) if hooked else nullcontext():
                plain, buckets = self.prepare()  # after hooks, which may put gradients there, and take them away
                if self.masters.granularity == "whole":
                    self._step_whole(scalars.number, None)
                else:
                    # Where nothing is to change, what was read is written back as it was, bit for bit, whatever the form of
                    # masters and states.
                    self._step_buckets(plain, buckets, scalars)
        except AttributeError as error:
            self._explain(error)
            raise
        if not hooked:
            # Torch's schedulers warn where `step` was not called before theirs.
            mark_step_called(optimizer)

    def _explain(self, error: AttributeError) -> None:
        """Raise RuntimeError if `error` is about an attribute of a parameter, in the place of which there was a handle."""
        if any(error.obj is handle for bucket in self.masters.buckets for handle in bucket.handles):
            raise RuntimeError(
                f"{type(self.masters.optimizer).__name__} reads {error.name!r} of a parameter; here it steps "
                "float32 tensors that stand for half parameters and have no attributes of theirs. Keep it in the "
                "optimizer's state, or use mixed_precision='fp32', 'bf16' or 'fp16'"
            ) from error

    @torch.no_grad()
    def step_with_closure(self, closure: Callable[[], Any], grad_scale: Callable[[], float]) -> Any:
        """As `step`, for an optimizer that evaluates the loss itself: `closure` computes it and its working gradients,
        which are divided by what `grad_scale` returns then. Returns the loss."""
        self.prepare()
        with hooks_once(self.masters.optimizer):
            if self.masters.granularity == "whole":
                loss = self._step_whole(grad_scale, closure)
            else:
                with torch.enable_grad():
                    loss = closure()
                # Only now it is known which parameters have a gradient.
                plain, buckets = self.prepare()
                self._step_buckets(plain, buckets, StepScalars(grad_scale()))
            return loss

    def call(self, method: Callable[[], Any], grad_scale: float | None, *, keep: bool = True) -> tuple[Any, bool]:
        """Call `method`, of the optimizer and no step, with float32 parameters in the place of half ones.

        grad_scale: what working gradients are divided by; None: there are none to be used. keep: whether what it writes to
        parameters and states is kept; weights are then rounded once. What it only reads stays to the bit. Returns its result,
        and whether it changed weights.
        """
        with torch.no_grad():
            if grad_scale is None:
                self.refresh_params()
            else:
                self.prepare()
            master_params = MasterParams(self.masters, grad_scale)
        try:
            # Holds a float32 copy of all masters, and of states that are packed or cut, meanwhile.
            result = method()
        finally:
            with torch.no_grad():
                master_params.restore_groups()
        with torch.no_grad():
            changed = master_params.changed()
            if keep or not changed:
                master_params.adopt()
            else:
                master_params.put_back()
        return result, changed

    def prepare(self) -> tuple[list[list[torch.Tensor]], list[Bucket]]:
        """Make buckets as the next step needs them; `step` does it by itself. Repeating it changes nothing.

        Returns the parameters that are stepped as they are, by group, and the buckets that have gradients."""
        plain = self.refresh_params()
        buckets = self.masters.divide_by_gradients()
        for bucket in buckets:
            for piece in bucket.pieces:
                grad = self.masters.gradient_of(piece.param)
                if grad is not None and grad.is_sparse:
                    self.refuse_sparse([bucket])
        return plain, buckets

    def refresh_params(self) -> list[list[torch.Tensor]]:
        """Give masters to parameters that have none yet; see `check_plain` for the others. Returns `plain`.

        Raises RuntimeError where groups lack what has a master."""
        self.masters.register_params()
        # A parameter that left the groups would keep its master, and come back with an old one.
        if self.masters.num_removed:
            self.masters.refuse_removed()
        plain = self.plain()
        if any(plain):
            self.check_plain(plain)
        return plain

    def check_plain(self, plain: Sequence[Sequence[torch.Tensor]]) -> None:
        """Have states of parameters without a master laid as a fused kernel takes them, or raise; see `FusedKernel`."""
        self._kernel.prepare([p for own in plain for p in own if p.grad is not None], looks_alone=True)

    def refuse_sparse(self, buckets: Iterable[Bucket]) -> None:
        """Raise RuntimeError if a parameter in one of `buckets` has a sparse gradient."""
        for bucket in buckets:
            for param in bucket.params:
                grad = self.masters.gradient_of(param)
                if grad is not None and grad.is_sparse:
                    name = self.masters.name_of(param)
                    outside = ", or leave offload_states False" if self.masters.hosts else KEPT_FLOAT32
                    outside = outside if self.masters.quantizer is None else ", or choose states='fp32'"
                    raise RuntimeError(SPARSE.format(name=name, dtype=param.dtype) + outside)

    def plain(self) -> list[list[torch.Tensor]]:
        """Return, by group, the parameters that are stepped as they are, without masters."""
        by_group = []
        for group in self.masters.optimizer.param_groups:  # a comprehension would be a Python call for each group
            own = []
            for param in self.masters.outside(group["params"]):
                if param.dtype not in HALF_DTYPES:
                    own.append(param)
            by_group.append(own)
        return by_group

    # ------------------------------------------------------------------ bucket by bucket

    def _step_buckets(
        self, plain: Sequence[Sequence[torch.Tensor]], buckets: Sequence[Bucket], scalars: StepScalars
    ) -> None:
        self.masters.rng.next()
        optimizer = self.masters.optimizer
        restricted = list(map(Restricted, repeat(optimizer), optimizer.param_groups))
        self.step_those(buckets, plain, scalars, restricted)
        if type(optimizer) not in OPTIMIZERS:
            # Optimizers that count steps in a group have to count in every group, as a step at once does.
            for only in restricted:
                only.step_if_nothing_was()

    def step_those(
        self,
        buckets: Sequence[Bucket],
        plain: Sequence[Sequence[torch.Tensor]],
        scalars: StepScalars,
        restricted: Sequence[Restricted],
    ) -> None:
        """Step `buckets`, and of each group those of the parameters `plain` that have a gradient and no master, inside
        what is `restricted` to the group."""
        groups = self.masters.optimizer.param_groups
        scratch = self._scratch_for(buckets)
        prefetches = self.prefetches(buckets) if self.masters.hosts else {}
        # Hooks of the user's `step` fire once for all buckets, outside of this.
        self._bare = self._muon or unhooked(type(self.masters.optimizer).step)
        for index, (group, only) in enumerate(zip(groups, restricted, strict=True)):
            with only:
                # Float32 parameters too, in batches: copies of their gradients are scratch as well.
                for params, may_fuse in step_batches(plain[index], max(self.masters.size, 1)) if plain[index] else ():
                    only.to(params)
                    with _unfused(group, group.get("fused") and not may_fuse):
                        self._step_plain(params, scalars)
                for bucket in buckets:
                    if bucket.group != index:
                        continue
                    only.to(bucket.handles)
                    with nullcontext() if bucket.host is None else prefetches[bucket.host].on_device(bucket):
                        self._step_bucket(bucket, scratch, scalars)
        self.masters.rng.drawn.clear()

    def _scratch_for(self, buckets: Sequence[Bucket]) -> _Scratch:
        """That of the last step, if it was small enough to be kept."""
        # For a small model on a CPU, to get its pages anew from the system takes as long as everything else in a step.
        kept = self.masters.scratch
        if kept is None or not kept.fits(buckets):
            scratch = _Scratch(buckets)
            if not scratch.is_small or self.masters.released:
                return scratch
            self.masters.scratch = kept = scratch
        return kept

    def prefetches(self, buckets: Sequence[Bucket]) -> dict[HostMemory, Prefetch]:
        """Begin to prefetch offloaded states, in the order in which `step_those` reads them."""
        travelling: dict[HostMemory, list[Bucket]] = {}
        # The order in which they are stepped below: the next one travels while this one is stepped.
        for bucket in sorted(buckets, key=lambda bucket: bucket.group):
            if bucket.host is not None:
                travelling.setdefault(bucket.host, []).append(bucket)
        state = self.masters.optimizer.state
        return {host: Prefetch(host, own, state) for host, own in travelling.items()}

    def _step_bucket(self, bucket: Bucket, scratch: _Scratch, scalars: StepScalars) -> None:
        values, grads = scratch.of(bucket)
        masters, state = bucket.read_masters(values, grads), self.masters.optimizer.state
        named = functools.partial(scratch.state, bucket)
        try:
            in_float32 = (
                nullcontext() if bucket.quantizer is None else bucket.quantizer.opened(bucket, state, named, grads)
            )
            with in_float32:
                # After states are unpacked, because packed states may use the gradients' memory as scratch until here.
                bucket.gather(self.masters.gradient_of, grads)
                bucket.attach(masters, grads)
                in_shape = self.masters.granularity == "per tensor" and not bucket.whole
                with bucket.with_shaped_params(self.masters.optimizer) if in_shape else nullcontext():
                    self._call([grads], scalars)
        finally:
            bucket.detach()
        bucket.commit_masters(masters, grads)

    def _step_plain(self, params: list[torch.Tensor], scalars: StepScalars) -> None:
        start_late_momentum(self.masters.optimizer)
        grads: list[Any] = [param.grad for param in params]
        if not scalars.grad_scale_is_one:
            sparse = any(grad.is_sparse for grad in grads)
            # Copies, because a fused kernel divides gradients in place, and the user's are to stay as they are.
            grads = [grad * inverse(scalars.number) if sparse else grad.clone() for grad in grads]
            scalars = NO_SCALARS if sparse else scalars
        grads = [
            grad if grad.is_sparse or has_same_layout(grad, param) else laid_like(grad, param)
            for grad, param in zip(grads, params, strict=True)
        ]
        with given_grads(params, grads):
            self._call(grads, scalars)

    def _call(self, grads: list[torch.Tensor], scalars: StepScalars) -> None:
        """Step on `grads`, which may be overwritten, as `scalars`: by the optimizer itself where it can."""
        optimizer: Any = self.masters.optimizer
        if scalars.grad_scale_is_one and scalars.found_inf is None:
            self._bare(optimizer)
        # A kernel reads the scale as float32: a larger one would become infinite, and every update zero.
        elif scalars.is_tensor or (scalars.number <= _FLOAT32_MAX and honours_grad_scale(optimizer)):
            scalars.step(functools.partial(self._bare, optimizer), optimizer, grads[0].device)
        else:
            torch._foreach_mul_(grads, inverse(scalars.number))
            self._bare(optimizer)

    # ------------------------------------------------------------------ all at once

    def _step_whole(self, grad_scale: Any, closure: Callable[[], Any] | None) -> Any:
        optimizer, buckets = self.masters.optimizer, self.masters.buckets
        # An optimizer that looks at all parameters at once, such as LBFGS, gets float32 ones for all.
        handle_of = {p.param: h for b in buckets for p, h in zip(b.pieces, b.handles, strict=True)}
        param_of = {handle: param for param, handle in handle_of.items()}
        values = [bucket.read_masters(bucket.scratch(), bucket.scratch()) for bucket in buckets]
        for bucket, value in zip(buckets, values, strict=True):
            bucket.attach(value, None)
        plain = {p: p.grad for p in params_of(optimizer) if p.dtype not in HALF_DTYPES}

        def evaluate() -> Any:
            # The closure runs the model: it must find the user's parameters, with what the optimizer has just tried.
            with replaced_params(optimizer, param_of):
                for bucket, value in zip(buckets, values, strict=True):
                    bucket.commit_masters(value, bucket.scratch())
                with torch.enable_grad():
                    loss = closure()  # type: ignore[misc]
                self._give_gradients(buckets, plain, grad_scale())
            return loss

        try:
            with replaced_params(optimizer, handle_of):
                if closure is not None:
                    return bare_step(optimizer, evaluate)
                self._give_gradients(buckets, plain, grad_scale)
                bare_step(optimizer)
                return None
        finally:
            for bucket, value in zip(buckets, values, strict=True):
                bucket.detach()
                bucket.commit_masters(value, bucket.scratch())
            for param, grad in plain.items():
                param.grad = grad

    def _give_gradients(self, buckets: list[Bucket], plain: dict[Any, Any], grad_scale: float) -> None:
        ratio = inverse(grad_scale)
        for bucket in buckets:
            for piece, handle in zip(bucket.pieces, bucket.handles, strict=True):
                grad = self.masters.gradient_of(piece.param)
                handle.grad = None if grad is None else grad.float() * ratio
        for param in plain:
            plain[param] = param.grad
            if param.grad is not None and grad_scale != 1.0:
                param.grad = param.grad * ratio


def step_batches(params: Iterable[torch.Tensor], size: int) -> list[tuple[list[torch.Tensor], bool]]:
    """Divide those of `params` that have a gradient into batches of at most `size` elements, to be stepped one by one."""
    own = [p for p in params if p.grad is not None and p.dtype not in HALF_DTYPES]
    # A fused kernel walks raw memory, and overwrites the gaps of a parameter that has any.
    loose = [] if all(map(_contiguous, own)) else [p for p in own if not is_dense(p)]
    dense = own if not loose else [p for p in own if is_dense(p)]
    return [
        # With each batch, whether a fused kernel may step it.
        ([piece.param for piece in lot], kind is dense)
        for kind in (dense, loose)
        for alike in split_by_device(kind)
        for lot in pack(alike, size)
    ]


class _Scratch:
    """Float32 scratch for the largest of some buckets, on each of their devices; made when used, freed with this object.

    is_small: it is at most 2 MiB of the host's memory, and no states are unpacked into it.
    """

    def __init__(self, buckets: Sequence[Bucket]) -> None:
        self._sizes: dict[torch.device, int] = {}
        for bucket in buckets:
            if bucket.size >= self._sizes.get(bucket.device, 0):  # 0 where a rank has nothing of a matrix
                self._sizes[bucket.device] = bucket.size
        packed = any(bucket.quantizer is not None for bucket in buckets)
        self.is_small = not packed and all(
            device.type == "cpu" and size <= SMALLEST_BUCKET for device, size in self._sizes.items()
        )
        self._tensors: dict[tuple[torch.device, str], torch.Tensor] = {}

    def fits(self, buckets: Sequence[Bucket]) -> bool:
        """Whether it is large enough for `buckets`, too."""
        return all(bucket.quantizer is None and bucket.size <= self._sizes.get(bucket.device, 0) for bucket in buckets)

    def tensors(self) -> list[torch.Tensor]:
        """Return what was made."""
        return list(self._tensors.values())

    def of(self, bucket: Bucket) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (values, gradients) of the bucket's size; the former only where the bucket needs it."""
        grads = self._tensor(bucket, "gradients")
        values = self._tensor(bucket, "values") if bucket.format.needs_values else grads
        return values, grads

    def state(self, bucket: Bucket, name: str) -> torch.Tensor:
        """Return what the state `name` of the bucket is unpacked into."""
        return self._tensor(bucket, f"state {name}")

    def _tensor(self, bucket: Bucket, name: str) -> torch.Tensor:
        key = (bucket.device, name)
        if key not in self._tensors:
            self._tensors[key] = torch.zeros(self._sizes[bucket.device], dtype=torch.float32, device=bucket.device)
        return self._tensors[key][: bucket.size]


@contextmanager
def _unfused(group: dict[str, Any], applies: Any) -> Iterator[None]:
    """For its length, give the optimizer of `group` its default implementation, if that `applies`."""
    if not applies:
        yield
        return
    chosen, group["fused"] = group["fused"], False
    try:
        yield
    finally:
        group["fused"] = chosen


def inverse(grad_scale: float) -> float:
    return 1.0 / grad_scale if math.isfinite(grad_scale) else 0.0
